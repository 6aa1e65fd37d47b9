"""A port on which members of a run connect, signed with its secret."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from netsim.files.signed import PeerError, StrangerError, answer_peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from netsim.files.signed import PeerAddress, SignedChannel

__all__ = ["SignedListener"]

_MOST_GREETED = 64  # connections that have not authenticated yet
_RETRY_SECONDS = 0.05  # where there are too many files


class SignedListener:
    """Accepts connections until it is closed; each is authenticated, and handled, in a thread of its own.

    Args:
        address: to listen at; port 0 takes a free one.
        secret: known to the run's processes.
        service: that both ends name.
        handle: called with each authenticated connection, which it closes.
        on_stranger: called with the error of a connection with another secret.

    Attributes:
        address: where it listens.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        address: PeerAddress,
        secret: bytes,
        service: str,
        handle: Callable[[SignedChannel], None],
        on_stranger: Callable[[StrangerError], None] = lambda error: None,
    ) -> None:
        self._secret, self._service, self._handle, self._on_stranger = secret, service, handle, on_stranger
        self._greeted: list[socket.socket] = []  # the oldest first
        self._lock, self._ended = threading.Lock(), threading.Event()
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server(address, family=family)
        self.address: PeerAddress = self._socket.getsockname()[:2]

    def start(self) -> None:
        """Accept connections from now on."""
        threading.Thread(target=self._accept, name=self._service, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or too many files
                self._ended.wait(_RETRY_SECONDS)
                continue
            with self._lock:
                self._greeted.append(connection)
                if len(self._greeted) > _MOST_GREETED:  # members authenticate sooner than strangers leave
                    with contextlib.suppress(OSError):
                        self._greeted.pop(0).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._answer, args=(connection,), name=self._service, daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        channel = None
        try:
            channel = answer_peer(connection, self._secret, self._service)
        except StrangerError as error:
            self._on_stranger(error)
        except PeerError:
            pass
        finally:
            with self._lock:
                if connection in self._greeted:
                    self._greeted.remove(connection)
        if channel is not None:
            self._handle(channel)
