"""A private connection between a parent and its child process.

Nobody else can open the socket pair, so what travels on it may be pickles.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.ranks.processes.pickling import dumps_for_child

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ChannelClosed", "Pipe", "RankEnd"]

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 250  # Linux refuses more in one message


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

    Frames are pickles, so both ends must be processes of one run. Threads may send side by side, and while one
    receives.

    Raises:
        ChannelClosed: (`send`, `recv`, ...) the other end is gone. What it sent before can still be received.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        """Two connected ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, obj: Any) -> None:
        """Send one object; blocks while the other end does not read and the socket's buffer is full."""
        frame = _framed(obj)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process at the other end has closed the channel") from error

    def send_receiving(self, obj: Any) -> list[Any]:
        """Send one object and return what came meanwhile.

        Two ends that both send would wait for each other once their buffers are full; the end that uses this
        never makes the other wait.
        """
        left, received = memoryview(_framed(obj)), []
        try:
            while left:
                readable, writable, _ = select.select([self], [self], [])
                if writable:
                    left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
                elif readable:
                    received.append(self.recv())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process at the other end has closed the channel") from error
        return received

    def recv(self) -> Any:
        """The next object; blocks until it is there."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        # The other end of a socket pair is our own child: nobody else can write here.
        return pickle.loads(self._read(length))  # nosec B301

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

    def _read(self, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        view, filled = memoryview(buffer), 0
        while filled < num_bytes:
            try:
                count = self._socket.recv_into(view[filled:])
            except ConnectionResetError:
                count = 0
            if not count:
                raise ChannelClosed("the process at the other end has closed the channel")
            filled += count
        return buffer


def _framed(obj: Any) -> bytes:
    try:
        frame = pickle.dumps(obj, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        frame = dumps_for_child(obj)  # by value: classes and functions that no module of the other end has
    return _LENGTH.pack(len(frame)) + frame
