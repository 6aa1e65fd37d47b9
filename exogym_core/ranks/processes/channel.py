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
    from collections.abc import Sequence

__all__ = ["ChannelClosed", "Pipe", "RankEnd"]

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 250  # Linux refuses more in one message
_MOST_BYTES_AT_ONCE = 1 << 20


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

    Raises:
        ChannelClosed: (`send`, `recv`, ...) the other end is gone. What it sent before can still be received.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._writer, self._reader = ShorthandWriter(), ShorthandReader()

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
        left, received = memoryview(self._framed(obj)), []
        try:
            while left:
                with contextlib.suppress(BlockingIOError):
                    left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
                    continue
                readable, writable, _ = select.select([self], [self], [])
                if readable and not writable:
                    received.append(self.recv())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process at the other end has closed the channel") from error
        return received

    def recv(self) -> Any:
        """The next object; blocks until it is there."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        # The other end of a socket pair is our own child: nobody else can write here.
        return self._reader.read(self._read(length))

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
        return bool(select.select([self], [], [], 0)[0])

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
        parts, left = [], num_bytes
        while left:
            try:
                part = self._socket.recv(min(left, _MOST_BYTES_AT_ONCE), socket.MSG_WAITALL)
            except ConnectionResetError:
                part = b""
            if not part:
                raise ChannelClosed("the process at the other end has closed the channel")
            left -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
