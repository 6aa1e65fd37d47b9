"""Ending what waits inside of gloo for a peer that neither answers nor closes its connections.

gloo's calls wait until their time-out, and torch's `abort` waits for them. A connection that is shut down here is for
gloo as one that broke: its calls fail at once, and no other call is touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["cut", "sockets_made"]

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


@contextmanager
def sockets_made() -> Iterator[dict[int, int]]:
    """What is in the mapping afterwards are the sockets that this process has opened inside."""
    before, made = _sockets(), dict[int, int]()
    yield made
    made |= {number: node for number, node in _sockets().items() if before.get(number) != node}


def cut(sockets: Mapping[int, int]) -> None:
    """Shut these connections down, as far as they are still there; who listens goes on listening."""
    for number, node in sockets.items():
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino != node:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
