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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from netsim.files.errors import DeadlockError, InputError
from netsim.network.clock import BY_RANKS, Clock, on_grid
from netsim.ranks.calls import Calls, StartCall, start_at_once
from netsim.ranks.mailboxes import Mailboxes
from netsim.ranks.meetings import Meetings
from netsim.ranks.reach import Reach
from netsim.ranks.requests import (
    Advance,
    Answer,
    Ask,
    Await,
    CallEnding,
    Confirm,
    Fetch,
    FirstSent,
    Join,
    Key,
    Letter,
    Mark,
    Post,
    Publish,
    Put,
    Request,
    Stand,
    Take,
    Wait,
    Withdraw,
)
from netsim.ranks.spans import Diary
from netsim.ranks.uptime import Uptime

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence

    import simpy

    from netsim.network.network import Downtime
    from netsim.network.recorder import Span

__all__ = ["Kernel", "StampedRow"]


T = TypeVar("T")


class StampedRow(NamedTuple):
    """A marked row: whose, when, and its rank's seconds of computing and of waiting until then.

    `network_seconds` is the network's part of the waiting.
    """

    rank: int
    virtual_seconds: float
    compute_seconds: float
    exposed_seconds: float
    row: Mapping[str, Any]
    network_seconds: float = 0.0


_MOST_TOLD = 8  # ranks in one line


class Kernel:
    """Serves the ranks' request streams on one clock.

    Args:
        num_ranks: how many ranks there are.
        refill: called with a rank whose stream is empty; returns when `streams[rank]` has a request, having
            let the rank run, or raises (deadlock, a rank's failure). If it returns without one, the rank can only
            go on when others have, whom the clock must let on before: it stands still until `can_run(rank)`.
        answer: called with (rank, value) for every `Question`.
        start: starts a call on a network: `start(call, group, on_done)` returns the function that lets a member
            (a position in `call.ranks`) in now, with the call as it posted it, and one that ends it undone;
            `on_done(member)` is called at the instant it is through.
        clock: shared with the network.
        collectives_in_flight: how many collectives of one group a rank has under way at once, in order.
        on_row: told of every marked row as it is stamped, in order of virtual time.
        blame: tells what keeps the network from ever going on; "" where nothing is out of order.
        is_hopeless: whether what is left on the clock cannot help anybody who waits, asked before it goes on;
            None: while there is something, it can.
        on_span: told of what ranks do, as it ends; None: nobody wants to know.
        downtime: tells when the ranks' hosts are down: they stand still then, and what they were computing is
            lost and begun again.
        hosts: the host of each rank, where there is a downtime.
        reach: tells who reaches whom, and brings what is fetched.
        on_older: called with a group and the numbers of its published state that may be asked for yet, the
            newest and older ones on their way; newer numbers have not been published at this time.
        on_request: told of every rank and request as it is served, questions with nothing left open: replayed
            from the start by a fresh kernel, they bring that kernel to the same instant and state. Nothing is
            kept here.
        can_run: whether a rank that stands still for `refill` can go on.
        settle: called while ranks stand still, before the clock goes on; returns when no rank can do anything by
            itself, so that who stands still is let on at an instant that does not depend on how far ranks have come.
        on_broken: called with a group whose calls have ended undone, since a member's time was up or it has gone.
        recall: blocks until one of those can go on who stand still by themselves; False where there are none.
        on_taken: told of every rank that takes letters, what it asked, and which, before it is answered.
        on_withdrawn: told of every message that has been taken back, before who did so is answered.

    Attributes:
        streams: one queue of requests a rank; whoever carries the ranks appends to them.
        compute_seconds, exposed_seconds, end_seconds: per rank.
        network_seconds: per rank the part of `exposed_seconds` in which what it waited for was under way; in the
            rest it waited for members who had not come yet.
        until_seconds: `run` returns before the first event after this instant, whoever has not ended by then.
    """

    def __init__(
        self,
        num_ranks: int,
        refill: Callable[[int], None],
        *,
        answer: Callable[[int, Answer], None],
        start: StartCall = start_at_once,
        clock: Clock | None = None,
        collectives_in_flight: int = 1,
        on_row: Callable[[StampedRow], None],
        blame: Callable[[], str] = lambda: "",
        is_hopeless: Callable[[], bool] | None = None,
        on_span: Callable[[Span], None] | None = None,
        downtime: Downtime | None = None,
        hosts: Sequence[int] = (),
        reach: Reach | None = None,
        on_older: Callable[[Hashable, Collection[int]], None] = lambda group, numbers: None,
        on_request: Callable[[int, Request], None] = lambda rank, request: None,
        can_run: Callable[[int], bool] = lambda rank: True,
        settle: Callable[[], None] = lambda: None,
        on_broken: Callable[[Hashable], None] = lambda group: None,
        recall: Callable[[], bool] = lambda: False,
        on_taken: Callable[[int, Take, tuple[Letter, ...]], None] = lambda rank, take, letters: None,
        on_withdrawn: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self.clock = clock if clock is not None else Clock()
        self.streams: list[deque[Request]] = [deque() for _ in range(num_ranks)]
        self.compute_seconds = [0.0] * num_ranks
        self.exposed_seconds = [0.0] * num_ranks
        self.end_seconds = [0.0] * num_ranks
        self.network_seconds = [0.0] * num_ranks
        self.until_seconds = math.inf
        self._waiting_since: dict[int, float] = {}  # ranks that wait at this instant
        self._refill, self._can_run, self._recall = refill, can_run, recall
        self._settle = settle
        self._on_taken = on_taken
        self._held: dict[int, simpy.Event] = {}  # ranks that stand still until others have gone on
        self._answer = answer
        self._on_row, self._keep = on_row, on_request
        self._blame = blame
        self._is_hopeless = is_hopeless or (lambda: math.isinf(self.clock.peek()))
        self._diary = Diary(self.clock, on_span) if on_span is not None else None
        self._lost: set[int] = set()  # ranks that others have gone on without, for ever
        self._down = downtime.hosts if downtime is not None else frozenset()
        self._uptime = Uptime(self.clock, downtime, hosts, self._lost, self._diary)
        self._calls = Calls(self.clock, start, collectives_in_flight, on_span, on_broken, on_withdrawn)
        self._mailboxes = Mailboxes(self.clock, start, start_at_once)
        reach = reach if reach is not None else Reach(None, hosts, lambda links: False)
        self._meetings = Meetings(self.clock, reach, self._calls.assemble, self._calls.dissolve, on_older)
        self._asking: dict[int, str] = {}
        self._has_ended = False  # one of the others has come to its end
        self._running = set(range(num_ranks))
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serve every stream to its `Exit`, or all up to `until_seconds`.

        Raises:
            DeadlockError: a rank still waits, and nothing that the clock has left to do can help it.
            Exception: whatever `refill` raises.
        """
        for rank in range(len(self.streams)):
            self._uptime.processes.append(self.clock.process(self._rank(rank)))
        upcoming = self.clock.upcoming
        while self._running:
            # A rank that goes on next is hope enough, as nearly always.
            goes_on = upcoming and upcoming[0][1] in BY_RANKS and upcoming[0][3].callbacks
            if not goes_on and self._is_hopeless():
                if not (self._held and self._recall()):
                    self.give_up(self._blame())
            elif upcoming and upcoming[0][0] > self.until_seconds:
                return
            else:
                self.clock.step()
            if self._held and self._failure is None:
                self._settle()
                self._let_held_on()
            # SimPy fails a rank's process at the end of the instant; other ranks must not go on until then.
            if self._failure is not None:
                raise self._failure

    def give_up(self, reason: str) -> None:
        """Nothing will ever finish what ranks wait for.

        Those who do something together have a time-out of their own. Where others have ended without all who are
        left, these are lost: they go on alone, to their own end. Else this raises DeadlockError, which tells the
        reason and who waits.
        """
        if self._meetings.is_under_way or self._mailboxes.let_one_go():
            return
        goes_on = self._has_ended and self._meetings.have_met
        if goes_on and self._uptime.standing | self._meetings.waiting == self._running:
            for rank in sorted(self._uptime.standing):
                self._lost.add(rank)
                self._uptime.processes[rank].interrupt()
            self._meetings.give_up()
            return
        raise DeadlockError(self._told(reason))

    def _told(self, reason: str) -> str:
        """Who waits for what that can never come: one line, and a table of all below it."""
        doing = self._calls.waiting()
        doing |= dict.fromkeys(self._uptime.standing, "on a crashed host")
        doing |= self._asking
        doing |= dict.fromkeys(self._held, "off the clock")
        if not doing:  # all compute while what they have posted goes on
            doing = self._calls.unfinished()
        ranks = sorted(doing)
        told = ", ".join(f"rank {rank} {doing[rank].partition(':')[0]}" for rank in ranks[:_MOST_TOLD])
        more = f" and {len(doing) - _MOST_TOLD} more" if len(doing) > _MOST_TOLD else ""
        wait = "waits" if len(doing) == 1 else "wait"
        if reason:
            line = f"{reason}, and {told}{more} {wait} for the network: let an event bring it back"
        else:
            line = f"deadlock: {told}{more} {wait} for what can never come"
        return "\n".join([line, *(f"  rank {rank}: {doing[rank]}" for rank in ranks)])

    @property
    def seconds_to_alarm(self) -> float:
        """Until the first time that a rank has given a call is up; infinity where none has."""
        return self._calls.seconds_to_alarm

    def connection_lost(self, group: Hashable) -> bool:
        """A connection of this group is given up: it breaks where a member has given its calls a time; else False."""
        return self._calls.lose(group)

    def network_changed(self) -> None:
        """Links are up, down or otherwise since this instant."""
        self._meetings.look_again()

    def _read(self, rank: int) -> Request | None:
        """The next request of a rank whose stream is empty, blocking in host time until it is there.

        None: it has to stand still for now.
        """
        try:
            self._refill(rank)
        except BaseException as failure:
            self._failure = failure
            raise
        stream = self.streams[rank]
        return stream.popleft() if stream else None

    def _let_held_on(self) -> None:
        """Those go on, at this instant, for whom others have done by now what they waited for."""
        for rank in [rank for rank in sorted(self._held) if self.streams[rank] or self._can_run(rank)]:
            self._held.pop(rank).succeed()

    def _rank(self, rank: int) -> Generator[simpy.Event, None, None]:
        keep, clock, stream, uptime = self._keep, self.clock, self.streams[rank], self._uptime
        while True:
            request = stream.popleft() if stream else self._read(rank)
            if request is None:
                held = self._held[rank] = self.clock.event()
                yield from self._wait(rank, "others", _until(held))
                keep(rank, Stand(clock.now))
                continue
            if self._down and uptime.is_down(rank):
                yield from uptime.until_up(rank)
            if isinstance(request, Post):
                keep(rank, request)
                self._calls.post(rank, request)
            elif isinstance(request, Wait):
                keep(rank, request)
                name = self._calls.op(request.key) if self._diary is not None else ""
                waiting = self._calls.wait(rank, request.key)
                self.network_seconds[rank] += yield from self._wait(rank, name, waiting)
            elif isinstance(request, Advance):
                keep(rank, request)
                if not 0 <= request.seconds < math.inf:
                    raise InputError(
                        f"rank {rank}: advance: got {request.seconds} seconds; give a finite time"
                    )
                seconds = on_grid(request.seconds)
                self.compute_seconds[rank] += seconds
                if seconds:
                    yield from uptime.compute(rank, seconds)
            elif isinstance(request, Mark):
                keep(rank, request)
                times = (clock.now, self.compute_seconds[rank], self.exposed_seconds[rank])
                self._on_row(StampedRow(rank, *times, request.row, self.network_seconds[rank]))
            elif isinstance(request, Ask):
                self._answer(rank, self._answer_to(rank, request.key))
            elif isinstance(request, Join | Confirm | Fetch | Take | FirstSent | Withdraw | Await):
                keep(rank, request._replace(is_past=True))
                yield from self._question(rank, request)
            elif isinstance(request, Publish):
                keep(rank, request)
                self._meetings.publish(rank, request)
            elif isinstance(request, Put):
                keep(rank, request)
                self._mailboxes.put(request)
            elif isinstance(request, Stand):
                keep(rank, request)
                yield from self._wait(rank, "others", _until(clock.at(request.until)))
            else:
                self.end_seconds[rank] = clock.now
                self._running.discard(rank)
                self._calls.gone(rank)
                self._has_ended = self._has_ended or rank not in self._lost
                return

    def _answer_to(self, rank: int, key: Key | None) -> float | bool:
        return float(self.clock.now) if key is None else self._calls.is_done(rank, key)

    def _question(
        self, rank: int, question: Join | Confirm | Fetch | Take | FirstSent | Withdraw | Await
    ) -> Generator[simpy.Event, None, None]:
        waiting: Generator[simpy.Event, None, Answer]
        match question:
            case Join():
                waiting = self._meetings.join(question)
            case Confirm():
                waiting = self._meetings.confirm(question)
            case Fetch():
                waiting = self._meetings.fetch(rank, question)
            case Take():
                waiting = self._mailboxes.take(rank, question)
            case FirstSent():
                waiting = self._calls.first_sent(question.box)
            case Withdraw():
                waiting = _at_once(self._calls.withdraw(question.key))
            case Await():
                waiting = self._await(rank, question)
        name = type(question).__name__.lower()
        if isinstance(question, Await):
            name = self._calls.op(question.key)
        self._asking[rank] = f"in {name}"
        begin, mail = self.clock.now, self._mailboxes.seconds_under_way(rank)
        answer = yield from self._wait(rank, name, waiting)
        if isinstance(question, Fetch):
            self.network_seconds[rank] += self.clock.now - begin
        elif isinstance(question, Take):  # while its letter was under way, or one to it
            self.network_seconds[rank] += self._mailboxes.seconds_under_way(rank) - mail
            self._on_taken(rank, question, cast("tuple[Letter, ...]", answer))
        del self._asking[rank]
        if answer is None:  # of a Fetch
            self._lost.add(rank)
        if not question.is_past:
            self._answer(rank, answer)
        # All whom one event answers have their answers before the first of them is waited for again: it may
        # need the others, off the clock.
        yield self.clock.at(self.clock.now)

    def _await(self, rank: int, question: Await) -> Generator[simpy.Event, None, CallEnding]:
        self.network_seconds[rank] += yield from self._calls.wait(rank, question.key, question.seconds)
        return self._calls.ending(rank, question.key)

    def _wait(
        self, rank: int, name: str, waiting: Generator[simpy.Event, None, T]
    ) -> Generator[simpy.Event, None, T]:
        """What takes place while `waiting` is no computing."""
        start, diary = self.clock.now, self._diary
        if diary is not None:
            diary.begin(rank, "wait", name)
        self._waiting_since[rank] = start
        result = yield from waiting
        del self._waiting_since[rank]
        self.exposed_seconds[rank] += self.clock.now - start
        if diary is not None:
            diary.end(rank)
        return result

    @property
    def running(self) -> frozenset[int]:
        """The ranks that have not come to their `Exit`."""
        return frozenset(self._running)

    def exposed_until(self, rank: int, instant: float) -> tuple[float, float]:
        """`exposed_seconds` and `network_seconds` of a rank, with what it waits for at this moment up to `instant`."""
        exposed, network = self.exposed_seconds[rank], self.network_seconds[rank]
        since = self._waiting_since.get(rank)
        if since is None:
            return exposed, network
        return exposed + instant - since, network + self._calls.network_seconds(rank, since, instant)

    def unfinished_spans(self) -> list[Span]:
        """What ranks are doing at this instant, as far as it has come: for a run that ends here."""
        spans = self._diary.unfinished() if self._diary is not None else []
        return spans + self._calls.unfinished_spans()


def _at_once(answer: Answer) -> Generator[simpy.Event, None, Answer]:
    """An answer that takes no time."""
    return answer
    yield  # makes this a generator


def _until(event: simpy.Event) -> Generator[simpy.Event, None, None]:
    yield event
