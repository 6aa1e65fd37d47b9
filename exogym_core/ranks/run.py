"""`run_ranks`: any code on any number of ranks, over any transport."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from exogym_core.communicator.simulated.simulation import World
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.processes import run_in_processes
from exogym_core.ranks.spec import WorkerSpec
from exogym_core.ranks.threads import run_in_threads
from netsim.files.errors import InputError, unknown_name
from netsim.ranks.kernel import Mark
from netsim.tools.trace import tracing
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator, Traffic
    from netsim.ranks.kernel import StampedRow

__all__ = ["RunResult", "run_ranks"]

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
    """

    results: list[T]
    virtual_seconds: float | None
    rank_virtual_seconds: list[float] | None
    compute_seconds: list[float]
    exposed_seconds: list[float]
    rows: list[StampedRow]
    traffic: list[Traffic]


def run_ranks(
    body: Callable[[Communicator], T],
    num_ranks: int,
    topology: Topology | str | Path | Mapping[str, Any] | None = None,
    transport: str = "netsim",
    workers: str | Mapping[str, Any] | WorkerSpec = "threads",
    *,
    placement: Sequence[str] | None = None,
    protocol: str | Mapping[str, Any] | None = None,
    algorithms: Mapping[str, str] | None = None,
    seed: int = 0,
    on_row: Callable[[StampedRow], None] | None = None,
    journal: Journal | None = None,
    trace: str | Path | None = None,
) -> RunResult[T]:
    """Run `body(comm)` on every rank and gather what it returns.

    Args:
        body: ordinary blocking code; `comm` is the rank's Communicator of the whole world.
        num_ranks: how many ranks.
        topology: a Topology, its file, the name of a shipped one, or a mapping; None: communication is free.
        transport: `netsim` (simulated) or `gloo` (a real process a rank, real sockets on loopback).
        workers: `threads`, `processes`, or a mapping as in an experiment; `gloo` ignores it.
        placement: host names, one a rank; by default ranks are spread evenly over regions.
        protocol: how transfers use links; by default the topology's, else `ideal`.
        algorithms: op -> algorithm of the simulated collectives, where not the default.
        seed: every rank's torch, numpy and `random` streams are made from (seed, rank).
        on_row: told of every marked row while the run goes on, in order of virtual time; as they come over `gloo`.
        journal: its past is played before what ranks request, rows included; its log is there while the run
            goes on.
        trace: a file to write what happened to, for Perfetto, such as `trace.json.gz` (see `netsim.tools.trace`). Of a
            run that is cut short by an error or Ctrl-C it holds what happened until then, and a warning says so.

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
    if transport == "gloo":
        if trace is not None:
            raise InputError(
                "run_ranks: trace needs transport 'netsim': there is no virtual time over 'gloo'"
            )
        return _over_gloo(body, num_ranks, seed, on_row, journal if journal is not None else Journal())
    if transport != "netsim":
        raise unknown_name("transport", str(transport), ("netsim", "gloo"))
    world = World.build(num_ranks, _loaded(topology), placement, protocol, algorithms)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spec = WorkerSpec.parse(workers).settle(num_ranks, num_cores)
    rows: list[StampedRow] = []

    def take_row(row: StampedRow) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    carrier = partial(run_in_threads, nth_core=os.getpid())
    if spec.processes is not None:
        carrier = partial(run_in_processes, processes=spec.processes)
    with tracing(trace, world.hosts, warnings.warn) as recorder:
        run = carrier(
            world,
            body,
            seed=seed,
            intra_op_threads=spec.intra_op_threads,
            on_row=take_row,
            journal=journal if journal is not None else Journal(),
            recorder=recorder,
        )
    kernel = run.simulation.kernel
    timed = world.topology is not None
    return RunResult(
        results=run.results,
        virtual_seconds=max(kernel.end_seconds) if timed else None,
        rank_virtual_seconds=kernel.end_seconds if timed else None,
        compute_seconds=kernel.compute_seconds,
        exposed_seconds=kernel.exposed_seconds,
        rows=rows,
        traffic=[state.traffic for state in run.states],
    )


def _over_gloo(
    body: Callable[[Communicator], T],
    num_ranks: int,
    seed: int,
    on_row: Callable[[StampedRow], None] | None,
    journal: Journal,
) -> RunResult[T]:
    """Of what ranks request there is a journal of marked rows alone: sockets need no replaying."""
    from exogym_core.ranks.gloo_ranks import launch_gloo, rows_in_order, untimed_row

    past = journal.past or [[] for _ in range(num_ranks)]
    journal.log = [[request for request in own if isinstance(request, Mark)] for own in past]

    def marked() -> list[StampedRow]:
        return rows_in_order([[request.row for request in own] for own in journal.log])  # type: ignore[union-attr]

    def take(rank: int, row: Mapping[str, Any]) -> None:
        journal.log[rank].append(Mark(row))
        if on_row is not None:
            on_row(untimed_row(rank, row))

    for row in marked():
        if on_row is not None:
            on_row(row)
    done = launch_gloo(body, num_ranks, seed=seed, on_mark=take)
    untimed = [0.0] * num_ranks
    return RunResult(done.results, None, None, untimed, untimed, marked(), done.traffic)


def _loaded(topology: Topology | str | Path | Mapping[str, Any] | None) -> Topology | None:
    if topology is None or isinstance(topology, Topology):
        return topology
    if isinstance(topology, str | Path):
        return Topology.load(topology)
    return Topology.from_mapping(topology)
