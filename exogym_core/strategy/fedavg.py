"""FedAvg and LocalSGD: train alone, average the parameters every H steps."""

from __future__ import annotations

from typing import Any

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option, options_of, positive_int
from exogym_core.strategy.participation.options import ClientOptions, PatienceOptions
from exogym_core.strategy.parts.average import RoundAveraging
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.means import ParameterMean
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

__all__ = ["AveragingCommunicator", "FedAvgStrategy", "LocalSGDStrategy"]


class FedAvgStrategy(Strategy, name="FedAvg"):
    """`H` local steps, then replace the parameters by their mean (over all ranks or random islands).

    Each round cuts a permutation of the ranks (of sites, behind `Sites`), drawn from the shared seed, into islands
    of `island_size` (the last may be smaller). Only an island's members exchange anything.

    The judged model is the last round's mean (of this rank's island); before it the initial parameters.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' bytes per worker every `H` steps, with n the
    size of the island. Optimizer states stay local.

    Args:
        inner_optim: the local optimizer (AdamW by default).
        island_size: average within random groups of this many ranks, drawn again each round; all if None or
            above the number of ranks.
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`.
        max_norm: clip the norm of the local gradient to this.
        codec, error_feedback, aggregate, buckets, exchange: of the mean, see `RoundAveraging`.
        averaging_timeout, deadline, min_ranks, ...: rounds that continue without absent ranks, see `PatienceOptions`.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv
        1602.05629, algorithm 1 with all clients in every round.
    """

    H: int = option(1, positive_int)
    island_size: int | None = option(None, positive_int)
    averaging: RoundAveraging = options_of(RoundAveraging)
    patience: PatienceOptions = options_of(PatienceOptions)
    clients: ClientOptions = options_of(ClientOptions)
    weigh_by_default = "samples"
    weighs_by_samples = True
    positional = ("inner_optim", "island_size", "H", "max_norm")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "num_rounds")
    plain_steps = True

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        if self.island_size is not None:
            self.judged = "own"  # islands have means of their own
        if self.averaging.error_feedback and self.island_size is not None:
            raise InputError(
                f"{self.where}: error_feedback=True goes with one group that stays; leave out island_size=",
                about=("error_feedback", "island_size"),
            )
        if self.clients.are_drawn and self.island_size is not None:
            raise InputError(
                f"{self.where}: drawn clients average among themselves; leave out island_size=",
                about=("island_size",),
            )
        if self.island_size is not None and self.patience.patience(self.where) is not None:
            raise InputError(
                f"{self.where}: time-outs for absent ranks go with one mean over all that are present; leave out "
                "island_size=",
                about=("island_size",),
            )

    def prepare(self) -> None:
        """Keep what could be shipped."""
        self.outer = ParameterMean(self.held, self.averaging.charged(self))
        self.num_rounds = 0

    def communicate(self, step: int) -> None:
        """At the end of a round: average the parameters of this rank's island."""
        if step % self.H:
            return
        if self.island_size is None:
            means = self.workers.mean_of(self.outer)
        else:
            number, between = step // self.H - 1, self.site.between
            island = self.island(between.rank, between.world_size, number)
            means = self.outer.mean_over(self.site.among(island, number), self.round_weight(island))
        if means is None:  # the others have gone on without this worker: it has their newest parameters now
            return
        self.outer.adopt(means)
        self.num_rounds += 1
        self.workers.publish(self.outer)

    def island(self, rank: int, num_nodes: int, round_number: int) -> list[int]:
        """The ranks that `rank` averages with in the 0-based round, itself included, sorted."""
        size = self.island_size
        if size is None or size >= num_nodes:
            return list(range(num_nodes))
        generator = shared_generator(self.seed, "islands", round_number)
        islands = torch.split(torch.randperm(num_nodes, generator=generator), size)
        return next(sorted(island.tolist()) for island in islands if rank in island)


class LocalSGDStrategy(FedAvgStrategy, name="LocalSGD"):
    """FedAvg under the name it has among equal workers, with rounds of 8 steps by default.

    References:
        Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """

    H: int = option(8, positive_int)


class AveragingCommunicator(FedAvgStrategy, part="FedAvg", positional=("island_size",)):
    """FedAvg as a member of a `Chain`: the mean of the parameters every `H` steps."""
