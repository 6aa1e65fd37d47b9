"""The simulation's end of the protocol: rank groups in worker processes, the kernel and the exchange in this one."""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
import warnings
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from exogym_core.communicator.exchange import Part, Reduce, reduce_tensors
from exogym_core.events import step_of
from exogym_core.workers.host import Runner, SimulatedHost
from exogym_core.workers.processes.children import ChannelClosed, Children, Pipe
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
    loads,
)
from exogym_core.workers.processes.rank_group import RankGroup
from exogym_core.workers.processes.shared_memory import Arena, Leases, blocks_in
from exogym_core.workers.threads import SECONDS_OF_SILENCE, Silence
from netsim.errors import BrokenCallError, InputError, MismatchError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from exogym_core.communicator.exchange import Slot
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.workers.host import Sinks
    from exogym_core.workers.processes.rank_group import Body
    from exogym_core.workers.processes.shared_memory import Block, Store
    from netsim.ranks import Answer, Key, StampedRow

__all__ = ["ProcessHost", "ProcessRunner", "WorkerProcesses", "blocks_of"]

# --- worker processes ----------------------------------------------------------------------------------------


# A process with a busy rank reports at least this often, while its Python runs (host time).
_SECONDS_OF_SILENCE = 1.5 * SECONDS_OF_SILENCE


class WorkerProcesses(Protocol):
    """Processes of rank groups, each with a channel, such as `Children`."""

    @property
    def channels(self) -> Sequence[Any]:
        """Channel to each process."""

    @property
    def pids(self) -> Sequence[Any]:
        """Process ids, or other names for the user to end them by."""

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Processes that have sent a message or ended; blocks for the first."""

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str | None:
        """Exit of a process in words; None while it runs."""

    def is_stopped(self, index: int) -> bool:
        """True if a signal has stopped it."""


# --- the runner ----------------------------------------------------------------------------------------------


# Limit for unwinding ranks before their processes are killed (host time).
_GRACE_SECONDS = 1.0


class ProcessRunner(Runner):
    """The simulation, fed by the records of the ranks' processes.

    Args:
        world: where the run takes place.
        blocks: the ranks of each process.
        store: where values lie.
        sinks: receivers of rows, snapshots and requests.
        reduce: computes reductions.
    """

    children: WorkerProcesses

    def __init__(
        self,
        world: World,
        blocks: Sequence[range],
        store: Store,
        sinks: Sinks,
        reduce: Reduce = reduce_tensors,
    ) -> None:
        super().__init__(world, sinks, reduce)
        self._steps: dict[int, int] = {}  # the last of each rank that was marked
        self._blocks, self._store, self._leases = blocks, store, Leases(store)
        self._process_of = {rank: index for index, block in enumerate(blocks) for rank in block}
        self._given: dict[Key, list[Block]] = {}  # blocks of values of calls that wait for members
        self._unfinished = [set(block) for block in blocks]
        self._live = list(range(len(blocks)))  # processes whose ranks have not all ended
        self._inboxes: deque[tuple[int, list[NamedTuple]]] = deque()

    def run(self, children: WorkerProcesses) -> None:
        """Run to the end; `failure` has the error that ended it, if any."""
        self.children = children
        try:
            self.kernel.run()
        except NetsimError as error:
            self.failure.add(error)
        if self.failure.error is not None:
            self._abort()

    def _abort(self) -> None:
        """Unwind every rank, and receive the cause behind the first failure."""
        live = {index for index, ranks in enumerate(self._unfinished) if ranks}
        for index in live:
            self._send(index, Abort(str(self.failure.error).partition("\n")[0]))
        deadline = time.monotonic() + _GRACE_SECONDS
        while live and time.monotonic() < deadline:
            for index in self.children.ready(live, timeout_seconds=deadline - time.monotonic()):
                try:
                    self._inboxes += ((index, each) for each in self.children.channels[index].recv_all())
                except ChannelClosed:
                    live.discard(index)
        for _, batch in self._inboxes:
            for record in batch:
                if isinstance(record, Failed):
                    self.failure.add(record.error)

    def _let_run(self, rank: int | None) -> bool:
        """Process messages of children, waiting for the first; called when the kernel needs `rank`."""
        # Raised here and not below: what ranks had requested before a failure is served first.
        self.failure.raise_if_any()
        if not self._inboxes:
            if not self.exchange.running:
                return False
            for index in self._ready(rank):
                try:
                    self._inboxes += ((index, each) for each in self.children.channels[index].recv_all())
                except ChannelClosed:
                    self._closed(index)
        if not self._inboxes:
            return False
        index, batch = self._inboxes.popleft()
        self.away -= self._unfinished[index]
        for record in batch:
            self._take_in(index, record)
        return True

    def _ready(self, rank: int | None) -> list[int]:
        """Processes that have sent a message; blocks for the first, and warns of silent ones."""
        children = self.children
        ready = children.ready(self._live, _SECONDS_OF_SILENCE)
        if ready:
            return ready
        for index in filter(self._can_go_on, self._live):
            pid = children.pids[index]
            state = (
                f"is stopped: kill -CONT {pid} resumes it"
                if children.is_stopped(index)
                else "sends nothing: it is starting, or busy in a call that holds the GIL"
            )
            warnings.warn(f"the process of {self._names(index)} ({pid}) {state}", UserWarning, stacklevel=2)
        return children.ready(self._live)

    def row(self, row: StampedRow) -> None:
        """Report a row, and note its step."""
        if (step := step_of(row.row)) is not None:
            self._steps[row.rank] = step
        super().row(row)

    def _can_go_on(self, index: int) -> bool:
        return not self.exchange.running.isdisjoint(self._unfinished[index])

    def _take_in(self, index: int, record: NamedTuple) -> None:
        exchange, store = self.exchange, self._store
        error = None
        match record:
            case Requests():
                self.kernel.streams[record.rank].extend(record.requests)
            case Part():
                blocks = blocks_in(record.tensors)
                if blocks:
                    self._leases.lend(blocks)
                    self._given.setdefault(record.key, []).extend(blocks)
                exchange.put(Part(*record[:-1], [store.get(ref) for ref in record.tensors]))
            case Deposited():
                if self.on_deposit is not None:
                    self.on_deposit(record.rank, record.note, [store.get(ref) for ref in record.refs])
                self._send(index, Freed(blocks_in(record.refs)))
            case Blocked():
                waited_for = exchange.open_call(record.key)
                # Else its values are on their way to the child.
                if waited_for is not None and record.member not in waited_for.served:
                    error = exchange.block(record.rank, waited_for, record.member)
            case Asking():
                exchange.block_for_clock(record.rank)
            case Ended():
                buffers = [store.get(ref).clone().numpy() for ref in record.refs]
                self.results[record.rank] = loads(record.result, buffers)
                self._send(index, Freed(blocks_in(record.refs)))
                self.states[record.rank] = record.state
                self._unfinished[index].discard(record.rank)
                self._live = [each for each, ranks in enumerate(self._unfinished) if ranks]
                error = exchange.exit(record.rank)
            case Failed():
                self.failure.add(record.error)
            case Freed():
                self._leases.give_back(record.blocks)
            case Silence():
                self._silent(record, self._blocks[index])
        if error is not None:
            self.failure.add(error)

    def _serve(self, slot: Slot, members: Sequence[int]) -> None:
        """Send every child the values of its members, once each."""
        if slot.ends_run and slot.error is not None:
            self.failure.add(slot.error)
        by_process: dict[int, list[int]] = {}
        for member in members:
            by_process.setdefault(self._process_of[slot.ranks[member]], []).append(member)
        assert isinstance(slot.error, MismatchError | BrokenCallError | None)
        values = slot.values or [()] * len(slot.ranks)
        distinct = {id(values[member]): values[member] for member in members}
        refs = {name: [self._store.put(tensor) for tensor in each] for name, each in distinct.items()}
        done = []
        for index, local in by_process.items():
            theirs = {member: refs[id(values[member])] for member in local}
            done.append((index, Done(slot.key, theirs, slot.error, [])))
            self._leases.lend(done[-1][1].blocks)
        if slot.is_over:
            self._leases.give_back(self._given.pop(slot.key, []))
        for index, message in done:
            freed = self._leases.due_to(index)
            self._send(index, message._replace(freed=freed) if freed else message)

    def answer(self, rank: int, value: Answer) -> None:
        """Resume `rank` with the kernel's answer."""
        self.exchange.unblock(rank)
        self._send(self._process_of[rank], Answered(rank, value))

    def _send(self, index: int, message: NamedTuple) -> None:
        try:
            received = self.children.channels[index].send_receiving(message)
        except ChannelClosed:
            return  # found, with the reason, when its records are read
        self._inboxes.extend((index, batch) for batch in received)

    def _names(self, index: int) -> str:
        ranks = sorted(self._unfinished[index])
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"

    def _closed(self, index: int) -> None:
        """Report a process that has ended before its ranks.

        Raises:
            RankError: always, where nothing else is made of it.
        """
        ended = self.children.describe_exit(index, timeout_seconds=1.0) or "closed its channel"
        calls = self.exchange.calls_in_flight()
        flight = f"; in flight: {calls[0]}" if calls else ""
        step = max((self._steps.get(rank, 0) for rank in self._unfinished[index]), default=0)
        after = f" after step {step}" if step else ""
        lines = [
            f"the process of {self._names(index)} ended{after}: {ended}{flight}",
            *(f"  in flight: {call}" for call in calls[1:]),
        ]
        raise RankError("\n".join(lines), min(self._unfinished[index])) from None


def blocks_of(num_ranks: int, num_blocks: int) -> list[range]:
    """Contiguous blocks of ranks, as even as can be.

    >>> blocks_of(5, 2)
    [range(0, 2), range(2, 5)]
    """
    edges = [num_ranks * index // num_blocks for index in range(num_blocks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


class ProcessHost(SimulatedHost):
    """Ranks in contiguous blocks over `spec.processes` worker processes."""

    def simulate(self, body: Body, sinks: Sinks) -> Runner:
        """Run the simulation here, fed by the worker processes."""
        processes = self.spec.processes
        assert processes is not None
        world = self.world.settled()  # once, and not by each process
        blocks = blocks_of(world.num_ranks, processes)
        target = partial(replace(self, world=world)._run_child, blocks, body)
        # With more intra-op threads than one, a forked child would hang in the parent's OpenMP pool.
        method = "auto" if self.spec.intra_op_threads == 1 else "spawn"
        try:
            with (
                contextlib.closing(Arena(num_regions=processes + 1)) as arena,
                Children(target, processes, method=method) as children,
            ):
                for channel in children.channels:
                    channel.send_fd(arena.fd)
                run = ProcessRunner(world, blocks, arena, sinks, partial(reduce_tensors, empty=arena.empty))
                run.run(children)
                run.failure.raise_if_any()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise InputError(
                f"{processes} processes need more open files than are allowed here: raise the limit (ulimit -n 1024), "
                "or use fewer (workers.processes) or workers.kind=threads"
            ) from error
        return run

    def _run_child(self, blocks: Sequence[range], body: Body, index: int, channel: Pipe) -> None:
        arena = Arena(channel.recv_fd(), num_regions=len(blocks) + 1, region=index + 1)
        threads = self.spec.intra_op_threads
        RankGroup.by_turns(self.world, blocks[index], channel, arena, self.seed, threads, index).run(body)
