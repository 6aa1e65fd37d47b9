"""One process of a site that has several: its ways to those of its site, who stay, and to the other sites."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.elastic.contract import ElasticCommunicator
from exogym_core.communicator.gloo.calls import GroupCalls
from exogym_core.communicator.gloo.rendezvous import ProcessGroups
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.communicator.elastic.link import SiteLink
    from exogym_core.communicator.gloo.communicator import GlooCommunicator

__all__ = ["SiteRankCommunicator", "site_link"]


class SiteRankCommunicator(ElasticCommunicator):
    """Connects all processes of all sites; sites are consecutive ranks, equally many each.

    There are groups of processes of one site, and of those in the same place of every site, over which sites meet
    (`exogym_core.communicator:SiteCommunicator`): with `ranks_per_worker` a strategy asks for both.

    Args:
        between: to the processes in this one's place in the other sites.
        inside: the site's processes.

    Attributes:
        between, inside: likewise.
    """

    def __init__(self, between: ElasticCommunicator, inside: GlooCommunicator) -> None:
        self.between, self.inside, self._own = between, inside, inside
        self._first = between.rank * inside.world_size
        state, rank = between.shared_state, self._first + inside.rank
        everyone = range(between.world_size * inside.world_size)
        super().__init__(state, GroupCalls(state, ProcessGroups(None, None, None), everyone, rank), rank)

    @property
    def link(self) -> SiteLink:
        return self.between.link

    def group(self, ranks: Sequence[int], reuse: bool = False, number: int | None = None) -> GlooCommunicator:
        members = [self._check_rank("group", "ranks", rank) for rank in ranks]
        own = range(self._first, self._first + self._own.world_size)
        if set(members) <= set(own):
            return self._own.group([rank - self._first for rank in members], reuse, number)
        if members == list(range(self._own.rank, self.world_size, self._own.world_size)):
            return self.between
        raise InputError(
            f"rank {self.rank}, group: {members} are of several sites, which come and go, and a site has "
            f"{self._own.world_size} processes: make ranks_per_worker equal to that"
        )

    def before_meeting(self, call: Callable[[], None]) -> None:
        self.between.before_meeting(call)

    def arrive_at(self, seconds: float) -> None:
        self.between.arrive_at(seconds)

    def compare_places(self, compare: bool) -> None:
        super().compare_places(compare)
        self._own.compare_places(compare)

    @contextmanager
    def off_clock(self) -> Iterator[None]:
        with self._own.off_clock(), super().off_clock():
            yield

    def state_dict(self) -> dict[str, Any]:
        return {**self._own.state_dict(), **super().state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.between.load_state_dict(saved)

    def finish(self) -> None:
        """This site is through; its processes stay while one of another site needs what they have."""
        self.between.finish()
        self._own.finish()

    def close(self) -> None:
        """Leave the other sites, and this one."""
        self.between.close()
        super().close()
        self._own.close()


def site_link(
    link: Callable[[int | None, int], SiteLink],
    site: int | None,
    inside: GlooCommunicator,
    patience_seconds: float,
) -> SiteLink:
    """A link for each process of a site: the first one's finds out which site it is, then the others come.

    Args:
        link: makes it, for a site (None: the rendezvous says which) and the place of a process in it.
        site: as the environment says.
        inside: connects the site's processes.
        patience_seconds: how long the rendezvous may not be there yet.

    Raises:
        InputError: the rendezvous has no place for the site, or another secret; on all its processes.
    """
    first, refused = None, ""
    if inside.rank == 0:
        try:
            first = link(site, 0)
        except InputError as error:
            refused = str(error)
    patient = inside.patient(patience_seconds + 60.0)
    with patient.off_clock():
        known, refused = patient.broadcast_object((None if first is None else first.site, refused))
    if refused:
        raise InputError(refused)
    return first if first is not None else link(known, inside.rank)
