"""Meetings of ranks, their joint work under a time-out, and states that they publish and download."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.deadlines import ArrivalDelays, Deadline
from exogym_core.communicator.simulated.meeting_requests import (
    Arrival,
    Confirm,
    Fetch,
    Fetched,
    Gathered,
    Join,
    JoinNext,
    Keep,
    Met,
    Publish,
)
from exogym_core.communicator.simulated.reach import AGAIN, Reach
from netsim.network.clock import Clock, Order
from netsim.ranks import Kernel, Key, call_at, group_of, on_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable

    import simpy

    from netsim.ranks.calls import Calls

__all__ = ["HEARTBEAT_SECONDS", "SLOW_TIMES", "MeetingKernel", "Meetings"]

#: Downloads of a rank that was too slow for two averages are not awaited, for this many times an average's time-out.
SLOW_TIMES = 10


#: A member that has been silent for so long does not answer (torchft's lighthouse: `heartbeat_timeout_ms`).
HEARTBEAT_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Meeting:
    """Ranks at a `Join`; the event `settled` happens when `present` is final."""

    first: Join
    settled: simpy.Event
    opened: float
    arrivals: list[Arrival] = field(default_factory=list)
    met: Met | None = None  # once it is settled
    num_come: int = 0  # including those that came to a later one instead
    due: float = math.inf  # when its time was over
    lacks: bool = False  # its time is over, and it waits for a quorum

    @property
    def deadline(self) -> Deadline:
        return Deadline(*self.first.deadline)  # of a journal it is a tuple

    @property
    def quorum(self) -> int:
        return min(self.deadline.quorum, len(self.first.ranks))

    def can_begin(self, ranks: Collection[int]) -> bool:
        """True if these ranks are a quorum, with one at each position."""
        return len(ranks) >= self.quorum and self.first.has_all_positions(ranks)


@dataclass(slots=True, eq=False)
class _Series:
    """Meetings of a group, each formed of whoever comes next.

    Attributes:
        members: ranks that take part in them, and have not ended.
        silent: members that do not answer, and since when.
        arrived: those that wait for the next one: what they asked, and the event of its forming, or of a crash.
        since: when the first of them came.
        last: ranks of the one before.
        number: of the next one.
        met: by rank, the last one that it was in.
        weight: the greatest so far.
        arrivals: delays of their members.
        enough: since when a quorum has been there; infinity: it is not.
        formed: when the last one was formed.
    """

    members: set[int] = field(default_factory=set)
    silent: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, tuple[JoinNext, simpy.Event]] = field(default_factory=dict)
    since: float = 0.0
    last: frozenset[int] = frozenset()
    number: int = 0
    met: dict[int, int] = field(default_factory=dict)
    weight: float = 0.0
    arrivals: ArrivalDelays = field(default_factory=ArrivalDelays)
    enough: float = math.inf
    formed: float = 0.0


@dataclass(slots=True, eq=False)
class _Team:
    """Ranks present, until all have sent `Confirm` or their time is over; `left` are those that then remain."""

    join: Join
    attempt: int
    present: tuple[Arrival, ...]
    ended: simpy.Event
    left: tuple[Arrival, ...] = ()
    num_confirmed: int = 0
    num_asked: int = 0
    is_overdue: bool = False  # its time is over, and no member is up
    since: float = 0.0  # when its time began: at its beginning, or the end of a member's last download

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.join.ranks[arrival.member] for arrival in self.present)


@dataclass(slots=True, eq=False)
class _State:
    """Published state of a group: its newest number, its holders, and events of ranks that wait for a newer one.

    Also its meetings' members so far, and the delays of their arrivals.
    """

    newest: int = -1
    num_bytes: int = 0
    holders: list[int] = field(default_factory=list)
    awaited: list[simpy.Event] = field(default_factory=list)
    published: float = 0.0  # when the newest came to be
    wanted: dict[int, int] = field(default_factory=dict)  # rank that waits -> the oldest number of use to it
    in_use: dict[int, int] = field(default_factory=dict)  # rank -> the number that it fetches
    fetched: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # rank -> what it got last, how much later
    slow: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # rank -> averages too slow, not awaited until
    members: set[int] = field(default_factory=set)
    arrivals: ArrivalDelays = field(default_factory=ArrivalDelays)


class Meetings:
    """Meetings, joint work and published states of ranks on a clock.

    Args:
        clock: virtual time.
        reach: reachability between ranks.
        calls: those of members that work together with a deadline may begin, and end undone when it has passed; their
            group is (the meetings' group, their ranks).
        outdated: called with a group and the numbers of its state that may be asked for yet.

    Attributes:
        waiting: ranks that wait for a state.
        have_met: whether any rank has joined a meeting, or waits for the state of one that may end without it.
        undone: ranks whose joint work has ended undone, until they confirm it: they compute no more of it.
    """

    def __init__(
        self,
        clock: Clock,
        reach: Reach,
        calls: Calls,
        outdated: Callable[[Hashable, Collection[int]], None],
    ) -> None:
        self.waiting: set[int] = set()
        self.have_met = False
        self.undone: set[int] = set()
        self._clock, self._reach = clock, reach
        self._calls, self._outdated = calls, outdated
        self._meetings: dict[Key, _Meeting] = {}
        self._last: dict[tuple[Hashable, int], int] = {}  # (group, member) -> the last meeting it came to
        self._teams: dict[tuple[Key, int], _Team] = {}
        self._states: dict[Hashable, _State] = {}
        self._overdue: list[Callable[[], None]] = []  # calls that wait until a member is up
        self._series: dict[Hashable, _Series] = {}

    # --- meetings of whoever comes next -----------------------------------------------------------------

    def take_part(self, rank: int, group: Hashable) -> None:
        """Count a rank among those that the meetings of a group wait for."""
        self._series.setdefault(group, _Series()).members.add(rank)
        self._form(group)

    def leave(self, rank: int) -> None:
        """Forget a rank that has ended."""
        for state in self._states.values():
            state.members.discard(rank)
        for group, series in self._series.items():
            series.members.discard(rank)
            self._form(group)

    def crashed(self, rank: int) -> None:
        """Take back what a rank that waits for a meeting has asked."""
        for series in self._series.values():
            if rank in series.arrived:
                series.arrived.pop(rank)[1].succeed(None)

    def join_next(self, rank: int, join: JoinNext) -> Generator[simpy.Event, None, Gathered | None]:
        """Join the next meeting of a group; None: the rank has crashed meanwhile, or the others have ended."""
        self.have_met = True
        series, formed = self._series[join.group], self._clock.event()
        if not series.arrived:
            series.since = self._clock.now
            self._at_end(self._series_seconds(series, join), partial(self._form, join.group))
        series.arrivals.add(series.number, self._clock.now - series.since)
        series.arrived[rank] = (join, formed)
        self._form(join.group)
        self.waiting.add(rank)
        gathered: Gathered | None = yield formed
        self.waiting.discard(rank)
        return gathered

    @staticmethod
    def _series_seconds(series: _Series, join: JoinNext) -> float:
        deadline = Deadline(*join.deadline)
        return series.arrivals.seconds(deadline, join.seconds, series.number) + deadline.grace_seconds

    def _form(self, group: Hashable) -> None:
        """Form the next meeting of a group if those that are there suffice."""
        series, now = self._series[group], self._clock.now
        answering = set(self._reach.answering(series.members))
        silent = series.members - answering
        for rank in silent - series.silent.keys():
            self._at_end(HEARTBEAT_SECONDS, partial(self._form, group))
            series.silent[rank] = now
        series.silent = {rank: since for rank, since in series.silent.items() if rank in silent}
        here = sorted(answering & series.arrived.keys())
        awaited = answering | {
            rank for rank, since in series.silent.items() if now < since + on_grid(HEARTBEAT_SECONDS)
        }
        if not here:
            return
        first = series.arrived[here[0]][0]
        deadline = Deadline(*first.deadline)
        grace = deadline.grace_seconds
        if len(here) < min(deadline.quorum, len(first.ranks)):
            series.enough = math.inf
            return
        if series.enough == math.inf:
            series.enough = now
            if grace:
                self._at_end(grace, partial(self._form, group))
        is_again = bool(series.last) and series.last & series.members <= set(here)
        due = max(series.since + on_grid(self._series_seconds(series, first)), series.enough + on_grid(grace))
        is_due = now >= due
        if not is_again and not (2 * len(here) > len(awaited) and (len(here) == len(awaited) or is_due)):
            return
        asked = [series.arrived.pop(rank) for rank in here]
        joins = [join for join, _ in asked]
        newest = max((join.weight, series.met.get(rank, -1)) for rank, join in zip(here, joins, strict=True))
        sources = [
            join.member
            for rank, join in zip(here, joins, strict=True)
            if (join.weight, series.met.get(rank, -1)) == newest
        ]
        present = tuple(sorted(Arrival(join.member, join.weight) for join in joins))
        is_newest = newest[0] > series.weight
        num_alive = len(self._reach.alive(series.members))
        with_times = (is_newest, num_alive, now - series.formed)
        gathered = Gathered(series.number, present, tuple(sorted(sources)), *with_times)
        series.last, series.weight = frozenset(here), max(newest[0], series.weight)
        series.met.update(dict.fromkeys(here, series.number))
        series.number, series.since, series.enough, series.formed = series.number + 1, now, math.inf, now
        first = joins[0]
        if first.averaging_seconds < math.inf:
            key = Key(group, gathered.number)
            about = Join(key, first.member, first.ranks, first.seconds, first.averaging_seconds)
            self._begin(about, 0, present)
        for _, formed in asked:
            formed.succeed(gathered)

    # --- presence ---------------------------------------------------------------------------------------

    def join(self, join: Join) -> Generator[simpy.Event, None, Met]:
        """Join a meeting; return the ranks present."""
        self.have_met = True
        state, number = self._states.setdefault(join.key.group, _State()), join.key.number
        assert isinstance(number, int)
        meeting = self._meetings.get(join.key)
        if meeting is None:
            meeting = self._meetings[join.key] = _Meeting(join, self._clock.event(), self._clock.now)
            state.members.update(join.ranks if join.awaited is None else join.awaited)
            seconds = state.arrivals.seconds(meeting.deadline, join.seconds, number)
            self._at_end(seconds, partial(self._is_over, meeting))
        state.members.add(join.ranks[join.member])
        state.arrivals.add(number, self._clock.now - meeting.opened)
        meeting.num_come += 1
        self._pass_over(join)
        if not meeting.settled.triggered:
            meeting.arrivals.append(Arrival(join.member, join.weight))
            self._settle_if_complete(meeting)
            if meeting.lacks:
                self._is_over(meeting)
        self._forget_if_over(meeting)
        if not meeting.settled.processed:
            yield meeting.settled
        assert meeting.met is not None
        return meeting.met

    def look_again(self) -> None:
        """Retry, after a change of the network, what was out of reach."""
        overdue, self._overdue = self._overdue, []
        for call in overdue:
            call()
        for group in self._series:
            self._form(group)
        for meeting in list(self._meetings.values()):
            self._settle_if_complete(meeting)
            if meeting.lacks:
                self._is_over(meeting)
        self._reach.look_again()

    def _is_over(self, meeting: _Meeting) -> None:
        """Begin the grace of a meeting whose deadline has passed, once a quorum is there."""
        if meeting.settled.triggered:
            return
        come = _ranks(meeting.first, meeting.arrivals)
        needs_others = meeting.quorum > 1 or meeting.first.num_positions > 1
        meeting.lacks = needs_others and not meeting.can_begin(self._reach.together(come))
        if meeting.lacks:
            return
        grace = meeting.deadline.grace_seconds
        if grace:
            self._at_end(grace, partial(self._is_due, meeting))
        else:
            self._is_due(meeting)

    def _is_due(self, meeting: _Meeting) -> None:
        """Close the meeting to all but ranks that return."""
        meeting.due = self._clock.now
        for _, later in self._back(meeting.first):
            self._at_end(later, partial(self._settle_if_complete, meeting))
        self._settle_if_complete(meeting)

    def _settle_if_complete(self, meeting: _Meeting) -> None:
        if meeting.settled.triggered:
            return
        come = _ranks(meeting.first, meeting.arrivals)
        if meeting.due < math.inf:
            if self._returning(meeting).issubset(come):
                self._settle(meeting)
            return
        wanted = {*(meeting.first.ranks if meeting.first.awaited is None else meeting.first.awaited)}
        wanted |= self._returning(meeting)
        if wanted.issubset(come):
            together = self._reach.together(come)
            if wanted.issubset(together) and meeting.can_begin(together):
                self._settle(meeting)

    def _back(self, join: Join) -> list[tuple[int, float]]:
        """Ranks that got the state of this number by downloading it, and how much later than the others."""
        return [
            (rank, later)
            for state in self._states_of(join.key.group)
            for rank, (number, later) in state.fetched.items()
            if number == join.key.number
        ]

    def _states_of(self, group: Hashable) -> list[_State]:
        """Published states of a group and its parts."""
        return [state for name, state in self._states.items() if group_of(name) == group]

    def _returning(self, meeting: _Meeting) -> set[int]:
        """Ranks that download the state of this number, or have just done so.

        They are waited for longer than others, by as much as they got the state later.
        """
        group, number = meeting.first.key
        found = {rank for rank, later in self._back(meeting.first) if self._clock.now < meeting.due + later}
        found |= {
            rank
            for state in self._states_of(group)
            for rank, theirs in state.in_use.items()
            if theirs == number and self._reach.is_downloading(rank)
        }
        # A download that begins at this instant: the state has just been published.
        found |= {
            rank
            for state in self._states_of(group)
            if state.newest == number
            for rank, at_least in state.wanted.items()
            if at_least <= number
        }
        slow = self._states[group].slow
        return {rank for rank in found if self._clock.now >= slow.get(rank, (0, 0.0))[1]}

    def _settle(self, meeting: _Meeting) -> None:
        """Close the meeting: later ranks are late."""
        if meeting.settled.triggered:
            return
        together = self._reach.together(_ranks(meeting.first, meeting.arrivals))
        if not meeting.can_begin(together):  # crashed since, or cut off from each other
            self._overdue.append(partial(self._settle, meeting))
            return
        present = self._kept(meeting.first, meeting.arrivals, together)
        members = self._states[meeting.first.key.group].members
        meeting.met = Met(present, len(self._reach.alive(members)))
        meeting.arrivals.clear()
        meeting.settled.succeed()
        self._forget_if_over(meeting)
        if meeting.first.averaging_seconds < math.inf:
            self._begin(meeting.first, 0, present)

    def _pass_over(self, join: Join) -> None:
        """Count a rank as having skipped all earlier meetings."""
        group, number = join.key
        assert isinstance(number, int)
        last = self._last.get((group, join.member), -1)
        self._last[group, join.member] = number
        if number == last + 1:
            return
        for key, missed in list(self._meetings.items()):
            if key.group == group and last < key.number < number:  # type: ignore[operator]
                missed.num_come += 1
                self._forget_if_over(missed)

    def _forget_if_over(self, meeting: _Meeting) -> None:
        if meeting.settled.triggered and meeting.num_come == len(meeting.first.ranks):
            self._meetings.pop(meeting.first.key, None)

    # --- joint work ------------------------------------------------------------------------------

    def confirm(self, rank: int, confirm: Confirm) -> Generator[simpy.Event, None, tuple[Arrival, ...]]:
        """Finish the joint work; return the ranks that remain."""
        team = self._teams[confirm.key, confirm.attempt]
        team.num_asked += 1
        if not team.ended.triggered:
            team.num_confirmed += 1
            if team.num_confirmed == len(team.present):
                team.left = team.present
                team.ended.succeed()
                for rank in team.ranks:
                    self._states.setdefault(team.join.key.group, _State()).slow.pop(rank, None)
        if team.num_asked == len(team.present):
            del self._teams[confirm.key, confirm.attempt]
            self._calls.assemble(
                (team.join.key.group, team.ranks)
            )  # no post of theirs can come late any more
        if not team.ended.processed:
            yield team.ended
        self.undone.discard(rank)
        return team.left

    def _begin(self, join: Join, attempt: int, present: tuple[Arrival, ...]) -> None:
        team = self._teams[join.key, attempt] = _Team(join, attempt, present, self._clock.event())
        team.since = self._clock.now
        self._calls.assemble((join.key.group, team.ranks))
        self._at_end(join.averaging_seconds, partial(self._end, team))

    def _end(self, team: _Team) -> None:
        """Time out: drop unreachable ranks, else the slowest; the others may continue."""
        if team.ended.triggered:
            return
        if any(map(self._reach.is_downloading, team.ranks)):
            team.since = self._clock.now
        due = team.since + on_grid(team.join.averaging_seconds)
        if self._clock.now < due:
            self._at_end(due - self._clock.now, partial(self._end, team))
            return
        left = self._reach.together(team.ranks)
        if team.is_overdue and len(left) == len(team.present) and team.join.num_positions > 1:
            # The only rank of a position is back, and goes on with what it was doing.
            team.is_overdue, team.since = False, self._clock.now
            self._at_end(team.join.averaging_seconds, partial(self._end, team))
            return
        team.is_overdue = not team.join.has_all_positions(left)
        if team.is_overdue:
            self._overdue.append(partial(self._end, team))
            return
        if len(left) == len(team.present):
            left = self._reach.without_slowest(team.ranks)
            left = left if team.join.has_all_positions(left) else ()
            self._are_slow(team.join, set(team.ranks) - set(left))
        team.left = self._kept(team.join, team.present, left)
        self._calls.dissolve((team.join.key.group, team.ranks))
        self.undone.update(team.ranks)
        if team.left:
            self._begin(team.join, team.attempt + 1, team.left)
        team.ended.succeed()

    def _are_slow(self, join: Join, ranks: Collection[int]) -> None:
        """Ignore downloads of ranks that were too slow twice, for a while: they would delay all others."""
        state = self._states.setdefault(join.key.group, _State())
        fetched = {
            rank: got for each in self._states_of(join.key.group) for rank, got in each.fetched.items()
        }
        for rank in ranks:
            num_slow, later = state.slow.get(rank, (0, 0.0))[0], fetched.get(rank, (0, 0.0))[1]
            held_off = SLOW_TIMES * (join.averaging_seconds + later) if num_slow else 0.0
            state.slow[rank] = (num_slow + 1, self._clock.now + held_off)

    @staticmethod
    def _kept(join: Join, arrivals: Collection[Arrival], ranks: Collection[int]) -> tuple[Arrival, ...]:
        return tuple(sorted(arrival for arrival in arrivals if join.ranks[arrival.member] in ranks))

    # --- published states ----------------------------------------------------------------------------------

    def publish(self, rank: int, publish: Publish) -> None:
        """Record that `rank` has a state from now on."""
        group, number = publish.key
        state = self._states.setdefault(group, _State())
        assert isinstance(number, int)
        if number < state.newest:
            return
        if number > state.newest:
            state.newest, state.num_bytes, state.holders = number, publish.num_bytes, []
            state.published = self._clock.now
        state.holders.append(rank)
        self._wake(state, True)
        self._outdated(group, {state.newest, *state.in_use.values()})

    def fetch(self, rank: int, fetch: Fetch) -> Generator[simpy.Event, None, Fetched | None]:
        """Download a state; returns which, or None if no holder can ever be reached."""
        state = self._states.setdefault(fetch.group, _State())
        self.have_met |= fetch.source is not None
        self.waiting.add(rank)
        fetched = yield from self._fetched(rank, fetch, state)
        self.waiting.discard(rank)
        return fetched

    def _fetched(
        self, rank: int, fetch: Fetch, state: _State
    ) -> Generator[simpy.Event, None, Fetched | None]:
        source: int | None = AGAIN
        while source == AGAIN:
            while (
                state.newest < fetch.at_least
                or fetch.source not in (None, *state.holders)
                or (fetch.is_open and self._is_under_way(group_of(fetch.group), state.newest))
            ):
                event = self._clock.event()
                state.awaited.append(event)
                state.wanted[rank] = fetch.at_least
                is_there = yield event
                del state.wanted[rank]
                if not is_there:
                    return None
            number, num_bytes = state.newest, state.num_bytes
            state.in_use[rank], published = number, state.published
            done = self._clock.event()
            sources = tuple(state.holders) if fetch.source is None else (fetch.source,)
            self._reach.download(rank, sources, num_bytes, done.succeed)
            meeting = self._meetings.get(Key(group_of(fetch.group), number))
            if meeting is not None and not done.triggered:
                self._settle_if_complete(meeting)  # where the download cannot begin
            source = yield done
            yield self._clock.at(on_grid(self._clock.now))
            del state.in_use[rank]
            meeting = self._meetings.get(Key(group_of(fetch.group), number))
            if source is not None and source != AGAIN:
                for team in self._teams.values():
                    if rank in team.ranks and team.join.key.group == group_of(fetch.group):
                        team.since = self._clock.now
                later = self._clock.now - published
                state.fetched[rank] = (number, later)
                if meeting is not None and meeting.due < math.inf:
                    left = max(meeting.due + later - self._clock.now, 0.0)
                    self._at_end(left, partial(self._settle_if_complete, meeting))
            if meeting is not None:
                self._settle_if_complete(meeting)
        if source is None:
            return None
        return Fetched(number, source, num_bytes)

    def _is_under_way(self, group: Hashable, number: int) -> bool:
        """True if members work together that have met at this number."""
        return any(
            key == (group, number) and not team.ended.triggered for (key, _), team in self._teams.items()
        )

    @property
    def is_under_way(self) -> bool:
        """True if joint work with a deadline is in progress."""
        return any(not team.ended.triggered and not team.is_overdue for team in self._teams.values())

    def give_up(self) -> None:
        """Answer all ranks that wait for a state: it will never arrive."""
        for series in self._series.values():
            for rank in list(series.arrived):
                self.crashed(rank)
        for state in self._states.values():
            self._wake(state, False)
        for rank in sorted(self.waiting):
            self._reach.give_up(rank)

    @staticmethod
    def _wake(state: _State, is_there: bool) -> None:
        for event in state.awaited:
            event.succeed(is_there)
        state.awaited.clear()

    def _at_end(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` after `seconds`, last in its instant; never if infinite."""
        if seconds == math.inf:
            return
        call_at(self._clock, self._clock.now + on_grid(seconds), call, Order.MEETINGS)


class MeetingKernel(Kernel):
    """Kernel that also serves meetings of ranks, their joint work, and states that they publish and download.

    Args:
        about: arguments of `Kernel`.
        reach: reachability between ranks, and downloads; None: every rank reaches every other, in no time.
        outdated: called with a group, and the only numbers of its published states that can be asked for yet.
        options: of `Kernel`.
    """

    def __init__(
        self,
        *about: Any,
        reach: Reach | None = None,
        outdated: Callable[[Hashable, Collection[int]], None] = lambda group, numbers: None,
        **options: Any,
    ) -> None:
        super().__init__(*about, **options)
        reach = reach if reach is not None else Reach(None, (), lambda links: False)
        meetings = self._meetings = Meetings(self.clock, reach, self._calls, outdated)
        self._idle = meetings.undone
        self._uptime.on_lost = meetings.crashed
        self._handlers.at_once.update({Publish: meetings.publish, Keep: self._keep})
        self._handlers.questions.update(
            {
                Join: lambda rank, request: meetings.join(request),
                JoinNext: self._join_next,
                Confirm: meetings.confirm,
                Fetch: self._fetch,
            }
        )

    def network_changed(self) -> None:
        """Retry what was out of reach: links have changed at this instant."""
        self._meetings.look_again()

    def _keep(self, rank: int, keep: Keep) -> None:
        self._uptime.unkept[rank] = 0.0
        self._meetings.take_part(rank, keep.group)

    def _join_next(self, rank: int, join: JoinNext) -> Generator[simpy.Event, None, Gathered | None]:
        """Join the next meeting of a group, after a crash once more; None: the others have ended without this rank."""
        while rank not in self._uptime.lost:
            gathered = yield from self._meetings.join_next(rank, join)
            if gathered is not None:
                return gathered
            yield from self._uptime.restart(rank)
        return None

    def _fetch(self, rank: int, fetch: Fetch) -> Generator[simpy.Event, None, Fetched | None]:
        begin = self.clock.now
        fetched = yield from self._meetings.fetch(rank, fetch)
        self.seconds.network[rank] += self.clock.now - begin
        if fetched is None:
            self._uptime.lost.add(rank)
        return fetched

    def _end(self, rank: int) -> None:
        super()._end(rank)
        self._meetings.leave(rank)

    def _can_go_on(self) -> bool:
        """Let ranks go on that wait in vain.

        Joint work has a time-out of its own. Where other ranks have ended without all that are left, these are lost:
        they continue alone.
        """
        if self._meetings.is_under_way or super()._can_go_on():
            return True
        running, uptime, meetings = self._ranks.running, self._uptime, self._meetings
        ended = set(range(len(self.streams))) - running - uptime.lost
        if not (ended and meetings.have_met and uptime.paused | meetings.waiting == running):
            return False
        uptime.lost |= meetings.waiting
        for rank in sorted(uptime.paused):
            uptime.lost.add(rank)
            uptime.processes[rank].interrupt()
        meetings.give_up()
        return True


def _ranks(join: Join, arrivals: Collection[Arrival]) -> list[int]:
    return sorted(join.ranks[arrival.member] for arrival in arrivals)
