"""Async SPARTA: the sparse share is averaged while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.communicate_optimize import CommunicationModule
from exogym_core.strategy.options.arguments import checked_options, refuse_unknown
from exogym_core.strategy.options.async_sparta import AsyncSPARTAOptions
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from exogym_core.strategy.parts.flight import Flight
from exogym_core.strategy.parts.outer import Round
from exogym_core.strategy.parts.selectors import selector_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from exogym_core.strategy.chain import Scope
    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["AsyncSPARTAOptions", "AsyncSPARTAStrategy", "AsyncSparseCommunicator"]


class AsyncSparseCommunicator(CommunicationModule):
    """Every `interval` steps an all-reduce of chosen values begins; `delay` steps later its result is applied.

    What local steps have changed meanwhile stays: `theta += mean - sent` on the chosen values.
    """

    Options = AsyncSPARTAOptions
    judged = "own"

    def __init__(self, **options: Any) -> None:
        self.options, unknown = checked_options(type(self), AsyncSPARTAOptions, options)
        refuse_unknown(type(self), unknown)
        self.index_selector = selector_named(self.options.index_selector, self.options.p_sparta)
        self.iteration = 0  # averages that have begun
        self._under_way: Round | None = None

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Lay the parameters out flat."""
        super().enter(strategy, scope)
        self.index_selector.seed = strategy.seed
        self._buckets = [[scope.parameters[i] for i in bucket] for bucket in plan_buckets(scope.parameters)]
        return scope

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Begin or apply what is due."""
        if num_nodes == 1:
            return
        if self._under_way is not None and (local_step + 1) % self.options.interval == self.options.delay:
            self.apply(self._under_way)
        if (local_step + 1) % self.options.interval == 0:
            self._under_way = self.begin()

    def begin(self) -> Round:
        """The chosen values are on their way to their mean."""
        self.iteration += 1
        sent = [flatten(bucket)[chosen] for bucket, chosen in zip(self._buckets, self._chosen(), strict=True)]
        return self._round(sent, [()] * len(sent))

    def apply(self, sent: Round) -> None:
        """What the mean differs by from what was sent is added."""
        for bucket, chosen, own, mean in zip(
            self._buckets, self._chosen(), sent.sent, sent.wait(), strict=True
        ):
            flat = flatten(bucket)
            flat[chosen] += mean - own
            write_back(flat, bucket)
        self._under_way = None

    def _chosen(self) -> list[Tensor]:
        """The places in each bucket of the last average that has begun."""
        places = []
        for bucket in self._buckets:
            flat = flatten(bucket)
            chosen = self.index_selector.get_indices(flat, self.iteration - 1).to(flat.device).view(-1)
            places.append(chosen.nonzero().view(-1) if chosen.dtype == torch.bool else chosen)
        return places

    def _round(self, sent: list[Tensor], calls: Sequence[Any]) -> Round:
        comm, averaging = self.scope.site.between, Averaging()
        flights = [
            Flight(averaging.steps(comm, flat.clone()), comm, numbers)
            for flat, numbers in zip(sent, calls, strict=True)
        ]
        return Round(sent, flights)

    def at_end(self) -> None:
        """What is in flight is applied."""
        if self._under_way is not None:
            self.apply(self._under_way)

    def state_dict(self) -> dict[str, Any]:
        """How many averages have begun, and the one under way."""
        under_way = None if self._under_way is None else self._under_way.state_dict()
        return {"iteration": self.iteration, "under_way": under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; what was under way is sent again."""
        self.iteration, saved = state["iteration"], state["under_way"]
        self._under_way = None if saved is None else self._round(saved["sent"], saved["calls"])


class AsyncSPARTAStrategy(Chain):
    """SPARTA whose averages travel beside the computing.

    Bytes: `2 (n - 1) / n p P` a worker every `interval` steps, as SPARTA with that interval. Second-hand: the delay and
    the interval are as EXO's users report them, not read in code.

    Args:
        optim_spec: the optimizer of local steps (AdamW by default).
        options: of `AsyncSPARTAOptions`, and of every Strategy.

    References:
        Beton et al., SPARTA: Improving Distributed Training Using Sparse Parameter Averaging, openreview stFPf3gzq1.
    """

    Options = AsyncSPARTAOptions

    def __init__(self, optim_spec: OptimizerLike | None = None, **options: Any) -> None:
        own, others = checked_options(type(self), AsyncSPARTAOptions, options)
        super().__init__([AsyncSparseCommunicator(**vars(own))], optim_spec, **others)
