"""Streaming DiLoCo: the model in fragments, each with rounds of its own that overlap training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Chain, Module
from exogym_core.strategy.options.arguments import checked_options, refuse_unknown
from exogym_core.strategy.options.fragments import fragments_of
from exogym_core.strategy.options.streaming import StreamingOptions
from exogym_core.strategy.outer_rounds import OuterStrategy
from exogym_core.strategy.parts.outer import OuterStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from exogym_core.strategy.chain import Scope
from exogym_core.strategy.parts.outer import Round

__all__ = ["StreamingDiLoCoCommunicator", "StreamingDiLoCoStrategy", "StreamingOptions"]


class StreamingDiLoCoCommunicator(Module):
    """A round of fragment p of P begins after step `floor((p + 1) H / P)` of every H, and ends tau steps later.

    Each fragment has a group of its own, so that the collectives of several are on their way at once.

    Args:
        H: steps between two rounds of a fragment.
        options: of `StreamingOptions`.
    """

    Options = StreamingOptions
    judged = "outer"

    def __init__(self, H: int | None = None, **options: Any) -> None:  # noqa: N803
        self.options, unknown = checked_options(type(self), StreamingOptions, {"H": H, **options})
        refuse_unknown(type(self), unknown)
        self.H, self.tau, self.alpha = self.options.H, self.options.tau, self.options.alpha

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Cut the parameters into fragments."""
        super().enter(strategy, scope)
        where, names = type(strategy).__name__, [name for name, _ in strategy.named_trainable()]
        told = self.options
        self.members = fragments_of(names, told.num_fragments, told.fragments, told.pattern, where, told.H)
        averaging = told.averaging().charged(strategy.coding, strategy.comm)
        parts = [[scope.parameters[index] for index in members] for members in self.members]
        self.outers = [OuterStep(part, told.outer_optim(), averaging) for part in parts]
        self._sites = [scope.site.apart() for _ in self.members]
        self._is_staged = averaging.codec is not None or scope.site.inside is not None
        self._under_way: dict[int, Round] = {}
        self.num_applied = 0
        return scope

    def after_update(self) -> None:
        """End the rounds that are due, begin those that are due."""
        step = self.strategy.local_step + 1
        if self._is_staged:
            for outer_round in self._under_way.values():
                outer_round.go_on()
        for p in range(len(self.outers)):
            offset = (p + 1) * self.H // len(self.outers)
            if self.tau and p in self._under_way and (step - self.tau - offset) % self.H == 0:
                self.apply(p, self._under_way.pop(p))
            if (step - offset) % self.H == 0:
                self._under_way[p] = self.begin(p)
                if not self.tau:
                    self.apply(p, self._under_way.pop(p))

    def begin(self, p: int) -> Round:
        """The fragment's outer gradient, the mean of `phi_p - theta_p`, is on its way."""
        return self.outers[p].begin(self._sites[p])

    @torch.no_grad()
    def apply(self, p: int, outer_round: Round) -> None:
        """An outer step on phi_p; `theta_p = alpha theta_p + (1 - alpha) phi_p`."""
        self.outers[p].apply(outer_round.wait())
        self.outers[p].mix(self.alpha)
        self.num_applied += 1

    def at_end(self) -> None:
        """Apply what is in flight."""
        for p in sorted(self._under_way):
            self.apply(p, self._under_way.pop(p))

    @property
    def optimizers(self) -> list[Optimizer]:
        """One outer optimizer a fragment."""
        return [outer.optim for outer in self.outers]

    def judged_state(self) -> dict[str, Tensor]:
        """Phi, each fragment as last applied."""
        values: dict[int, Tensor] = {}
        for members, outer in zip(self.members, self.outers, strict=True):
            values |= zip(members, outer.theta, strict=True)
        return self.named([values[index] for index in range(len(values))])

    @property
    def judged_version(self) -> int:
        """Fragments that have been applied."""
        return self.num_applied

    def state_dict(self) -> dict[str, Any]:
        """The fragments' outer states, and the rounds under way."""
        return {
            "outers": [outer.state_dict() for outer in self.outers],
            "under_way": {str(p): outer_round.state_dict() for p, outer_round in self._under_way.items()},
            "num_applied": self.num_applied,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; what was under way is sent again."""
        for outer, saved in zip(self.outers, state["outers"], strict=True):
            outer.load_state_dict(saved)
        self._under_way = {
            int(p): self.outers[int(p)].resumed(self._sites[int(p)], saved)
            for p, saved in state["under_way"].items()
        }
        self.num_applied = state["num_applied"]


class StreamingDiLoCoStrategy(OuterStrategy):
    """DiLoCo fragment by fragment, overlapped: phi_p and its momentum are equal on all ranks.

    Bytes: each of P fragments sends `2 (n - 1) / n` times its encoded bytes per worker every `H` steps: in all as
    much as DiLoCo, at most a P-th of it at a time. The paper's wire format is `codec="e3m0"`.

    With P = 1, tau = 0, alpha = 0 and `outer_lr=0.7` it is DiLoCo. torchft's `sync_every`, `fragment_sync_delay` and
    `fragment_update_alpha` are `H`, `tau` and `alpha`; its rounds begin tau steps earlier, and end where these begin.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.4, Nesterov momentum 0.9 by default).
        H: steps between two rounds of a fragment (100).
        options: of `StreamingOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512.
        Departures follow torchft's local_sgd.py.
    """

    Options = StreamingOptions
    module = StreamingDiLoCoCommunicator
