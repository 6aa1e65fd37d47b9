"""FedAvg and LocalSGD: train alone, average the parameters every H steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exogym_core.strategy.chain import Composition, RoundModule
from exogym_core.strategy.options import option, positive_int
from exogym_core.strategy.parts.average import AveragingOptions
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

__all__ = ["AveragingCommunicator", "FedAvgOptions", "FedAvgStrategy", "LocalSGDOptions", "LocalSGDStrategy"]


class FedAvgOptions(AveragingOptions):
    """Options of FedAvg: local steps a round, and the size of islands that average.

    Args:
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`.
        island_size: average within random groups of this many sites, drawn again each round; all if None or
            above their number.
    """

    H: int = option(1, positive_int)
    island_size: int | None = option(None, positive_int)

    def check(self, where: str) -> None:
        """Refuse what is owed to an island that is gone."""
        super().check(where)
        if self.error_feedback and self.island_size is not None:
            raise InputError(
                f"{where}: error_feedback=True goes with one group that stays; leave out island_size="
            )


class LocalSGDOptions(FedAvgOptions):
    """FedAvg's, with rounds of 8 steps."""

    H: int = option(8, positive_int)


class AveragingCommunicator(RoundModule, name="FedAvg"):
    """Average all parameters every `H` steps, over all ranks or within random islands.

    Each round cuts a permutation of the ranks (of sites, behind `Sites`), drawn from the shared seed, into islands
    of `island_size` (the last may be smaller). Only an island's members exchange anything.

    Judged is what the last round made of the parameters (of this rank's island); before it the initial ones.

    Args:
        island_size: as of `FedAvgOptions`.
        options: of `FedAvgOptions`.
    """

    Options = FedAvgOptions
    positional = ("island_size",)
    judged = "outer"
    state = State("num_rounds", "result", "residuals")

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Keep what could be shipped."""
        self._averaging = self.options.averaging().charged(self.strategy)
        self.residuals = [self._averaging.residual(flat) for flat in self.flats()]
        self.num_rounds = 0
        self.result = [parameter.detach().clone() for parameter in self.scope.parameters]

    def judged_state(self) -> dict[str, Tensor]:
        """The parameters that the last round made."""
        return self.named(self.result)

    def end_round(self, number: int) -> None:
        """Average the parameters of this rank's island."""
        between = self.scope.site.between
        island = self.scope.site.among(self.island(between.rank, between.world_size, number), number)
        for bucket, residual in zip(self.buckets, self.residuals, strict=True):
            if island.between.world_size > 1:
                write_back(island.average(self._averaging, flatten(bucket), residual), bucket)
        self.num_rounds += 1
        for value, parameter in zip(self.result, self.scope.parameters, strict=True):
            value.copy_(parameter.detach())

    def island(self, rank: int, num_nodes: int, round_number: int) -> list[int]:
        """The ranks that `rank` averages with in the 0-based round, itself included, sorted."""
        size = self.options.island_size
        if size is None or size >= num_nodes:
            return list(range(num_nodes))
        generator = shared_generator(self.seed, "islands", round_number)
        islands = torch.split(torch.randperm(num_nodes, generator=generator), size)
        return next(sorted(island.tolist()) for island in islands if rank in island)


class FedAvgStrategy(Composition, name="FedAvg"):
    """`H` local steps, then replace the parameters by their mean (over all ranks or random islands).

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' bytes per worker every `H` steps, with n the
    size of the island. Optimizer states stay local.

    Args:
        inner_optim: the local optimizer (AdamW by default).
        island_size: average within random groups of this many ranks, drawn again each round; all if None or
            above the number of ranks.
        H: local steps a round.
        max_norm: clip the norm of the local gradient to this.
        options: of `FedAvgOptions`, and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv
        1602.05629, algorithm 1 with all clients in every round.
    """

    module = AveragingCommunicator
    positional = ("inner_optim", "island_size", "H", "max_norm")


class LocalSGDStrategy(FedAvgStrategy, name="LocalSGD"):
    """FedAvg under the name it has among equal workers, with rounds of 8 steps by default.

    References:
        Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """

    Options = LocalSGDOptions
