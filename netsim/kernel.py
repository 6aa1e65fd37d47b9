"""Ranks in virtual time: each rank's stream of requests becomes a SimPy process.

A rank is ordinary blocking code elsewhere (a thread, another process). What it does to virtual time reaches
the kernel as a stream of one-way requests, and the outcome depends on the streams alone: the kernel reads a
rank's next request only when virtual time has reached that rank, and reading may block in host time until
the rank has got that far.

Request times lie on a grid of 2**-30 s, so that equal steps are really equal whatever the clock says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from simpy import Interrupt

from netsim.clock import Clock, on_grid
from netsim.errors import DeadlockError
from netsim.requests import (
    Advance,
    Answer,
    Arrival,
    Ask,
    Call,
    Exit,
    Join,
    Key,
    Mark,
    Post,
    Request,
    Wait,
)
from netsim.spans import Diary, Span

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import simpy

    from netsim.downtime import Downtime

__all__ = [
    "Advance",
    "Answer",
    "Arrival",
    "Ask",
    "Call",
    "Exit",
    "Join",
    "Kernel",
    "Key",
    "Mark",
    "Play",
    "Post",
    "Request",
    "Span",
    "StampedRow",
    "Wait",
    "instant_play",
]


class StampedRow(NamedTuple):
    """A marked row: whose, when, and its rank's seconds of computing and of waiting until then."""

    rank: int
    virtual_seconds: float
    compute_seconds: float
    exposed_seconds: float
    row: Mapping[str, Any]


_MOST_TOLD = 8  # ranks in one line
_END_OF_INSTANT: Any = 1 << 20  # a priority: whatever else happens at that instant goes before

Enter = Callable[[int, Call], None]
Play = Callable[[Call, Hashable, Callable[[int], None]], Enter]


@dataclass(slots=True, eq=False)
class _InFlight:
    """A call some member has posted: when each member is through, and who sleeps until then."""

    call: Call
    num_bytes: int  # of all members that have posted, where each knows its own part
    enter: Enter
    done_at: dict[int, float] = field(default_factory=dict)  # rank -> grid instant
    posted_at: dict[int, float] = field(default_factory=dict)  # rank -> instant, if anybody wants to know
    sleepers: dict[int, simpy.Event] = field(default_factory=dict)
    num_waited: int = 0


@dataclass(slots=True, eq=False)
class _Meeting:
    """Who has come to a `Join`; `settled` happens when it is known who was in time."""

    settled: simpy.Event
    arrivals: list[Arrival] = field(default_factory=list)
    num_late: int = 0

    @property
    def is_open(self) -> bool:
        return not self.settled.triggered

    def settle(self, deadline: simpy.Event | None = None) -> None:
        """Nobody who comes from now on is in time."""
        if self.is_open:
            self.arrivals.sort()
            self.settled.succeed()


def instant_play(call: Call, group: Hashable, on_done: Callable[[int], None]) -> Enter:
    """Communication that takes no time: everyone is through when the last has come."""
    arrived: list[int] = []

    def enter(member: int, call: Call) -> None:
        arrived.append(member)
        if len(arrived) == len(call.ranks):
            for each in sorted(arrived):
                on_done(each)

    return enter


class Kernel:
    """Plays the ranks' request streams on one clock.

    Args:
        num_ranks: how many ranks there are.
        refill: called with a rank whose stream is empty; returns when `streams[rank]` has a request, having
            let the rank run, or raises (deadlock, a rank's failure).
        answer: called with (rank, value) for every `Ask` and `Join`.
        play: starts a call on a network: `play(call, group, on_done)` returns the function that lets a member
            (a position in `call.ranks`) in now, with the call as it posted it; `on_done(member)` is called at
            the instant it is through.
        clock: shared with the network.
        collectives_in_flight: how many collectives of one group a rank has under way at once, in order.
        on_row: told of every marked row as it is stamped, in order of virtual time.
        blame: tells what keeps the network from ever going on.
        on_span: told of what ranks do, as it ends; None: nobody wants to know.
        downtime: tells when the ranks' hosts are down: they stand still then, and what they were computing is
            lost and begun again.
        hosts: the host of each rank, where there is a downtime.

    Attributes:
        streams: one queue of requests a rank; whoever carries the ranks appends to them.
        log: what every rank has requested so far, with nothing left open: played again from the start by a
            fresh kernel, it brings that kernel to the same instant and state.
        compute_seconds, exposed_seconds, end_seconds: per rank.
    """

    def __init__(
        self,
        num_ranks: int,
        refill: Callable[[int], None],
        *,
        answer: Callable[[int, Answer], None],
        play: Play = instant_play,
        clock: Clock | None = None,
        collectives_in_flight: int = 1,
        on_row: Callable[[StampedRow], None],
        blame: Callable[[], str] = lambda: "the network has nothing more to do",
        on_span: Callable[[Span], None] | None = None,
        downtime: Downtime | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        self.clock = clock if clock is not None else Clock()
        self.streams: list[deque[Request]] = [deque() for _ in range(num_ranks)]
        self.log: list[list[Request]] = [[] for _ in range(num_ranks)]
        self.compute_seconds = [0.0] * num_ranks
        self.exposed_seconds = [0.0] * num_ranks
        self.end_seconds = [0.0] * num_ranks
        self._refill = refill
        self._answer = answer
        self._play = play
        self._width = collectives_in_flight
        self._on_row = on_row
        self._blame = blame
        self._on_span = on_span
        self._diary = Diary(self.clock, on_span)
        self._downtime, self._hosts = downtime, hosts
        if downtime is not None:
            downtime.on_crash = self._crashed
        self._processes: list[simpy.Process] = []
        self._computing: set[int] = set()
        self._standing: set[int] = set()  # ranks whose hosts are down
        self._in_flight: dict[Key, _InFlight] = {}
        self._meetings: dict[Key, _Meeting] = {}
        # (group, rank) -> that rank's unfinished collectives of the group, oldest first.
        self._lanes: dict[tuple[Hashable, int], deque[tuple[_InFlight, Post]]] = {}
        self._asleep: dict[int, Call] = {}
        self._num_running = num_ranks
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Play every stream to its `Exit`.

        Raises:
            DeadlockError: the clock has nothing left to do and a rank still waits.
            Exception: whatever `refill` raises.
        """
        for rank in range(len(self.streams)):
            self._processes.append(self.clock.process(self._rank(rank)))
        while self._num_running:
            if math.isinf(self.clock.peek()):
                self.give_up(self._blame())
            self.clock.step()
            # SimPy fails a rank's process at the end of the instant; other ranks must not go on until then.
            if self._failure is not None:
                raise self._failure

    def give_up(self, reason: str) -> NoReturn:
        """End the run, as ranks wait for what the network will never finish.

        Raises DeadlockError, which tells the reason and who waits.
        """
        doing = {rank: f"in {call.op}" for rank, call in self._asleep.items()}
        doing |= dict.fromkeys(self._standing, "on a crashed host")
        if not doing:  # all compute while what they have posted goes on
            posted = ((flight, rank) for flight in self._in_flight.values() for rank in flight.call.ranks)
            doing = {rank: f"in {flight.call.op}" for flight, rank in posted if rank not in flight.done_at}
        told = ", ".join(f"rank {rank} {doing[rank]}" for rank in sorted(doing)[:_MOST_TOLD])
        more = f" and {len(doing) - _MOST_TOLD} more" if len(doing) > _MOST_TOLD else ""
        wait = "waits" if len(doing) == 1 else "wait"
        raise DeadlockError(f"{reason}, and {told}{more} {wait} for the network: let an event bring it back")

    def _read(self, rank: int) -> Request:
        """The rank's next request, blocking in host time until it is there."""
        stream = self.streams[rank]
        try:
            while not stream:
                self._refill(rank)
        except BaseException as failure:
            self._failure = failure
            raise
        return stream.popleft()

    def _rank(self, rank: int) -> Generator[simpy.Event, None, None]:
        log, clock = self.log[rank], self.clock
        while True:
            request = self._read(rank)
            if self._is_down(rank):
                yield from self._until_up(rank)
            if isinstance(request, Post):
                log.append(request)
                self._post(rank, request)
            elif isinstance(request, Wait):
                log.append(request)
                yield from self._wait(rank, request.key)
            elif isinstance(request, Advance):
                log.append(request)
                seconds = on_grid(request.seconds)
                self.compute_seconds[rank] += seconds
                if seconds:
                    yield from self._compute(rank, seconds)
            elif isinstance(request, Mark):
                log.append(request)
                times = (clock.now, self.compute_seconds[rank], self.exposed_seconds[rank])
                self._on_row(StampedRow(rank, *times, request.row))
            elif isinstance(request, Ask):
                self._answer(rank, self._answer_to(rank, request.key))
            elif isinstance(request, Join):
                log.append(request._replace(is_past=True))
                yield from self._join(rank, request)
            else:
                self.end_seconds[rank] = clock.now
                self._num_running -= 1
                return

    def _answer_to(self, rank: int, key: Key | None) -> float | bool:
        if key is None:
            return float(self.clock.now)
        flight = self._in_flight.get(key)
        return flight is None or flight.done_at.get(rank, math.inf) <= self.clock.now

    def _join(self, rank: int, join: Join) -> Generator[simpy.Event, None, None]:
        meeting = self._meetings.get(join.key)
        if meeting is None:
            meeting = self._meetings[join.key] = _Meeting(self.clock.event())
            deadline = self.clock.at(self.clock.now + on_grid(join.seconds), _END_OF_INSTANT)
            assert deadline.callbacks is not None
            deadline.callbacks.append(meeting.settle)
        if meeting.is_open:
            meeting.arrivals.append(Arrival(join.member, join.weight))
        else:
            meeting.num_late += 1
        if len(meeting.arrivals) + meeting.num_late == join.num_members:
            del self._meetings[join.key]
            meeting.settle()
        start = self.clock.now
        if not meeting.settled.processed:
            self._diary.begin(rank, "wait", "join")
            yield meeting.settled
            self._diary.end(rank)
        self.exposed_seconds[rank] += self.clock.now - start
        if not join.is_past:
            self._answer(rank, tuple(meeting.arrivals))

    # --- hosts that crash -----------------------------------------------------------------------------------

    def _compute(self, rank: int, seconds: float) -> Generator[simpy.Event, None, None]:
        """Compute for so long without a crash: what one cuts off is lost, and begun again at the return."""
        while True:
            self._diary.begin(rank, "compute", "compute")
            self._computing.add(rank)
            try:
                yield self.clock.timeout(seconds)
            except Interrupt:
                self._diary.end(rank, as_kind="lost")
                yield from self._until_up(rank)
            else:
                self._computing.discard(rank)
                self._diary.end(rank)
                return

    def _crashed(self, host: int) -> None:
        """A host goes down: those of its ranks that compute stop."""
        for rank in sorted(self._computing):
            if self._hosts[rank] == host:
                self._computing.discard(rank)
                self._processes[rank].interrupt()

    def _is_down(self, rank: int) -> bool:
        return self._downtime is not None and self._downtime.since(self._hosts[rank]) is not None

    def _until_up(self, rank: int) -> Generator[simpy.Event, None, None]:
        """Stand still until the rank's host is back."""
        assert self._downtime is not None
        self._standing.add(rank)
        while self._is_down(rank):
            yield from self._downtime.until_up(self._hosts[rank])
            yield self.clock.at(on_grid(self.clock.now))
        self._standing.discard(rank)

    def unfinished_spans(self) -> list[Span]:
        """What ranks are doing at this instant, as far as it has come: for a run that ends here."""
        spans = self._diary.unfinished()
        for flight in self._in_flight.values():
            for rank, begin in sorted(flight.posted_at.items()):
                if rank not in flight.done_at:
                    times = (begin, self.clock.now)
                    spans.append(Span(rank, "communication", flight.call.op, *times, flight.num_bytes))
        return spans

    # --- calls ---------------------------------------------------------------------------------------------

    def _post(self, rank: int, post: Post) -> None:
        """Let the rank into the call, behind its earlier collectives of the same group."""
        flight = self._in_flight.get(post.key)
        if flight is None:
            flight = self._start(post.key, post.call)
        elif post.call.op == "all_to_all":
            flight.num_bytes += post.call.num_bytes
        if self._on_span is not None:
            flight.posted_at[rank] = self.clock.now
        if flight.call.op == "sendrecv":  # messages do not queue behind collectives
            flight.enter(post.member, post.call)
            return
        lane = self._lanes.setdefault((post.key.group, rank), deque())
        lane.append((flight, post))
        if len(lane) <= self._width:
            flight.enter(post.member, post.call)

    def _start(self, key: Key, call: Call) -> _InFlight:
        play = self._play if len(set(call.ranks)) > 1 else instant_play
        flight = _InFlight(call, call.num_bytes, enter=lambda member, call: None)
        flight.enter = play(call, key.group, lambda member: self._done(key, flight, member))
        self._in_flight[key] = flight
        return flight

    def _done(self, key: Key, flight: _InFlight, member: int) -> None:
        """The call is over for this member at this instant: wake it, let its next collective in."""
        rank = flight.call.ranks[member]
        flight.done_at[rank] = on_grid(self.clock.now)
        if self._on_span is not None:
            times = (flight.posted_at[rank], flight.done_at[rank])
            self._on_span(Span(rank, "communication", flight.call.op, *times, flight.num_bytes))
        sleeper = flight.sleepers.pop(rank, None)
        if sleeper is not None:
            sleeper.succeed()
        if flight.call.op == "sendrecv":
            return
        lane = self._lanes[key.group, rank]
        lane.remove(next(entry for entry in lane if entry[0] is flight))
        if len(lane) >= self._width:
            following, post = lane[self._width - 1]
            following.enter(post.member, post.call)

    def _wait(self, rank: int, key: Key) -> Generator[simpy.Event, None, None]:
        flight = self._in_flight[key]
        start = self.clock.now
        self._diary.begin(rank, "wait", flight.call.op)
        if rank not in flight.done_at:
            self._asleep[rank] = flight.call
            sleeper = flight.sleepers[rank] = self.clock.event()
            yield sleeper
            del self._asleep[rank]
        if flight.done_at[rank] > self.clock.now:
            yield self.clock.at(flight.done_at[rank])
        self.exposed_seconds[rank] += self.clock.now - start
        self._diary.end(rank)
        flight.num_waited += 1
        if flight.num_waited == len(flight.call.ranks):
            del self._in_flight[key]
