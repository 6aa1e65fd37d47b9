"""Ranks that join a meeting, work together and may lose each other meanwhile; and states that they publish."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from netsim.network.clock import Clock, Order, call_at, on_grid
from netsim.ranks.reach import AGAIN, SLOW_TIMES
from netsim.ranks.requests import Arrival, Confirm, Fetch, Fetched, Join, Key, Publish

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable

    import simpy

    from netsim.ranks.reach import Reach

__all__ = ["Meetings"]


@dataclass(slots=True, eq=False)
class _Meeting:
    """Ranks at a `Join`; the event `settled` happens when `present` is final."""

    first: Join
    settled: simpy.Event
    arrivals: list[Arrival] = field(default_factory=list)
    present: tuple[Arrival, ...] = ()
    num_come: int = 0  # those who came to a later one instead included
    due: float = math.inf  # when its time was over


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
    is_overdue: bool = False  # its time is over, and nobody is up

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.join.ranks[arrival.member] for arrival in self.present)


@dataclass(slots=True, eq=False)
class _State:
    """Published state of a group: its newest number, its holders, and events of ranks that wait for a newer one."""

    newest: int = -1
    num_bytes: int = 0
    holders: list[int] = field(default_factory=list)
    awaited: list[simpy.Event] = field(default_factory=list)
    published: float = 0.0  # when the newest came to be
    in_use: dict[int, int] = field(default_factory=dict)  # rank -> the number that it fetches
    fetched: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # rank -> what it got last, how much later
    slow: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # rank -> averages too slow, not awaited until


class Meetings:
    """Serves `Join`, `Confirm`, `Publish` and `Fetch` on a clock.

    Args:
        clock: virtual time.
        reach: reachability between ranks.
        assemble: called when those who met begin to do something together in the time they have, with the name
            of their group: (the meetings' group, their ranks); and when all of them have finished.
        dissolve: called with such a name when their time is over: their calls end undone.
        on_older: called with a group and the numbers of its state that may be asked for yet: the newest one,
            and older ones on their way. What is newer than all of them has not been published at this time.

    Attributes:
        waiting: ranks that wait for a state.
        have_met: whether any rank has joined a meeting.
    """

    def __init__(
        self,
        clock: Clock,
        reach: Reach,
        assemble: Callable[[Hashable], None],
        dissolve: Callable[[Hashable], None],
        on_older: Callable[[Hashable, Collection[int]], None],
    ) -> None:
        self.waiting: set[int] = set()
        self.have_met = False
        self._clock, self._reach = clock, reach
        self._assemble, self._dissolve, self._on_older = assemble, dissolve, on_older
        self._meetings: dict[Key, _Meeting] = {}
        self._last: dict[tuple[Hashable, int], int] = {}  # (group, member) -> the last meeting it came to
        self._present: tuple[Arrival, ...] = ()  # at the meeting settled last; often the same at the next
        self._teams: dict[tuple[Key, int], _Team] = {}
        self._states: dict[Hashable, _State] = {}
        self._overdue: list[Callable[[], None]] = []  # what has to wait until somebody is up

    # --- presence ---------------------------------------------------------------------------------------

    def join(self, join: Join) -> Generator[simpy.Event, None, tuple[Arrival, ...]]:
        """Join a meeting; return the ranks present."""
        self.have_met = True
        meeting = self._meetings.get(join.key)
        if meeting is None:
            meeting = self._meetings[join.key] = _Meeting(join, self._clock.event())
            self._at_end(join.seconds, lambda: self._is_due(meeting))
        meeting.num_come += 1
        self._pass_over(join)
        if not meeting.settled.triggered:
            meeting.arrivals.append(Arrival(join.member, join.weight))
            self._settle_if_complete(meeting)
        self._forget_if_over(meeting)
        if not meeting.settled.processed:
            yield meeting.settled
        return meeting.present

    def look_again(self) -> None:
        """Retry, after a change of the network, what was out of reach."""
        overdue, self._overdue = self._overdue, []
        for call in overdue:
            call()
        for meeting in list(self._meetings.values()):
            self._settle_if_complete(meeting)
        self._reach.look_again()

    def _is_due(self, meeting: _Meeting) -> None:
        """End the time for all but ranks that return."""
        meeting.due = self._clock.now
        for _, later in self._back(meeting.first):
            self._at_end(later, lambda: self._settle_if_complete(meeting))
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
        if wanted.issubset(come) and wanted.issubset(self._reach.together(come)):
            self._settle(meeting)

    def _back(self, join: Join) -> list[tuple[int, float]]:
        """Ranks that got the state of this number by downloading it, and how much later than the others."""
        state = self._states.get(join.key.group)
        if state is None:
            return []
        return [(rank, later) for rank, (number, later) in state.fetched.items() if number == join.key.number]

    def _returning(self, meeting: _Meeting) -> set[int]:
        """Ranks that download the state of this number, or have just done so.

        They are waited for longer than others, by as much as they got the state later.
        """
        group, number = meeting.first.key
        state = self._states.get(group)
        if state is None:
            return set()
        found = {rank for rank, later in self._back(meeting.first) if self._clock.now < meeting.due + later}
        found |= {
            rank
            for rank, theirs in state.in_use.items()
            if theirs == number and self._reach.is_downloading(rank)
        }
        return {rank for rank in found if self._clock.now >= state.slow.get(rank, (0, 0.0))[1]}

    def _settle(self, meeting: _Meeting) -> None:
        """Close the meeting: later ranks are late."""
        if meeting.settled.triggered:
            return
        together = self._reach.together(_ranks(meeting.first, meeting.arrivals))
        if not together:  # all have crashed since
            self._overdue.append(partial(self._settle, meeting))
            return
        present = self._kept(meeting.first, meeting.arrivals, together)
        meeting.present = self._present = self._present if self._present == present else present
        meeting.arrivals.clear()
        meeting.settled.succeed()
        self._forget_if_over(meeting)
        if meeting.first.averaging_seconds < math.inf:
            self._begin(meeting.first, 0, meeting.present)

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

    def confirm(self, confirm: Confirm) -> Generator[simpy.Event, None, tuple[Arrival, ...]]:
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
            self._assemble((team.join.key.group, team.ranks))  # no post of theirs can come late any more
        if not team.ended.processed:
            yield team.ended
        return team.left

    def _begin(self, join: Join, attempt: int, present: tuple[Arrival, ...]) -> None:
        team = self._teams[join.key, attempt] = _Team(join, attempt, present, self._clock.event())
        self._assemble((join.key.group, team.ranks))
        self._at_end(join.averaging_seconds, lambda: self._end(team))

    def _end(self, team: _Team) -> None:
        """End the time: unreachable ranks are dropped, else the slowest; the others may continue."""
        if team.ended.triggered:
            return
        left = self._reach.together(team.ranks)
        team.is_overdue = not left
        if not left:
            self._overdue.append(partial(self._end, team))
            return
        if len(left) == len(team.present):
            left = self._reach.without_slowest(team.ranks)
            self._are_slow(team.join, set(team.ranks) - set(left))
        team.left = self._kept(team.join, team.present, left)
        self._dissolve((team.join.key.group, team.ranks))
        if team.left:
            self._begin(team.join, team.attempt + 1, team.left)
        team.ended.succeed()

    def _are_slow(self, join: Join, ranks: Collection[int]) -> None:
        """Do not wait, for a while, for downloads of ranks that were too slow twice: they would delay all others."""
        state = self._states.setdefault(join.key.group, _State())
        for rank in ranks:
            num_slow, later = state.slow.get(rank, (0, 0.0))[0], state.fetched.get(rank, (0, 0.0))[1]
            held_off = SLOW_TIMES * (join.averaging_seconds + later) if num_slow else 0.0
            state.slow[rank] = (num_slow + 1, self._clock.now + held_off)

    @staticmethod
    def _kept(join: Join, arrivals: Collection[Arrival], ranks: Collection[int]) -> tuple[Arrival, ...]:
        return tuple(sorted(arrival for arrival in arrivals if join.ranks[arrival.member] in ranks))

    # --- published states ----------------------------------------------------------------------------------

    def publish(self, rank: int, publish: Publish) -> None:
        """Note that `rank` has a state from now on."""
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
        self._on_older(group, {state.newest, *state.in_use.values()})

    def fetch(self, rank: int, fetch: Fetch) -> Generator[simpy.Event, None, Fetched | None]:
        """Download a state; returns which, or None if no holder can ever be reached."""
        state = self._states.setdefault(fetch.group, _State())
        self.waiting.add(rank)
        fetched = yield from self._fetched(rank, fetch, state)
        self.waiting.discard(rank)
        return fetched

    def _fetched(
        self, rank: int, fetch: Fetch, state: _State
    ) -> Generator[simpy.Event, None, Fetched | None]:
        source: int | None = AGAIN
        while source == AGAIN:
            while state.newest < fetch.at_least:
                event = self._clock.event()
                state.awaited.append(event)
                if not (yield event):
                    return None
            number, num_bytes = state.newest, state.num_bytes
            state.in_use[rank], published = number, state.published
            done = self._clock.event()
            self._reach.download(rank, tuple(state.holders), num_bytes, partial(_happen, done))
            source = yield done
            yield self._clock.at(on_grid(self._clock.now))
            del state.in_use[rank]
            if source is not None and source != AGAIN:
                self._has_fetched(rank, Key(fetch.group, number), self._clock.now - published)
            self._look_at(Key(fetch.group, number))
        if source is None:
            return None
        return Fetched(number, source, num_bytes)

    def _has_fetched(self, rank: int, key: Key, later: float) -> None:
        self._states[key.group].fetched[rank] = (cast("int", key.number), later)
        meeting = self._meetings.get(key)
        if meeting is not None and meeting.due < math.inf:
            left = max(meeting.due + later - self._clock.now, 0.0)
            self._at_end(left, lambda: self._settle_if_complete(meeting))

    def _look_at(self, key: Key) -> None:
        """Reconsider a meeting after a download that it may have waited for."""
        meeting = self._meetings.get(key)
        if meeting is not None:
            self._settle_if_complete(meeting)

    @property
    def is_under_way(self) -> bool:
        """True if joint work with a deadline is in progress."""
        return any(not team.ended.triggered and not team.is_overdue for team in self._teams.values())

    def give_up(self) -> None:
        """Answer all that wait for a state that it will never arrive."""
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
        """Call `call` after `seconds`, last in its instant; never where they are infinite."""
        if seconds == math.inf:
            return
        call_at(self._clock, self._clock.now + on_grid(seconds), call, Order.MEETINGS)


def _happen(event: simpy.Event, value: object) -> None:
    event.succeed(value)


def _ranks(join: Join, arrivals: Collection[Arrival]) -> list[int]:
    return sorted(join.ranks[arrival.member] for arrival in arrivals)
