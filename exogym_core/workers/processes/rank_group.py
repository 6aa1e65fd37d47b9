"""The ranks' end of the protocol: the ranks of one worker process by turns, alongside a host that exchanges messages.

A rank group sends batches of messages (requests, values, waits) and flushes them whenever it posts values or has
no rank to run; the simulation answers with values. Large tensors travel through shared memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from exogym_core.communicator.base import CODE_CARRIERS
from exogym_core.communicator.exchange import Part
from exogym_core.communicator.simulated.calls import RankState
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.workers.failures import reported_error, run_rank
from exogym_core.workers.processes.children import ChannelClosed, trim_memory
from exogym_core.workers.processes.protocol import (
    Abort,
    Answered,
    Asking,
    Blocked,
    Deposited,
    Done,
    Ended,
    Failed,
    Freed,
    Requests,
    dumps_for_child,
)
from exogym_core.workers.processes.shared_memory import Arena
from exogym_core.workers.turns import SECONDS_BETWEEN_ROWS, Aborted, Turns
from netsim.errors import InputError
from netsim.ranks import Key, Mark, Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.simulated.calls import ScheduleBook
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.workers.processes.children import RankEnd
    from exogym_core.workers.processes.shared_memory import Store
    from exogym_core.workers.turns import Silence
    from netsim.ranks import Answer, Call, Question

__all__ = ["Alone", "Body", "RankGroup", "Uncounted"]


class Alone:
    """The turn of one rank in the thread that called it, in place of `exogym_core.workers.turns:Turns`.

    Nothing has to be handed over: programs that others have written keep their main thread, their signals and
    their random streams. Calls may come from any thread of the process, one at a time.

    Args:
        unwinding: makes what is raised when the run is being unwound.

    Attributes:
        ready: filled by what is read: the rank can go on.
        read: takes in one message from the channel; False when the run is being unwound.
    """

    def __init__(self, unwinding: Callable[[], BaseException]) -> None:
        self._unwinding = unwinding
        self.ready: deque[int] = deque()
        self.aborting = False
        self.read: Callable[[], bool] = lambda: False
        self._reading = threading.RLock()

    def check(self) -> None:
        """Raise if the run is being unwound.

        Raises:
            BaseException: the run is being unwound.
        """
        if self.aborting:
            raise self._unwinding()

    def require_rank_thread(self, rank: int) -> None:
        """Any thread may wait."""

    def give_way(self, rank: int) -> None:
        """Read until the rank can go on.

        Raises:
            BaseException: the run is being unwound.
        """
        with self._reading:
            while rank not in self.ready:
                if not self.read():
                    raise self._unwinding()
            self.ready.remove(rank)


class Uncounted:
    """Traffic of zero: the simulation counts what calls send.

    To find the fastest algorithm of every call takes longer than many a program's call.
    """

    carrier_of_codes = CODE_CARRIERS[0]

    def traffic(self, call: Call, member: int) -> tuple[int, int]:
        """Return zero: the simulation counts traffic."""
        return 0, 0


Body = Callable[[SimulatedCommunicator], Any]


@dataclass(eq=False)
class _Given:
    """Values received for members of this process, with the number of members that have not taken them."""

    done: Done
    num_left: int


@dataclass(eq=False)
class _Ticket:
    """Post of a rank as a member of a call, until it has taken its values."""

    key: Key
    member: int
    given: _Given | None = None
    waiter: int | None = None


class RankGroup:
    """The ranks of one process, and their end of the channel.

    Args:
        num_ranks: of the whole run.
        ranks: those that live here.
        channel: to the process of the simulation.
        arena: memory shared with it.
        turns: pass the turn from rank to rank.
        book: what their calls send.
    """

    def __init__(
        self,
        num_ranks: int,
        ranks: range,
        channel: RankEnd,
        arena: Store,
        turns: Turns | Alone,
        book: ScheduleBook,
    ) -> None:
        self.ranks, self.channel, self.arena, self.turns = ranks, channel, arena, turns
        self.book, self.num_ranks = book, num_ranks
        self.tickets: dict[tuple[Key, int], _Ticket] = {}
        # By call that some ranks here have posted: the number of those here that have not.
        self._coming: dict[Key, int] = {}
        self.answers: dict[int, Answer] = {}
        self._outgoing: list[NamedTuple] = []
        self._requests: dict[int, list[Request]] = {}
        self._num_running = len(ranks)
        self._next_flush = 0.0
        self.reason = ""  # why the run has failed

    @classmethod
    def by_turns(
        cls,
        world: World,
        ranks: range,
        channel: RankEnd,
        arena: Store,
        seed: int,
        threads: int,
        nth_core: int,
    ) -> RankGroup:
        """Ranks that take turns as threads.

        Args:
            world: where the run takes place.
            ranks: as above.
            channel: as above.
            arena: as above.
            seed: random streams are made from (seed, rank).
            threads: torch's threads for one operator.
            nth_core: which of this machine's cores the ranks share.
        """

        def silent(silence: Silence) -> None:
            with contextlib.suppress(ChannelClosed):  # the run has just ended
                channel.send([silence])

        from exogym_core.communicator.simulated.simulation import Schedules  # which ranks alone do without

        turns = Turns(ranks, seed, threads, nth_core, silent)
        return cls(world.num_ranks, ranks, channel, arena, turns, Schedules(world))

    @classmethod
    def alone(
        cls,
        num_ranks: int,
        rank: int,
        channel: RankEnd,
        arena: Store,
        unwind: Callable[[str], BaseException] = lambda reason: Aborted(),
    ) -> RankGroup:
        """Run one rank in the calling thread, without counting its traffic.

        `unwind` makes what is raised in it when the run has failed.
        """
        turns = Alone(lambda: unwind(block.reason))
        block = cls(num_ranks, range(rank, rank + 1), channel, arena, turns, Uncounted())

        def read() -> bool:
            block.flush()
            return block._take_in(channel.recv())

        turns.read = read
        return block

    def run(self, body: Body) -> None:
        """Run `body(comm)` on every rank here, to the end or until the run is given up."""
        if isinstance(self.turns, Turns):
            self.turns.run(lambda rank: self.run_rank(rank, body), self._host)
        else:
            with contextlib.suppress(Aborted):  # the other side reports what ended the run
                self.run_rank(self.ranks[0], body)
        self.flush()

    def communicator(self, rank: int, state: RankState) -> SimulatedCommunicator:
        """The rank's, of the whole world."""
        port = _PipePort(self, rank)
        return SimulatedCommunicator(port, range(self.num_ranks), rank, self.book, state)

    def run_rank(self, rank: int, body: Body) -> None:
        """Run `body(comm)` on one rank here, and report how it ended."""
        state = RankState()
        results: dict[int, Any] = {}
        try:
            failed = run_rank(self.communicator(rank, state), body, results)
        finally:
            self._num_running -= 1
        trim_memory()  # replicas' optimizers are freed, while the simulation takes in the results
        self.queue(
            Failed(rank, reported_error(rank, failed))
            if failed is not None
            else self._ended(rank, results[rank], state)
        )

    def _ended(self, rank: int, result: Any, state: RankState) -> Ended | Failed:
        buffers: list[memoryview] | None = (
            [] if isinstance(self.arena, Arena) else None
        )  # Ray's store is slower
        try:
            content = dumps_for_child(result, buffers)
        except InputError as error:
            return Failed(rank, error)
        refs = [self.arena.put(torch.frombuffer(each, dtype=torch.uint8)) for each in buffers or ()]
        # Its counters, without calls in flight, whose handles are this process's own.
        return Ended(rank, content, refs, RankState(traffic=state.traffic))

    def _host(self) -> None:
        assert isinstance(self.turns, Turns)
        while self._num_running:
            if self.turns.ready:
                self.turns.let_ranks_run()
            else:
                self.flush()
                if not self._take_in(self.channel.recv()):
                    return

    def _take_in(self, message: object) -> bool:
        match message:
            case Done():
                if message.freed:
                    self.arena.free(message.freed)
                given = _Given(message, len(message.members))
                for member in message.members:
                    ticket = self.tickets.pop((message.key, member))
                    ticket.given = given
                    if ticket.waiter is not None:
                        self.turns.ready.append(ticket.waiter)
            case Answered():
                self.answers[message.rank] = message.value
                self.turns.ready.append(message.rank)
            case Freed():
                self.arena.free(message.blocks)
            case Abort():
                self.reason = message.reason
                return False
            case _:
                return False
        return True

    # --- called by ranks -----------------------------------------------------------------------------------

    def request(self, rank: int, request: Request) -> None:
        """Keep a request until the next flush; rows are not kept for long, since progress shows them."""
        self._requests.setdefault(rank, []).append(request)
        if isinstance(request, Mark) and time.monotonic() >= self._next_flush:
            self.flush()

    def give(self, record: Part, waits: bool) -> _Ticket:
        """Send one member's values at once: others may be waiting for them; or with what follows, if that is a wait."""
        ticket = _Ticket(record.key, record.member)
        if not record.signature.needs_nobody(record.member):
            self.tickets[record.key, record.member] = ticket
        coming = self._coming.pop(record.key, None)
        if coming is None:
            coming = sum([rank in self.ranks for rank in record.ranks])
        if coming > 1:
            self._coming[record.key] = coming - 1
        self.queue(record)
        if not waits:
            self.flush()
        return ticket

    def is_coming(self, key: Key) -> bool:
        """True if a rank here has not yet posted a call that another one here has."""
        return key in self._coming

    def forget(self, ticket: _Ticket) -> None:
        """Forget a post that has been taken back."""
        del self.tickets[ticket.key, ticket.member]
        self._coming.pop(ticket.key, None)

    def queue(self, record: NamedTuple) -> None:
        """Queue a message for the next flush."""
        self._outgoing.append(record)

    def deposit(self, rank: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Send tensors for the observer at once; memory of earlier ones that have been taken is used again."""
        while self.channel.waiting():
            if not self._take_in(self.channel.recv()):
                self.turns.aborting = True
                self.turns.check()
        self.queue(Deposited(rank, note, [self.arena.put(tensor) for tensor in tensors]))
        self.flush()

    def block(self, rank: int, record: NamedTuple, holds: bool = False) -> None:
        """Report to the parent that `rank` waits, and give way; if it `holds`, with the next messages of others."""
        self.queue(record)
        if self.turns.ready and not holds:  # others here may compute for long
            self.flush()
        self.turns.give_way(rank)

    def free(self, given: _Given) -> None:
        """Release a member's values; after the last member the parent reuses their memory."""
        given.num_left -= 1
        if not given.num_left:
            blocks = given.done.blocks
            if blocks:
                self.queue(Freed(blocks))

    def flush(self) -> None:
        """Send what has gathered; requests after values, as the kernel reads them only when it needs them."""
        batch = [*self._outgoing, *(Requests(rank, some) for rank, some in self._requests.items())]
        self._outgoing, self._requests = [], {}
        self._next_flush = time.monotonic() + SECONDS_BETWEEN_ROWS
        if batch:
            self.channel.send(batch)


class _PipePort:
    """Port of a rank to the simulation in the parent."""

    copies = True

    def __init__(self, block: RankGroup, rank: int) -> None:
        self._block, self._rank, self._turns = block, rank, block.turns
        self.turns = block.turns if isinstance(block.turns, Turns) else None

    def request(self, request: Request) -> None:
        self._turns.check()
        self._block.request(self._rank, request)

    def post(self, part: Part, waits: bool = False) -> _Ticket:
        self._turns.check()
        refs = [self._block.arena.put(tensor) for tensor in part.tensors]
        return self._block.give(Part(*part[:-1], refs), waits)

    def take(self, ticket: _Ticket, member: int) -> tuple[Tensor, ...]:
        self._turns.check()
        if ticket.given is None:
            self._turns.require_rank_thread(self._rank)
            ticket.waiter = self._rank
            # Few ranks can continue before the others here have posted.
            holds = self._block.is_coming(ticket.key)
            self._block.block(self._rank, Blocked(self._rank, ticket.key, member), holds)
        assert ticket.given is not None
        done = ticket.given.done
        if done.error is not None:
            raise done.error
        refs = done.own.get(member, done.shared)
        return tuple(self._block.arena.get(ref) for ref in refs)

    def taken(self, ticket: _Ticket) -> None:
        assert ticket.given is not None
        self._block.free(ticket.given)

    def ready(self, ticket: _Ticket, member: int) -> bool:
        return ticket.given is not None

    def forget(self, ticket: _Ticket, member: int) -> None:
        self._block.forget(ticket)

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        self._turns.check()
        self._block.deposit(self._rank, note, tensors)

    def flush(self) -> None:
        self._block.flush()

    def ask(self, question: Question) -> Answer:
        self._turns.check()
        self._turns.require_rank_thread(self._rank)
        self._block.request(self._rank, question)
        self._block.block(self._rank, Asking(self._rank))
        return self._block.answers.pop(self._rank)
