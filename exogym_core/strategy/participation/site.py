"""A site: ranks that act as one participant; its ranks share one replica and the way to the other sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from exogym_core.strategy.parts.flight import run
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.parts.flight import Steps

__all__ = ["Site", "SiteExchange"]


class SiteExchange(Protocol):
    """Exchange that replaces values by a mean of several ranks', such as `Averaging` and `Mixing`."""

    def steps(self, comm: Communicator, flat: Tensor, residual: Tensor | None = None) -> Steps[Tensor]:
        """Change `flat` in place."""


@dataclass(frozen=True)
class Site:
    """This rank's connections: to the ranks of its site, and to the rank in its place of every site.

    Attributes:
        inside: the ranks of this rank's site; None if it is the only one.
        between: the ranks with this rank's place, one a site.
    """

    inside: Communicator | None
    between: Communicator

    @classmethod
    def of(cls, comm: Communicator, ranks_per_site: int, where: str, name: str = "ranks_per_worker") -> Site:
        """Sites of so many consecutive ranks each; called by all ranks of `comm`.

        Raises:
            InputError: the ranks cannot be cut into such sites.
        """
        if ranks_per_site == 1:
            return cls(None, comm)
        if comm.world_size % ranks_per_site:
            raise InputError(
                f"{where}: {name}={ranks_per_site} does not divide the {comm.world_size} ranks; "
                f"every {name.removeprefix('ranks_per_')} has as many"
            )
        place = comm.rank % ranks_per_site
        first = comm.rank - place
        inside = comm.group(range(first, first + ranks_per_site))
        return cls(inside, comm.group(range(place, comm.world_size, ranks_per_site)))

    def steps(self, averaging: SiteExchange, flat: Tensor, residual: Tensor | None = None) -> Steps[Tensor]:
        """Average `flat` over sites, in place; the ranks of a site have the same values.

        Each rank of a site of k averages the k-th part that falls to it with its like in the other sites,
        then gives the result to its site's ranks. So between sites the values travel once per site, over
        the connections of all its ranks at the same time.
        """
        if self.inside is None:
            return (yield from averaging.steps(self.between, flat, residual))
        if self.between.world_size == 1:
            return flat
        lost = None if residual is None else self.own(residual)
        yield from averaging.steps(self.between, self.own(flat), lost)
        return (yield from self.spread_steps(flat))

    def own(self, flat: Tensor) -> Tensor:
        """The part of `flat`, a view, that this rank brings to its like in the other sites."""
        if self.inside is None:
            return flat
        return flat.tensor_split(self.inside.world_size)[self.inside.rank]

    def spread_steps(self, flat: Tensor) -> Steps[Tensor]:
        """Complete `flat`, of which each rank of the site has its own part, in place."""
        if self.inside is None:
            return flat
        place, size = self.inside.rank, self.inside.world_size
        parts = flat.tensor_split(size)
        with self.inside.counted_as(parts[place].nbytes):
            posted = self.inside.all_to_all(
                [parts[place]] * size, async_op=True, shapes=[tuple(part.shape) for part in parts]
            )
        received = yield posted
        for part, got in zip(parts, received, strict=True):
            part.copy_(got)
        return flat

    @property
    def is_first(self) -> bool:
        """True if this rank speaks for those of its site that have the same values."""
        return self.inside is None or self.inside.rank == 0

    def shared(self, values: list[Tensor]) -> list[Tensor]:
        """Values of the first of the site's ranks with equal values, on all of them."""
        return values if self.inside is None else self.inside.broadcast_object(values)

    def average(self, averaging: SiteExchange, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """Average over sites, and wait for it."""
        return run(self.steps(averaging, flat, residual))

    def apart(self) -> Site:
        """This site in groups of its own, whose collectives wait for no others'; called by all its ranks."""
        inside = None if self.inside is None else self.inside.group(range(self.inside.world_size))
        return Site(inside, self.between.group(range(self.between.world_size)))

    def among(self, sites: Sequence[int], number: int) -> Site:
        """This rank's connections to some of the sites, its own among them, in the round of that number."""
        if len(sites) == self.between.world_size:
            return self
        # A group that comes again goes over the connections that it has.
        return Site(self.inside, self.between.group(sites, reuse=True, number=number))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with the first rank's: to each site's first rank, then inside the site."""
        for bucket in plan_buckets(tensors):
            members = [tensors[index] for index in bucket]
            flat = flatten(members)
            if self.inside is None or self.inside.rank == 0:
                self.between.broadcast(flat)
            if self.inside is not None:
                self.inside.broadcast(flat)
            write_back(flat, members)
