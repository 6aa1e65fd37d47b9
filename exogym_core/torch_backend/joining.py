"""Joining the simulation of ranks that somebody else has started: a process of its own, found through c10d's store.

Rank 0 starts it, with a unix socket in a private folder whose path it leaves in the store; each rank connects, and is
let in if it is the same user's. What travels there is as between a parent and its children. Ranks import nothing of
what the simulation is made of.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from typing import TYPE_CHECKING

import torch

from exogym_core.communicator.simulated.port import RankState
from exogym_core.ranks.failures import told
from exogym_core.ranks.processes.arena import Arena
from exogym_core.ranks.processes.channel import ChannelClosed, Pipe
from exogym_core.ranks.processes.rank_block import RankBlock
from exogym_core.ranks.processes.records import Ended, Failed
from exogym_core.ranks.turns import Aborted
from exogym_core.torch_backend.guests import listen
from exogym_core.torch_backend.launched import Launched
from exogym_core.torch_backend.session import ComputeClock, RankSession, attach
from netsim.files.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["connect"]

_PATH = "netgym simulation"
_SERVER = "exogym_core.torch_backend.server"


def connect(store: Store, rank: int, num_ranks: int) -> RankSession:
    """Join the simulation of this run, starting it on rank 0.

    The variables NETGYM_TOPOLOGY (default `lan`), NETGYM_PROTOCOL, NETGYM_COMPUTE, NETGYM_COLLECTIVES and NETGYM_OUT
    of rank 0 say what is simulated, and where a run folder is written.

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
            "netsim: torchrun has restarted this program, and its simulation cannot go on from there: run it without "
            "--max-restarts"
        )
    if launched is not None:
        text, path = launched.compute, launched.socket
    else:
        text = os.environ.get("NETGYM_COMPUTE", "live")
    compute = ComputeClock.parse(text)
    if launched is None:
        if rank == 0:
            _start(store, num_ranks)
        path = store.get(_PATH).decode()
    channel = Pipe(_connected(path, launched))
    try:
        channel.send((rank, os.getpid(), num_ranks))
        mistake = channel.recv()
        if mistake is not None:
            raise InputError(mistake)
        arena = Arena(channel.recv_fds(1)[0], num_regions=num_ranks + 1, region=rank + 1)
        channel.reads_ahead = True
    except ChannelClosed:
        raise RankError(f"rank {rank}: the simulation has ended before all ranks were there", rank) from None
    # The launcher says itself what has ended the run.
    unwind = _ended_run if launched is None else lambda reason: SystemExit(1)
    block = RankBlock.alone(num_ranks, rank, channel, arena, unwind)
    comm = block.communicator(rank, RankState())
    return attach(comm, compute, functools.partial(_leave, block, channel, rank))


def _connected(path: str, launched: Launched | None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        if launched is None:
            raise
        told = (
            "ranks have come, and the launcher simulates one set of them: launch the script once for each set"
        )
        raise launched.refused(told) from None
    return connection


def _ended_run(reason: str) -> BaseException:
    return RankError(
        f"the simulated run has been ended: {reason}" if reason else "the simulated run has been ended", -1
    )


def _leave(block: RankBlock, channel: Pipe, rank: int, session: RankSession) -> None:
    """At the end of the rank's process or thread: say whether its program has come to its own end."""
    failure = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(failure, SystemExit):
        # torch.multiprocessing ends a rank that has raised with exit code 1.
        failure = (failure.__context__ or failure) if failure.code not in (None, 0) else None
    try:
        if block.reason:  # the run has failed before
            return
        if failure is not None:
            block.tell(Failed(rank, told(rank, failure)))
        else:
            session.settle()
            session.end()
            session.comm.finish()
            block.tell(Ended(rank, b"\x80\x04N.", RankState()))
        block.flush()
    except (ChannelClosed, NetsimError, Aborted):  # told by the simulation itself
        pass
    finally:
        channel.close()


def _start(store: Store, num_ranks: int) -> None:
    folder = tempfile.mkdtemp(prefix="netgym-")  # of mode 0700
    path = os.path.join(folder, "simulation")
    with listen(path, num_ranks) as listener:
        if threading.active_count() == 1 and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _fork(listener, num_ranks, path)
        else:  # what other threads hold would be held for ever in a fork
            simulation = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(listener.fileno()), str(num_ranks), path, *sys.argv],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the ranks' own; without them it ends by itself
            )
            simulation.returncode = 0  # nobody waits for it
    store.set(_PATH, path)


def _fork(listener: socket.socket, num_ranks: int, path: str) -> None:
    """The same by fork, which saves importing torch once more; nobody has to wait for the new process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own threads are not missed there
        child = os.fork()
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
        from exogym_core.torch_backend.server import main

        code = main(os.dup(listener.fileno()), num_ranks, path)
    finally:
        os._exit(code)
