"""The simulation for ranks that somebody else has started: a process of its own, found through c10d's store.

Rank 0 starts it, with a unix socket in a private folder whose path it leaves in the store; each rank connects, and is
let in if it is the same user's. What travels there is as between a parent and its children.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.communicator.simulated.port import RankState
from exogym_core.communicator.simulated.simulation import World
from exogym_core.communicator.values import combine
from exogym_core.ranks.failures import told
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.processes.arena import Arena
from exogym_core.ranks.processes.carrying import ProcessRun, blocks_of
from exogym_core.ranks.processes.channel import ChannelClosed, Ears, Pipe
from exogym_core.ranks.processes.rank_block import RankBlock
from exogym_core.ranks.processes.records import Ended, Failed
from exogym_core.ranks.sent import SentBytes
from exogym_core.ranks.turns import Aborted
from exogym_core.torch_backend.report import Exposure, report_of
from exogym_core.torch_backend.session import ComputeClock, RankSession, attach
from netsim.files.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["connect"]

_SECONDS_TO_START = 300.0
_PATH = "netgym simulation"


def connect(store: Store, rank: int, num_ranks: int) -> RankSession:
    """Join the simulation of this run, starting it on rank 0.

    The variables NETGYM_TOPOLOGY (default `lan`), NETGYM_PROTOCOL, NETGYM_COMPUTE, NETGYM_COLLECTIVES and NETGYM_OUT
    of rank 0 say what is simulated, and where a run folder is written.

    Raises:
        InputError: a variable is wrong, or torchrun has restarted the program.
        RankError: the simulation's process has ended.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise InputError(
            "netsim: torchrun has restarted this program, and its simulation cannot go on from there: run it without "
            "--max-restarts"
        )
    compute = ComputeClock.parse(os.environ.get("NETGYM_COMPUTE", "live"))
    if rank == 0:
        _world(num_ranks)  # or its mistakes would be told by another process
        _start(store, num_ranks)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(store.get(_PATH).decode())
    channel = Pipe(connection)
    try:
        channel.send((rank, os.getpid()))
        arena = Arena(channel.recv_fds(1)[0], num_regions=num_ranks + 1, region=rank + 1)
        channel.reads_ahead = True
        world = channel.recv()
    except ChannelClosed:
        raise RankError(f"rank {rank}: the simulation has ended before all ranks were there", rank) from None
    block = RankBlock.alone(world, rank, channel, arena, _ended_run)
    comm = block.communicator(rank, RankState())
    return attach(comm, compute, functools.partial(_leave, block, channel, rank))


def _ended_run(reason: str) -> BaseException:
    return RankError(
        f"the simulated run has been ended: {reason}" if reason else "the simulated run has been ended", -1
    )


def _leave(block: RankBlock, channel: Pipe, rank: int, session: RankSession) -> None:
    """At the end of the rank's process or thread: say whether its program has come to its own end."""
    failure = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(failure, SystemExit) and failure.code in (None, 0):
        failure = None
    try:
        if failure is not None:
            block.tell(Failed(rank, told(rank, failure)))
        else:
            session.settle()
            session.end()
            session.comm.finish()
            block.tell(Ended(rank, b"\x80\x04N.", session.comm.state))
        block.flush()
    except (ChannelClosed, NetsimError, Aborted):  # told by the simulation itself
        pass
    finally:
        channel.close()


def _world(num_ranks: int) -> World:
    from netsim.topology import Topology

    return World.build(
        num_ranks,
        Topology.load(os.environ.get("NETGYM_TOPOLOGY", "lan")),
        None,
        os.environ.get("NETGYM_PROTOCOL"),
        os.environ.get("NETGYM_COLLECTIVES"),
    )


def _start(store: Store, num_ranks: int) -> None:
    folder = tempfile.mkdtemp(prefix="netgym-")  # of mode 0700
    path = os.path.join(folder, "simulation")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(num_ranks)
        if threading.active_count() == 1 and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _fork(listener, num_ranks, path)
        else:  # what other threads hold would be held for ever in a fork
            simulation = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(num_ranks), path],
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
        code = _main(os.dup(listener.fileno()), num_ranks, path)
    finally:
        os._exit(code)


# --- in the process of the simulation ----------------------------------------------------------------------


class _Guests:
    """The ranks' processes, seen through their connections; see `exogym_core.ranks.processes.children:Children`."""

    def __init__(self, channels: list[Pipe], pids: list[int]) -> None:
        self.channels, self.pids = channels, pids
        self._ears = Ears(lambda index: [channels[index].fileno()])

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Those that have sent something or ended, waiting for the first."""
        return list(self._ears.ready(indices, timeout_seconds))

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str:
        """All that can be seen of a process that is nobody's child here."""
        return f"process {self.pids[index]} has gone"

    def is_stopped(self, index: int) -> bool:
        """Not looked at."""
        return False


def _accept(listener: socket.socket, num_ranks: int) -> _Guests:
    """Every rank's connection; other users are not let in."""
    guests: dict[int, tuple[Pipe, int]] = {}
    listener.settimeout(_SECONDS_TO_START)
    while len(guests) < num_ranks:
        connection, _ = listener.accept()
        connection.setblocking(True)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", raw)[1] != os.getuid():
            connection.close()
            continue
        channel = Pipe(connection)
        rank, pid = channel.recv()
        guests[rank] = channel, pid
    pairs = [guests[rank] for rank in range(num_ranks)]
    return _Guests([channel for channel, _ in pairs], [pid for _, pid in pairs])


def _serve(fd: int, num_ranks: int, path: str) -> int:
    world = _world(num_ranks)
    listener = socket.socket(fileno=fd)
    try:
        guests = _accept(listener, num_ranks)
    finally:
        listener.close()
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    arena, exposure, sent = Arena(num_regions=num_ranks + 1), Exposure(num_ranks), SentBytes()
    run = ProcessRun(
        world,
        blocks_of(num_ranks, num_ranks),
        arena,
        exposure.take,
        None,
        Journal(on_request=sent.take),
        None,
        functools.partial(combine, empty=arena.empty),
    )
    for channel in guests.channels:
        channel.send_fds([arena.fd])
        channel.send(world)
        channel.reads_ahead = True
    run.run(guests)
    if run.failure.error is not None:
        print(f"error: {run.failure.error}", file=sys.stderr, flush=True)
        return 1
    _record(report_of(run, exposure, sent).as_json())
    return 0


def _record(document: dict[str, Any]) -> None:
    out = os.environ.get("NETGYM_OUT")
    if out:
        from exogym_core.results.record import RunFolder

        folder = RunFolder.create(out, Path(out).name)
        folder.write_text(
            "launch.json", json.dumps({"run_folder": str(folder.path), **document}, indent=2) + "\n"
        )


def _main(fd: int, num_ranks: int, path: str) -> int:
    try:
        return _serve(fd, num_ranks, path)
    except (InputError, ChannelClosed, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
