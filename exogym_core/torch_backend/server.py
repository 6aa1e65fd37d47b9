"""The process of the simulation for ranks that somebody else has started; see `exogym_core.torch_backend.joining`."""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.simulated.simulation import World
from exogym_core.communicator.values import combine
from exogym_core.ranks.carrier import Sinks
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.processes.arena import Arena
from exogym_core.ranks.processes.carrying import ProcessRun, blocks_of
from exogym_core.ranks.processes.channel import ChannelClosed, Ears, Pipe
from exogym_core.ranks.sent import SentBytes
from exogym_core.torch_backend.report import Exposure, report_of
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["main"]

_SECONDS_TO_START = 300.0


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


def _world(num_ranks: int) -> World:
    from netsim.topology import Topology

    return World.build(
        num_ranks,
        Topology.load(os.environ.get("NETGYM_TOPOLOGY", "lan")),
        None,
        os.environ.get("NETGYM_PROTOCOL"),
        os.environ.get("NETGYM_COLLECTIVES"),
    )


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
    listener = socket.socket(fileno=fd)
    try:
        guests = _accept(listener, num_ranks)
    finally:
        listener.close()
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    try:
        world = _world(num_ranks)
    except InputError as error:  # told by the ranks, whose variables they are
        for channel in guests.channels:
            channel.send(str(error))
        return 1
    arena, exposure, sent = Arena(num_regions=num_ranks + 1), Exposure(num_ranks), SentBytes()
    run = ProcessRun(
        world,
        blocks_of(num_ranks, num_ranks),
        arena,
        Sinks(exposure.take, journal=Journal(on_request=sent.take)),
        functools.partial(combine, empty=arena.empty),
        meets_outside=True,
    )
    for channel in guests.channels:
        channel.send(None)
        channel.send_fds([arena.fd])
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


def main(fd: int, num_ranks: int, path: str) -> int:
    """Let `num_ranks` ranks in by the socket `fd`, which is at `path`, and simulate until they end; the exit code."""
    try:
        return _serve(fd, num_ranks, path)
    except (InputError, ChannelClosed, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
