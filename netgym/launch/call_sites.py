"""Calls, bytes and waiting of a run by the calling line of the program."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from netsim.ranks import Post, Progress

if TYPE_CHECKING:
    from collections.abc import Hashable

    from exogym_core.communicator.simulated.calls import ScheduleBook
    from netsim.ranks import Key, Request, StampedRow

__all__ = ["CallSite", "CallSites", "Instant", "SiteTotals"]


class CallSite(NamedTuple):
    """A place of the program, and the operation called there."""

    place: str
    op: str


_OUTSIDE = CallSite("outside of calls", "")


@dataclass
class SiteTotals:
    """Sums over all ranks.

    Attributes:
        calls: that ranks have posted; a collective of eight ranks counts eight times.
        num_bytes: of their tensors.
        exposed_seconds: waited there.
        network_seconds: the part of it in which bytes were under way; in the rest other members were missing.
        awaited_seconds: of the network, that ranks waited, here or elsewhere, while the calls posted here were the
            oldest of their group under way: later ones queue behind them.
        hidden_seconds: in which calls posted here were under way while their rank did not wait.
    """

    calls: int = 0
    num_bytes: int = 0
    exposed_seconds: float = 0.0
    network_seconds: float = 0.0
    awaited_seconds: float = 0.0
    hidden_seconds: float = 0.0


@dataclass
class _Overlap:
    """A rank's calls under way, by where they were posted, and whether it waits."""

    since: float = 0.0  # the last change
    waits_for: Key | None = None
    is_waiting: bool = False
    awaited_seconds: float = 0.0
    awaited_before: float = 0.0  # when this wait began
    under_way: Counter[CallSite] = field(default_factory=Counter)
    # By group, in the order of posts.
    queues: defaultdict[Hashable, OrderedDict[Key, CallSite]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )


class Instant(NamedTuple):
    """A rank's counters at the end of one of its steps."""

    step: int
    virtual_seconds: float
    compute_seconds: float
    exposed_seconds: float
    network_seconds: float


@dataclass
class CallSites:
    """Counts calls and waiting by place, from rows and requests of ranks in order of virtual time.

    A row with `place` and `op` holds for the requests of its rank until its next such row. A row with `step` ends a
    step; one with `startup_seconds` has the time before the rank's clock started; one with `uncharged` names a backend
    or device used alongside the simulated network, one with `computes` a speed of computing.

    Args:
        num_ranks: of the program.
        keeps_history: keep every change of place.

    Attributes:
        book: bytes of calls; set before the first.
        num_calls: posted calls.
        num_started: number of ranks whose clock has started.
        bytes_sent, wan_bytes: payload that left each rank, and the part of it that went to other regions.
        first_steps, last_steps: first and last end of a step, by rank.
        startup_seconds: of each rank.
        computes: speeds at which operations were charged, by dtype.
        uncharged: backends that ranks used alongside the simulated network.
        history: changes of place: (rank, instant, place).
    """

    num_ranks: int
    keeps_history: bool = False
    book: ScheduleBook = field(init=False)
    bytes_sent: list[int] = field(init=False)
    wan_bytes: list[int] = field(init=False)
    startup_seconds: list[float] = field(init=False)
    first_steps: dict[int, Instant] = field(default_factory=dict)
    last_steps: dict[int, Instant] = field(default_factory=dict)
    num_calls: int = 0
    num_started: int = 0
    computes: dict[str, None] = field(default_factory=dict)
    uncharged: dict[str, None] = field(default_factory=dict)
    history: list[tuple[int, float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bytes_sent, self.wan_bytes = [0] * self.num_ranks, [0] * self.num_ranks
        self.startup_seconds = [0.0] * self.num_ranks
        self._sites = [_OUTSIDE] * self.num_ranks
        self._counted_until = [(0.0, 0.0)] * self.num_ranks
        self._totals: defaultdict[CallSite, SiteTotals] = defaultdict(SiteTotals)
        self._overlaps = [_Overlap() for _ in range(self.num_ranks)]
        self._posted_at: dict[tuple[int, Key], CallSite] = {}  # until the rank has waited for the call

    def take_request(self, rank: int, request: Request) -> None:
        """Count a rank's request."""
        if not isinstance(request, Post):
            return
        totals = self._totals[self._sites[rank]]
        self._posted_at[rank, request.key] = self._sites[rank]
        self.num_calls += 1
        totals.calls += 1
        totals.num_bytes += request.call.num_bytes
        sent, wan = self.book.traffic(request.call, request.member)
        self.bytes_sent[rank] += sent
        self.wan_bytes[rank] += wan

    def take_row(self, row: StampedRow) -> None:
        """Add a row that a rank has marked."""
        rank, marked = row.rank, row.row
        if "place" in marked:
            self._count_waiting(rank, row.exposed_seconds, row.network_seconds)
            self._sites[rank] = CallSite(marked["place"], marked["op"])
            if self.keeps_history:
                self.history.append((rank, row.virtual_seconds, marked["place"]))
        elif "step" in marked:
            seconds = (row.virtual_seconds, row.compute_seconds, row.exposed_seconds, row.network_seconds)
            self.last_steps[rank] = Instant(marked["step"], *seconds)
            self.first_steps.setdefault(rank, self.last_steps[rank])
        elif "startup_seconds" in marked:
            self.startup_seconds[rank] = marked["startup_seconds"]
            self.num_started += 1
        elif "computes" in marked:
            self.computes[marked["computes"]] = None
        elif "uncharged" in marked:
            self.uncharged[marked["uncharged"]] = None

    def take_progress(
        self, rank: int, change: Progress, key: Key | None, instant: float, seconds: float
    ) -> None:
        """Follow a rank's waiting and its calls under way; see `Progress`."""
        overlap = self._overlaps[rank]
        self._count_overlap(overlap, instant)
        site = None if key is None else self._posted_at.get((rank, key))
        if change is Progress.STOPS:
            overlap.is_waiting, overlap.waits_for = True, key
            overlap.awaited_before = overlap.awaited_seconds
        elif change is Progress.GOES_ON:
            self._count_awaited(overlap, site, seconds - (overlap.awaited_seconds - overlap.awaited_before))
            overlap.is_waiting, overlap.waits_for = False, None
            if key is not None:
                self._posted_at.pop((rank, key), None)
        elif site is not None and key is not None:
            queue = overlap.queues[key.group]
            if change is Progress.UNDER_WAY:
                queue[key] = site
                overlap.under_way[site] += 1
            elif queue.pop(key, None) is not None:
                overlap.under_way[site] -= 1

    def _count_overlap(self, overlap: _Overlap, instant: float) -> None:
        """Count the time since the last change, of calls under way.

        A rank that waits for one of them waits for the oldest of its group; all are hidden from one that does not wait.
        """
        elapsed, overlap.since = instant - overlap.since, instant
        if elapsed <= 0:
            return
        if not overlap.is_waiting:
            for site, number in overlap.under_way.items():
                if number:
                    self._totals[site].hidden_seconds += elapsed
        elif (key := overlap.waits_for) is not None and key in (queue := overlap.queues[key.group]):
            self._count_awaited(overlap, next(iter(queue.values())), elapsed)

    def _count_awaited(self, overlap: _Overlap, site: CallSite | None, seconds: float) -> None:
        overlap.awaited_seconds += seconds
        if site is not None:
            self._totals[site].awaited_seconds += seconds

    def current(self, rank: int) -> CallSite:
        """Last place that a rank has marked."""
        return self._sites[rank]

    def _count_waiting(self, rank: int, exposed_seconds: float, network_seconds: float) -> None:
        exposed, network = self._counted_until[rank]
        self._counted_until[rank] = exposed_seconds, network_seconds
        if exposed_seconds > exposed:
            totals = self._totals[self._sites[rank]]
            totals.exposed_seconds += exposed_seconds - exposed
            totals.network_seconds += network_seconds - network

    def finish(self, waited: list[tuple[float, float]], instant: float) -> dict[CallSite, SiteTotals]:
        """The sites in order of their waiting, there or for their calls, the longest first.

        Args:
            waited: seconds of waiting of each rank when the run ended, and the network's part of them.
            instant: of that end.
        """
        for rank, seconds in enumerate(waited):
            self._count_waiting(rank, *seconds)
            overlap = self._overlaps[rank]
            self._count_overlap(overlap, instant)
            if overlap.waits_for is not None:
                site = self._posted_at.get((rank, overlap.waits_for))
                self._count_awaited(overlap, site, seconds[1] - overlap.awaited_seconds)

        def longest_first(item: tuple[CallSite, SiteTotals]) -> tuple[float, CallSite]:
            return -max(item[1].exposed_seconds, item[1].awaited_seconds), item[0]

        return dict(sorted(self._totals.items(), key=longest_first))
