"""Whether two sites reach each other: plain connections on ports like gloo's, which may fail as often as they like."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING

from netsim.files.signed import PeerError, answer, connect

if TYPE_CHECKING:
    from netsim.files.signed import Place

__all__ = ["PairTests"]

_SERVICE = "netgym site"
_NUM_LETTERS = 16_384  # more than a packet, both ways: some routes let only small ones through
_MOST_GREETED = 64
_ANSWER_SECONDS = 10.0
_SIOCGIFADDR = 0x8915


class PairTests:
    """One process's end: it answers others, and tests whether it reaches them.

    Args:
        address: of this machine, where gloo listens too, unless GLOO_SOCKET_IFNAME says otherwise.
        secret: known to the run's processes.

    Attributes:
        place: where it listens; None where it cannot.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._greeted: list[socket.socket] = []
        self._lock = threading.Lock()
        self.place: Place | None = None
        with contextlib.suppress(OSError):
            host = _address_of_interface(os.environ.get("GLOO_SOCKET_IFNAME", "")) or address
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family)
            self.place = self._listener.getsockname()[:2]
            threading.Thread(target=self._accept, name="pair tests", daemon=True).start()

    def reaches(self, place: Place, seconds: float) -> bool:
        """Whether the listener there answers within that time."""
        try:
            channel = connect(place, self._secret, _SERVICE, "another site", seconds)
            try:
                channel.send(text="x" * _NUM_LETTERS)
                return len(channel.receive(seconds)["text"]) == _NUM_LETTERS
            finally:
                channel.close()
        except (PeerError, KeyError):
            return False

    def close(self) -> None:
        """Stop answering."""
        if self.place is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._greeted.append(connection)
                if len(self._greeted) > _MOST_GREETED:  # of strangers, who say nothing
                    with contextlib.suppress(OSError):
                        self._greeted.pop(0).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._answer, args=(connection,), name="pair test", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            channel = answer(connection, self._secret, _SERVICE)
            try:
                channel.send(**channel.receive(_ANSWER_SECONDS))
            finally:
                channel.close()
        except PeerError:
            pass
        finally:
            with self._lock:
                if connection in self._greeted:
                    self._greeted.remove(connection)


def _address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface; "" where it has none, or nobody can tell."""
    if not name or sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(told[20:24])
    return ""
