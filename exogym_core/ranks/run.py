"""`run_ranks`: any code on any number of ranks, over any transport.

Transports are a registry: `netsim` and `gloo` are entries at the end of this file, like any other. One's own is
registered before the run; docs/transports.md adds one.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from exogym_core.communicator.simulated.simulation import World
from exogym_core.ranks.carrier import Sinks
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.processes.carrying import run_in_processes
from exogym_core.ranks.spec import WorkerSpec
from exogym_core.ranks.threads import run_in_threads
from netsim.files.errors import InputError, NetsimError, unknown_name
from netsim.ranks.requests import Mark
from netsim.tools.trace import tracing
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.communicator.handle import Traffic
    from exogym_core.communicator.simulated.simulation import Simulation
    from exogym_core.ranks.carrier import Carrier, OnDeposit
    from netsim.ranks.kernel import StampedRow

__all__ = ["RankRun", "RunResult", "Transport", "register_transport", "run_ranks", "transport_named"]

T = TypeVar("T")


@dataclass(frozen=True)
class RunResult(Generic[T]):
    """What ranks returned and what it took.

    Attributes:
        results: what `body` returned, in rank order.
        virtual_seconds: when the last rank ended; None without a topology, or on a real transport.
        rank_virtual_seconds: when each rank ended, likewise.
        compute_seconds, exposed_seconds: virtual seconds each rank computed, and waited without computing.
        rows: what ranks marked, in order of virtual time.
        traffic: what each rank sent.
        network_seconds: the part of `exposed_seconds` in which what a rank waited for was under way.
        window_limit: where a sender's window limited collectives most, with the remedy; None where links did.
        collectives: the algorithms that were used, by operation; empty where nothing was simulated.
        link_bytes: payload that crossed each link of the topology; empty where nothing was simulated.
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
    link_history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def of(
        cls, simulation: Simulation, results: list[T], rows: list[StampedRow], traffic: list[Traffic]
    ) -> RunResult[T]:
        """What a simulation that is through has found, with what ranks returned, marked and sent."""
        kernel, network, history = simulation.kernel, simulation.network, simulation.link_history
        limit = simulation.window_limit
        return cls(
            results=results,
            virtual_seconds=max(kernel.end_seconds) if network is not None else None,
            rank_virtual_seconds=kernel.end_seconds if network is not None else None,
            compute_seconds=kernel.compute_seconds,
            exposed_seconds=kernel.exposed_seconds,
            rows=rows,
            traffic=traffic,
            network_seconds=kernel.network_seconds,
            window_limit=str(limit) if limit is not None else None,
            collectives={op: sorted(names) for op, names in sorted(simulation.algorithms.items())},
            link_bytes=network.link_bytes.tolist() if network is not None else [],
            link_history=history.rows() if history is not None else [],
        )


@dataclass(frozen=True)
class RankRun:
    """What a transport is to carry: the arguments of `run_ranks`, which tells what they mean, checked."""

    body: Callable[[Communicator], Any]
    num_ranks: int
    topology: Topology | None
    workers: str | Mapping[str, Any] | WorkerSpec
    placement: Sequence[str] | None
    protocol: str | Mapping[str, Any] | None
    collectives: str | Mapping[str, str] | None
    seed: int
    on_row: Callable[[StampedRow], None] | None
    on_deposit: OnDeposit | None
    keep_rows: bool
    journal: Journal
    trace: str | Path | None
    timeout_seconds: float | None = 60.0
    compare_calls: bool = True


@dataclass(frozen=True)
class Transport:
    """A way for ranks to run and their tensors to travel.

    Attributes:
        name: for `transport=`.
        carry: runs `body(comm)` on every rank and gathers what comes of it.
        has_clock: ranks live in virtual time, on a topology that may be given with placement and protocol, and
            what happens can be traced.
        can_leave_behind: those who are late or cut off can be done without (`Communicator.among_present`).
        joins_launchers: ranks that torchrun has started join each other over it, instead of being started.
    """

    name: str
    carry: Callable[[RankRun], RunResult[Any]]
    has_clock: bool = False
    can_leave_behind: bool = False
    joins_launchers: bool = False


_transports: dict[str, Transport] = {}


def register_transport(transport: Transport) -> None:
    """Have `transport=NAME` mean this one.

    Raises:
        InputError: the name is taken by another.
    """
    known = _transports.setdefault(transport.name, transport)
    if known is not transport:
        raise InputError(
            f"register_transport: there is a transport {transport.name!r} already; choose another name"
        )


def transport_named(name: object) -> Transport:
    """The transport of that name.

    Raises:
        UnknownNameError: there is none; the line lists those there are.
    """
    if not isinstance(name, str) or name not in _transports:
        raise unknown_name("transport", str(name), _transports)
    return _transports[name]


def run_ranks(
    body: Callable[[Communicator], T],
    num_ranks: int,
    topology: Topology | str | Path | Mapping[str, Any] | None = None,
    transport: str = "netsim",
    workers: str | Mapping[str, Any] | WorkerSpec = "threads",
    *,
    placement: Sequence[str] | None = None,
    protocol: str | Mapping[str, Any] | None = None,
    collectives: str | Mapping[str, str] | None = "auto",
    seed: int = 0,
    on_row: Callable[[StampedRow], None] | None = None,
    on_deposit: OnDeposit | None = None,
    keep_rows: bool = True,
    journal: Journal | None = None,
    trace: str | Path | None = None,
    timeout_seconds: float | None = 60.0,
    compare_calls: bool = True,
) -> RunResult[T]:
    """Run `body(comm)` on every rank and gather what it returns.

    Args:
        body: ordinary blocking code; `comm` is the rank's Communicator of the whole world.
        num_ranks: how many ranks.
        topology: a Topology, its file, the name of a shipped one, or a mapping; None: communication is free.
        transport: `netsim` (simulated), `gloo` (a real process a rank, real sockets on loopback), or one that was
            registered (see `register_transport`).
        workers: `threads`, `processes`, `ray`, or a mapping as in an experiment; `gloo` ignores it.
        placement: host names, one a rank; by default ranks are spread evenly over regions.
        protocol: how transfers use links; by default the topology's, else `ideal`.
        collectives: algorithms of the simulated collectives: `auto`, the fastest for each operation, group and size on
            this network; a name such as `ring`; or operation -> name. Over `gloo` they are gloo's own.
        seed: every rank's torch, numpy and `random` streams are made from (seed, rank).
        on_row: told of every marked row while the run goes on, in order of virtual time; as they come over `gloo`.
        on_deposit: told (rank, note, tensors) of what ranks `deposit`; the tensors are there until it returns.
        keep_rows: False: `rows` stays empty, for long runs that `on_row` takes in.
        journal: its past is replayed before what ranks request, rows included; it is told of every request.
        trace: a file to write what happened to, for Perfetto, such as `trace.json.gz` (see `netsim.tools.trace`). Of a
            run that is cut short by an error or Ctrl-C it holds what happened until then, and a warning says so.
        timeout_seconds: over `gloo`, how long ranks wait for each other; None: four times as long as a rank has itself
            worked since its last call, half an hour at least. Nothing in simulation.
        compare_calls: over `gloo`, whether ranks tell each other what they call before it runs; a round trip each.

    Raises:
        MismatchError: ranks disagree about a call.
        DeadlockError: ranks wait for what can never come.
        RankError: a rank raised an exception of its own, or its process died.
        InputError: an argument is wrong.

    >>> import torch
    >>> run = run_ranks(lambda comm: comm.all_reduce(torch.tensor([comm.rank])), 3)
    >>> [int(total) for total in run.results]
    [3, 3, 3]
    """
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise InputError(f"run_ranks: num_ranks is {num_ranks!r}; give a whole number from 1 up")
    carrier = transport_named(transport)
    if trace is not None and not carrier.has_clock:
        raise InputError(
            f"run_ranks: trace needs transport 'netsim': there is no virtual time over {transport!r}"
        )
    run = RankRun(
        body=body,
        num_ranks=num_ranks,
        topology=_loaded(topology),
        workers=workers,
        placement=placement,
        protocol=protocol,
        collectives=collectives,
        seed=seed,
        on_row=on_row,
        on_deposit=on_deposit,
        keep_rows=keep_rows,
        journal=journal if journal is not None else Journal(),
        trace=trace,
        timeout_seconds=timeout_seconds,
        compare_calls=compare_calls,
    )
    try:
        return carrier.carry(run)
    except (
        NetsimError
    ) as error:  # its text says where in a rank's code; where ranks are carried tells nothing
        raise error.with_traceback(None) from None


def _over_netsim(asked: RankRun) -> RunResult[Any]:
    """In threads or processes of this machine, on the simulated network."""
    world = World.build(asked.num_ranks, asked.topology, asked.placement, asked.protocol, asked.collectives)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spec = WorkerSpec.parse(asked.workers).settle(asked.num_ranks, num_cores)
    rows: list[StampedRow] = []

    def take_row(row: StampedRow) -> None:
        if asked.keep_rows:
            rows.append(row)
        if asked.on_row is not None:
            asked.on_row(row)

    with tracing(asked.trace, world.hosts, warnings.warn) as recorder:
        sinks = Sinks(take_row, asked.on_deposit, asked.journal, recorder)
        run = _CARRIERS[spec.kind](world, asked.body, asked.seed, spec, sinks)
    return RunResult.of(run.simulation, run.results, rows, [state.traffic for state in run.states])


def _on_ray(*run: Any) -> Carrier:
    from exogym_core.ranks.ray.actors import run_on_ray  # of an extra

    return run_on_ray(*run)


_CARRIERS: dict[str, Callable[..., Carrier]] = {
    "threads": run_in_threads,
    "processes": run_in_processes,
    "ray": _on_ray,
}


def _over_gloo(asked: RankRun) -> RunResult[Any]:
    """Of what ranks request there is a journal of marked rows alone: sockets need no replaying."""
    from exogym_core.ranks.gloo.ranks import launch_gloo, rows_in_order, untimed_row

    journal, on_row = asked.journal, asked.on_row
    past = [[request.row for request in own if isinstance(request, Mark)] for own in journal.past]
    rows = past or [[] for _ in range(asked.num_ranks)]
    earlier = rows_in_order(rows)

    def take(rank: int, row: Mapping[str, Any]) -> None:
        journal.on_request(rank, Mark(row))
        if asked.keep_rows:
            rows[rank].append(row)
        if on_row is not None:
            on_row(untimed_row(rank, row))

    for stamped in earlier:
        journal.on_request(stamped.rank, Mark(stamped.row))
        if on_row is not None:
            on_row(stamped)
    done = launch_gloo(
        asked.body,
        asked.num_ranks,
        seed=asked.seed,
        check=asked.compare_calls,
        timeout_seconds=asked.timeout_seconds,
        on_mark=take,
        on_deposit=asked.on_deposit,
    )
    untimed = [0.0] * asked.num_ranks
    kept = rows_in_order(rows) if asked.keep_rows else []
    return RunResult(done.results, None, None, untimed, untimed, kept, done.traffic, untimed)


def _loaded(topology: Topology | str | Path | Mapping[str, Any] | None) -> Topology | None:
    if topology is None or isinstance(topology, Topology):
        return topology
    if isinstance(topology, str | Path):
        return Topology.load(topology)
    return Topology.from_mapping(topology)


register_transport(Transport("netsim", _over_netsim, has_clock=True, can_leave_behind=True))
register_transport(Transport("gloo", _over_gloo, joins_launchers=True))
