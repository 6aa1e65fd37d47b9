"""SPARTA: average a small random share of the parameters at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.options.arguments import fraction, one_argument, positive_int
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from exogym_core.strategy.parts.selectors import IndexSelector, selector_named

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SPARTAStrategy", "SparseCommunicator"]


class SparseCommunicator(CommunicationModule):
    """Average the values that a selector chooses, every `interval` steps.

    All parameters of a dtype form one flat tensor, and one all-reduce carries what is chosen from it. The
    choice comes from the shared seed, so neither indices nor a mask travel.
    """

    judged = "own"

    def __init__(self, index_selector: IndexSelector, interval: int = 1) -> None:
        self.index_selector = index_selector
        self.interval = positive_int(type(self).__name__, "interval", interval)
        self.iteration = 0

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.index_selector.seed = self.seed
        parameters = self.strategy.trainable
        self._buckets = [[parameters[index] for index in bucket] for bucket in plan_buckets(parameters)]

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Average if this step is due."""
        if (local_step + 1) % self.interval:
            return
        if num_nodes > 1:
            for bucket in self._buckets:
                self._average_chosen(bucket)
        self.iteration += 1

    def _average_chosen(self, bucket: list[Tensor]) -> None:
        flat = flatten(bucket)
        chosen = self.index_selector.get_indices(flat, self.iteration).to(flat.device)
        if chosen.dtype == torch.bool:
            chosen = chosen.view(-1).nonzero().view(-1)
        if len(chosen):
            flat[chosen] = self.comm.all_reduce(flat[chosen], "avg")
            write_back(flat, bucket)

    def state_dict(self) -> dict[str, Any]:
        """How many times it has communicated."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.iteration = state["iteration"]


class SPARTAStrategy(CommunicateOptimizeStrategy):
    """Update locally, then average a share `p_sparta` of the parameters over all ranks.

    Bytes: a ring sends `2 (n - 1) / n` times `p_sparta` of the parameters' bytes per worker every
    `interval` steps.

    Args:
        optim_spec: the local optimizer (AdamW by default); also `inner_optim_spec` and `inner_optim`.
        p_sparta: the share averaged each time, above 0 and at most 1.
        index_selector: "random", "shuffled_sequential", "partitioned", or an IndexSelector or its class.
        interval: communicate every so many steps; also called `sparta_interval`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Beton et al., Improving the Efficiency of Distributed Training using Sparse Parameter Averaging,
        openreview stFPf3gzq1.
    """

    def __init__(
        self,
        optim_spec: Any = None,
        p_sparta: float = 0.005,
        *,
        index_selector: str | type[IndexSelector] | IndexSelector = "random",
        interval: int | None = None,
        sparta_interval: int | None = None,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        every = one_argument(where, 1, interval=interval, sparta_interval=sparta_interval)
        self.index_selector = selector_named(index_selector, fraction(where, "p_sparta", p_sparta))
        sparse = SparseCommunicator(self.index_selector, every)
        super().__init__([sparse], optim_spec=optim_spec, **options)
