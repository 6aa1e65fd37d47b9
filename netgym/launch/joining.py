"""Joining a simulation from ranks started by torchrun or a test: its process is found through c10d's store.

Rank 0 starts it, with a unix socket in a private folder whose path it leaves in the store; each rank connects, and is
accepted if it runs as the same user. Messages are those between a parent and its children. Ranks do not import
the simulation.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

import torch

from exogym_core.communicator.simulated.communicator import RankState
from exogym_core.workers.failures import Aborted, reported_error
from exogym_core.workers.processes.children import ChannelClosed, Pipe, fork
from exogym_core.workers.processes.protocol import Failed
from exogym_core.workers.processes.shared_memory import Arena
from netgym.launch.clock import imported_clocks, virtualize
from netgym.launch.compute import ComputeClock
from netgym.launch.launched import Launched, clock_of_environment, listen, refused
from netgym.launch.lone_rank import LoneRank, ended
from netgym.launch.session import RankSession, attach, session_of_thread
from netsim.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["connect"]


_PATH = "netgym simulation"


def connect(store: Store, rank: int, num_ranks: int) -> RankSession:
    """Join the simulation of this run, starting it on rank 0.

    The variables NETGYM_TOPOLOGY (default `lan`), NETGYM_PROTOCOL, NETGYM_COMPUTE, NETGYM_COLLECTIVES, NETGYM_CLOCK
    (default `host`) and NETGYM_OUT of rank 0 describe the simulation and its run folder.

    In a program that `netgym launch` has started once, and that starts its ranks itself, the launcher simulates.

    Raises:
        InputError: a variable is wrong, torchrun has restarted the program, or the launcher does not expect this rank.
        RankError: the simulation's process has ended.
    """
    launched = Launched.current()
    if launched is not None and launched.num_ranks:
        raise launched.refused_rank(rank, num_ranks)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise InputError(
            "netsim: torchrun has restarted this program, and its simulation cannot continue from there: run it "
            "without --max-restarts"
        )
    spec = os.environ.get("NETGYM_COMPUTE", "live") if launched is None else launched.compute
    compute = ComputeClock.parse(spec)
    if launched is None and clock_of_environment() == "virtual":
        virtualize(session_of_thread, imported_clocks())
    if launched is None and rank == 0:
        _start(store, num_ranks)
    path = store.get(_PATH).decode() if launched is None else launched.socket
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        if launched is None:
            raise
        raise refused(
            "ranks have come, and the launcher simulates one set of them: launch the script once for each set"
        ) from None
    channel = Pipe(connection)
    try:
        channel.send((rank, os.getpid(), num_ranks))
        refusal = channel.recv()
        if refusal is not None:
            raise InputError(refusal)
        arena = Arena(channel.recv_fd(), num_regions=num_ranks + 1, region=rank + 1)
    except ChannelClosed:
        raise RankError(f"rank {rank}: the simulation has ended before all ranks were there", rank) from None

    # The launcher reports itself why the run has ended.
    def unwind(reason: str) -> BaseException:
        if (session := session_of_thread()) is not None:
            session.has_ended = True
        if launched is not None:
            return SystemExit(1)
        return RankError(": ".join(filter(None, ["the simulated run has been ended", reason])), -1)

    rank_group = LoneRank(num_ranks, rank, channel, arena, unwind)
    comm = rank_group.communicator(rank, RankState())
    session = attach(comm, compute, functools.partial(_leave, rank_group, channel, rank))
    if launched is not None and not launched.has_values:
        from netgym.launch.without_values import communicate_without_values

        communicate_without_values(session)
    return session


def _leave(rank_group: LoneRank, channel: Pipe, rank: int, session: RankSession) -> None:
    """Report at the end of the rank's process or thread whether its program ended by itself."""
    failure = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(failure, SystemExit):
        # torch.multiprocessing ends a rank that has raised with exit code 1.
        failure = (failure.__context__ or failure) if failure.code not in (None, 0) else None
    try:
        if rank_group.reason:  # the run has failed before
            return
        if failure is not None:
            rank_group.queue(Failed(rank, reported_error(rank, failure)))
        else:
            session.settle()
            session.end()
            session.comm.finish()
            rank_group.queue(ended(rank))
        rank_group.flush()
    except (ChannelClosed, NetsimError, Aborted):  # reported by the simulation itself
        pass
    finally:
        session.has_ended = True
        channel.close()


def _start(store: Store, num_ranks: int) -> None:
    folder = tempfile.mkdtemp(prefix="netgym-")  # of mode 0700
    path = os.path.join(folder, "simulation")
    with listen(path, num_ranks) as listener:
        if threading.active_count() == 1 and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _fork(listener, path)
        else:  # a fork would keep locks of other threads for ever
            simulation = subprocess.Popen(
                [sys.executable, "-m", "netgym.launch.server", str(listener.fileno()), path, *sys.argv],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the ranks' own; without them it ends by itself
            )
            simulation.returncode = 0  # never reaped here
    store.set(_PATH, path)


def _fork(listener: socket.socket, path: str) -> None:
    """Start the simulation by a double fork, which saves importing torch once more."""
    child = fork()
    if child:
        os.waitpid(child, 0)
        return
    code = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(3, listener.fileno())
        os.closerange(listener.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        torch.set_num_threads(1)
        from netgym.launch.server import main

        code = main(os.dup(listener.fileno()), path)
    finally:
        os._exit(code)
