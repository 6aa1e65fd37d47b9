"""Meetings of ranks, their joint work under a time-out, and states that they publish and download."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from exogym_core.communicator.deadlines import ArrivalDelays, Returns
from exogym_core.communicator.simulated.meeting_requests import (
    Arrival,
    Confirm,
    Fetch,
    Fetched,
    Join,
    Met,
    Publish,
)
from exogym_core.communicator.simulated.reach import AGAIN, Reach
from netsim.network.clock import Clock, Order
from netsim.ranks import Key, call_at, group_of, on_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable

    import simpy

    from netsim.ranks.calls import Calls

__all__ = ["HEARTBEAT_SECONDS", "Meetings"]

#: A member that has been silent for so long does not answer (torchft's lighthouse: `heartbeat_timeout_ms`).
HEARTBEAT_SECONDS = 5.0

_Present = dict[int, Arrival]  # by rank, in the order of members


@dataclass(slots=True, eq=False)
class _Meeting:
    """Ranks that have come to a meeting with a number; the event `settled` happens when it is closed."""

    first: Join
    settled: simpy.Event
    arrived: _Present = field(default_factory=dict)
    met: Met | None = None  # once it is settled
    due: float = math.inf  # when its time was over
    lacks: bool = False  # its time is over, and it waits for a quorum

    @property
    def quorum(self) -> int:
        return min(self.first.deadline.quorum, len(self.first.ranks))

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
    arrived: dict[int, tuple[Join, simpy.Event]] = field(default_factory=dict)
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
    key: Key
    attempt: int
    present: _Present
    ended: simpy.Event
    since: float  # when its time began: at its beginning, or the end of a member's last download
    left: _Present = field(default_factory=dict)
    num_asked: int = 0
    is_overdue: bool = False  # its time is over, and no member is up

    @property
    def group(self) -> Hashable:
        """Group of their calls."""
        return self.key.group, tuple(self.present)


@dataclass(slots=True, eq=False)
class _State:
    """Published state of a group, and of a whole group its meetings with a number.

    Attributes:
        newest, num_bytes: number and size of the newest state.
        published: when it came to be.
        holders: ranks that have it.
        awaited: events of ranks that wait for a newer one.
        wanted: by rank that waits, the oldest number of use to it.
        in_use: by rank that fetches, the number.
        returns: ranks that come back by downloading, to meetings of a whole group.
        members: ranks that were awaited by a meeting so far, or have come to one.
        meetings: by number.
        last: by rank, the last meeting that it came to.
        arrivals: their delays.
    """

    newest: int = -1
    num_bytes: int = 0
    published: float = 0.0
    holders: list[int] = field(default_factory=list)
    awaited: list[simpy.Event] = field(default_factory=list)
    wanted: dict[int, int] = field(default_factory=dict)
    in_use: dict[int, int] = field(default_factory=dict)
    returns: Returns = field(default_factory=Returns)
    members: set[int] = field(default_factory=set)
    meetings: dict[int, _Meeting] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    arrivals: ArrivalDelays = field(default_factory=ArrivalDelays)


class Meetings:
    """Meetings, joint work and published states of ranks on a clock.

    Args:
        clock: virtual time.
        reach: reachability between ranks.
        calls: those of members that work together with a deadline may begin, and end undone when it has passed; their
            group is (the meetings' group, their ranks).
        undone: gets ranks whose joint work has ended undone, until they confirm it: they compute no more of it.
        outdated: called with a group and the numbers of its state that may be asked for yet.

    Attributes:
        waiting: ranks that wait for a state, or for the next meeting.
        have_met: whether any rank has joined a meeting, or waits for the state of one that may end without it.
    """

    def __init__(
        self,
        clock: Clock,
        reach: Reach,
        calls: Calls,
        undone: set[int],
        outdated: Callable[[Hashable, Collection[int]], None],
    ) -> None:
        self.waiting: set[int] = set()
        self.have_met = False
        self._clock, self._reach = clock, reach
        self._calls, self._undone, self._outdated = calls, undone, outdated
        self._series: defaultdict[Hashable, _Series] = defaultdict(_Series)
        self._teams: dict[tuple[Key, int], _Team] = {}
        self._overdue: list[_Team] = []
        self._states: defaultdict[Hashable, _State] = defaultdict(_State)

    # --- meetings of whoever comes next -----------------------------------------------------------------

    def take_part(self, rank: int, group: Hashable) -> None:
        """Count a rank among those that the meetings of a group wait for."""
        self._series[group].members.add(rank)
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

    def join_next(self, rank: int, join: Join) -> Generator[simpy.Event, None, Met | None]:
        """Join the next meeting of a group; None: the rank has crashed meanwhile, or the others have ended."""
        self.have_met = True
        group = join.key.group
        series, formed = self._series[group], self._clock.event()
        if not series.arrived:
            series.since = self._clock.now
            self._at_end(self._series_seconds(series, join), partial(self._form, group))
        series.arrivals.add(series.number, self._clock.now, series.since)
        series.arrived[rank] = (join, formed)
        self._form(group)
        self.waiting.add(rank)
        met: Met | None = yield formed
        self.waiting.discard(rank)
        return met

    @staticmethod
    def _series_seconds(series: _Series, join: Join) -> float:
        learned = series.arrivals.seconds(join.deadline, join.seconds, series.number)
        return learned + join.deadline.grace_seconds

    def _form(self, group: Hashable) -> None:
        """Form the next meeting of a group if those that are there suffice."""
        series, now = self._series[group], self._clock.now
        answering, before = set(self._reach.answering(series.members)), series.silent
        series.silent = {rank: before.get(rank, now) for rank in series.members - answering}
        if series.silent.keys() - before.keys():
            self._at_end(HEARTBEAT_SECONDS, partial(self._form, group))
        here = sorted(answering & series.arrived.keys())
        if not here:
            return
        first, _ = series.arrived[here[0]]
        deadline = first.deadline
        if len(here) < min(deadline.quorum, len(first.ranks)):
            series.enough = math.inf
            return
        if series.enough == math.inf:
            series.enough = now
            if deadline.grace_seconds:
                self._at_end(deadline.grace_seconds, partial(self._form, group))
        is_again = bool(series.last) and series.last & series.members <= set(here)
        due = max(
            series.since + on_grid(self._series_seconds(series, first)),
            series.enough + on_grid(deadline.grace_seconds),
        )
        hidden = (since for since in series.silent.values() if now < since + on_grid(HEARTBEAT_SECONDS))
        num_awaited = len(answering) + sum(1 for _ in hidden)
        if not is_again and not (2 * len(here) > num_awaited and (len(here) == num_awaited or now >= due)):
            return
        asked = [series.arrived.pop(rank) for rank in here]
        joins = {rank: join for rank, (join, _) in zip(here, asked, strict=True)}
        states = {rank: (join.weight, series.met.get(rank, -1)) for rank, join in joins.items()}
        newest = max(states.values())
        present = {
            rank: Arrival(joins[rank].member, joins[rank].weight) for rank in first.ranks if rank in joins
        }
        met = Met(
            tuple(present.values()),
            len(self._reach.alive(series.members)),
            series.number,
            tuple(present[rank].member for rank in present if states[rank] == newest),
            newest[0] > series.weight,
            now - series.formed,
        )
        series.last, series.weight = frozenset(here), max(newest[0], series.weight)
        series.met.update(dict.fromkeys(here, series.number))
        self._begin(first, Key(group, series.number), 0, present)
        series.number, series.since, series.enough, series.formed = series.number + 1, now, math.inf, now
        for _, formed in asked:
            formed.succeed(met)

    # --- presence ---------------------------------------------------------------------------------------

    def join(self, rank: int, join: Join) -> Generator[simpy.Event, None, Met]:
        """Join a meeting; return the ranks present."""
        self.have_met = True
        state, number = self._states[join.key.group], cast("int", join.key.number)
        meeting = state.meetings.get(number)
        if meeting is None:
            meeting = state.meetings[number] = _Meeting(join, self._clock.event())
            state.members.update(join.ranks if join.awaited is None else join.awaited)
            seconds = state.arrivals.seconds(join.deadline, join.seconds, number)
            self._at_end(seconds, partial(self._is_over, meeting))
        state.members.add(rank)
        state.arrivals.add(number, self._clock.now)
        state.last[rank] = number
        if not meeting.settled.triggered:
            meeting.arrived[rank] = Arrival(join.member, join.weight)
            self._update(meeting)
        if len(state.last) == len(join.ranks):  # forget meetings that all have come to, or omitted
            oldest = min(state.last.values())
            while (first := next(iter(state.meetings), oldest + 1)) <= oldest and state.meetings[first].met:
                del state.meetings[first]
        if not meeting.settled.processed:
            yield meeting.settled
        assert meeting.met is not None
        return meeting.met

    def look_again(self) -> None:
        """Retry, after a change of the network, what was out of reach."""
        overdue, self._overdue = self._overdue, []
        for team in overdue:
            self._end(team)
        for group in self._series:
            self._form(group)
        for state in self._states.values():
            for meeting in list(state.meetings.values()):
                self._update(meeting)
        self._reach.look_again()

    def _update(self, meeting: _Meeting) -> None:
        """Close a meeting when all are there that it waits for; begin its grace if it lacks a quorum no more."""
        if meeting.settled.triggered:
            return
        wanted = self._returning(meeting)
        if meeting.due == math.inf:
            first = meeting.first
            wanted.update(first.ranks if first.awaited is None else first.awaited)
        if wanted <= meeting.arrived.keys():
            together = self._reach.together(meeting.arrived)
            # Past the deadline some may have crashed since, or be cut off from the others.
            if meeting.can_begin(together) and (meeting.due < math.inf or wanted.issubset(together)):
                self._settle(meeting, together)
        if meeting.lacks:
            self._is_over(meeting)

    def _is_over(self, meeting: _Meeting) -> None:
        """Begin the grace of a meeting whose deadline has passed, once a quorum is there."""
        if meeting.settled.triggered:
            return
        needs_others = meeting.quorum > 1 or meeting.first.num_positions > 1
        meeting.lacks = needs_others and not meeting.can_begin(self._reach.together(meeting.arrived))
        if meeting.lacks:
            return
        if grace := meeting.first.deadline.grace_seconds:
            self._at_end(grace, partial(self._is_due, meeting))
        else:
            self._is_due(meeting)

    def _is_due(self, meeting: _Meeting) -> None:
        """Close the meeting to all but ranks that return."""
        meeting.due = self._clock.now
        group, number = meeting.first.key
        for later in self._states[group].returns.ages(cast("int", number)).values():
            self._at_end(later, partial(self._update, meeting))
        self._update(meeting)

    def _returning(self, meeting: _Meeting) -> set[int]:
        """Ranks that download the state of this number, or have just done so."""
        group, number = meeting.first.key.group, cast("int", meeting.first.key.number)
        downloading = set[int]()
        for name, state in self._states.items():
            if group_of(name) != group:
                continue
            downloading |= {
                rank
                for rank, theirs in state.in_use.items()
                if theirs == number and self._reach.is_downloading(rank)
            }
            if state.newest == number:  # a download that begins at this instant: it has just been published
                downloading |= {rank for rank, at_least in state.wanted.items() if at_least <= number}
        return self._states[group].returns.awaited(number, meeting.due, downloading, self._clock.now)

    def _settle(self, meeting: _Meeting, together: Collection[int]) -> None:
        """Close the meeting: later ranks are late."""
        present = {rank: meeting.arrived[rank] for rank in meeting.first.ranks if rank in together}
        key, members = meeting.first.key, self._states[meeting.first.key.group].members
        number = cast("int", key.number)
        meeting.met = Met(tuple(present.values()), len(self._reach.alive(members)), number)
        meeting.arrived.clear()
        meeting.settled.succeed()
        self._begin(meeting.first, key, 0, present)

    # --- joint work ------------------------------------------------------------------------------

    def confirm(self, rank: int, confirm: Confirm) -> Generator[simpy.Event, None, tuple[Arrival, ...]]:
        """Finish the joint work; return the ranks that remain."""
        team = self._teams[confirm.key, confirm.attempt]
        team.num_asked += 1
        if team.num_asked == len(team.present):
            if not team.ended.triggered:
                team.left = team.present
                team.ended.succeed()
                for each in team.present:
                    self._states[team.key.group].returns.slow.pop(each, None)
            del self._teams[confirm.key, confirm.attempt]
            self._calls.assemble(team.group)  # no post of theirs can come late any more
        if not team.ended.processed:
            yield team.ended
        self._undone.discard(rank)
        return tuple(team.left.values())

    def _begin(self, join: Join, key: Key, attempt: int, present: _Present) -> None:
        """Begin the joint work of the ranks of a meeting; without a time-out it has no end to be found."""
        if join.averaging_seconds == math.inf:
            return
        team = _Team(join, key, attempt, present, self._clock.event(), self._clock.now)
        self._teams[key, attempt] = team
        self._calls.assemble(team.group)
        self._at_end(join.averaging_seconds, partial(self._end, team))

    def _end(self, team: _Team) -> None:
        """Time out: drop unreachable ranks, else the slowest; the others may continue."""
        if team.ended.triggered:
            return
        join, ranks = team.join, tuple(team.present)
        if any(map(self._reach.is_downloading, ranks)):
            team.since = self._clock.now
        due = team.since + on_grid(join.averaging_seconds)
        if self._clock.now < due:
            self._at_end(due - self._clock.now, partial(self._end, team))
            return
        left = self._reach.together(ranks)
        if team.is_overdue and len(left) == len(ranks) and join.num_positions > 1:
            # The only rank of a position is back, and goes on with what it was doing.
            team.is_overdue, team.since = False, self._clock.now
            self._at_end(join.averaging_seconds, partial(self._end, team))
            return
        team.is_overdue = not join.has_all_positions(left)
        if team.is_overdue:
            self._overdue.append(team)
            return
        if len(left) == len(ranks):
            left = self._reach.without_slowest(ranks)
            left = left if join.has_all_positions(left) else ()
            returns = self._states[team.key.group].returns
            returns.are_slow(set(ranks) - set(left), join.averaging_seconds, self._clock.now)
        team.left = {rank: arrival for rank, arrival in team.present.items() if rank in left}
        self._calls.dissolve(team.group)
        self._undone.update(ranks)
        if team.left:
            self._begin(join, team.key, team.attempt + 1, team.left)
        team.ended.succeed()

    # --- published states ----------------------------------------------------------------------------------

    def publish(self, rank: int, publish: Publish) -> None:
        """Record that `rank` has a state from now on."""
        group, number = publish.key.group, cast("int", publish.key.number)
        state = self._states[group]
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
        self.have_met |= fetch.source is not None
        state, whole = self._states[fetch.group], group_of(fetch.group)
        source: int | None = AGAIN
        while source == AGAIN:
            while (
                state.newest < fetch.at_least
                or fetch.source not in (None, *state.holders)
                or (fetch.is_open and self._is_under_way(Key(whole, state.newest)))
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
            meeting = self._states[whole].meetings.get(number)
            if meeting is not None and not done.triggered:
                self._update(meeting)  # where the download cannot begin
            source = yield done
            yield self._clock.at(on_grid(self._clock.now))
            del state.in_use[rank]
            meeting = self._states[whole].meetings.get(number)
            if source is not None and source != AGAIN:
                for team in self._teams.values():
                    if rank in team.present and team.key.group == whole:
                        team.since = self._clock.now
                later = self._clock.now - published
                self._states[whole].returns.downloaded[rank] = (number, later)
                if meeting is not None and meeting.due < math.inf:
                    left = max(meeting.due + later - self._clock.now, 0.0)
                    self._at_end(left, partial(self._update, meeting))
            if meeting is not None:
                self._update(meeting)
        return None if source is None else Fetched(number, source, num_bytes)

    def _is_under_way(self, key: Key) -> bool:
        """True if ranks that have met at `key` work together."""
        return any(team.key == key and not team.ended.triggered for team in self._teams.values())

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
        if seconds < math.inf:
            call_at(self._clock, self._clock.now + on_grid(seconds), call, Order.MEETINGS)
