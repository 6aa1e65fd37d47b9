"""A process of a launched program: hooks for torch.distributed, and the script as torchrun or `python` would run it."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import signal
import sys
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
import torch.distributed.rpc

from netgym.launch.clock import imported_clocks, virtualize
from netgym.launch.compute import ComputeClock
from netgym.launch.cuda_on_cpu import stand_in_for_cuda
from netgym.launch.launched import Launched, refused
from netgym.launch.private import rendezvous_by
from netgym.launch.registration import register, replace_backends
from netgym.launch.session import attach, postpone_handlers, session_of_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from netgym.launch.run import Script

__all__ = ["become_launched", "run_rank", "run_script"]


def become_launched(clocks: list[tuple[ModuleType, str]] | None = None) -> None:
    """Configure torch.distributed in this process by the launch that its variables name.

    Args:
        clocks: `imported_clocks()` of the process that forked this one; by default of this one.
    """
    launched = Launched.current()
    if launched is None:
        return
    register()
    replace_backends(cuda_as_cpu=bool(launched.num_devices))
    torch.distributed.rpc.init_rpc = _refuse_rpc
    # Forked processes need no hook.
    prepare = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: prepare(name) | {"netgym": _Hook()}
    postpone_handlers()
    if launched.clock == "virtual":
        virtualize(session_of_thread, imported_clocks() if clocks is None else clocks)
    if launched.num_devices:
        stand_in_for_cuda(launched.num_devices)
    if not launched.has_values:  # imports slowly
        from netgym.launch.without_values import run_without_values

        run_without_values()


def _refuse_rpc(*arguments: Any, **options: Any) -> None:
    raise refused(
        "torch.distributed.rpc is not simulated, so its time would be missing: use collectives or send and recv"
    )


class _Hook:
    """Adds a process that multiprocessing spawns to the launch: unpickled with its first message, before its main."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return become_launched, ()


def run_script(script: Script) -> None:
    """Run a script as `python` would, to the end of its exit handlers.

    Raises:
        SystemExit: the script ended with another exit code than 0.
    """
    _forget_exit_handlers()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it; children of ours ignore it
    if script.prints_to_stderr:
        os.dup2(2, 1)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [script.name, *script.arguments]
    try:
        if script.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            path = os.path.abspath(script.name)  # as Python has it, and found again in any folder
            sys.path.insert(0, os.path.dirname(path))
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    atexit._run_exitfuncs()


def run_rank(
    comm: SimulatedCommunicator,
    script: Script,
    launched: Launched,
    clocks: list[tuple[ModuleType, str]],
    port: int,
) -> None:
    """Run a script as a child of torchrun would, as a rank of the simulation; torchrun's store listens at `port`."""
    rank, size = comm.rank, comm.world_size
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size))
    os.environ |= {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "netgym",
    }
    launched.to_environment()
    become_launched(clocks)
    pid = os.getpid()

    def meet(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:  # type: ignore[name-defined]
        query = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
        asked = query.get("rank", rank), query.get("world_size", size)
        if asked != (rank, size) or os.getpid() != pid:
            raise launched.refused_rank(*asked)
        yield dist.FileStore(launched.store, size), rank, size  # type: ignore[attr-defined]

    rendezvous_by(meet)  # torch's own would listen on a port; these ranks share a private folder
    session = attach(comm, ComputeClock.parse(launched.compute))
    if not launched.has_values:
        from netgym.launch.without_values import communicate_without_values

        communicate_without_values(session)
    run_script(script)
    session.settle()
    session.end()


_inherited: list[object] = []


def _forget_exit_handlers() -> None:
    """Drop the launcher's exit handlers, which a fork inherits."""
    atexit._clear()
    # Not cleared: to free torch's finalizers would write to 3 MB of memory that ranks share.
    _inherited.append(weakref.finalize._registry)  # type: ignore[attr-defined]
    weakref.finalize._registry = {}  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
