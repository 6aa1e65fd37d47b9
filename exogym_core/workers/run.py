"""`run_ranks`: any code on any number of ranks, over any transport.

Transports are a registry: `netsim` and `gloo` are entries at the end of this file, like any other. One's own is
registered before the run; docs/transports.md adds one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.communicator.simulated.simulation import World
from exogym_core.workers.host import RunResult, SimulatedHost, Sinks, rows_in_order
from exogym_core.workers.journal import Journal
from exogym_core.workers.processes.process_runner import ProcessHost
from exogym_core.workers.runner import ThreadHost
from exogym_core.workers.spec import WorkerSpec, num_cores
from netsim import Protocol, Topology, tracing
from netsim.errors import InputError, NetsimError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.workers.host import Host, OnDeposit
    from netsim import Recorder
    from netsim.ranks import StampedRow

__all__ = [
    "RankRun",
    "RunResult",
    "Transport",
    "loaded_topology",
    "register_transport",
    "run_ranks",
    "transport_named",
]

T = TypeVar("T")


@dataclass(frozen=True)
class RankRun:
    """Run requested of a transport: the checked arguments of `run_ranks`, described there."""

    body: Callable[[Communicator], Any]
    num_ranks: int
    topology: Topology | None
    workers: str | Mapping[str, Any] | WorkerSpec
    placement: Sequence[str] | None
    protocol: str | Mapping[str, Any] | Protocol | None
    collectives: str | Mapping[str, str] | None
    seed: int
    on_row: Callable[[StampedRow], None] | None
    on_deposit: OnDeposit | None
    keep_rows: bool
    journal: Journal
    trace: str | Path | None
    timeout_seconds: float | None = 60.0
    compare_calls: bool = True
    shared_cores: int | None = None

    def on(self, host: Host, recorder: Recorder | None = None) -> RunResult[Any]:
        """Run the ranks on a host; the result has the marked rows where they are kept."""
        rows: list[StampedRow] = []

        def take(row: StampedRow) -> None:
            if self.keep_rows:
                rows.append(row)
            if self.on_row is not None:
                self.on_row(row)

        return replace(host.run(self.body, Sinks(take, self.on_deposit, self.journal, recorder)), rows=rows)


@dataclass(frozen=True)
class Transport:
    """Way to run ranks and to carry their tensors, under a name.

    Attributes:
        name: for `transport=`.
        carry: runs `body(comm)` on every rank and returns their results; ours do so on a `Host`.
        has_clock: ranks live in virtual time, on a topology that may be given with placement and protocol, and
            the run can be traced.
        can_leave_behind: rounds continue without ranks that are late or cut off (`Communicator.among_present`).
        joins_launchers: ranks that torchrun has started join each other over it, instead of being started.
    """

    name: str
    carry: Callable[[RankRun], RunResult[Any]]
    has_clock: bool = False
    can_leave_behind: bool = False
    joins_launchers: bool = False


_transports: dict[str, Transport] = {}


def register_transport(transport: Transport) -> None:
    """Register a transport under its name.

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
    protocol: str | Mapping[str, Any] | Protocol | None = None,
    collectives: str | Mapping[str, str] | None = "auto",
    seed: int = 0,
    on_row: Callable[[StampedRow], None] | None = None,
    on_deposit: OnDeposit | None = None,
    keep_rows: bool = True,
    journal: Journal | None = None,
    trace: str | Path | None = None,
    timeout_seconds: float | None = 60.0,
    compare_calls: bool = True,
    shared_cores: int | None = None,
) -> RunResult[T]:
    """Run `body(comm)` on every rank and gather what it returns.

    Args:
        body, num_ranks: ordinary blocking code; `comm` is the rank's Communicator of all `num_ranks` ranks.
        topology: a Topology, its file, the name of a shipped one, or a mapping; None: communication is free.
        transport: `netsim` (simulated), `gloo` (processes and real sockets on loopback), or a registered one.
        workers: `threads`, `processes`, `ray`, or a mapping as in an experiment; `gloo` ignores it.
        placement: host names, one a rank; by default ranks are spread evenly over regions.
        protocol: use of links by transfers; by default the topology's, else `linux-tcp`.
        collectives: as for `fit`: `auto`, the name of an algorithm, or operation -> name; `gloo` has its own.
        seed: every rank's torch, numpy and `random` streams are made from (seed, rank).
        on_row, on_deposit: receivers of marked rows and of snapshots, see `Sinks`.
        keep_rows: False: `rows` of the result stays empty.
        journal: requests to replay before the ranks' own; it logs every request.
        trace: a file for a trace for Perfetto, such as `trace.json.gz`; a run that is cut short leaves what it has.
        timeout_seconds, compare_calls: over `gloo`, as for `fit`.
        shared_cores: cores of the one machine on which all simulated ranks compute; None: each has its own.

    Raises:
        InputError: an argument is wrong.
        NetsimError: ranks disagree about a call (MismatchError), wait for ever (DeadlockError), or failed (RankError).

    >>> import torch
    >>> run = run_ranks(lambda comm: comm.all_reduce(torch.tensor([comm.rank])), 3)
    >>> [int(total) for total in run.results]
    [3, 3, 3]
    """
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise InputError(f"run_ranks: num_ranks is {num_ranks!r}; give a whole number from 1 up")
    chosen = transport_named(transport)
    if trace is not None and not chosen.has_clock:
        raise InputError(
            f"run_ranks: trace needs transport 'netsim': there is no virtual time over {transport!r}"
        )
    where = (loaded_topology(topology), workers, placement, protocol, collectives)
    sinks = (on_row, on_deposit, keep_rows, journal if journal is not None else Journal())
    run = RankRun(body, num_ranks, *where, seed, *sinks, trace, timeout_seconds, compare_calls, shared_cores)
    try:
        return chosen.carry(run)
    except NetsimError as error:  # its text has the place in a rank's code; our own frames say nothing
        raise error.with_traceback(None) from None


def _over_netsim(asked: RankRun) -> RunResult[Any]:
    """Run ranks on the simulated network."""
    where = (asked.topology, asked.placement, asked.protocol, asked.collectives)
    world = World.build(asked.num_ranks, *where, asked.shared_cores)
    spec = WorkerSpec.parse(asked.workers).settle(asked.num_ranks, num_cores())
    outcome = None
    try:
        with tracing(asked.trace, world.hosts, warnings.warn) as recorder:
            outcome = asked.on(_simulated_host(world, asked.seed, spec), recorder)
    except InputError as problem:  # such as a disk that is full at the end
        if outcome is None:
            raise
        warnings.warn(f"trace: {problem}", UserWarning, stacklevel=2)
    return outcome


def _simulated_host(world: World, seed: int, spec: WorkerSpec) -> SimulatedHost:
    if spec.kind == "ray":
        from exogym_core.workers.ray.actors import RayHost  # of an extra

        return RayHost(world, seed, spec)
    return (ProcessHost if spec.kind == "processes" else ThreadHost)(world, seed, spec)


def _over_gloo(asked: RankRun) -> RunResult[Any]:
    """Run ranks over real sockets of this machine."""
    from exogym_core.workers.gloo.ranks import GlooHost

    run = asked.on(GlooHost(asked.num_ranks, asked.seed, asked.compare_calls, asked.timeout_seconds))
    return replace(run, rows=rows_in_order(run.rows, asked.num_ranks))


def loaded_topology(topology: Topology | str | Path | Mapping[str, Any] | None) -> Topology | None:
    """The topology of a name, a file or plain data."""
    if topology is None or isinstance(topology, Topology):
        return topology
    if isinstance(topology, str | Path):
        return Topology.load(topology)
    return Topology.from_mapping(topology)


register_transport(Transport("netsim", _over_netsim, has_clock=True, can_leave_behind=True))
register_transport(Transport("gloo", _over_gloo, joins_launchers=True))
