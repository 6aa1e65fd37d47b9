"""Hosts: the places where ranks of a run live, under one interface.

    run_ranks, fit --- Transport.host(job).run(body, sinks) ---> body(comm) on every rank of the host
                   <--- rows, snapshots: Sinks; results, times, traffic: RunResult

A host is threads or worker processes of this machine, actors of a Ray cluster, processes joined by gloo, one of
torchrun's processes, or a site that meets others at a rendezvous.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from torch import Tensor

from exogym_core.communicator.exchange import Reduce, reduce_tensors
from exogym_core.communicator.simulated.communicator import RankState
from exogym_core.communicator.simulated.simulation import Simulation
from exogym_core.workers.failures import Aborted, distance_from_cause, own_cause
from exogym_core.workers.journal import Journal, message_name
from netsim.errors import InputError, NetsimError
from netsim.network.trace import tracing
from netsim.ranks import Request, StampedRow

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableSequence
    from pathlib import Path

    from exogym_core.communicator.base import Traffic
    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.events import Marked
    from exogym_core.workers.spec import WorkerSpec
    from exogym_core.workers.threads import Silence
    from netsim import Protocol as LinkProtocol
    from netsim import Recorder, Topology
    from netsim.ranks import MailboxMessage, Take

__all__ = [
    "Host",
    "OnDeposit",
    "RankJob",
    "RunResult",
    "Runner",
    "SimulatedHost",
    "Sinks",
    "rows_in_order",
    "run_rank",
    "untimed_row",
]

T = TypeVar("T")

OnDeposit = Callable[[int, Any, Sequence[Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """Checked arguments of `run_ranks`, described there."""

    num_ranks: int
    topology: Topology | None = None
    placement: Sequence[str] | None = None
    protocol: str | Mapping[str, Any] | LinkProtocol | None = None
    collectives: str | Mapping[str, str] | None = "auto"
    seed: int = 0
    workers: str | Mapping[str, Any] | WorkerSpec = "threads"
    trace: str | Path | None = None
    timeout_seconds: float | None = 60.0
    compare_calls: bool = True
    shared_cores: int | None = None
    choose: Callable[[], Mapping[str, str]] | None = None  # see `World`


@dataclass(frozen=True)
class Sinks:
    """Receivers of a run's events.

    Attributes:
        on_row: called with every row that a rank marks, in order of virtual time; without a clock, as rows arrive.
        on_deposit: called with (rank, note, tensors) of every snapshot that a rank deposits; the tensors are valid
            until it returns. None: snapshots are dropped.
        journal: requests of ranks, each as it is served; those from before the run are replayed first.
        recorder: trace of the network; None: no trace.
    """

    on_row: Callable[[StampedRow], None] = lambda row: None
    on_deposit: OnDeposit | None = None
    journal: Journal = field(default_factory=Journal)
    recorder: Recorder | None = None

    def replay_untimed(self, num_ranks: int) -> None:
        """Log and pass on the rows of an earlier part of a run without virtual time."""
        past = [untimed_row(rank, row) for rank, row in self.journal.past_rows()]
        for stamped in rows_in_order(past, num_ranks):
            self.take_untimed(stamped.rank, stamped.row)

    def take_untimed(self, rank: int, row: Marked | Mapping[str, Any]) -> None:
        """Log and pass on a row marked where there is no virtual time."""
        self.journal.mark(rank, row)
        self.on_row(untimed_row(rank, row))


@dataclass(frozen=True)
class RunResult(Generic[T]):
    """Results of the ranks of a host, and times and traffic of their run.

    Attributes:
        results: values that `body` returned, in rank order.
        virtual_seconds: when the last rank ended; None without a topology, or on a real transport.
        rank_virtual_seconds: when each rank ended; None as above.
        compute_seconds, exposed_seconds: virtual seconds each rank computed, and waited without computing.
        rows: marked rows, in order of virtual time.
        traffic: of each rank.
        network_seconds: the part of `exposed_seconds` in which the awaited call was in flight.
        window_limit: where a sender's window limited collectives most, with the remedy; None where links did.
        collectives: the algorithms that were used, by operation; empty where nothing was simulated.
        link_bytes: payload that crossed each link of the topology; empty where nothing was simulated.
        request_dollars: price of requests to object stores.
        link_history: the same in the course of the run: rows of `virtual_seconds` and bytes from the start by link.
    """

    results: list[T]
    virtual_seconds: float | None
    rank_virtual_seconds: list[float] | None
    compute_seconds: list[float]
    exposed_seconds: list[float]
    rows: list[StampedRow]
    traffic: list[Traffic]
    network_seconds: list[float] = field(default_factory=list)
    window_limit: str | None = None
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_bytes: list[float] = field(default_factory=list)
    request_dollars: float = 0.0
    link_history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def simulated(
        cls,
        simulation: Simulation,
        results: list[T],
        traffic: Sequence[Traffic] = (),
        rows: Sequence[StampedRow] = (),
    ) -> Self:
        """Result of a finished simulation."""
        kernel, network, history = simulation.kernel, simulation.network, simulation.link_history
        limit = simulation.window_limit
        return cls(
            results=results,
            virtual_seconds=max(kernel.seconds.end) if network is not None else None,
            rank_virtual_seconds=kernel.seconds.end if network is not None else None,
            compute_seconds=kernel.seconds.compute,
            exposed_seconds=kernel.seconds.exposed,
            rows=list(rows),
            traffic=list(traffic),
            network_seconds=kernel.seconds.network,
            window_limit=str(limit) if limit is not None else None,
            collectives={op: sorted(names) for op, names in sorted(simulation.algorithms.items())},
            link_bytes=network.link_bytes.tolist() if network is not None else [],
            request_dollars=simulation.request_dollars,
            link_history=history.rows() if history is not None else [],
        )

    @classmethod
    def untimed(cls, results: list[T], traffic: list[Traffic]) -> Self:
        """Result of ranks without virtual time."""
        zeros = [0.0] * len(results)
        return cls(results, None, None, zeros, zeros, [], traffic, zeros)


class Host(Protocol):
    """Place where ranks of a job live: the interface that `run_ranks` and `fit` use."""

    def run(self, body: Callable[[Any], T], sinks: Sinks) -> RunResult[T]:
        """Run `body(comm)` on every rank of this host, to its end.

        Args:
            body: ordinary blocking code; `comm` is the rank's Communicator of the whole world.
            sinks: receive rows, snapshots and requests while it runs.

        Returns:
            Results of the ranks that live here; `rows` stays empty, since `sinks` has them.

        Raises:
            NetsimError: what ended the run: a mismatch, a deadlock, a rank's own failure (RankError).
            InputError: `body` cannot be sent to where ranks live, or a result back.
        """


def run_rank(
    comm: SimulatedCommunicator, body: Callable[[Any], Any], results: MutableSequence[Any] | dict[int, Any]
) -> BaseException | None:
    """Run one rank to its end; its result goes to `results[comm.rank]`, its failure is returned.

    Raises:
        Aborted: the run is being unwound, and this rank had no failure of its own.
    """
    try:
        results[comm.rank] = body(comm)
        comm.finish()
    except Aborted as aborted:
        cause = own_cause(aborted)
        if cause is None:
            raise
        return cause
    except BaseException as error:  # SystemExit in a rank must not end the process silently
        return error
    return None


class FirstFailure:
    """The failure that explains a run's end: the first, unless a rank's own exception lies behind it."""

    error: NetsimError | None = None

    def add(self, error: NetsimError) -> None:
        """Keep a failure, if it explains the end better."""
        if self.error is None or distance_from_cause(error) < distance_from_cause(self.error):
            self.error = error

    def raise_if_any(self) -> None:
        """Raise the failure, if there was one."""
        if self.error is not None:
            raise self.error


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
        if self._in_flight is not None:
            self._in_flight.requested(rank, request)
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


@dataclass(frozen=True)
class SimulatedHost(ABC):
    """Host whose ranks are served by the simulation, which runs in this process.

    Attributes:
        world: ranks, topology, protocol and collectives.
        seed: random streams are made from (seed, rank).
        spec: number of processes and intra-op threads; settled.
        trace: a file for a trace of the network, and of what ranks do; None: no trace.
    """

    world: World
    seed: int
    spec: WorkerSpec
    trace: str | Path | None = None

    def run(self, body: Callable[[Any], T], sinks: Sinks) -> RunResult[T]:
        """Run `body(comm)` on every rank of the world."""
        run = None
        if self.trace is None:
            run = self.simulate(body, sinks)
        else:
            try:
                with tracing(self.trace, self.world.hosts, warnings.warn) as recorder:
                    run = self.simulate(body, replace(sinks, recorder=recorder))
            except InputError as problem:  # such as a disk that is full at the end
                if run is None:
                    raise
                warnings.warn(f"trace: {problem}", UserWarning, stacklevel=2)
        return RunResult.simulated(run, run.results, [state.traffic for state in run.states])

    @abstractmethod
    def simulate(self, body: Callable[[Any], Any], sinks: Sinks) -> Runner:
        """Run the simulation and its ranks to their end; raises as `run`."""


def untimed_row(rank: int, row: Any) -> StampedRow:
    """Row marked where there is no virtual time."""
    return StampedRow(rank, 0.0, 0.0, 0.0, row)


def rows_in_order(rows: Iterable[StampedRow], num_ranks: int) -> list[StampedRow]:
    """Untimed rows of all ranks in one list: the first of each rank in rank order, then the second ..."""
    own: list[list[StampedRow]] = [[] for _ in range(num_ranks)]
    for row in rows:
        own[row.rank].append(row)
    return [row for same_place in itertools.zip_longest(*own) for row in same_place if row is not None]
