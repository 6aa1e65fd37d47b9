"""Other people's programs as ranks of a simulated run, and what is to be told of them when they have ended."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from exogym_core.communicator.simulated.simulation import World
from exogym_core.ranks.carrier import Sinks
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.processes.carrying import run_in_processes
from exogym_core.ranks.sent import SentBytes
from exogym_core.ranks.spec import WorkerSpec
from exogym_core.torch_backend.private import rendezvous_by
from exogym_core.torch_backend.registration import register
from exogym_core.torch_backend.replacement import replace_backends
from exogym_core.torch_backend.report import Exposure, ProgramReport, report_of
from exogym_core.torch_backend.session import ComputeClock, attach
from netsim.network.recorder import Recorder
from netsim.tools.chakra import ExecutionTraces
from netsim.tools.trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from netsim.ranks.requests import Request
    from netsim.topology import Topology

__all__ = ["LaunchedProgram", "run_program"]


@dataclass(frozen=True)
class LaunchedProgram:
    """A script or module as torchrun would start it.

    Attributes:
        name: the script's path, or the module's name.
        arguments: of its command line.
        is_module: run `name` as `python -m` does.
        replaced_backends: backends that it asks for and gets `netsim` instead.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    replaced_backends: tuple[str, ...] = ()


def run_program(
    program: LaunchedProgram,
    num_ranks: int,
    topology: Topology,
    *,
    compute: ComputeClock,
    placement: Sequence[str] | None = None,
    protocol: Any = None,
    collectives: Any = None,
    trace: Path | None = None,
    chakra: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> ProgramReport:
    """Run a program on `num_ranks` ranks of `topology`, a process each.

    Args:
        program: what every rank runs.
        num_ranks: how many there are.
        topology: the network.
        compute: what computing costs.
        placement: host names, one a rank.
        protocol: how transfers use links.
        collectives: algorithms of collectives.
        trace: a file for Perfetto.
        chakra: a folder for execution traces, one a rank.
        warn: told in a line what else is to be known.

    Raises:
        NetsimError: what ended the run, with the program's own file and line.
        InputError: an argument is wrong.
    """
    world = World.build(num_ranks, topology, placement, protocol, collectives)
    exposure, sent = Exposure(num_ranks), SentBytes()
    # Programs of others may well compute for long between two calls.
    warnings.filterwarnings("ignore", message=".* sends nothing: ")
    with tempfile.TemporaryDirectory(prefix="netgym-") as folder, tracing(trace, world.hosts, warn) as kept:
        recorder = Recorder() if kept is None and chakra is not None else kept
        traces = ExecutionTraces(num_ranks, partial(_now, recorder)) if chakra is not None else None

        def requested(rank: int, request: Request) -> None:
            sent.take(rank, request)
            if traces is not None:
                traces.take(rank, request)

        run = run_in_processes(
            world,
            partial(_become_rank, program=program, compute=compute, store=os.path.join(folder, "store")),
            seed=0,
            spec=WorkerSpec("processes", num_ranks),
            sinks=Sinks(exposure.take, journal=Journal(on_request=requested), recorder=recorder),
            alone=True,
        )
    if traces is not None and chakra is not None and recorder is not None:
        traces.add_times([*recorder.spans, *recorder.unfinished_spans()])
        traces.write(chakra)
    return report_of(run, exposure, sent)


def _now(recorder: Recorder | None) -> float:
    """The virtual time of what it records."""
    assert recorder is not None
    assert recorder.network is not None
    return float(recorder.network.env.now)


def _become_rank(
    comm: SimulatedCommunicator, program: LaunchedProgram, compute: ComputeClock, store: str
) -> None:
    """Be what torchrun's child would be, and run the program to its end."""
    register()
    rank, size = comm.rank, comm.world_size
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "netgym",
    }

    def meet(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:  # type: ignore[name-defined]
        yield dist.FileStore(store, size), rank, size  # type: ignore[attr-defined]

    # torch's own would listen on a port; these ranks share a private folder.
    rendezvous_by(meet)
    replace_backends(program.replaced_backends)
    sys.argv = [program.name, *program.arguments]
    session = attach(comm, compute)
    try:
        if program.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(program.name)))
            runpy.run_path(program.name, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    session.settle()
    session.end()
