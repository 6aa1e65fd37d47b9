"""Ranks that come to the simulation by a unix socket, each from a process that somebody else has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING

from exogym_core.ranks.processes.channel import ChannelClosed, Ears, Pipe
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

__all__ = ["Guests", "listen"]

_SECONDS_A_LOOK = 0.1


def listen(path: str, backlog: int = 128) -> socket.socket:
    """A listening socket at `path`, whose folder must be private."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(backlog)
    return listener


class Guests:
    """The ranks' processes, seen through their connections; see `exogym_core.ranks.processes.homes:Homes`.

    Context manager: connections are closed on leaving, and after an exception the processes are ended.

    Attributes:
        channels, pids: of each rank.
    """

    def __init__(self, guests: Mapping[int, tuple[Pipe, int]]) -> None:
        self.channels = [guests[rank][0] for rank in range(len(guests))]
        self.pids = [guests[rank][1] for rank in range(len(guests))]
        self._ears = Ears(lambda index: [self.channels[index].fileno()])

    @classmethod
    def let_in(cls, listener: socket.socket, deadline: float, stop: Callable[[], str] = lambda: "") -> Guests:
        """Every rank's connection: as many as the first says that there are; other users are not let in.

        Args:
            listener: where they come.
            deadline: on `time.monotonic`, for all to be there.
            stop: asked now and then; a line says why no more will come.

        Raises:
            InputError: they do not agree on how many there are, or somebody came twice.
            TimeoutError: they are not all there.
        """
        guests: dict[int, tuple[Pipe, int]] = {}
        size = 0
        listener.settimeout(_SECONDS_A_LOOK)
        while not size or len(guests) < size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                reason = stop()
                if reason or time.monotonic() > deadline:
                    came = f"{len(guests)} of {size} ranks had come" if size else "no rank had come"
                    raise TimeoutError(f"{reason or 'time is up'}: {came}") from None
                continue
            connection.setblocking(True)
            if not _is_ours(connection):
                connection.close()
                continue
            channel = Pipe(connection)
            rank, pid, claimed = channel.recv()
            size = size or claimed
            if claimed != size or rank in guests or not 0 <= rank < size:
                told = (
                    f"a process has come as rank {rank} of {claimed}, and {len(guests)} of {size} were there"
                )
                for each, _ in [*guests.values(), (channel, pid)]:
                    each.send(told)
                raise InputError(f"{told}: one launch simulates one set of ranks")
            guests[rank] = channel, pid
        return cls(guests)

    def __enter__(self) -> Guests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end()
        for channel in self.channels:
            channel.close()

    def welcome(self, arena_fd: int) -> None:
        """Have every rank begin."""
        for channel in self.channels:
            channel.send(None)
            channel.send_fds([arena_fd])
            channel.reads_ahead = True

    def refuse(self, reason: str) -> None:
        """Have every rank raise an error."""
        for channel in self.channels:
            with contextlib.suppress(ChannelClosed):
                channel.send(reason)

    def end(self) -> None:
        """Kill the processes that are still there."""
        for index, channel in enumerate(self.channels):
            with contextlib.suppress(ProcessLookupError, ChannelClosed):
                channel.send(None)  # a process that has closed its end has ended, and its id may be another's
                os.kill(self.pids[index], signal.SIGKILL)

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Processes that have sent something or ended; waits for the first."""
        return list(self._ears.ready(indices, timeout_seconds))

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str:
        """Exit of a process that is no child of this one, as far as it can be seen."""
        return f"process {self.pids[index]} has gone"

    def is_stopped(self, index: int) -> bool:
        """False: a stop of another's child cannot be seen."""
        return False


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] == os.getuid())
