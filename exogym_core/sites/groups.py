"""Process groups between two or more sites: connected, ended early, states sent through them."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
from typing import TYPE_CHECKING

import torch

from exogym_core.communicator.gloo.rendezvous import ConnectionLostError

if TYPE_CHECKING:
    from exogym_core.communicator.gloo.rendezvous import ProcessGroups

__all__ = ["OpenedSockets", "moved"]

_DESCRIPTORS = "/dev/fd"  # of this process; there on Linux and macOS


def _sockets() -> dict[int, int]:
    """This process's sockets: descriptor -> inode, which a later one of that number does not share."""
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
        """Shut down these connections where still open; listening sockets stay."""
        for number, node in (self._now() if self._is_counting else self._opened).items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino != node:
                    continue
                with socket.socket(fileno=os.dup(number)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)

    def _now(self) -> dict[int, int]:
        return {number: node for number, node in _sockets().items() if self._before.get(number) != node}


_PART_BYTES = 8 << 20  # of a state, at once: each part has its own time-out
_PART_SECONDS = 30.0


def moved(groups: ProcessGroups, sender: int, receiver: int, payload: bytes | None) -> bytes:
    """Bytes from one of two sites to the other; `payload` is the sender's.

    Raises:
        ConnectionLostError: a part took longer, or the connection broke.
    """
    control, place = groups.control, int(sender > receiver)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = place
    try:
        control._set_default_timeout(datetime.timedelta(seconds=_PART_SECONDS))
        size = torch.tensor([0 if payload is None else len(payload)])
        control.broadcast([size], options).wait()
        whole = (
            torch.empty(int(size), dtype=torch.uint8)
            if payload is None
            else torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        )
        for part in torch.split(whole, _PART_BYTES):
            control.broadcast([part], options).wait()
    except RuntimeError as error:
        raise ConnectionLostError(
            f"the state sent by site {sender} was cut off: {str(error).partition(chr(10))[0]}", receiver
        ) from None
    return whole.numpy().tobytes() if payload is None else payload
