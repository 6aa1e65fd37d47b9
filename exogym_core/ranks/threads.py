"""Ranks in threads of this process, by turns, beside the kernel."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.ranks.carrier import Carrier
from exogym_core.ranks.failures import run_rank, told
from exogym_core.ranks.turns import Turns
from exogym_core.ranks.watch import SECONDS_BETWEEN_ROWS
from netsim.files.errors import NetsimError
from netsim.ranks.requests import Key, Mark, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature, Slot
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.ranks.carrier import Sinks
    from exogym_core.ranks.spec import WorkerSpec
    from netsim.ranks.requests import Answer, Question

__all__ = ["run_in_threads"]

# A rank that only computes may run ahead; now and then the kernel takes in what it has asked for.
_BACKLOG = 10_000


class _ThreadRun(Carrier):
    """One run: the simulation in the calling thread, every rank in a thread of its own."""

    def __init__(self, world: World, seed: int, intra_op_threads: int, sinks: Sinks) -> None:
        ranks = range(world.num_ranks)
        self.turns = Turns(
            ranks, seed, intra_op_threads, os.getpid(), lambda silence: self._silent(silence, ranks)
        )
        super().__init__(world, sinks)
        self.answers: dict[int, Answer] = {}
        self._next_rows = 0.0

    def run(self, body: Callable[[SimulatedCommunicator], Any]) -> None:
        self.turns.run(lambda rank: self._rank(rank, body), self.simulation.kernel.run)

    def _rank(self, rank: int, body: Callable[[SimulatedCommunicator], Any]) -> None:
        world = self.simulation.world
        port = _ThreadPort(self, rank)
        comm = SimulatedCommunicator(
            port, range(world.num_ranks), rank, self.simulation.schedules, self.states[rank]
        )
        failed = run_rank(comm, body, self.results)
        if failed is not None:
            self.fail(told(rank, failed))
        self.fail(self.simulation.exchange.exit(rank))

    def fail(self, error: NetsimError | None) -> None:
        """Keep the first failure and have every rank unwound."""
        if error is not None:
            self.failure.add(error)
            self.turns.aborting = True

    def is_row_due(self) -> bool:
        """Whether the kernel should be let on, so that marked rows are seen."""
        now = time.monotonic()
        if now < self._next_rows:
            return False
        self._next_rows = now + SECONDS_BETWEEN_ROWS
        return True

    # --- what the simulation asks for, in the host's turn --------------------------------------------------

    def _let_run(self, rank: int | None) -> bool:
        # Raised here and not below: what ranks had requested before a failure is served first.
        self.failure.raise_if_any()
        if not self.turns.ready:
            return False
        self.turns.let_ranks_run()
        return True

    def _served(self, slot: Slot, members: Sequence[int]) -> None:
        self.turns.ready.extend(rank for rank, member in slot.waiters if member in slot.served)
        if slot.ends_run:
            self.fail(slot.error)

    def _answered(self, rank: int, value: Answer) -> None:
        self.simulation.exchange.unblock(rank)
        self.answers[rank] = value
        self.turns.ready.append(rank)


class _ThreadPort:
    """A rank's way to the simulation: calls in the same process, giving way where it must wait."""

    copies = False

    def __init__(self, run: _ThreadRun, rank: int) -> None:
        self._run, self._rank, self._turns = run, rank, run.turns
        self._exchange = run.simulation.exchange
        self._stream = run.simulation.kernel.streams[rank]

    def request(self, request: Request) -> None:
        self._turns.check()
        self._stream.append(request)
        behind = len(self._stream) > _BACKLOG or (isinstance(request, Mark) and self._run.is_row_due())
        if behind and self._turns.is_rank_thread(self._rank):
            self._turns.give_way_to_host(self._rank)

    def post(
        self,
        key: Key,
        ranks: tuple[int, ...],
        member: int,
        signature: Signature,
        tensors: Sequence[Tensor],
        waits: bool = False,
    ) -> Slot:
        self._turns.check()
        return self._exchange.put(self._rank, key, ranks, member, signature, tensors)

    def take(self, ticket: Slot, member: int) -> tuple[Tensor, ...]:
        self._turns.check()
        if member not in ticket.served:
            self._turns.require_rank_thread(self._rank)
            self._run.fail(self._exchange.block(self._rank, ticket, member))
            self._turns.give_way(self._rank)
        if ticket.error is not None:
            raise type(ticket.error)(
                *ticket.error.args
            )  # one object a rank: each gets a traceback of its own
        assert ticket.outcome is not None
        return ticket.outcome.of(member)

    def taken(self, ticket: Slot) -> None:
        """Nothing to give back: values were handed over by reference."""

    def ready(self, ticket: Slot, member: int) -> bool:
        return member in ticket.served

    def forget(self, ticket: Slot, member: int) -> None:
        """Nothing: the exchange has forgotten it."""

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        self._turns.check()
        if self._run.on_deposit is not None:
            self._run.on_deposit(self._rank, note, tensors)

    def flush(self) -> None:
        if self._turns.is_rank_thread(self._rank):
            self._turns.give_way_to_host(self._rank)

    def ask(self, question: Question) -> Answer:
        self._turns.check()
        self._turns.require_rank_thread(self._rank)
        self._stream.append(question)
        self._run.simulation.wait_for_clock(self._rank)
        self._turns.give_way(self._rank)
        return self._run.answers.pop(self._rank)


def run_in_threads(
    world: World,
    body: Callable[[SimulatedCommunicator], Any],
    seed: int,
    spec: WorkerSpec,
    sinks: Sinks,
) -> Carrier:
    """Run `body(comm)` on every rank of `world`.

    Returns:
        The run, at its end.

    Raises:
        NetsimError: what ended the run: a mismatch, a deadlock, or a rank's own failure (RankError).
    """
    run = _ThreadRun(world, seed, spec.intra_op_threads, sinks)
    try:
        run.run(body)
    except NetsimError as error:
        run.failure.add(error)
    run.failure.raise_if_any()
    return run
