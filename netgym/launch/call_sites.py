"""Calls, bytes and waiting of a run by the calling line of the program."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from netsim.ranks import MessageGroup, Post, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from exogym_core.communicator.simulated.communicator import ScheduleBook
    from netsim.ranks import Key, Request, StampedRow

__all__ = ["CallSite", "CallSites", "Instant", "PostedCall", "RankCalls", "SiteTotals"]

T = TypeVar("T")


class CallSite(NamedTuple):
    """A place of the program, and the operation called there."""

    place: str
    op: str


_OUTSIDE = CallSite("outside of calls", "")


class PostedCall(NamedTuple):
    """Origin of calls: where they were posted, in which process group, and whether its members are in several sites."""

    site: CallSite
    group: str = ""
    is_between_sites: bool = False


@dataclass
class SiteTotals:
    """Sums over all ranks.

    Attributes:
        calls: that ranks have posted; a collective of eight ranks counts eight times.
        num_bytes: of their tensors.
        sent_bytes, sent_between_bytes: payload that left ranks, and the part of it that went to other sites.
        exposed_seconds: waited there.
        network_seconds: the part of it in which bytes were under way; in the rest other members were missing.
        awaited_seconds: of the network, that ranks waited, here or elsewhere, while the calls posted here were the
            oldest of their group under way: later ones queue behind them.
        awaited_between_seconds: the part of them for calls whose members are in several sites.
        hidden_seconds: in which calls posted here were under way while their rank did not wait.
    """

    calls: int = 0
    num_bytes: int = 0
    sent_bytes: int = 0
    sent_between_bytes: int = 0
    exposed_seconds: float = 0.0
    network_seconds: float = 0.0
    awaited_seconds: float = 0.0
    awaited_between_seconds: float = 0.0
    hidden_seconds: float = 0.0

    def add(self, other: SiteTotals) -> None:
        """Add the sums of `other` to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Instant(NamedTuple):
    """A rank's counters at the end of one of its steps."""

    step: int
    virtual_seconds: float
    compute_seconds: float
    exposed_seconds: float
    network_seconds: float


@dataclass
class RankCalls:
    """Counters of one rank, its calls under way, and whether it waits.

    Attributes:
        bytes_sent, wan_bytes: payload that left it, and the part of it that went to other regions.
        startup_seconds: before its clock started.
        steps: first and last end of a step; None: it has marked none.
        site: the place and operation that it marked last.
        counted: exposed and network seconds that are counted already.
        since: the last change of its waiting or of its calls under way.
        waits_for: the call that it waits for; None: it does not wait, or not for a call.
        awaited_seconds, awaited_before: waited for calls of the oldest of a group, and before this wait began.
        under_way: number of its calls under way, by where they were posted.
        queues: by group, in the order of posts.
        posted_at: where each call was posted, until the rank has waited for it.
        account: of its computing on a device, see `DeviceClock.take_account`; None: none was marked.
    """

    bytes_sent: int = 0
    wan_bytes: int = 0
    startup_seconds: float = 0.0
    steps: tuple[Instant, Instant] | None = None
    site: CallSite = _OUTSIDE
    counted: tuple[float, float] = (0.0, 0.0)
    since: float = 0.0
    waits_for: Key | None = None
    is_waiting: bool = False
    awaited_seconds: float = 0.0
    awaited_before: float = 0.0
    under_way: Counter[PostedCall] = field(default_factory=Counter)
    queues: defaultdict[Hashable, OrderedDict[Key, PostedCall]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )
    posted_at: dict[Key, PostedCall] = field(default_factory=dict)
    account: dict[str, Any] | None = None

    def mean_step(self, field: str) -> float | None:
        """A field of `Instant` a step, from the end of the first to the end of the last; None with fewer than two."""
        if self.steps is None or (number := self.steps[1].step - self.steps[0].step) == 0:
            return None
        begin, end = (getattr(instant, field) for instant in self.steps)
        return float(end - begin) / number


class CallSites:
    """Counts calls and waiting by place, from rows and requests of ranks in order of virtual time.

    A row with `place` and `op` holds for the requests of its rank until its next such row. A row with `step` ends a
    step; one with `group` names a process group; one with `startup_seconds` has the time before the rank's clock
    started; one with `uncharged` names a backend or device used alongside the simulated network, one with `computes` an
    account of its computing.

    Args:
        num_ranks: of the program.
        sites_of: returns the site of each of some ranks.

    Attributes:
        ranks: of the program.
        book: bytes of calls; set before the first.
        num_calls: posted calls.
        num_started: number of ranks whose clock has started.
        uncharged: backends that ranks used alongside the simulated network.
    """

    book: ScheduleBook

    def __init__(
        self,
        num_ranks: int,
        sites_of: Callable[[tuple[int, ...]], Sequence[str]] = lambda ranks: (),
    ) -> None:
        self.ranks = [RankCalls() for _ in range(num_ranks)]
        self.num_calls = self.num_started = 0
        self.uncharged: dict[str, None] = {}
        self._totals: defaultdict[PostedCall, SiteTotals] = defaultdict(SiteTotals)
        self._groups: dict[Hashable, str] = {}
        self._is_between = lru_cache(maxsize=1024)(lambda ranks: len(set(sites_of(ranks))) > 1)

    def take_request(self, rank: int, request: Request) -> None:
        """Count a rank's request."""
        if not isinstance(request, Post):
            return
        own, group = self.ranks[rank], request.key.group
        name = self._groups.get(group.group if isinstance(group, MessageGroup) else group, "")
        posted = PostedCall(own.site, name, self._is_between(request.call.ranks))
        totals, own.posted_at[request.key] = self._totals[posted], posted
        self.num_calls += 1
        totals.calls += 1
        totals.num_bytes += request.call.num_bytes
        sent, wan = self.book.traffic(request.call, request.member)
        totals.sent_bytes += sent
        totals.sent_between_bytes += wan
        own.bytes_sent += sent
        own.wan_bytes += wan

    def take_row(self, row: StampedRow) -> None:
        """Add a row that a rank has marked."""
        own, marked = self.ranks[row.rank], row.row
        if "place" in marked:
            self._count_waiting(own, row.exposed_seconds, row.network_seconds)
            own.site = CallSite(marked["place"], marked["op"])
        elif "step" in marked:
            seconds = (row.virtual_seconds, row.compute_seconds, row.exposed_seconds, row.network_seconds)
            end = Instant(marked["step"], *seconds)
            own.steps = (own.steps[0] if own.steps else end, end)
        elif "group" in marked:
            self._groups[marked["group"]] = marked["name"]
        elif "startup_seconds" in marked:
            own.startup_seconds = marked["startup_seconds"]
            self.num_started += 1
        elif "computes" in marked:
            own.account = marked["computes"]
        elif "uncharged" in marked:
            self.uncharged[marked["uncharged"]] = None

    def take_progress(
        self, rank: int, change: Progress, key: Key | None, instant: float, seconds: float
    ) -> None:
        """Follow a rank's waiting and its calls under way; see `Progress`."""
        own = self.ranks[rank]
        self._count_overlap(own, instant)
        site = None if key is None else own.posted_at.get(key)
        if change is Progress.STOPS:
            own.is_waiting, own.waits_for, own.awaited_before = True, key, own.awaited_seconds
        elif change is Progress.GOES_ON:
            self._count_awaited(own, site, seconds - (own.awaited_seconds - own.awaited_before))
            own.is_waiting, own.waits_for = False, None
            if key is not None:
                own.posted_at.pop(key, None)
        elif site is not None and key is not None:
            queue = own.queues[key.group]
            if change is Progress.UNDER_WAY:
                queue[key] = site
                own.under_way[site] += 1
            elif queue.pop(key, None) is not None:
                own.under_way[site] -= 1

    def _count_overlap(self, own: RankCalls, instant: float) -> None:
        """Count the time since the last change, of calls under way.

        A rank that waits for one of them waits for the oldest of its group; all are hidden from one that does not wait.
        """
        elapsed, own.since = instant - own.since, instant
        if elapsed <= 0:
            return
        if not own.is_waiting:
            for site, number in own.under_way.items():
                if number:
                    self._totals[site].hidden_seconds += elapsed
        elif (key := own.waits_for) is not None and key in (queue := own.queues[key.group]):
            self._count_awaited(own, next(iter(queue.values())), elapsed)

    def _count_awaited(self, own: RankCalls, posted: PostedCall | None, seconds: float) -> None:
        own.awaited_seconds += seconds
        if posted is not None:
            self._totals[posted].awaited_seconds += seconds
            self._totals[posted].awaited_between_seconds += seconds * posted.is_between_sites

    def _count_waiting(self, own: RankCalls, exposed_seconds: float, network_seconds: float) -> None:
        (exposed, network), own.counted = own.counted, (exposed_seconds, network_seconds)
        if exposed_seconds > exposed:
            totals = self._totals[PostedCall(own.site)]
            totals.exposed_seconds += exposed_seconds - exposed
            totals.network_seconds += network_seconds - network

    def finish(self, waited: list[tuple[float, float]], instant: float) -> None:
        """Count what is under way when the run ends.

        Args:
            waited: seconds of waiting of each rank when the run ended, and the network's part of them.
            instant: of that end.
        """
        for own, seconds in zip(self.ranks, waited, strict=True):
            self._count_waiting(own, *seconds)
            self._count_overlap(own, instant)
            if own.waits_for is not None:
                self._count_awaited(own, own.posted_at.get(own.waits_for), seconds[1] - own.awaited_seconds)

    def totals_by(self, part: Callable[[PostedCall], T]) -> dict[T, SiteTotals]:
        """Sums by a part of the calls' origin, the longest waiting first, there or for their calls."""
        totals = defaultdict[T, SiteTotals](SiteTotals)
        for posted, each in self._totals.items():
            totals[part(posted)].add(each)

        def longest_first(item: tuple[T, SiteTotals]) -> tuple[float, str]:
            return -max(item[1].exposed_seconds, item[1].awaited_seconds), str(item[0])

        return dict(sorted(totals.items(), key=longest_first))
