"""A private connection between a parent and its child process.

Nobody else can open the socket pair, so what travels on it may be pickles.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.ranks.processes.shorthand import ShorthandReader, ShorthandWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["ChannelClosed", "Ears", "Pipe", "RankEnd"]

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 250  # Linux refuses more in one message
_BYTES_AT_ONCE = 1 << 16


class ChannelClosed(EOFError):  # noqa: N818 (an ending, not always an error)
    """The other end of a `Pipe` has been closed, or its process has ended."""


class RankEnd(Protocol):
    """A rank's end of a connection to the simulation."""

    def send(self, obj: Any) -> None:
        """Send one object."""

    def recv(self) -> Any:
        """The next object; blocks until it is there."""

    def waiting(self) -> bool:
        """Whether there is one already."""


class Pipe:
    """One end of a private connection between a parent and its child: objects and descriptors, in order.

    Frames may be pickles, so both ends must be processes of one run. Threads may send side by side, and while one
    receives.

    Attributes:
        reads_ahead: what has come is read as far as it goes: fewer calls of the system, but descriptors would be lost,
            and `recv_all` has to be used by who selects.

    Raises:
        ChannelClosed: (`send`, `recv`, ...) the other end is gone. What it sent before can still be received.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._writer, self._reader = ShorthandWriter(), ShorthandReader()
        self.reads_ahead = False
        self._ahead = b""  # read, and not handed out

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        """Two connected ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, obj: Any) -> None:
        """Send one object; blocks while the other end does not read and the socket's buffer is full."""
        try:
            with self._sending:
                self._socket.sendall(self._framed(obj))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process at the other end has closed the channel") from error

    def send_receiving(self, obj: Any) -> list[Any]:
        """Send one object and return what came meanwhile.

        Two ends that both send would wait for each other once their buffers are full; the end that uses this
        never makes the other wait.
        """
        frame, received = memoryview(self._framed(obj)), []
        try:
            while frame:
                try:
                    frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    readable, writable, _ = select.select([self], [self], [])
                    if readable and not writable:
                        received += self.recv_all()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process at the other end has closed the channel") from error
        return received

    def recv(self) -> Any:
        """The next object; blocks until it is there."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        # The other end of a socket pair is our own child: nobody else can write here.
        return self._reader.read(self._read(length))

    def recv_all(self) -> list[Any]:
        """The next object and those that have come with it, which no `select` would tell of; blocks for the first."""
        received = [self.recv()]
        while self._ahead:
            received.append(self.recv())
        return received

    def send_fds(self, fds: Sequence[int]) -> None:
        """Hand over open file descriptors; the other end gets its own copies."""
        for start in range(0, len(fds), _MAX_FDS):
            try:
                socket.send_fds(self._socket, [b"F"], list(fds[start : start + _MAX_FDS]))
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosed("the process at the other end has closed the channel") from error

    def recv_fds(self, num: int) -> list[int]:
        """Receive what the other end gave to one `send_fds` of `num` descriptors; the caller closes them."""
        received: list[int] = []
        while len(received) < num:
            expected = min(_MAX_FDS, num - len(received))
            data, fds, _, _ = socket.recv_fds(self._socket, 1, expected)
            received += fds
            if not data or len(fds) != expected:
                for fd in received:
                    os.close(fd)
                raise ChannelClosed(f"expected {num} descriptors, and the channel ended before")
        for fd in received:
            os.set_inheritable(fd, False)
        return received

    def waiting(self) -> bool:
        """Whether something has come already."""
        return bool(self._ahead or select.select([self], [], [], 0)[0])

    def fileno(self) -> int:
        """The socket's descriptor, for `select` and its like."""
        return self._socket.fileno()

    def finish(self, *, receiving: bool = False) -> None:
        """Send no more (and with `receiving`, expect no more): the other end's `recv` then ends at once."""
        with contextlib.suppress(OSError):  # the other end may be gone already
            self._socket.shutdown(socket.SHUT_RDWR if receiving else socket.SHUT_WR)

    def close(self) -> None:
        """Give the descriptor back; may be called again."""
        self._socket.close()

    def detach(self) -> int:
        """The descriptor, which from now on belongs to the caller."""
        return self._socket.detach()

    def _framed(self, obj: Any) -> bytes:
        frame = self._writer.write(obj)
        return _LENGTH.pack(len(frame)) + frame

    def _read(self, num_bytes: int) -> bytes:
        ahead = self._ahead
        while len(ahead) < num_bytes:
            try:
                left = num_bytes - len(ahead)
                part = self._socket.recv(max(_BYTES_AT_ONCE, left) if self.reads_ahead else left)
            except ConnectionResetError:
                part = b""
            if not part:
                raise ChannelClosed("the process at the other end has closed the channel")
            ahead = ahead + part if ahead else part
        self._ahead = ahead[num_bytes:]
        return ahead[:num_bytes]


class Ears:
    """Waits for the first of several descriptors; asked about the same ones again it has nothing to set up.

    Args:
        fds_of: the descriptors of each of those listened to.
    """

    def __init__(self, fds_of: Callable[[int], Sequence[int]]) -> None:
        self._fds_of = fds_of
        self._indices: tuple[int, ...] = ()
        self._poll = select.poll()
        self._owner: dict[int, int] = {}

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> dict[int, list[int]]:
        """Those of `indices` of which something has come, each with its descriptors; in order."""
        asked = tuple(indices)
        if asked != self._indices:
            self._poll, self._indices = select.poll(), asked
            self._owner = {fd: index for index in asked for fd in self._fds_of(index)}
            for fd in self._owner:
                self._poll.register(fd, select.POLLIN)
        found: dict[int, list[int]] = {}
        for fd, _ in self._poll.poll(None if timeout_seconds is None else timeout_seconds * 1000):
            found.setdefault(self._owner[fd], []).append(fd)
        return dict(sorted(found.items())) if len(found) > 1 else found
