"""Delayed and eager DiLoCo: outer steps whose communication may take a whole round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.parts.outer import OuterOptions
from exogym_core.strategy.parts.rounds import OuterRounds, RoundUnderWay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from exogym_core.strategy.parts.outer import Round

__all__ = [
    "DelayedDiLoCoCommunicator",
    "DelayedDiLoCoStrategy",
    "EagerDiLoCoCommunicator",
    "EagerDiLoCoStrategy",
]


class DelayedDiLoCoCommunicator(RoundUnderWay, OuterRounds, name="DelayedDiLoCo"):
    """The mean of round k's pseudo-gradients is applied at the end of round k + 1.

    Args:
        H: local steps a round.
        options: of `OuterOptions`.
    """

    Options = OuterOptions

    positional = ("H",)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Begin with the same phi on every rank."""
        super()._init_node(model, rank, num_nodes)
        self._site = self.scope.site.apart()
        self._is_staged = self.averaging.codec is not None or self.scope.site.inside is not None

    def after_update(self) -> None:
        """Send the outer gradient of a round that ends, and apply that of the round before."""
        if self._is_staged and self._under_way is not None:
            self._under_way.go_on()
        if (self.strategy.local_step + 1) % self.options.H == 0:
            before = self._under_way
            if before is not None:
                before.wait()  # all calls of one round come before all of the next, on all ranks
            self._under_way = self.begin()
            self.apply(before)

    def begin(self) -> Round:
        """`phi - theta_i` is on its way to its mean."""
        return self.outer.begin(self._site)

    def apply(self, before: Round | None) -> None:
        """An outer step along the mean of the round before, if there is one; every worker continues from phi."""
        if before is None:
            self.outer.reset_parameters()
        else:
            self.advance(before.wait())

    def resumed(self, saved: Mapping[str, Any]) -> Round:
        """Send the round's pseudo-gradients again."""
        return self.outer.resumed(self._site, saved)


class DelayedDiLoCoStrategy(Composition, name="DelayedDiLoCo"):
    """DiLoCo whose outer gradients may take a round to arrive, and are applied when the next one ends.

    A worker begins every round at phi: what it did in a round is in phi one round later.

    Bytes: as DiLoCo's.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        H: local steps a round.
        options: of `OuterOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Kale et al., Eager Updates For Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """

    module = DelayedDiLoCoCommunicator
    positional = ("optim_spec", "outer_optim_spec", "H")


class EagerDiLoCoCommunicator(DelayedDiLoCoCommunicator, name="EagerDiLoCo"):
    """At the end of round k: an outer step along `(own d(k) + the sum of others' d(k - 1)) / n`.

    Phi and its momentum differ from rank to rank. With one worker it is DiLoCo.
    """

    judged = "own"

    @torch.no_grad()
    def apply(self, before: Round | None) -> None:
        """Apply the own part fresh and the others' a round late; at the end theirs alone."""
        n, fresh = self.scope.site.between.world_size, self._under_way
        if fresh is None and n == 1:
            return  # there are no others
        gradients = [torch.zeros_like(flat) for flat in self.outer.flats]
        for number, gradient in enumerate(gradients):
            if fresh is not None:
                gradient += fresh.sent[number] / n
            if before is not None:
                gradient += before.wait()[number] - before.sent[number] / n
        self.advance(gradients)


class EagerDiLoCoStrategy(DelayedDiLoCoStrategy, name="EagerDiLoCo"):
    """DiLoCo that steps at once along its own fresh outer gradient and the others' of the round before.

    Bytes: as DiLoCo's.

    References:
        Kale et al., Eager Updates For Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """

    module = EagerDiLoCoCommunicator
