"""Eager DiLoCo: an outer step along one's own fresh displacement and the others' of the round before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.delayed import DelayedDiLoCoCommunicator, DelayedDiLoCoStrategy
from exogym_core.strategy.parts.outer import OuterOptions

if TYPE_CHECKING:
    from exogym_core.strategy.parts.outer import Round

__all__ = ["EagerDiLoCoCommunicator", "EagerDiLoCoStrategy"]


class EagerDiLoCoCommunicator(DelayedDiLoCoCommunicator):
    """At the end of round k: an outer step along `(own d(k) + the sum of others' d(k - 1)) / n`.

    Phi and its momentum differ from rank to rank. With one worker it is DiLoCo.
    """

    judged = "own"

    @torch.no_grad()
    def apply(self, before: Round | None) -> None:
        """One's own part fresh, the others' a round late; at the end theirs alone."""
        n, fresh = self.scope.site.between.world_size, self._under_way
        gradients = [torch.zeros_like(flat) for flat in self.outer.flats]
        for number, gradient in enumerate(gradients):
            if fresh is not None:
                gradient += fresh.sent[number] / n
            if before is not None:
                gradient += before.wait()[number] - before.sent[number] / n
        self.outer.apply(gradients)
        self.outer.reset_parameters()
        self.num_rounds += 1

    def judged_state(self) -> None:
        """Every rank's own."""

    @property
    def judged_version(self) -> int:
        """As every replica's: the steps."""
        return self.strategy.local_step


class EagerDiLoCoStrategy(DelayedDiLoCoStrategy):
    """DiLoCo that steps at once along its own fresh outer gradient and the others' of the round before.

    Bytes: as DiLoCo's.

    References:
        Kale et al., Eager Updates For Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """

    Options = OuterOptions
    module = EagerDiLoCoCommunicator
