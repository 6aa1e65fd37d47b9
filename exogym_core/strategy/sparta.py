"""SPARTA: average a small random share of the parameters at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.communicate_optimize import CommunicationModule
from exogym_core.strategy.options.arguments import checked_options, refuse_unknown
from exogym_core.strategy.options.sparta import SpartaOptions
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from exogym_core.strategy.chain import Scope
    from exogym_core.strategy.parts.selectors import IndexSelector

__all__ = ["SPARTAStrategy", "SparseCommunicator", "SpartaOptions"]


class SparseCommunicator(CommunicationModule):
    """Average the values that a selector chooses, every `interval` steps.

    All parameters of a dtype form one flat tensor, and one all-reduce carries what is chosen from it. The
    choice comes from the shared seed, so neither indices nor a mask travel.

    Args:
        index_selector: as of `SpartaOptions`.
        interval: likewise.
        options: of `SpartaOptions`.
    """

    Options = SpartaOptions
    judged = "own"

    def __init__(
        self,
        index_selector: str | type[IndexSelector] | IndexSelector | None = None,
        interval: int | None = None,
        **options: Any,
    ) -> None:
        given = {"index_selector": index_selector, "interval": interval, **options}
        self.options, unknown = checked_options(type(self), SpartaOptions, given)
        refuse_unknown(type(self), unknown)
        self.index_selector, self.interval = self.options.selector(), self.options.interval
        self.iteration = 0

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Lay the parameters out flat."""
        super().enter(strategy, scope)
        self.index_selector.seed = strategy.seed
        self._averaging = self.options.averaging().charged(strategy.coding, strategy.comm)
        plan = plan_buckets(scope.parameters)
        self._buckets = [[scope.parameters[index] for index in bucket] for bucket in plan]
        self._residuals = [self._averaging.residual(flatten(bucket)) for bucket in self._buckets]
        return scope

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Average if this step is due."""
        if (local_step + 1) % self.interval:
            return
        if self.scope.site.between.world_size > 1:
            for number in range(len(self._buckets)):
                self._average_chosen(number)
        self.iteration += 1

    def _average_chosen(self, number: int) -> None:
        bucket, residual = self._buckets[number], self._residuals[number]
        flat = flatten(bucket)
        chosen = self.index_selector.get_indices(flat, self.iteration).to(flat.device)
        if chosen.dtype == torch.bool:
            chosen = chosen.view(-1).nonzero().view(-1)
        if not len(chosen):
            return
        lost = None if residual is None else residual[chosen]
        flat[chosen] = self.scope.site.average(self._averaging, flat[chosen], lost)
        if residual is not None and lost is not None:
            residual[chosen] = lost
        write_back(flat, bucket)

    def state_dict(self) -> dict[str, Any]:
        """How many times it has communicated, and what encoding has rounded off."""
        return {
            "iteration": self.iteration,
            "residuals": [r.clone() for r in self._residuals if r is not None],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.iteration = state["iteration"]
        for residual, saved in zip(self._residuals, state["residuals"], strict=False):
            if residual is not None:
                residual.copy_(saved)


class SPARTAStrategy(Chain):
    """Update locally, then average a share `p_sparta` of the parameters over all ranks.

    Bytes: a ring sends `2 (n - 1) / n` times `p_sparta` of the parameters' bytes per worker every
    `interval` steps.

    Args:
        optim_spec: the local optimizer (AdamW by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        options: of `SpartaOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Beton et al., Improving the Efficiency of Distributed Training using Sparse Parameter Averaging,
        openreview stFPf3gzq1.
    """

    Options = SpartaOptions

    def __init__(self, optim_spec: Any = None, p_sparta: float | None = None, **options: Any) -> None:
        sparta, others = checked_options(type(self), SpartaOptions, {"p_sparta": p_sparta, **options})
        sparse = SparseCommunicator(**vars(sparta))
        self.index_selector = sparse.index_selector
        super().__init__([sparse], optim_spec, **others)
