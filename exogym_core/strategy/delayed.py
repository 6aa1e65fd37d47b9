"""Delayed and eager DiLoCo: outer steps whose communication may take a whole round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option, options_of, positive_int
from exogym_core.strategy.parts.outer import OuterAveraging, OuterOptimizer, OuterStep
from exogym_core.strategy.parts.rounds import UnderWay
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from exogym_core.strategy.parts.rounds import Round

__all__ = [
    "DelayedDiLoCoCommunicator",
    "DelayedDiLoCoStrategy",
    "EagerDiLoCoCommunicator",
    "EagerDiLoCoStrategy",
]


class DelayedDiLoCoStrategy(Strategy, name="DelayedDiLoCo"):
    """DiLoCo whose outer gradients may take a round to arrive, and are applied when the next one ends.

    A worker begins every round at phi: its displacement of a round reaches phi one round later.

    Bytes: as DiLoCo's.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        H: local steps a round.
        codec, error_feedback, aggregate, buckets, exchange: of the mean, see `OuterAveraging`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Kale et al., Eager Updates For Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """

    H: int = option(100, positive_int)
    outer_optimizer: OuterOptimizer = options_of(OuterOptimizer)
    averaging: OuterAveraging = options_of(OuterAveraging)
    positional = ("optim_spec", "outer_optim_spec", "H")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "under_way", "num_rounds")

    def prepare(self) -> None:
        """Begin with the same phi on every rank."""
        self.outer = OuterStep(self.held, self.outer_optimizer.outer_optim(), self.averaging.charged(self))
        self.under_way = UnderWay(self.site.apart(), self.outer.averaging, self.outer.residuals)
        self.num_rounds = 0

    def communicate(self, step: int) -> None:
        """Send the outer gradient of a round that ends, and apply that of the round before."""
        self.under_way.go_on()
        if step % self.H:
            return
        before = self.under_way.take()
        if before is not None:
            before.wait()  # all calls of one round come before all of the next, on all ranks
        self.apply(before, self.under_way.send(self.outer.values()))

    def apply(self, before: Round | None, fresh: Round | None) -> None:
        """An outer step along the mean of the round before, if there is one; every worker continues from phi."""
        if before is None:
            self.outer.reset_parameters()
        else:
            self.outer.step(before.wait())
            self.num_rounds += 1

    def finish(self) -> None:
        """Apply rounds in flight."""
        if (last := self.under_way.take()) is not None:
            self.apply(last, None)


class EagerDiLoCoStrategy(DelayedDiLoCoStrategy, name="EagerDiLoCo"):
    """DiLoCo that steps at once along its own fresh outer gradient and the others' of the round before.

    Bytes: as DiLoCo's.

    References:
        Kale et al., Eager Updates For Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """

    judged = "own"

    @torch.no_grad()
    def apply(self, before: Round | None, fresh: Round | None) -> None:
        """A step along `(own d(k) + the sum of others' d(k - 1)) / n`: the own fresh, at the end theirs alone."""
        n = self.site.between.world_size
        if fresh is None and n == 1:
            return  # there are no others
        gradients = [torch.zeros_like(flat) for flat in self.outer.flats]
        means = None if before is None else before.wait()
        for number, gradient in enumerate(gradients):
            if fresh is not None:
                gradient += fresh.sent[number] / n
            if before is not None and means is not None:
                gradient += means[number] - before.sent[number] / n
        self.outer.step(gradients)
        self.num_rounds += 1


class DelayedDiLoCoCommunicator(DelayedDiLoCoStrategy, part="DelayedDiLoCo", positional=("H",)):
    """Delayed DiLoCo as a member of a `Chain`."""


class EagerDiLoCoCommunicator(EagerDiLoCoStrategy, part="EagerDiLoCo", positional=("H",)):
    """Eager DiLoCo as a member of a `Chain`."""
