"""Ranks as threads of one process that run one at a time, and the simulation beside them.

torch's default generator, numpy's and `random`'s belong to the process, so freely running threads would be
neither repeatable nor equal to processes. One participant has the turn; it gives way only when it blocks in
one of our calls, and the random states travel with the turn. The host (the thread that called `run`) is a
participant too: it runs the kernel, or carries messages, and has the turn when no rank is ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import warnings
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.workers.failures import Aborted, is_own, place_in, place_text, reported_error
from exogym_core.workers.host import Runner, SimulatedHost, run_rank
from exogym_core.workers.journal import join
from exogym_core.workers.rng import RandomStates, seed_process
from netsim.errors import InputError, NetsimError
from netsim.network.clock import raised_gc_threshold
from netsim.ranks import Mark, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Delivery
    from exogym_core.communicator.exchange import Part, Slot
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.workers.host import Sinks
    from netsim.ranks import Answer, Question

__all__ = [
    "SECONDS_BETWEEN_ROWS",
    "SECONDS_OF_SILENCE",
    "Silence",
    "ThreadHost",
    "Turns",
    "intra_op_threads",
    "spent_seconds",
]

T = TypeVar("T")

SECONDS_OF_SILENCE = 30.0  # host time
# Rows reach the run monitor at least this often (host time: what ranks compute does not depend on it).
SECONDS_BETWEEN_ROWS = 0.1


class Silence(NamedTuple):
    """A rank has made no call for a while.

    Attributes:
        rank: which.
        seconds: for how long, in host time.
        num_calls: number of calls of its process so far.
        place: file, line and function of a user's code where it is; else of ours, the innermost.
        is_unusual: nothing in this run took as long before.
    """

    rank: int
    seconds: float
    num_calls: int
    place: tuple[str, int, str]
    is_unusual: bool

    def warn(self) -> None:
        """Warn the user in a line."""
        path, line, _ = self.place
        where = f"in {place_text(self.place)}" if is_own(path) else "inside of netgym"
        text = (
            f"rank {self.rank} has made no call for {self.seconds:.0f} s while others wait for it: it is {where} "
            "(if it is computing, wait; if it hangs, stop the run)"
        )
        warnings.warn_explicit(text, UserWarning, path, line)


def spent_seconds(pid: int) -> tuple[float, bool]:
    """Processor seconds of a process and all its threads, and whether it sleeps; (0, False) if unknown."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "S"
    return 0.0, False


_HOST = -1
# Limit for a rank's own code to end after Ctrl-C, before it is interrupted, and then once more.
_GRACE_SECONDS = 0.5


class Turns:
    """Turns of ranks of this process and their host.

    Args:
        ranks: the ranks that live here.
        seed: random streams are made from (seed, rank).
        intra_op_threads: torch's threads for one operator, in every rank thread.
        nth_core: number of the core that all its ranks share; a hand-over on one core costs 5 to 15 us,
            between two 15 to 33. Ignored with more intra-op threads than one.
        on_silence: called, in a thread of its own, with a rank that has the turn and makes no call for long.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        seed: int,
        intra_op_threads: int,
        nth_core: int,
        on_silence: Callable[[Silence], None],
    ) -> None:
        self.ready: deque[int] = deque(ranks)
        self.parked: dict[int, None] = {}  # ranks that continue with others, or when no other can, in order
        self.aborting = False
        self._intra_op_threads = intra_op_threads
        self._seed = seed
        self._states: dict[int, RandomStates] = {}  # of those that have had the turn
        self._locks: dict[int, threading.Lock] = {}
        for each in (_HOST, *ranks):
            self._locks[each] = threading.Lock()
            self._locks[each].acquire()
        self._threads: dict[int, threading.Thread] = {}
        self._nth_core = nth_core
        self._holder = _HOST  # of the turn
        self._num_calls = 0
        self._left_behind: list[threading.Thread] = []
        self._on_silence = on_silence
        self._task: Callable[[], object] | None = None  # of a rank, for the host's thread
        self._task_ended = threading.Semaphore(0)

    def run(self, body: Callable[[int], None], host: Callable[[], None]) -> None:
        """Run `body(rank)` of every rank in a thread of its own, and `host()` here, by turns.

        `host` has the turn first. When it returns or raises, ranks that have not ended are unwound.
        `body` must not raise anything but `Aborted`.
        """
        self._states[_HOST] = RandomStates.of_process()
        for rank in self.ready:
            self._threads[rank] = threading.Thread(
                target=self._rank_thread, args=(rank, body), name=f"rank {rank}", daemon=True
            )
        threads = list(self._threads.values())
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,), name="watch of ranks", daemon=True)
        watch.start()
        try:
            # Garbage is collected as often as if each rank were a process of its own.
            with self._one_core(), intra_op_threads(), raised_gc_threshold(len(threads)):
                try:
                    for number, thread in enumerate(threads):
                        try:
                            thread.start()
                        except RuntimeError:
                            problem = (
                                f"workers: this machine starts {number:,} threads for {len(threads):,} ranks"
                            )
                            raise InputError(f"{problem}: use fewer workers") from None
                    host()
                finally:
                    self._unwind()
                    for thread in threads:
                        if thread.ident is not None and thread not in self._left_behind:
                            join(thread)
        finally:
            ended.set()
            watch.join()

    def _watch(self, ended: threading.Event) -> None:
        """Check whether the rank that has the turn still makes calls; report it every `SECONDS_OF_SILENCE`."""
        seen, since, num_reported, longest = (self._holder, self._num_calls), time.monotonic(), 0, 0.0
        while not ended.wait(SECONDS_OF_SILENCE / 10):
            now, (rank, num_calls) = time.monotonic(), (self._holder, self._num_calls)
            if (rank, num_calls) != seen or rank == _HOST or self._task is not None:
                longest = max(longest, now - since)
                seen, since, num_reported = (rank, num_calls), now, 0
            elif now - since >= SECONDS_OF_SILENCE * (num_reported + 1):
                num_reported += 1
                thread = self._threads.get(rank)
                frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
                if frame is not None:
                    # A step that took long once may do so again.
                    unusual = now - since > 2 * longest
                    self._on_silence(Silence(rank, now - since, num_calls, place_in(frame), unusual))

    def require_rank_thread(self, rank: int) -> None:
        """Check that the calling thread is the rank's, before it gives way.

        Raises:
            InputError: this is another thread, such as autograd's, which serves all ranks of a process.
        """
        if threading.current_thread() is not self._threads.get(rank):
            raise InputError(
                f"rank {rank}: a blocking call in a gradient hook on autograd's own thread; post it "
                f"with async_op=True and wait in step(), or give every rank its own process"
            )

    # --- giving way ----------------------------------------------------------------------------------------

    def give_way(self, rank: int) -> None:
        """Pass the turn on from a rank that waits; returns when it has the turn again.

        Raises:
            Aborted: the run is being unwound.
        """
        self._hand_over(rank, self._next())

    def give_way_to_host(self, rank: int) -> None:
        """Pass the turn to the host though this rank is ready, unless the call comes from another thread of the rank.

        Raises as `give_way`.
        """
        if threading.current_thread() is self._threads.get(rank):
            self.ready.append(rank)
            self._hand_over(rank, _HOST)

    def by_host(self, function: Callable[[], T]) -> T:
        """Result of `function`, called by the host's thread while a rank keeps the turn.

        So it is independent of the rank's gradient mode, autocast and backward pass, and Ctrl-C interrupts it.

        Raises:
            Aborted: the run is being unwound; the host raises what `function` raised.
        """
        if self._holder == _HOST:
            return function()
        results: list[T] = []
        if not self.aborting:
            self._task = lambda: results.append(function())
            self._locks[_HOST].release()
            self._task_ended.acquire()
        if not results:
            raise Aborted
        return results[0]

    def park(self, rank: int) -> None:
        """Give way until another rank calls `unpark`, or no other rank is ready."""
        self.parked[rank] = None
        self.give_way(rank)

    def unpark(self, ranks: Iterable[int]) -> None:
        """Make parked ones of these ranks ready."""
        for rank in ranks:
            if rank in self.parked:
                del self.parked[rank]
                self.ready.append(rank)

    def let_ranks_run(self) -> None:
        """Run ranks, of which one is ready, called by the host; returns when none is, or one passes it the turn."""
        self._hand_over(_HOST, self.ready.popleft())

    def _next(self) -> int:
        if self.aborting or not self.ready:
            return _HOST
        return self.ready.popleft()

    def _hand_over(self, me: int, to: int) -> None:
        if to == me:
            return
        try:
            self._pass_on(me, to)
            self._locks[me].acquire()
            while me == _HOST and self._task is not None:
                try:
                    self._task()
                except BaseException:
                    self.aborting = True
                    raise
                finally:
                    self._task = None
                    self._task_ended.release()
                self._locks[me].acquire()
        except BaseException:  # Ctrl-C reaches the host while a rank has the turn: get it back, then unwind
            self.aborting = True
            self._get_back(me)
            raise
        if self.aborting and me != _HOST:
            raise Aborted

    def _pass_on(self, me: int, to: int) -> None:
        leaving = self._states.setdefault(me, RandomStates())
        leaving.save()
        if to in self._states:  # else it seeds its own streams
            self._states[to].load(leaving)
        self._holder = to
        self._locks[to].release()

    def _get_back(self, me: int) -> None:
        """Regain the turn after an exception that interrupted the wait for it, or its arrival."""
        while not self._locks[me].acquire(timeout=_GRACE_SECONDS):
            if self._holder == me:
                return
            if me == _HOST:
                self._stop(self._holder)

    def _stop(self, rank: int) -> None:
        """End a rank that is busy with code of its own; one that does not end is left behind."""
        thread = self._threads.get(rank)
        if thread is None:
            return
        # Raised in that thread at its next line of Python.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Aborted)
        )
        thread.join(_GRACE_SECONDS)
        if thread.is_alive() and self._holder == rank:
            self._left_behind.append(self._threads.pop(rank))
            self._holder = _HOST
            self._locks[_HOST].release()
            warnings.warn(
                f"rank {rank} does not end: its thread is left behind, inside of a call that Python cannot "
                "interrupt",
                UserWarning,
                stacklevel=2,
            )

    def check(self) -> None:
        """Count a call of a rank.

        Raises:
            Aborted: the run is being unwound.
        """
        self._num_calls += 1
        if self.aborting:
            raise Aborted

    def _rank_thread(self, rank: int, body: Callable[[int], None]) -> None:
        self._locks[rank].acquire()
        try:
            if not self.aborting:
                torch.set_num_threads(self._intra_op_threads)  # OpenMP's count is one a thread
                seed_process(self._seed, rank)
                body(rank)
        except Aborted:
            pass
        finally:
            if self._threads.get(rank) is threading.current_thread():  # else it was left behind
                del self._threads[rank]
                self._pass_on(rank, self._next())

    def _unwind(self) -> None:
        """Give every unfinished rank the turn, so that its `finally` blocks run."""
        self.aborting = True
        interrupted: KeyboardInterrupt | None = None
        for rank, thread in sorted(self._threads.items()):
            while rank in self._threads and thread.ident is not None:  # it has been started
                try:
                    self._hand_over(_HOST, rank)
                except KeyboardInterrupt as error:
                    interrupted = error
        self._states[_HOST].load()
        if interrupted is not None:
            raise interrupted

    @contextlib.contextmanager
    def _one_core(self) -> Iterator[None]:
        """Pin this thread, and the rank threads it starts, to one core."""
        if self._intra_op_threads > 1 or not hasattr(os, "sched_getaffinity"):
            yield
            return
        cores = os.sched_getaffinity(0)
        # A batch thread that is woken does not interrupt the one that wakes it, which holds the GIL and is
        # about to sleep: half the switches of a hand-over.
        is_plain = os.sched_getscheduler(0) == os.SCHED_OTHER
        try:
            os.sched_setaffinity(0, {sorted(cores)[self._nth_core % len(cores)]})
            if is_plain:
                _schedule_as(os.SCHED_BATCH)
            yield
        finally:
            os.sched_setaffinity(0, cores)
            if is_plain:
                _schedule_as(os.SCHED_OTHER)


@contextlib.contextmanager
def intra_op_threads(number: int | None = None) -> Iterator[None]:
    """Let torch compute on `number` threads in the block, and restore the setting after it."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)  # the setting of new threads is the process's


def _schedule_as(policy: int) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, policy, os.sched_param(0))


# --- the simulation in the host's turn ---------------------------------------------------------------------

# A rank that only computes may run ahead; now and then the kernel takes in what it has asked for, while that is in a
# processor's cache and young for Python's garbage collector.
_BACKLOG = 300


class _ThreadRunner(Runner):
    """A run with the simulation in the calling thread, and every rank in a thread of its own."""

    def __init__(self, world: World, seed: int, intra_op_threads: int, sinks: Sinks) -> None:
        ranks = range(world.num_ranks)
        self.turns = Turns(
            ranks, seed, intra_op_threads, os.getpid(), lambda silence: self._silent(silence, ranks)
        )
        if world.choose is not None:
            world = replace(world, choose=partial(self.turns.by_host, world.choose))
        super().__init__(world, sinks)
        self.answers: dict[int, Answer] = {}
        self._everyone = tuple(ranks)  # one object for the communicators of all ranks
        self.next_rows = 0.0  # host time at which the kernel runs, so that marked rows are reported

    def run_rank(self, rank: int, body: Callable[[SimulatedCommunicator], Any]) -> None:
        port = _ThreadPort(self, rank)
        comm = SimulatedCommunicator(port, self._everyone, rank, self.schedules, self.states[rank])
        failed = run_rank(comm, body, self.results)
        if failed is not None:
            self.fail(reported_error(rank, failed))
        self.fail(self.exchange.exit(rank))

    def fail(self, error: NetsimError | None) -> None:
        """Keep the first failure and have every rank unwound."""
        if error is not None:
            self.failure.add(error)
            self.turns.aborting = True

    # --- what the simulation asks for, in the host's turn --------------------------------------------------

    def _let_run(self, rank: int | None) -> bool:
        # Raised here and not below: what ranks had requested before a failure is served first.
        self.failure.raise_if_any()
        if not self.turns.ready:
            self.turns.unpark(list(self.turns.parked)[:1])
        if not self.turns.ready:
            return False
        self.turns.let_ranks_run()
        return True

    def _serve(self, slot: Slot, members: Sequence[int]) -> None:
        for rank, member in slot.waiters:
            if member in slot.served:
                self.turns.ready.append(rank)
        if slot.ends_run:
            self.fail(slot.error)

    def answer(self, rank: int, value: Answer) -> None:
        """Resume `rank` with the kernel's answer."""
        self.exchange.unblock(rank)
        self.answers[rank] = value
        self.turns.ready.append(rank)


class _ThreadPort:
    """Port of a rank to the simulation in the same process; gives way where the rank must wait."""

    copies = False

    def __init__(self, run: _ThreadRunner, rank: int) -> None:
        self._run, self._rank, self.turns = run, rank, run.turns
        self._exchange = run.exchange
        self._stream = run.kernel.streams[rank]

    def request(self, request: Request) -> None:
        self.turns.check()
        self._stream.append(request)
        is_behind = len(self._stream) > _BACKLOG
        if isinstance(request, Mark) and (now := time.monotonic()) >= self._run.next_rows:
            self._run.next_rows = now + SECONDS_BETWEEN_ROWS
            is_behind = True
        if is_behind:
            self.turns.give_way_to_host(self._rank)

    def post(self, part: Part, waits: bool = False) -> Slot:
        self.turns.check()
        return self._exchange.put(part)

    def take(self, ticket: Slot, member: int, deliver: Delivery[T]) -> T:
        self.turns.check()
        if member not in ticket.served:
            self.turns.require_rank_thread(self._rank)
            self._run.fail(self._exchange.block(self._rank, ticket, member))
            self.turns.give_way(self._rank)
        if ticket.error is not None:
            # One object a rank: each gets a traceback of its own.
            raise type(ticket.error)(*ticket.error.args)
        return deliver(ticket.values[member])

    def ready(self, ticket: Slot, member: int) -> bool:
        return member in ticket.served

    def forget(self, ticket: Slot, member: int) -> None:
        """No state to drop: the exchange has forgotten the post."""

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        self.turns.check()
        if self._run.on_deposit is not None:
            self._run.on_deposit(self._rank, note, tensors)

    def flush(self) -> None:
        self.turns.give_way_to_host(self._rank)

    def ask(self, question: Question) -> Answer:
        self.turns.check()
        self.turns.require_rank_thread(self._rank)
        self._stream.append(question)
        self._exchange.block_for_clock(self._rank)
        self.turns.give_way(self._rank)
        return self._run.answers.pop(self._rank)


class ThreadHost(SimulatedHost):
    """Every rank in a thread of this process, by turns."""

    def simulate(self, body: Callable[[SimulatedCommunicator], Any], sinks: Sinks) -> Runner:
        """Run the simulation in the calling thread."""
        run = _ThreadRunner(self.world, self.seed, self.spec.intra_op_threads, sinks)
        try:
            run.turns.run(partial(run.run_rank, body=body), run.kernel.run)
        except NetsimError as error:
            run.failure.add(error)
        run.failure.raise_if_any()
        return run
