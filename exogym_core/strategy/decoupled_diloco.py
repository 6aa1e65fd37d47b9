"""Decoupled DiLoCo: learners never wait; a syncer merges fragments once a quorum has sent them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.options.arguments import checked_options, fraction, number, option, positive_int
from exogym_core.strategy.parts.flat import write_back
from exogym_core.strategy.served import ServedOptions, ServedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["DecoupledDiLoCoOptions", "DecoupledDiLoCoStrategy"]

_TAIL = 4  # values behind a fragment: which, of which round, samples, local steps


@dataclass(frozen=True)
class DecoupledDiLoCoOptions(ServedOptions):
    """What decoupled DiLoCo takes.

    Args:
        H: local steps in which every fragment is sent once.
        num_fragments: P, parts of about equal size; fragment p leaves after step `(p + 1) H / P` of every H.
        quorum: K, learners whose fragment must have come before it is merged; by default all.
        grace: virtual seconds that the syncer waits for more after the quorum is there.
        outer_lr: of the fragments' Nesterov step.
        outer_momentum: its momentum.
        mix: the share of the merged fragment in what a learner goes on from.
    """

    H: int = option(24, positive_int)
    num_fragments: int = option(24, positive_int)
    quorum: int | None = option(None, positive_int)
    grace: float = option(0.0, number)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    mix: float = option(0.5, fraction)


class DecoupledDiLoCoStrategy(ServedStrategy):
    """Learners send displacements of fragments and go on at once; merged fragments are mixed in when they come.

    The syncer merges round r of a fragment when `quorum` learners have sent it and `grace` seconds have passed, with
    weights `w = samples^2 / steps`: `D = sum w d / sum w`, then a Nesterov step on the fragment's outer parameters.
    What comes for a round that has been merged is dropped. A learner mixes a merged fragment with its own,
    `theta = (1 - mix) theta + mix phi`, and measures its next displacement from phi.

    Second-hand: the rule is as summaries of the paper tell it. Its treatment of tensors by length and direction, and
    what learners do with merged fragments, were not found; the weighted mean and `mix` stand in for them.

    Bytes: `4 P / num_fragments` up and down a learner and fragment.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        options: of `DecoupledDiLoCoOptions`, and of every Strategy.

    References:
        Decoupled DiLoCo, arXiv 2604.21428.
    """

    Options = DecoupledDiLoCoOptions
    options: DecoupledDiLoCoOptions

    def __init__(self, optim_spec: OptimizerLike | None = None, **options: Any) -> None:
        self.options, others = checked_options(type(self), DecoupledDiLoCoOptions, options)
        super().__init__(optim_spec=optim_spec, **others)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        told = self.options
        self.num_fragments = min(told.num_fragments, told.H, self.phi.numel())
        self._parts = torch.tensor_split(torch.arange(self.phi.numel()), self.num_fragments)
        self._due = [(p + 1) * told.H // self.num_fragments for p in range(self.num_fragments)]
        self._velocity = torch.zeros_like(self.phi)
        self._merged = [0] * self.num_fragments  # rounds that the syncer has merged
        self._samples = [0.0] * self.num_fragments  # since the learner last sent the fragment
        self._pending: dict[tuple[int, int], dict[int, Tensor]] = {}

    # --- a learner -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """A local step; what has been merged comes in, and a fragment that is due goes out."""
        self.clip_gradients()
        self.optimizer_step()
        self._samples = [samples + max(self.context.samples, 1) for samples in self._samples]
        letters = self.comm.take("merged")
        place = self.local_step % self.options.H + 1
        leaving = [p for p, due in enumerate(self._due) if due == place]
        if letters or leaving:
            theta = self._flat()
            for _, letter in letters:
                part = self._parts[int(letter[-1])]
                self.phi[part] = letter[:-1]
                theta[part] = theta[part].lerp(letter[:-1], self.options.mix)
            write_back(theta, self.trainable)
            for p in leaving:
                self._send(p, theta)
        super(ServedStrategy, self).step()

    def _send(self, p: int, theta: Tensor) -> None:
        part, round_number = self._parts[p], self.local_step // self.options.H
        tail = torch.tensor([float(p), float(round_number), self._samples[p], float(self.options.H)])
        self.comm.put(torch.cat([self.phi[part] - theta[part], tail]), self.server)
        self._samples[p] = 0.0

    # --- the syncer ----------------------------------------------------------------------------------------

    def serve(self, updated: Callable[[float], None]) -> None:
        """Merge what has a quorum, until no learner sends anything any more."""
        steps = 0.0
        while letters := self.comm.take(wait=math.inf):
            if self.options.grace:
                letters += self.comm.take(wait=self.options.grace)
            for source, letter in letters:
                steps += self.options.H / self.num_fragments
                p, round_number = int(letter[-4]), int(letter[-3])
                if round_number >= self._merged[p]:
                    self._pending.setdefault((p, round_number), {})[source] = letter
            self._merge_ready(self.options.quorum or self.num_nodes)
            updated(steps / self.num_nodes)
        self._merge_ready(1)  # learners have ended: what has come counts
        updated(steps / self.num_nodes)

    def _merge_ready(self, quorum: int) -> None:
        for key in sorted(self._pending):
            if len(self._pending[key]) >= quorum:
                self._merge(key[0], key[1], self._pending.pop(key))

    def _merge(self, p: int, round_number: int, letters: dict[int, Tensor]) -> None:
        told, part = self.options, self._parts[p]
        weights = {source: float(letter[-2] ** 2 / letter[-1]) for source, letter in letters.items()}
        total = sum(weights.values())
        mean = sum((letters[source][:-_TAIL] * (weights[source] / total) for source in sorted(letters)), 0.0)
        velocity = told.outer_momentum * self._velocity[part] + mean
        self._velocity[part] = velocity
        self.phi[part] = self.phi[part] - told.outer_lr * (mean + told.outer_momentum * velocity)
        self._merged[p], self.num_arrived = round_number + 1, self.num_arrived + 1
        answer = torch.cat([self.phi[part], torch.tensor([float(p)])])
        for learner in range(self.num_nodes):
            self.comm.put(answer, learner, "merged")
