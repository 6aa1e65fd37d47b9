"""Decoupled DiLoCo: learners never wait; a syncer merges fragments once a quorum has sent them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.options import fraction, number, option, positive_int
from exogym_core.strategy.participation.servers import ServedStrategy, from_message, to_message
from exogym_core.strategy.parts.flat import flatten, unflatten, write_back
from exogym_core.strategy.parts.rounds import embeddings_of, merged, packed
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["DecoupledDiLoCoStrategy"]


_TAIL = 4  # values behind a fragment: which, of which round, samples and local steps since it last left


class DecoupledDiLoCoStrategy(ServedStrategy, name="DecoupledDiLoCo", experimental=True):
    """Learners send displacements of fragments and continue at once; merged fragments are mixed in on arrival.

    The syncer merges round r of a fragment when all learners have sent it, or `quorum` of them `grace` seconds ago.
    Weights are `w = samples^2 / steps`; embeddings go by `D = sum w d / sum w`, other tensors by mean length and mean
    direction, `D = (sum w |d| / sum w) unit(sum w d / |d|)`. A Nesterov step along D gives the fragment's phi, which
    goes to every learner: `theta = (1 - mix) theta + mix phi`; displacements are from there. Late messages are dropped.

    Second-hand, from summaries of the paper. How learners use merged fragments (`mix` stands in) and how the
    grace window adapts (it is fixed) were not found.

    Bytes: `4 P / num_fragments` up and down a learner and fragment, on average.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        H: local steps in which every fragment is sent once.
        num_fragments: P, of whole tensors and about equal size, embeddings apart; fragment p leaves after step
            `(p + 1) H / P` of every H.
        quorum: K, number of learners whose fragment must have arrived before it is merged; by default all.
        grace: virtual seconds that the syncer waits for the others after the quorum is there.
        outer_lr: of the fragments' Nesterov step.
        outer_momentum: its momentum.
        mix: the share of the merged fragment in the parameters with which a learner continues.
        options: of every Strategy.

    References:
        Decoupled DiLoCo, arXiv 2604.21428.
    """

    H: int = option(24, positive_int)
    num_fragments: int = option(24, positive_int)
    quorum: int | None = option(None, positive_int)
    grace: float = option(0.0, number)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    mix: float = option(0.5, fraction)

    arithmetic = ("merge_in",)
    state = State("_velocity", "_merged", "_since", "_pending", "_deadlines")

    def prepare(self) -> None:
        """Begin with the same parameters everywhere."""
        super().prepare()
        self._velocity = torch.zeros_like(self.phi)
        self._embeddings = embeddings_of(self.model, self.trainable)
        sizes = [parameter.numel() for parameter in self.trainable]
        self.fragments = packed(sizes, min(self.num_fragments, self.H), apart=self._embeddings)
        self._merged = [0] * len(self.fragments)  # rounds that the syncer has merged
        self._since = [[0, 0] for _ in self.fragments]  # samples and steps since each left
        # Of a fragment in a round: messages by sender, and the instant at which those that have a quorum are due.
        self._pending: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._deadlines: dict[tuple[int, int], float] = {}

    def _of(self, p: int, flat: Tensor) -> list[Tensor]:
        """The fragment's tensors, as views of a flat model."""
        parts = unflatten(flat, self.trainable)
        return [parts[index] for index in self.fragments[p]]

    # --- a learner -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """A local step; then mix in merged fragments, and send the fragment that is due."""
        self.clip_gradients()
        self.optimizer_step()
        self._since = [[seen + max(self.context.samples, 1), steps + 1] for seen, steps in self._since]
        messages = self.comm.take("merged")
        place, number = self.local_step % self.H + 1, len(self.fragments)
        leaving = [p for p in range(number) if (p + 1) * self.H // number == place]
        if messages or leaving:
            theta = self._flat()
            for _, message in messages:
                merged_phi, (which,) = from_message(message, 1)
                p = int(which)
                write_back(merged_phi, self._of(p, self.phi))
                for own, phi in zip(self._of(p, theta), self._of(p, self.phi), strict=True):
                    own.lerp_(phi, self.mix)
            write_back(theta, self.trainable)
            for p in leaving:
                displacement = flatten(self._of(p, self.phi)) - flatten(self._of(p, theta))
                about = p, self.local_step // self.H, *self._since[p]
                self.comm.put(to_message(displacement, *about), self.server)
                self._since[p] = [0, 0]
        super(ServedStrategy, self).step()

    # --- the syncer ----------------------------------------------------------------------------------------

    def serve(self, updated: Callable[[float], None]) -> None:
        """Merge fragments that have a quorum, until all learners have ended."""
        have_ended = False
        while not have_ended:
            wait = min(self._deadlines.values(), default=math.inf) - self.comm.now()
            messages = self.comm.take(wait=max(wait, 0.0))
            have_ended = not messages and not self._deadlines  # learners: what has come counts then
            for source, message in messages:
                self._served += self.H / len(self.fragments)
                p, round_number = map(int, from_message(message, _TAIL)[1][:2])
                if round_number >= self._merged[p]:
                    self._pending.setdefault((p, round_number), {})[source] = message
            ready = self._pending if have_ended else self._ready(self.comm.now(), is_over=not messages)
            for key in sorted(ready):
                self._merge(*key)
            updated(self._served / self.num_nodes)

    def _ready(self, now: float, *, is_over: bool) -> set[tuple[int, int]]:
        """Fragments and rounds that are due; where `is_over`, nothing came before the next deadline."""
        for key, messages in self._pending.items():
            if len(messages) >= min(self.quorum or self.num_nodes, self.num_nodes):
                grace = self.grace if len(messages) < self.num_nodes else 0.0
                self._deadlines[key] = min(self._deadlines.get(key, math.inf), now + grace)
        until = max(now, min(self._deadlines.values(), default=now)) if is_over else now
        return {key for key, deadline in self._deadlines.items() if deadline <= until}

    def _merge(self, p: int, round_number: int) -> None:
        self.merge_in(p, self._pending[p, round_number])
        for key in [key for key in self._pending if key[0] == p and key[1] <= round_number]:
            del self._pending[key]
            self._deadlines.pop(key, None)
        self._merged[p], self.num_arrived = round_number + 1, self.num_arrived + 1
        answer = to_message(flatten(self._of(p, self.phi)), p)
        for learner in range(self.num_nodes):
            self.comm.put(answer, learner, "merged")

    def merge_in(self, p: int, messages: Mapping[int, Tensor]) -> None:
        """A Nesterov step of fragment `p` along what learners have sent."""
        read = [from_message(messages[source], _TAIL) for source in sorted(messages)]
        weights = [samples**2 / steps for _, (_, _, samples, steps) in read]
        displacements = [unflatten(flat, self._of(p, self.phi)) for flat, _ in read]
        held = zip(self.fragments[p], self._of(p, self.phi), self._of(p, self._velocity), strict=True)
        for place, (index, phi, velocity) in enumerate(held):
            parts = [displacement[place] for displacement in displacements]
            step = merged(parts, weights, by_direction=index not in self._embeddings)
            velocity.mul_(self.outer_momentum).add_(step)
            phi.sub_(self.outer_lr * (step + self.outer_momentum * velocity))
