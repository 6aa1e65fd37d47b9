"""The ranks' end of the protocol: the ranks of one worker process by turns, alongside a host that exchanges messages.

A rank group sends batches of messages (requests, values, waits) and flushes them whenever it posts values or has
no rank to run; the simulation answers with values. Large tensors travel through shared memory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from exogym_core.communicator.exchange import Part
from exogym_core.communicator.simulated.communicator import RankState, SimulatedCommunicator
from exogym_core.workers.failures import reported_error
from exogym_core.workers.host import run_rank
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
from exogym_core.workers.threads import SECONDS_BETWEEN_ROWS, Turns
from netsim.errors import InputError
from netsim.ranks import Key, Mark, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Delivery
    from exogym_core.communicator.simulated.communicator import ScheduleBook
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.workers.processes.children import RankEnd
    from exogym_core.workers.processes.shared_memory import Store, TensorRef
    from exogym_core.workers.threads import Silence
    from netsim.ranks import Answer, Question

__all__ = ["Body", "RankGroup"]


T = TypeVar("T")

Body = Callable[[SimulatedCommunicator], Any]

# Memory that is returned costs page faults when it is needed again.
_LARGE_BYTES, _SECONDS_BETWEEN_TRIMS = 1 << 22, 1.0


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
        book: traffic of their calls.

    Attributes:
        has_turns: several ranks share this process.
        tickets: posts without values yet.
        coming: by call that some ranks here have posted, the number of those here that have not.
        answers: of the clock, by rank.
        requests: of each rank since the last flush.
        reason: why the run has failed.
    """

    has_turns = True

    def __init__(
        self,
        num_ranks: int,
        ranks: range,
        channel: RankEnd,
        arena: Store,
        turns: Turns,
        book: ScheduleBook,
    ) -> None:
        self.ranks, self.channel, self.arena, self.turns = ranks, channel, arena, turns
        self.book, self.everyone = book, tuple(range(num_ranks))
        self.tickets: dict[tuple[Key, int], _Ticket] = {}
        self.coming: dict[Key, int] = {}
        self.answers: dict[int, Answer] = {}
        self._outgoing: list[NamedTuple] = []
        self.requests: dict[int, list[Request]] = {}
        self._num_running = len(ranks)
        self.next_flush = self._next_trim = 0.0
        self.reason = ""

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
            nth_core: number of the core that the ranks share.
        """

        def silent(silence: Silence) -> None:
            with contextlib.suppress(ChannelClosed):  # the run has just ended
                channel.send([silence])

        from exogym_core.communicator.simulated.simulation import Schedules  # which ranks alone do without

        turns = Turns(ranks, seed, threads, nth_core, silent)
        return cls(world.num_ranks, ranks, channel, arena, turns, Schedules(world))

    def run(self, body: Body) -> None:
        """Run `body(comm)` on every rank here, to the end or until the run is given up."""
        self.turns.run(lambda rank: self.run_rank(rank, body), self._host)
        self.flush()

    def communicator(self, rank: int, state: RankState) -> SimulatedCommunicator:
        """The rank's, of the whole world."""
        port = _PipePort(self, rank)
        return SimulatedCommunicator(port, self.everyone, rank, self.book, state)

    def run_rank(self, rank: int, body: Body) -> None:
        """Run `body(comm)` on one rank here, and report how it ended."""
        state = RankState(empty=self.empty)
        results: dict[int, Any] = {}
        try:
            failed = run_rank(self.communicator(rank, state), body, results)
        finally:
            self._num_running -= 1
        trim_memory()  # the replica's optimizers are freed, before its results are copied
        self.queue(
            Failed(rank, reported_error(rank, failed))
            if failed is not None
            else self._ended(rank, results.pop(rank), state)
        )
        trim_memory()  # and then the replica

    def _ended(self, rank: int, result: Any, state: RankState) -> Ended | Failed:
        # Ray's store is slower than a copy.
        buffers: list[memoryview] | None = [] if isinstance(self.arena, Arena) else None
        try:
            content = dumps_for_child(result, buffers)
        except InputError as error:
            return Failed(rank, error)
        lines = [torch.frombuffer(each, dtype=torch.uint8) for each in buffers or ()]
        refs = [
            self.arena.put(self.arena.empty(line.shape, line.dtype, once=True).copy_(line)) for line in lines
        ]
        # Its counters, without calls in flight, whose handles are this process's own.
        return Ended(rank, content, refs, RankState(traffic=state.traffic))

    def _host(self) -> None:
        while self._num_running:
            if self.turns.ready:
                self.turns.let_ranks_run()
            else:
                self.flush()
                if not self.take_in(self.channel.recv()):
                    return

    def take_in(self, message: object) -> bool:
        """Process a message of the simulation; False if the ranks have to unwind."""
        match message:
            case Done():
                if message.freed:
                    self.arena.free(message.freed)
                given = _Given(message, len(message.values))
                for member in message.values:
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

    def put(self, tensors: Sequence[Tensor], *, copies: bool = False) -> list[TensorRef]:
        """Put tensors in shared memory; with `copies`, since they are to change before all have read them."""
        self._trim(sum(tensor.nbytes for tensor in tensors))
        return [self.arena.put(tensor, copies=copies) for tensor in tensors]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Tensor in shared memory for what will be `put`, once."""
        self._trim(math.prod(shape) * dtype.itemsize)
        return self.arena.empty(shape, dtype, once=True)

    def _trim(self, num_bytes: int) -> None:
        """Before large tensors, return freed memory to the system."""
        now = time.monotonic()
        if now >= self._next_trim and num_bytes > _LARGE_BYTES:
            trim_memory()
            self._next_trim = now + _SECONDS_BETWEEN_TRIMS

    def queue(self, record: NamedTuple) -> None:
        """Queue a message for the next flush."""
        self._outgoing.append(record)

    def flush(self) -> None:
        """Send queued messages; requests after values, as the kernel reads them only when it needs them."""
        batch = [*self._outgoing, *(Requests(rank, some) for rank, some in self.requests.items())]
        self._outgoing, self.requests = [], {}
        self.next_flush = time.monotonic() + SECONDS_BETWEEN_ROWS
        if batch:
            self.channel.send(batch)


class _PipePort:
    """Port of a rank to the simulation in the parent."""

    copies = True

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank, self._turns = group, rank, group.turns
        self.turns = group.turns if group.has_turns else None

    def request(self, request: Request) -> None:
        """Keep a request until the next flush; rows are not kept for long, since progress shows them."""
        self._turns.check()
        group = self._group
        group.requests.setdefault(self._rank, []).append(request)
        if isinstance(request, Mark) and time.monotonic() >= group.next_flush:
            self._take_in()
            group.flush()

    def post(self, part: Part, waits: bool = False) -> _Ticket:
        """Send a part at once: others may be waiting for it; or with what follows, if that is a wait."""
        self._turns.check()
        group, (key, ranks, member, signature, tensors) = self._group, part
        ticket = _Ticket(key, member)
        if not signature.needs_nobody(member):
            group.tickets[key, member] = ticket
        coming = group.coming.pop(key, None)
        if coming is None:
            coming = sum([rank in group.ranks for rank in ranks])
        if coming > 1:
            group.coming[key] = coming - 1
        # An all-reduce reads them before anyone has its result; other values are read when their rank has gone on.
        refs = group.put(tensors, copies=signature.name != "all_reduce")
        group.queue(Part(key, ranks, member, signature, refs))
        if not waits:
            group.flush()
        return ticket

    def take(self, ticket: _Ticket, member: int, deliver: Delivery[T]) -> T:
        self._turns.check()
        if ticket.given is None:
            self._turns.require_rank_thread(self._rank)
            ticket.waiter = self._rank
            # Few ranks can continue before the others here have posted.
            self._block(Blocked(self._rank, ticket.key, member), holds=ticket.key in self._group.coming)
        assert ticket.given is not None
        done = ticket.given.done
        if done.error is not None:
            raise done.error
        result = deliver(tuple(self._group.arena.get(ref) for ref in done.values[member]))
        ticket.given.num_left -= 1
        if not ticket.given.num_left and done.blocks:  # after the last member the parent reuses their memory
            self._group.queue(Freed(done.blocks))
        return result

    def ready(self, ticket: _Ticket, member: int) -> bool:
        return ticket.given is not None

    def forget(self, ticket: _Ticket, member: int) -> None:
        del self._group.tickets[ticket.key, ticket.member]
        self._group.coming.pop(ticket.key, None)

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        """Send tensors for the evaluator at once."""
        self._turns.check()
        self._take_in()
        self._group.queue(Deposited(self._rank, note, self._group.put(tensors)))
        self._group.flush()

    def _take_in(self) -> None:
        """Process received messages: memory that others have read is reused, or returned to the system."""
        group = self._group
        while group.channel.waiting():
            if not group.take_in(group.channel.recv()):
                self._turns.aborting = True
                self._turns.check()

    def flush(self) -> None:
        self._group.flush()

    def ask(self, question: Question) -> Answer:
        self._turns.check()
        self._turns.require_rank_thread(self._rank)
        self._group.requests.setdefault(self._rank, []).append(question)
        self._block(Asking(self._rank))
        return self._group.answers.pop(self._rank)

    def _block(self, record: NamedTuple, holds: bool = False) -> None:
        """Report to the parent that this rank waits, and give way; if it `holds`, with the next messages of others."""
        self._group.queue(record)
        if self._turns.ready and not holds:  # others here may compute for long
            self._group.flush()
        self._turns.give_way(self._rank)
