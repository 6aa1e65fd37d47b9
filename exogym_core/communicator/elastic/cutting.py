"""Ending what waits inside of gloo for a peer that neither answers nor closes its connections.

gloo's calls wait until their time-out, and torch's `abort` waits for them. A connection that is shut down here is for
gloo as one that broke: its calls fail at once, and no other call is touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

__all__ = ["OpenedSockets"]

_DESCRIPTORS = "/dev/fd"  # of this process; there on Linux and macOS


def _sockets() -> dict[int, int]:
    """This process's sockets: descriptor -> what tells it from a later one of that number."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError, ValueError):
                about = os.fstat(int(name))
                if stat.S_ISSOCK(about.st_mode):
                    found[int(name)] = about.st_ino
    return found


class OpenedSockets:
    """The sockets that this process opens from now on, until `stop`."""

    def __init__(self) -> None:
        self._before, self._opened = _sockets(), dict[int, int]()
        self._is_counting = True

    def stop(self) -> None:
        """Count no sockets that are opened later."""
        self._opened, self._is_counting = self._now(), False

    def cut(self) -> None:
        """Shut these connections down, as far as they are still there; who listens goes on listening."""
        for number, node in (self._now() if self._is_counting else self._opened).items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino != node:
                    continue
                with socket.socket(fileno=os.dup(number)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)

    def _now(self) -> dict[int, int]:
        return {number: node for number, node in _sockets().items() if self._before.get(number) != node}
