"""Runs of a simulated world: the simulation, its sinks, results and failures; and ranks in threads."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.exchange import Reduce, reduce_tensors
from exogym_core.communicator.simulated.communicator import RankState, SimulatedCommunicator
from exogym_core.communicator.simulated.simulation import Simulation
from exogym_core.workers.failures import FirstFailure, reported_error, run_rank
from exogym_core.workers.host import SimulatedHost
from exogym_core.workers.journal import message_name
from exogym_core.workers.turns import SECONDS_BETWEEN_ROWS, Turns
from netsim.errors import NetsimError
from netsim.ranks import Mark, Request, StampedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Part, Slot
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.workers.host import Sinks
    from exogym_core.workers.turns import Silence
    from netsim.ranks import Answer, MailboxMessage, Question, Take

__all__ = ["Runner", "ThreadHost"]


class Runner(Simulation):
    """A run of a world's ranks.

    Args:
        world: where it takes place.
        sinks: receivers of rows, snapshots and requests.
        reduce: computes reductions.

    Attributes:
        failure: the error that ended the run, if any.
        results: values that `body` returned, in rank order.
        states: every rank's counters.
    """

    def __init__(self, world: World, sinks: Sinks, reduce: Reduce = reduce_tensors) -> None:
        self.on_deposit, self._on_row, journal = sinks.on_deposit, sinks.on_row, sinks.journal
        super().__init__(world, journal.past, sinks.recorder, reduce)
        self._on_request, self._in_flight = journal.on_request, journal.in_flight
        if self._in_flight is not None:
            self._in_flight.tensors_of = self.exchange.stored.__getitem__
            self.exchange.stored.update(self._in_flight.kept.items())
        self.failure = FirstFailure()
        self.results: list[Any] = [None] * world.num_ranks
        self.states = [RankState() for _ in range(world.num_ranks)]
        self._reported_silences: set[tuple[int, int]] = set()

    def row(self, row: StampedRow) -> None:
        """Pass a row with its virtual times to the run's sink."""
        super().row(row)
        self._on_row(row)

    def served(self, rank: int, request: Request) -> None:
        """Pass a request that the kernel has served to the run's journal."""
        self._on_request(rank, request)

    def taken(self, rank: int, take: Take, messages: tuple[MailboxMessage, ...]) -> None:
        """Follow the messages that a rank takes."""
        names = [message_name(take, message) for message in messages]
        if self._in_flight is not None:
            self._in_flight.taken(rank, names)
        if take.is_past:  # its state has them
            for name in names:
                self.exchange.stored.pop(name, None)

    def _silent(self, silence: Silence, block: range) -> None:
        """Warn once of a rank that makes no call, if only ranks of its process can make progress."""
        which = (silence.rank, silence.num_calls)
        others_wait = self.exchange.running <= set(block) and len(self.states) > 1
        if silence.is_unusual and others_wait and which not in self._reported_silences:
            self._reported_silences.add(which)
            silence.warn()


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
        super().__init__(world, sinks)
        self.answers: dict[int, Answer] = {}
        self.next_rows = 0.0  # host time at which the kernel runs, so that marked rows are reported

    def run_rank(self, rank: int, body: Callable[[SimulatedCommunicator], Any]) -> None:
        ranks, port = range(self.world.num_ranks), _ThreadPort(self, rank)
        comm = SimulatedCommunicator(port, ranks, rank, self.schedules, self.states[rank])
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
        self.turns.ready.extend(rank for rank, member in slot.waiters if member in slot.served)
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
        if is_behind and self.turns.is_rank_thread(self._rank):
            self.turns.give_way_to_host(self._rank)

    def post(self, part: Part, waits: bool = False) -> Slot:
        self.turns.check()
        return self._exchange.put(part)

    def take(self, ticket: Slot, member: int) -> tuple[Tensor, ...]:
        self.turns.check()
        if member not in ticket.served:
            self.turns.require_rank_thread(self._rank)
            self._run.fail(self._exchange.block(self._rank, ticket, member))
            self.turns.give_way(self._rank)
        if ticket.error is not None:
            # One object a rank: each gets a traceback of its own.
            raise type(ticket.error)(*ticket.error.args)
        assert ticket.outcome is not None
        return ticket.outcome.of(member)

    def taken(self, ticket: Slot) -> None:
        """No lease to return: values were passed by reference."""

    def ready(self, ticket: Slot, member: int) -> bool:
        return member in ticket.served

    def forget(self, ticket: Slot, member: int) -> None:
        """No state to drop: the exchange has forgotten the post."""

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        self.turns.check()
        if self._run.on_deposit is not None:
            self._run.on_deposit(self._rank, note, tensors)

    def flush(self) -> None:
        if self.turns.is_rank_thread(self._rank):
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
            run.turns.run(lambda rank: run.run_rank(rank, body), run.kernel.run)
        except NetsimError as error:
            run.failure.add(error)
        run.failure.raise_if_any()
        return run
