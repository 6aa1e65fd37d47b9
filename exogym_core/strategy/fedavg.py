"""FedAvg and LocalSGD: train alone, average the parameters every H steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.communicate_optimize import CommunicationModule
from exogym_core.strategy.options.arguments import checked_options, refuse_unknown
from exogym_core.strategy.options.fedavg import FedAvgOptions, LocalSGDOptions
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from exogym_core.strategy.parts.generators import shared_generator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.strategy.chain import Scope

__all__ = ["AveragingCommunicator", "FedAvgOptions", "FedAvgStrategy", "LocalSGDStrategy"]


class AveragingCommunicator(CommunicationModule):
    """Average all parameters every `H` steps, over all ranks or within random islands.

    Each round cuts a permutation of the ranks (of sites, behind `Sites`), drawn from the shared seed, into islands
    of `island_size` (the last may be smaller). Only an island's members exchange anything.

    Judged is what the last round made of the parameters (of this rank's island); before it the initial ones.

    Args:
        island_size: as of `FedAvgOptions`.
        options: of `FedAvgOptions`.
    """

    Options = FedAvgOptions
    judged = "outer"

    def __init__(self, island_size: int | None = None, **options: Any) -> None:
        given = {"island_size": island_size, **options}
        self.options, unknown = checked_options(type(self), FedAvgOptions, given)
        refuse_unknown(type(self), unknown)
        self.H, self.island_size = self.options.H, self.options.island_size

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Keep what could be shipped."""
        super().enter(strategy, scope)
        self._averaging = self.options.averaging().charged(strategy.coding, strategy.comm)
        plan = plan_buckets(scope.parameters)
        self._buckets = [[scope.parameters[index] for index in bucket] for bucket in plan]
        self._residuals = [self._averaging.residual(flatten(bucket)) for bucket in self._buckets]
        self._num_rounds = 0
        self._result = [parameter.detach().clone() for parameter in scope.parameters]
        return scope

    def judged_state(self) -> dict[str, Tensor]:
        """The parameters that the last round made."""
        return self.named(self._result)

    @property
    def judged_version(self) -> int:
        """Rounds that have ended."""
        return self._num_rounds

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Average if a round ends with this step."""
        if (local_step + 1) % self.H:
            return
        between = self.scope.site.between
        number = local_step // self.H
        island = self.scope.site.among(self.island(between.rank, between.world_size, number), number)
        for bucket, residual in zip(self._buckets, self._residuals, strict=True):
            if island.between.world_size > 1:
                write_back(island.average(self._averaging, flatten(bucket), residual), bucket)
        self._num_rounds += 1
        for value, parameter in zip(self._result, self.scope.parameters, strict=True):
            value.copy_(parameter.detach())

    def state_dict(self) -> dict[str, Any]:
        """What the last round made, how many have ended, and what encoding has rounded off."""
        residuals = [residual.clone() for residual in self._residuals if residual is not None]
        result = [value.clone() for value in self._result]
        return {"num_rounds": self._num_rounds, "result": result, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._num_rounds = state["num_rounds"]
        for value, saved in zip(self._result, state["result"], strict=True):
            value.copy_(saved)
        for residual, saved in zip(self._residuals, state["residuals"], strict=False):
            if residual is not None:
                residual.copy_(saved)

    def island(self, rank: int, num_nodes: int, round_number: int) -> list[int]:
        """The ranks that `rank` averages with in the 0-based round, itself included, sorted."""
        if self.island_size is None or self.island_size >= num_nodes:
            return list(range(num_nodes))
        generator = shared_generator(self.seed, "islands", round_number)
        islands = torch.split(torch.randperm(num_nodes, generator=generator), self.island_size)
        return next(sorted(island.tolist()) for island in islands if rank in island)


class FedAvgStrategy(Chain):
    """`H` local steps, then replace the parameters by their mean (over all ranks or random islands).

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' bytes per worker every `H` steps, with n the
    size of the island. Optimizer states stay local.

    Args:
        inner_optim: the local optimizer (AdamW by default).
        island_size: average within random groups of this many ranks, drawn anew each round; all if None or
            above the number of ranks.
        H: local steps a round.
        max_norm: clip the norm of the local gradient to this.
        options: of `FedAvgOptions`, and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv
        1602.05629, algorithm 1 with all clients in every round.
    """

    Options = FedAvgOptions

    def __init__(
        self,
        inner_optim: Any = None,
        island_size: int | None = None,
        H: int | None = None,  # noqa: N803
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        given = {"inner_optim": inner_optim, "island_size": island_size, "H": H, **options}
        fedavg, others = checked_options(type(self), self.Options, given)
        self.H = fedavg.H
        super().__init__([AveragingCommunicator(**vars(fedavg))], max_norm=max_norm, **others)


class LocalSGDStrategy(FedAvgStrategy):
    """FedAvg under the name it has among equal workers, with rounds of 8 steps by default.

    References:
        Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """

    Options = LocalSGDOptions
