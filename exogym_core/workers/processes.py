"""Ranks in processes: blocks of ranks by turns in each, the simulation in the parent.

A child sends batches of records (requests, values, who blocks) and flushes them whenever it gives values or
has no rank to run; the parent answers with values. Large tensors travel through shared memory.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.communicator.simulated import RankState, SimulatedCommunicator
from exogym_core.communicator.simulation import Schedules, Simulation, World
from exogym_core.workers.arena import Arena, TensorRef
from exogym_core.workers.channel import Channel, ChannelClosed
from exogym_core.workers.children import Children
from exogym_core.workers.failures import FirstFailure, run_rank, told
from exogym_core.workers.pickling import dumps_for_child
from exogym_core.workers.turns import Turns
from netsim.errors import InputError, MismatchError, NetsimError, RankError
from netsim.kernel import Answer, Key, Mark, Request

if TYPE_CHECKING:
    from torch import Tensor

    from exogym_core.communicator.exchange import Signature, Slot
    from exogym_core.workers.journal import Journal
    from netsim.kernel import Ask, Join, StampedRow

__all__ = ["run_in_processes"]

Body = Callable[[SimulatedCommunicator], Any]

# As in threads: what ranks mark is seen at least this often (host time).
_SECONDS_BETWEEN_ROWS = 0.1
# What unwinding ranks may take before their processes are killed (host time).
_GRACE_SECONDS = 1.0

# --- what travels ------------------------------------------------------------------------------------------


class _Requests(NamedTuple):
    rank: int
    requests: list[Request]


class _Values(NamedTuple):
    rank: int
    key: Key
    ranks: tuple[int, ...]
    member: int
    signature: Signature
    refs: list[TensorRef]


class _Blocked(NamedTuple):
    rank: int
    key: Key


class _Asking(NamedTuple):
    rank: int


class _Ended(NamedTuple):
    rank: int
    result: bytes
    state: RankState


class _Failed(NamedTuple):
    rank: int
    error: NetsimError


class _Freed(NamedTuple):
    refs: list[TensorRef]


class _Done(NamedTuple):
    """The values of a call for the members that live in this child; `own` where they differ."""

    key: Key
    shared: list[TensorRef]
    own: dict[int, list[TensorRef]]
    error: MismatchError | None


class _Answer(NamedTuple):
    rank: int
    value: Answer


class _Abort(NamedTuple):
    pass


# --- the child ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Ticket:
    """A call posted by ranks of this child, until they have taken its values."""

    key: Key
    num_local: int
    given: list[TensorRef] = field(default_factory=list)
    done: _Done | None = None
    waiters: list[int] = field(default_factory=list)
    num_taken: int = 0


class _Child:
    """The ranks of one process, and their end of the channel."""

    def __init__(
        self,
        world: World,
        ranks: range,
        channel: Channel,
        arena: Arena,
        seed: int,
        threads: int,
        nth_core: int,
    ) -> None:
        self.ranks, self.channel, self.arena = ranks, channel, arena
        self.turns = Turns(ranks, seed, threads, nth_core)
        self.schedules = Schedules(world)
        self.world = world
        self.tickets: dict[Key, _Ticket] = {}
        self.answers: dict[int, Answer] = {}
        self._outgoing: list[NamedTuple] = []
        self._requests: dict[int, list[Request]] = {}
        self._num_running = len(ranks)
        self._next_flush = 0.0

    def run(self, body: Body) -> None:
        self.turns.run(lambda rank: self._rank(rank, body), self._host)
        self.flush()

    def _rank(self, rank: int, body: Body) -> None:
        state = RankState()
        comm = SimulatedCommunicator(
            _PipePort(self, rank), range(self.world.num_ranks), rank, self.schedules, state
        )
        results: dict[int, Any] = {}
        try:
            failed = run_rank(comm, body, results)
        finally:
            self._num_running -= 1
        self._tell(
            _Failed(rank, told(rank, failed)) if failed is not None else _ended(rank, results[rank], state)
        )

    def _host(self) -> None:
        while self._num_running:
            if self.turns.ready:
                self.turns.let_ranks_run()
            else:
                self.flush()
                if not self._take_in(self.channel.recv()):
                    return

    def _take_in(self, message: object) -> bool:
        match message:
            case _Done():
                ticket = self.tickets.pop(message.key)
                ticket.done = message
                self.arena.free(ticket.given)
                self.turns.ready.extend(ticket.waiters)
            case _Answer():
                self.answers[message.rank] = message.value
                self.turns.ready.append(message.rank)
            case _:
                return False
        return True

    # --- called by ranks -----------------------------------------------------------------------------------

    def request(self, rank: int, request: Request) -> None:
        """Keep a request until the next flush; rows are not kept for long, since somebody may watch."""
        self._requests.setdefault(rank, []).append(request)
        if isinstance(request, Mark) and time.monotonic() >= self._next_flush:
            self.flush()

    def give(self, record: _Values) -> _Ticket:
        """Send one member's values at once: others may be waiting for them."""
        ticket = self.tickets.get(record.key)
        if ticket is None:
            num_local = sum(rank in self.ranks for rank in record.ranks)
            ticket = self.tickets[record.key] = _Ticket(record.key, num_local)
        ticket.given += record.refs
        self._tell(record)
        self.flush()
        return ticket

    def _tell(self, record: NamedTuple) -> None:
        self._outgoing.append(record)

    def block(self, rank: int, record: NamedTuple) -> None:
        """Tell the parent that `rank` waits, and give way."""
        self._tell(record)
        self.turns.give_way(rank)

    def free(self, ticket: _Ticket) -> None:
        """One local member has taken its values; after the last their memory is the parent's again."""
        ticket.num_taken += 1
        if ticket.num_taken == ticket.num_local and ticket.done is not None:
            refs = [*ticket.done.shared, *(ref for own in ticket.done.own.values() for ref in own)]
            if any(isinstance(ref.content, int) for ref in refs):
                self._tell(_Freed(refs))

    def flush(self) -> None:
        """Send what has gathered; requests after values, as the kernel reads them only when it needs them."""
        batch = [*self._outgoing, *(_Requests(rank, some) for rank, some in self._requests.items())]
        self._outgoing, self._requests = [], {}
        self._next_flush = time.monotonic() + _SECONDS_BETWEEN_ROWS
        if batch:
            self.channel.send(batch)


def _ended(rank: int, result: Any, state: RankState) -> _Ended | _Failed:
    try:
        return _Ended(rank, dumps_for_child(result), state)
    except InputError as error:
        return _Failed(rank, error)


class _PipePort:
    """A rank's way to the simulation in the parent."""

    def __init__(self, child: _Child, rank: int) -> None:
        self._child, self._rank, self._turns = child, rank, child.turns

    def request(self, request: Request) -> None:
        self._turns.check()
        self._child.request(self._rank, request)

    def post(
        self, key: Key, ranks: tuple[int, ...], member: int, signature: Signature, tensors: Sequence[Tensor]
    ) -> _Ticket:
        self._turns.check()
        refs = [self._child.arena.put(tensor) for tensor in tensors]
        return self._child.give(_Values(self._rank, key, ranks, member, signature, refs))

    def take(self, ticket: _Ticket, member: int) -> tuple[Tensor, ...]:
        self._turns.check()
        if ticket.done is None:
            self._turns.require_rank_thread(self._rank)
            ticket.waiters.append(self._rank)
            self._child.block(self._rank, _Blocked(self._rank, ticket.key))
        assert ticket.done is not None
        if ticket.done.error is not None:
            raise ticket.done.error
        refs = ticket.done.own.get(member, ticket.done.shared)
        return tuple(self._child.arena.get(ref) for ref in refs)

    def taken(self, ticket: _Ticket) -> None:
        self._child.free(ticket)

    def ready(self, ticket: _Ticket) -> bool:
        return ticket.done is not None

    def flush(self) -> None:
        self._child.flush()

    def ask(self, question: Ask | Join) -> Answer:
        self._turns.check()
        self._turns.require_rank_thread(self._rank)
        self._child.request(self._rank, question)
        self._child.block(self._rank, _Asking(self._rank))
        return self._child.answers.pop(self._rank)


# --- the parent --------------------------------------------------------------------------------------------


class _Parent:
    """The simulation, fed by the children's records."""

    def __init__(
        self,
        world: World,
        blocks: Sequence[range],
        arenas: Sequence[Arena],
        on_row: Callable[[StampedRow], None],
        journal: Journal,
    ) -> None:
        self.simulation = Simulation(
            world, self._let_run, self._completed, self._answered, on_row, journal.past
        )
        journal.log = self.simulation.kernel.log
        self.failure = FirstFailure()
        self.results: list[Any] = [None] * world.num_ranks
        self.states = [RankState() for _ in range(world.num_ranks)]
        self._blocks, self._arenas = blocks, arenas
        self._home = {rank: index for index, block in enumerate(blocks) for rank in block}
        self._slots: dict[Key, Slot] = {}
        self._unfinished = [set(block) for block in blocks]
        self._inboxes: deque[tuple[int, list[NamedTuple]]] = deque()
        self.children: Children | None = None

    def run(self, children: Children) -> None:
        self.children = children
        try:
            self.simulation.kernel.run()
        except NetsimError as error:
            self.failure.add(error)
        if self.failure.error is not None:
            self._abort()

    def _abort(self) -> None:
        """Have every rank unwound, and listen for the cause behind the first failure."""
        assert self.children is not None
        live = {index for index, ranks in enumerate(self._unfinished) if ranks}
        for index in live:
            self._send(index, _Abort())
        deadline = time.monotonic() + _GRACE_SECONDS
        while live and time.monotonic() < deadline:
            for index in self.children.ready(live, timeout_seconds=deadline - time.monotonic()):
                try:
                    self._inboxes.append((index, self.children.channels[index].recv()))
                except ChannelClosed:
                    live.discard(index)
        for _, batch in self._inboxes:
            for record in batch:
                if isinstance(record, _Failed):
                    self.failure.add(record.error)

    def _let_run(self, rank: int) -> None:
        """Take in what children have sent, waiting for the first; called when the kernel needs `rank`."""
        assert self.children is not None
        # Raised here and not below: what ranks had requested before a failure is played first.
        self.failure.raise_if_any()
        if not self._inboxes:
            if not self.simulation.exchange.any_running():
                raise self.simulation.stuck(rank)
            live = [index for index, ranks in enumerate(self._unfinished) if ranks]
            for index in self.children.ready(live):
                try:
                    self._inboxes.append((index, self.children.channels[index].recv()))
                except ChannelClosed:
                    raise self._died(index) from None
        index, batch = self._inboxes.popleft()
        for record in batch:
            self._take_in(index, record)

    def _take_in(self, index: int, record: NamedTuple) -> None:
        exchange, arena = self.simulation.exchange, self._arenas[index]
        error = None
        match record:
            case _Requests():
                self.simulation.kernel.streams[record.rank].extend(record.requests)
            case _Values():
                tensors = [arena.get(ref) for ref in record.refs]
                slot = exchange.put(
                    record.rank, record.key, record.ranks, record.member, record.signature, tensors
                )
                if not slot.done:
                    self._slots[record.key] = slot
            case _Blocked():
                waited_for = self._slots.get(record.key)
                if waited_for is not None:  # else its values are on their way to the child
                    error = exchange.block(record.rank, waited_for)
            case _Asking():
                self.simulation.wait_for_clock(record.rank)
            case _Ended():
                # Pickled by our own child, which sent it through its channel.
                self.results[record.rank] = pickle.loads(record.result)  # nosec B301
                self.states[record.rank] = record.state
                self._unfinished[index].discard(record.rank)
                error = exchange.exit(record.rank)
            case _Failed():
                self.failure.add(record.error)
            case _Freed():
                arena.free(record.refs)
        if error is not None:
            self.failure.add(error)

    def _completed(self, slot: Slot) -> None:
        """Send every child its members' values, once each."""
        self._slots.pop(slot.key, None)
        members: dict[int, list[int]] = {}
        for member, rank in enumerate(slot.ranks):
            members.setdefault(self._home[rank], []).append(member)
        messages = [(index, self._done(slot, index, local)) for index, local in members.items()]
        # Sent only when all are copied: a child that has its values uses the memory of its inputs again, and
        # these may be values of others.
        for index, message in messages:
            self._send(index, message)

    def _done(self, slot: Slot, index: int, local: Sequence[int]) -> _Done:
        """The values for the `local` members, who live in child `index`, in its arena."""
        arena, own, shared = self._arenas[index], {}, []
        if slot.outcome is not None:
            own = {
                member: [arena.put(tensor) for tensor in slot.outcome.own[member]]
                for member in local
                if member in slot.outcome.own
            }
            shared = [arena.put(tensor) for tensor in slot.outcome.shared]
        assert isinstance(slot.error, MismatchError | None)
        return _Done(slot.key, shared, own, slot.error)

    def _answered(self, rank: int, value: Answer) -> None:
        self._send(self._home[rank], _Answer(rank, value))

    def _send(self, index: int, message: NamedTuple) -> None:
        assert self.children is not None
        try:
            received = self.children.channels[index].send_receiving(message)
        except ChannelClosed:
            return  # found, with the reason, when its records are read
        self._inboxes.extend((index, batch) for batch in received)

    def _died(self, index: int) -> RankError:
        assert self.children is not None
        ended = self.children.describe_exit(index, timeout_seconds=1.0) or "closed its channel"
        ranks = sorted(self._unfinished[index])
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        calls = self.simulation.exchange.calls_in_flight()
        flight = f"; in flight: {calls[0]}" if calls else ""
        lines = [f"the process of {names} ended: {ended}{flight}", *(f"  {call}" for call in calls)]
        return RankError("\n".join(lines), ranks[0])


def run_in_processes(
    world: World,
    body: Body,
    *,
    seed: int,
    processes: int,
    intra_op_threads: int,
    on_row: Callable[[StampedRow], None],
    journal: Journal,
) -> tuple[Simulation, list[Any], list[RankState]]:
    """Run `body(comm)` on every rank of `world`, ranks in contiguous blocks over `processes` children.

    Returns:
        The finished simulation, the results in rank order, and every rank's state.

    Raises:
        NetsimError: what ended the run: a mismatch, a deadlock, a rank's own failure or its process's death.
        InputError: `body` cannot be sent to a process, or a result back.
    """
    edges = [world.num_ranks * index // processes for index in range(processes + 1)]
    blocks = [range(start, end) for start, end in itertools.pairwise(edges)]
    target = partial(_run_child, world, blocks, body, seed, intra_op_threads)
    # With more intra-op threads than one, a forked child would hang in the parent's OpenMP pool.
    method = "auto" if intra_op_threads == 1 else "spawn"
    arenas = [Arena() for _ in blocks]
    try:
        with Children(target, processes, method=method) as children:
            for channel, arena in zip(children.channels, arenas, strict=True):
                channel.send_fds([arena.fd])
            parent = _Parent(world, blocks, arenas, on_row, journal)
            parent.run(children)
            parent.failure.raise_if_any()
    finally:
        for arena in arenas:
            arena.close()
    return parent.simulation, parent.results, parent.states


def _run_child(
    world: World,
    blocks: Sequence[range],
    body: Body,
    seed: int,
    intra_op_threads: int,
    index: int,
    channel: Channel,
) -> None:
    arena = Arena(channel.recv_fds(1)[0], upper_half=True)
    _Child(world, blocks[index], channel, arena, seed, intra_op_threads, nth_core=index).run(body)
