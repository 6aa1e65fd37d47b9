"""Ranks in virtual time: each rank's stream of requests becomes a SimPy process.

A rank is ordinary blocking code elsewhere (a thread, another process). What it does to virtual time reaches
the kernel as a stream of one-way requests, and the outcome depends on the streams alone: the kernel reads a
rank's next request only when virtual time has reached that rank, and reading may block in host time until
the rank has got that far.

Request times lie on a grid of 2**-30 s, so that equal steps are really equal whatever the clock says.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from simpy import Interrupt

from netsim.errors import DeadlockError, InputError
from netsim.network.clock import BY_RANKS, Clock, on_grid
from netsim.network.trace import Span
from netsim.ranks.calls import Calls, Mailboxes, Progress, StartCall, start_at_once
from netsim.ranks.requests import (
    Advance,
    Answer,
    Ask,
    Await,
    CallEnding,
    Exit,
    FirstSent,
    HoldUntil,
    Key,
    MailboxMessage,
    Mark,
    Post,
    Put,
    Request,
    Take,
    Wait,
    Withdraw,
)
from netsim.units import format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Sequence

    import simpy

    from netsim.network.network import Downtime

__all__ = ["Kernel", "RankSink", "RankSource", "StampedRow"]

T = TypeVar("T")

_MOST_NAMED = 8  # ranks in one line
_PAUSE = "pause"  # cause of an interrupt
_ROUNDING = 2.0**-31  # seconds, half of the grid's


class StampedRow(NamedTuple):
    """A marked row with its rank, its time, and the rank's seconds of computing and of waiting until then.

    `network_seconds` is the network's part of the waiting.
    """

    rank: int
    virtual_seconds: float
    compute_seconds: float
    exposed_seconds: float
    row: Any
    network_seconds: float = 0.0


class _SpanLog:
    """Spans of computing and waiting, reported as they end."""

    def __init__(self, clock: Clock, on_span: Callable[[Span], None]) -> None:
        self._clock, self._on_span = clock, on_span
        self._open: dict[int, Span] = {}

    def begin(self, rank: int, kind: Literal["compute", "wait"], name: str) -> None:
        self._open[rank] = Span(rank, kind, name, self._clock.now, self._clock.now)

    def end(self, rank: int, as_kind: Literal["lost"] | None = None) -> None:
        span = self._open.pop(rank, None)
        if span is not None and self._clock.now > span.begin_seconds:
            self._on_span(span._replace(kind=as_kind or span.kind, end_seconds=self._clock.now))

    def unfinished(self) -> list[Span]:
        return [span._replace(end_seconds=self._clock.now) for _, span in sorted(self._open.items())]


class _SharedCores:
    """Cores of one machine on which all ranks compute: processor sharing.

    While more ranks compute than there are cores, each is slowed down by the same factor, as an operating system does
    to equal processes. Where none is slowed down, work takes the time that it takes on a clock without this.
    """

    def __init__(self, clock: Clock, num_cores: int) -> None:
        self._clock, self._num_cores = clock, num_cores
        # Work: the service at which it ends, a number that breaks ties, the event of its end. Each rank that
        # computes gets the same service, in seconds on a core of its own, counted from when all were idle.
        self._ends: list[tuple[float, int, simpy.Event]] = []
        self._numbers = itertools.count()
        self._service, self._since = 0.0, 0.0
        self._alarm: simpy.Event | None = None

    def begin(self, seconds: float) -> simpy.Event:
        """Begin `seconds` of work; the event is its end."""
        self._catch_up()
        event = self._clock.event()
        heappush(self._ends, (self._service + seconds, next(self._numbers), event))
        self._set_alarm()
        return event

    def stop(self, event: simpy.Event) -> float:
        """End the work of `event` without it; returns the seconds of work left."""
        self._catch_up()
        left = sum(each[0] - self._service for each in self._ends if each[2] is event)
        self._ends = [each for each in self._ends if each[2] is not event]
        heapify(self._ends)
        self._set_alarm()
        return left

    @property
    def _slowdown(self) -> float:
        return max(1.0, len(self._ends) / self._num_cores)

    def _catch_up(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        self._service = self._service + elapsed / self._slowdown if self._ends else 0.0

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._clock.cancel(self._alarm)
        self._alarm = None
        if self._ends:
            left = max(self._ends[0][0] - self._service, 0.0)
            self._alarm = self._clock.at(on_grid(self._clock.now + left * self._slowdown), call=self._finish)

    def _finish(self, _: simpy.Event) -> None:
        """End the work that the alarm was set for, and all that ends within a step of the grid."""
        self._alarm = None
        self._catch_up()
        # The first ends now whatever the service says: far from zero the clock is coarser than the grid.
        due = max(self._service, self._ends[0][0]) + _ROUNDING
        while self._ends and self._ends[0][0] <= due:
            heappop(self._ends)[2].succeed()
        self._set_alarm()


class _Uptime:
    """Computing of ranks, interrupted by crashes and pauses of their hosts.

    Attributes:
        processes: the ranks' processes, which a crash or a pause interrupts.
        paused: ranks whose hosts are down.
        lost: ranks that others have gone on without, for ever.
        hosts_down: hosts that are down.
        unkept: of ranks that keep their state at times, the seconds computed since.
        to_redo: of these, the seconds that a crash has lost, to be computed again.
        on_lost: called with such a rank at a crash.
    """

    def __init__(
        self,
        clock: Clock,
        downtime: Downtime | None,
        hosts: Sequence[int],
        spans: _SpanLog | None,
        cores: _SharedCores | None,
    ) -> None:
        self.processes: list[simpy.Process] = []
        self.paused: set[int] = set()
        self.lost: set[int] = set()
        self.hosts_down = downtime.hosts if downtime is not None else frozenset()
        self._clock, self._downtime, self._hosts = clock, downtime, hosts
        self._spans, self._cores = spans, cores
        self._busy: set[int] = set()
        self._stopped: set[int] = set()  # ranks that have work left, paused
        self.unkept: dict[int, float] = {}
        self.to_redo: dict[int, float] = {}
        self._redoing: set[int] = set()
        self.on_lost: Callable[[int], None] = lambda rank: None
        if downtime is not None:
            downtime.on_crash, downtime.on_pause = self._crashed, self._paused

    def compute(self, rank: int, seconds: float) -> Generator[simpy.Event, None, float]:
        """Compute for `seconds` without a crash: a crash loses the work, which begins again when the host is up.

        A pause interrupts it. Returns the seconds by which others on shared cores slowed it down.
        """
        left, elapsed = seconds, 0.0
        while True:
            if self._spans is not None:
                self._spans.begin(rank, "compute", "compute")
            self._busy.add(rank)
            begin = self._clock.now
            if self._cores is not None:
                end = self._cores.begin(left)
            else:
                end = self._clock.timeout(left) if left == seconds else self._clock.at(on_grid(begin + left))
            try:
                yield end
            except Interrupt as interrupt:
                now = self._clock.now
                left = on_grid(begin + left) - now if self._cores is None else self._cores.stop(end)
                elapsed += now - begin
                if interrupt.cause == _PAUSE:
                    self._stopped.add(rank)
                if self._spans is not None:
                    self._spans.end(rank, as_kind=None if rank in self._stopped else "lost")
                yield from self.restart(rank)
                if rank not in self._stopped:  # a crash, perhaps during a pause
                    left, elapsed = seconds, 0.0
                self._stopped.discard(rank)
            else:
                self._busy.discard(rank)
                if self._spans is not None:
                    self._spans.end(rank)
                return 0.0 if self._cores is None else elapsed + self._clock.now - begin - seconds

    def _crashed(self, host: int) -> None:
        """Interrupt the ranks of a host that compute while it goes down."""
        self._stopped -= {rank for rank in self._stopped if self._hosts[rank] == host}
        self._interrupt(host, None)
        for rank, seconds in self.unkept.items():
            if self._hosts[rank] == host:
                if seconds and rank not in self._redoing:  # which begins again as all computing does
                    self.to_redo[rank] = seconds
                self.on_lost(rank)

    def restart(self, rank: int) -> Generator[simpy.Event, None, None]:
        """Wait until a rank's host is up, and compute again what a crash has lost since the rank kept its state."""
        while self.is_down(rank) or self.to_redo.get(rank):
            if self.is_down(rank):
                yield from self.until_up(rank)
            else:
                self._redoing.add(rank)
                yield from self.compute(rank, self.to_redo.pop(rank))
                self._redoing.discard(rank)

    def _paused(self, host: int) -> None:
        """Interrupt the ranks of a host that compute while it is paused."""
        self._interrupt(host, _PAUSE)

    def _interrupt(self, host: int, cause: str | None) -> None:
        for rank in sorted(self._busy):
            if self._hosts[rank] == host:
                self._busy.discard(rank)
                self.processes[rank].interrupt(cause)

    def is_down(self, rank: int) -> bool:
        """True while the rank's host is down, unless the rank continues without it."""
        return bool(self.hosts_down) and rank not in self.lost and self._hosts[rank] in self.hosts_down

    def until_up(self, rank: int) -> Generator[simpy.Event, None, None]:
        """Pause until the rank's host is up."""
        assert self._downtime is not None
        self.paused.add(rank)
        try:
            while self.is_down(rank):
                yield from self._downtime.until_up(self._hosts[rank])
                yield self._clock.at(on_grid(self._clock.now))
        except Interrupt:  # it is lost
            pass
        self.paused.discard(rank)


class RankSeconds:
    """Seconds of each rank, by what it did.

    Attributes:
        compute, exposed: seconds of computing, and of waiting.
        network: the part of `exposed` in which the awaited call was in flight; in the rest the rank waited for members
            that had not posted.
        end: the instant of its end.
        waiting_since: of ranks that wait, the instant at which they began.
    """

    def __init__(self, num_ranks: int) -> None:
        self.compute = [0.0] * num_ranks
        self.exposed = [0.0] * num_ranks
        self.network = [0.0] * num_ranks
        self.end = [0.0] * num_ranks
        self.waiting_since: dict[int, float] = {}


class _Ranks(NamedTuple):
    """Ranks that have not ended.

    Attributes:
        running: all of them.
        held: those that pause until others have gone on, with the event that resumes each.
        asking: those that wait for an answer, with the question in words.
        idle: those whose computing is skipped.
        passed: by group, the last point that one of its ranks passed before `Ask.until`.
    """

    running: set[int]
    held: dict[int, simpy.Event]
    asking: dict[int, str]
    idle: set[int]
    passed: dict[Hashable, int]


class _Handlers(NamedTuple):
    """Handlers of requests, by class: served at once, in virtual time, and in virtual time with an answer."""

    at_once: dict[type[Any], Callable[[int, Any], object]]
    in_time: dict[type[Any], Callable[[int, Any], Generator[simpy.Event, None, None]]]
    questions: dict[type[Any], Callable[[int, Any], Generator[simpy.Event, None, Answer]]]


class RankSource:
    """Port from which the kernel gets requests; the defaults are those of ranks that have made all of theirs."""

    def refill(self, rank: int) -> None:
        """Let `rank`, whose stream is empty, run until `Kernel.streams[rank]` has a request.

        Returns without one if the rank can only continue after others for whom the clock must advance first: the kernel
        holds it until `can_run(rank)`. Raises what ends the run, such as a deadlock or a rank's failure.
        """
        raise NotImplementedError

    def can_run(self, rank: int) -> bool:
        """Return whether a held rank can continue."""
        return True

    def settle(self) -> None:
        """Let ranks run until each waits for the clock; called before the clock advances while ranks are held.

        So a held rank continues at an instant that does not depend on host time.
        """

    def recall(self) -> bool:
        """Block until a rank that waits for an event outside the simulation can continue; False if none waits."""
        return False


class RankSink:
    """Port to which the kernel reports; the defaults ignore the report.

    Attributes:
        on_span: called with every span of a rank as it ends; None: spans are not made.
    """

    on_span: Callable[[Span], None] | None = None

    def answer(self, rank: int, value: Answer) -> None:
        """Answer a rank's `Question`, at the rank's virtual time."""

    def row(self, row: StampedRow) -> None:
        """Take a marked row, in order of virtual time."""

    def served(self, rank: int, request: Request) -> None:
        """Log a request as it is served, questions with `is_past` set.

        Replayed by a new kernel from the start, these requests bring it to the same instant and state.
        """

    def taken(self, rank: int, take: Take, messages: tuple[MailboxMessage, ...]) -> None:
        """Record the messages that a rank takes from its mailbox, before it is answered."""

    def withdrawn(self, key: Key) -> None:
        """Record that a message is withdrawn, before its sender is answered."""

    def broken(self, group: Hashable) -> None:
        """Record that a group's calls have ended undone, after a member's time-out."""

    def undone(self, key: Key) -> None:
        """Record that a call has ended undone, since a member has ended."""


class Kernel:
    """Serves the ranks' request streams on one clock.

    Args:
        num_ranks: the number of ranks.
        source: makes ranks request more.
        sink: gets answers, rows and reports.
        start: starts a call on a network: `start(call, group, on_done)` returns a function that enters a member
            (a position in `call.ranks`) now, with the call as it posted it, and one that cancels the call;
            `on_done(member)` is called at the instant that the member has finished.
        clock: shared with the network.
        collectives_in_flight: the number of collectives of one group that a rank runs at once, in order.
        find_stop: names the fault that stops the network for ever, "" if there is none, where no event on the clock can
            help a rank that waits, else returns None; called before each step. By default any event can.
        downtime: downtimes of hosts: their ranks pause, and the work that they were computing begins again.
        hosts: the host of each rank, with `downtime`.
        shared_cores: cores of the one machine on which all ranks compute, each on one; None: all have their own.

    Attributes:
        streams: one queue of requests a rank; the source appends to them.
        seconds: of each rank.
        calls: those in flight.
        until_seconds: `run` returns before the first event after this instant.
    """

    def __init__(
        self,
        num_ranks: int,
        source: RankSource,
        sink: RankSink,
        *,
        start: StartCall = start_at_once,
        clock: Clock | None = None,
        collectives_in_flight: int = 1,
        find_stop: Callable[[], str | None] | None = None,
        downtime: Downtime | None = None,
        hosts: Sequence[int] = (),
        shared_cores: int | None = None,
    ) -> None:
        self.clock = clock if clock is not None else Clock()
        self.streams: list[deque[Request]] = [deque() for _ in range(num_ranks)]
        self.seconds = RankSeconds(num_ranks)
        self.until_seconds = math.inf
        self._source, self._sink = source, sink
        self._find_stop = find_stop or (lambda: "" if math.isinf(self.clock.peek()) else None)
        self._spans = _SpanLog(self.clock, sink.on_span) if sink.on_span is not None else None
        cores = None
        if shared_cores is not None and shared_cores < num_ranks:
            cores = _SharedCores(self.clock, shared_cores)
        self._uptime = _Uptime(self.clock, downtime, hosts, self._spans, cores)
        self.calls = Calls(self.clock, start, collectives_in_flight, sink, self.seconds.network)
        self._mailboxes = Mailboxes(self.clock, start, start_at_once)
        self._ranks = _Ranks(set(range(num_ranks)), {}, {}, set(), {})
        self._failure: BaseException | None = None
        self._handlers = _Handlers(
            at_once={
                Post: self.calls.post,
                Mark: self._mark,
                Ask: self._ask,
                Put: lambda rank, request: self._mailboxes.put(request),
            },
            in_time={
                Wait: lambda rank, wait: self._wait(rank, "", self.calls.wait(rank, wait.key), wait.key),
                Advance: self._compute,
                HoldUntil: lambda rank, hold: self._wait(
                    rank, "others", _until(self.clock.at(on_grid(hold.until)))
                ),
            },
            questions={
                Take: self._take,
                FirstSent: lambda rank, request: self.calls.sent.first(request.box),
                Withdraw: lambda rank, request: _immediate(self.calls.withdraw(request.key)),
                Await: self._await,
            },
        )

    def run(self) -> None:
        """Serve every stream to its `Exit`, or all up to `until_seconds`.

        Raises:
            DeadlockError: a rank still waits, and nothing that the clock has left to do can help it.
            Exception: whatever `refill` raises.
        """
        for rank in range(len(self.streams)):
            self._uptime.processes.append(self.clock.process(self._rank(rank)))
        upcoming, running, held = self.clock.upcoming, self._ranks.running, self._ranks.held
        while running:
            # A rank that continues next shows progress, as nearly always.
            goes_on = upcoming and upcoming[0][1] in BY_RANKS and upcoming[0][3].callbacks
            if not goes_on and (stop := self._find_stop()) is not None:
                if not (held and self._source.recall()):
                    self.give_up(stop)
            elif upcoming and upcoming[0][0] > self.until_seconds:
                return
            else:
                self.clock.step()
            if held and self._failure is None:
                self._source.settle()
                for rank in sorted(held):
                    if self.streams[rank] or self._source.can_run(rank):
                        held.pop(rank).succeed()
            # SimPy fails a rank's process at the end of the instant; other ranks must not continue until then.
            if self._failure is not None:
                raise self._failure

    def give_up(self, reason: str) -> None:
        """Let ranks go on for which nothing can ever happen.

        Raises:
            DeadlockError: they cannot; `reason` and the ranks that wait.
        """
        if not self._can_go_on():
            raise DeadlockError(self._deadlock_report(reason))

    def _can_go_on(self) -> bool:
        """Let ranks go on that wait in vain; False: none can."""
        return self._mailboxes.let_one_go()

    def _deadlock_report(self, reason: str) -> str:
        """Describe the ranks that wait for events that can never happen: one line, and a table of all below it."""
        doing = self.calls.waiting()
        doing |= dict.fromkeys(self._uptime.paused, "on a crashed host")
        doing |= self._ranks.asking
        doing |= dict.fromkeys(self._ranks.held, "off the clock")
        if not doing:  # all compute while their calls are in flight
            doing = self.calls.unfinished()
        ranks = sorted(doing)
        text = format_list([f"rank {rank} {doing[rank].partition(':')[0]}" for rank in ranks], _MOST_NAMED)
        wait = "waits" if len(doing) == 1 else "wait"
        if reason:
            line = f"{reason}, and {text} {wait} for the network: let an event bring it back"
        else:
            line = f"deadlock: {text} {wait} for an event that cannot happen"
        return "\n".join([line, *(f"  rank {rank}: {doing[rank]}" for rank in ranks)])

    def _rank(self, rank: int) -> Generator[simpy.Event, None, None]:
        served, stream, uptime = self._sink.served, self.streams[rank], self._uptime
        at_once, in_time, questions = self._handlers
        while True:
            if not stream:  # blocks in host time
                try:
                    self._source.refill(rank)
                except BaseException as failure:
                    self._failure = failure
                    raise
            if not stream:
                held = self._ranks.held[rank] = self.clock.event()
                yield from self._wait(rank, "others", _until(held))
                served(rank, HoldUntil(self.clock.now))
                continue
            request = stream.popleft()
            if uptime.hosts_down and uptime.is_down(rank):
                yield from uptime.until_up(rank)
            if uptime.to_redo:
                yield from uptime.restart(rank)
            kind = type(request)
            if kind in questions:
                yield from self._question(rank, request)
                continue
            if kind is Exit:
                self._end(rank)
                return
            if kind is not Ask:  # which changes nothing
                served(rank, request)
            if kind in at_once:
                at_once[kind](rank, request)
                if isinstance(request, Ask) and request.key is None:
                    yield self.clock.at(self.clock.now)  # others that ask at this instant are answered, too
            else:
                yield from in_time[kind](rank, request)

    def _end(self, rank: int) -> None:
        self.seconds.end[rank] = self.clock.now
        if self.calls.on_progress is not None:
            self.calls.on_progress(rank, Progress.STOPS, None, self.clock.now, 0.0)
        self._ranks.running.discard(rank)
        self.calls.gone(rank)
        self._uptime.unkept.pop(rank, None)

    def _mark(self, rank: int, mark: Mark) -> None:
        times = (self.clock.now, self.seconds.compute[rank], self.seconds.exposed[rank])
        self._sink.row(StampedRow(rank, *times, mark.row, self.seconds.network[rank]))

    def _ask(self, rank: int, ask: Ask) -> None:
        if ask.key is None:
            self._sink.answer(rank, float(self.clock.now))
        elif ask.until is None:
            self._sink.answer(rank, self.calls.is_done(rank, ask.key))
        else:
            group, number = ask.key.group, cast("int", ask.key.number)
            passed = self._ranks.passed
            if self.clock.now < ask.until:
                passed[group] = max(passed.get(group, number), number)
            self._sink.answer(rank, number > passed.get(group, -1))

    def _compute(self, rank: int, advance: Advance) -> Generator[simpy.Event, None, None]:
        if not 0 <= advance.seconds < math.inf:
            raise InputError(f"rank {rank}: advance: got {advance.seconds} seconds; give a finite time")
        if rank in self._ranks.idle:
            return
        seconds = on_grid(advance.seconds)
        self.seconds.compute[rank] += seconds
        if seconds:
            self.seconds.compute[rank] += yield from self._uptime.compute(rank, seconds)
            if rank in self._uptime.unkept:
                self._uptime.unkept[rank] += seconds

    def _question(self, rank: int, question: Any) -> Generator[simpy.Event, None, None]:
        self._sink.served(rank, question._replace(is_past=True))
        key = question.key if isinstance(question, Await) else None
        name = self.calls.op(key) if key is not None else type(question).__name__.lower()
        self._ranks.asking[rank] = f"in {name}"
        waiting = self._handlers.questions[type(question)](rank, question)
        answer = yield from self._wait(rank, name, waiting, key)
        del self._ranks.asking[rank]
        if not question.is_past:
            self._sink.answer(rank, answer)
        # All ranks that one event answers have their answers before the kernel reads the first of them again, which
        # may need the others off the clock.
        yield self.clock.at(self.clock.now)

    def _take(self, rank: int, take: Take) -> Generator[simpy.Event, None, tuple[MailboxMessage, ...]]:
        """Take messages; the wait is the network's while one from or to the rank is in flight."""
        before = self._mailboxes.seconds_in_flight(rank)
        messages = yield from self._mailboxes.take(rank, take)
        self.seconds.network[rank] += self._mailboxes.seconds_in_flight(rank) - before
        self._sink.taken(rank, take, messages)
        return messages

    def _await(self, rank: int, question: Await) -> Generator[simpy.Event, None, CallEnding]:
        yield from self.calls.wait(rank, question.key, question.seconds)
        return self.calls.ending(rank, question.key)

    def _wait(
        self, rank: int, name: str, waiting: Generator[simpy.Event, None, T], key: Key | None = None
    ) -> Generator[simpy.Event, None, T]:
        """Run `waiting` as exposed time of the rank: for the call `key`, or else for `name`."""
        seconds, spans, on_progress = self.seconds, self._spans, self.calls.on_progress
        start, network = self.clock.now, seconds.network[rank]
        if on_progress is not None:
            on_progress(rank, Progress.STOPS, key, start, 0.0)
        if spans is not None:
            spans.begin(rank, "wait", name if key is None else self.calls.op(key))
        seconds.waiting_since[rank] = start
        result = yield from waiting
        del seconds.waiting_since[rank]
        now = self.clock.now
        seconds.exposed[rank] += now - start
        if on_progress is not None:
            on_progress(rank, Progress.GOES_ON, key, now, seconds.network[rank] - network)
        if spans is not None:
            spans.end(rank)
        return result

    @property
    def running(self) -> frozenset[int]:
        """The ranks that have not come to their `Exit`."""
        return frozenset(self._ranks.running)

    def exposed_until(self, rank: int, instant: float) -> tuple[float, float]:
        """Exposed and network seconds of a rank, with what it waits for at this moment up to `instant`."""
        exposed, network = self.seconds.exposed[rank], self.seconds.network[rank]
        since = self.seconds.waiting_since.get(rank)
        if since is None:
            return exposed, network
        return exposed + instant - since, network + self.calls.network_seconds(rank, since, instant)

    def unfinished_spans(self) -> list[Span]:
        """Spans of ranks that are open at this instant, for a run that ends here."""
        spans = self._spans.unfinished() if self._spans is not None else []
        return spans + self.calls.unfinished_spans()


def _immediate(answer: Answer) -> Generator[simpy.Event, None, Answer]:
    """An answer that takes no time."""
    return answer
    yield  # makes this a generator


def _until(event: simpy.Event) -> Generator[simpy.Event, None, None]:
    yield event
