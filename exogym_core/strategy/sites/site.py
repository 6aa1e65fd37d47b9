"""Workers that are groups of ranks: a site's ranks share one replica and its way to the other sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.parts.average import Averaging

__all__ = ["Workers"]


@dataclass(frozen=True)
class Workers:
    """This rank's connections: to the ranks of its worker, and to the rank in its place of every worker.

    Attributes:
        inside: the ranks of this rank's worker; None if it is the only one.
        between: the ranks with this rank's place, one a worker.
    """

    inside: Communicator | None
    between: Communicator

    @classmethod
    def of(
        cls, comm: Communicator, ranks_per_worker: int, where: str, name: str = "ranks_per_worker"
    ) -> Workers:
        """Workers of so many consecutive ranks each; called by all ranks of `comm`.

        Raises:
            InputError: the ranks cannot be cut into such workers.
        """
        if ranks_per_worker == 1:
            return cls(None, comm)
        if comm.world_size % ranks_per_worker:
            raise InputError(
                f"{where}: {name}={ranks_per_worker} does not divide the {comm.world_size} ranks; "
                f"every {name.removeprefix('ranks_per_')} has as many"
            )
        place = comm.rank % ranks_per_worker
        first = comm.rank - place
        inside = comm.group(range(first, first + ranks_per_worker))
        return cls(inside, comm.group(range(place, comm.world_size, ranks_per_worker)))

    def average(self, averaging: Averaging, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """Average `flat` over workers, in place; the ranks of a worker have the same values.

        Each rank of a worker of k averages the k-th part that falls to it with its like in the other workers,
        then gives the result to its worker's ranks. So between workers the values travel once per worker, over
        the connections of all its ranks at the same time.
        """
        if self.inside is None:
            return averaging.flat(self.between, flat, residual)
        if self.between.world_size == 1:
            return flat
        place, size = self.inside.rank, self.inside.world_size
        parts = flat.tensor_split(size)
        own = parts[place]
        averaging.flat(self.between, own, None if residual is None else residual.tensor_split(size)[place])
        with self.inside.counted_as(own.nbytes):
            received = self.inside.all_to_all([own] * size)
        for part, got in zip(parts, received, strict=True):
            part.copy_(got)
        return flat

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with the first rank's: to each worker's first rank, which tells the others."""
        for bucket in plan_buckets(tensors):
            members = [tensors[index] for index in bucket]
            flat = flatten(members)
            if self.inside is None or self.inside.rank == 0:
                self.between.broadcast(flat)
            if self.inside is not None:
                self.inside.broadcast(flat)
            write_back(flat, members)
