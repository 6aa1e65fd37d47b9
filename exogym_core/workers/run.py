"""`run_ranks`: any code on any number of ranks, over any transport.

Transports are a registry: `netsim` and `gloo` are entries at the end of this file, like any other. Your own is
registered before the run; docs/transports.md adds one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.communicator.simulated.simulation import World
from exogym_core.workers.host import RankJob, RunResult, SimulatedHost, Sinks, rows_in_order
from exogym_core.workers.journal import Journal
from exogym_core.workers.processes.process_runner import ProcessHost
from exogym_core.workers.spec import WorkerSpec, num_cores
from exogym_core.workers.threads import ThreadHost
from netsim import Protocol, Topology
from netsim.errors import InputError, NetsimError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.workers.host import Host, OnDeposit
    from netsim.ranks import StampedRow

__all__ = [
    "RankJob",
    "RunResult",
    "Transport",
    "loaded_topology",
    "register_transport",
    "run_ranks",
    "transport_named",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Transport:
    """Way to run ranks and to carry their tensors, under a name.

    Attributes:
        name: for `transport=`.
        host: the place where the ranks of a job run.
        has_clock: ranks live in virtual time, on a topology that may be given with placement and protocol, and
            the run can be traced.
        can_leave_behind: rounds continue without ranks that are late or cut off (`Communicator.among_present`).
        joins_launchers: ranks that torchrun has started join each other over it, instead of being started.
    """

    name: str
    host: Callable[[RankJob], Host]
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
        trace: a file for a trace for Perfetto, such as `trace.json.gz`; an interrupted run leaves an incomplete one.
        timeout_seconds, compare_calls: over `gloo`, as for `fit`.
        shared_cores: cores of the one machine on which all simulated ranks compute; None: each has its own.

    Raises:
        InputError: an argument is wrong.
        NetsimError: ranks disagree about a call (MismatchError), are in a deadlock (DeadlockError), or failed
            (RankError).

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
    job = RankJob(
        num_ranks=num_ranks,
        topology=loaded_topology(topology),
        placement=placement,
        protocol=protocol,
        collectives=collectives,
        seed=seed,
        workers=workers,
        trace=trace,
        timeout_seconds=timeout_seconds,
        compare_calls=compare_calls,
        shared_cores=shared_cores,
    )
    rows: list[StampedRow] = []

    def take(row: StampedRow) -> None:
        if keep_rows:
            rows.append(row)
        if on_row is not None:
            on_row(row)

    sinks = Sinks(take, on_deposit, journal if journal is not None else Journal())
    try:
        run = chosen.host(job).run(body, sinks)
    except NetsimError as error:  # its text has the place in a rank's code; our own frames say nothing
        raise error.with_traceback(None) from None
    return replace(run, rows=rows if chosen.has_clock else rows_in_order(rows, num_ranks))


def _simulated(job: RankJob) -> SimulatedHost:
    """Ranks on the simulated network."""
    where = (job.topology, job.placement, job.protocol, job.collectives)
    world = World.build(job.num_ranks, *where, job.shared_cores, job.choose)
    spec = WorkerSpec.parse(job.workers).settle(job.num_ranks, num_cores())
    if spec.kind == "ray":
        from exogym_core.workers.ray import RayHost  # of an extra

        return RayHost(world, job.seed, spec, job.trace)
    return (ProcessHost if spec.kind == "processes" else ThreadHost)(world, job.seed, spec, job.trace)


def _over_gloo(job: RankJob) -> Host:
    """Ranks over real sockets of this machine."""
    from exogym_core.workers.gloo import GlooHost

    return GlooHost(job.num_ranks, job.seed, job.compare_calls, job.timeout_seconds)


def loaded_topology(topology: Topology | str | Path | Mapping[str, Any] | None) -> Topology | None:
    """The topology of a name, a file or plain data."""
    if topology is None or isinstance(topology, Topology):
        return topology
    if isinstance(topology, str | Path):
        return Topology.load(topology)
    return Topology.from_mapping(topology)


register_transport(Transport("netsim", _simulated, has_clock=True, can_leave_behind=True))
register_transport(Transport("gloo", _over_gloo, joins_launchers=True))
