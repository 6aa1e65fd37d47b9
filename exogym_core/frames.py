"""Messages between processes that know one secret: nobody else is heard, and nothing can be changed on the way.

Whoever connects and whoever is connected to prove to each other that they know the secret, with numbers that are
new each time. Every message is signed with a key of its connection and direction and counted, so none can be
forged, altered, left out or sent twice. Messages are plain JSON, not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any, Self

from netsim.files.errors import InputError

__all__ = ["Frames", "FramesEndedError", "RefusedPeerError", "parse_address"]

_GREETING = b"netgym rendezvous 1\n"
_NONCE_BYTES, _PROOF_BYTES, _SEAL_BYTES = 32, 32, 16
_REFUSED = b"\0" * _PROOF_BYTES
_HEAD = struct.Struct(">I16s")
_MOST_BYTES = 4 << 20  # of one message
_GREETING_SECONDS = 5.0


class FramesEndedError(Exception):
    """The connection is no more."""


class RefusedPeerError(InputError):
    """Who is at the other end does not know the secret, or is something else altogether."""


class Frames:
    """One end of a connection, after both have shown that they know the secret.

    Several threads may send; one receives.

    Raises:
        RefusedPeerError: the other end knows another secret, or speaks otherwise.
        FramesEndedError: it has gone.
    """

    def __init__(self, connection: socket.socket, secret: bytes, is_server: bool) -> None:
        self._socket, self._lock = connection, threading.Lock()
        self._num_sent = self._num_received = 0
        connection.settimeout(_GREETING_SECONDS)
        with contextlib.suppress(OSError):  # no TCP, as in tests
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            nonces = self._greet(secret, is_server)
        except (OSError, FramesEndedError):
            self.close()
            raise FramesEndedError("it has gone while it was greeted") from None
        except RefusedPeerError:
            self.close()
            raise
        connection.settimeout(None)
        if is_server:  # who does not read must not hold up the others
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
        keys = [hmac.digest(secret, side + nonces, "sha256") for side in (b"to server", b"to client")]
        self._receiving, self._sending = keys if is_server else reversed(keys)

    @classmethod
    def connect(cls, address: tuple[str, int], secret: bytes, seconds: float = _GREETING_SECONDS) -> Self:
        """To who listens there.

        Raises:
            OSError: nobody does.
        """
        return cls(socket.create_connection(address, timeout=seconds), secret, is_server=False)

    def _greet(self, secret: bytes, is_server: bool) -> bytes:
        mine = secrets.token_bytes(_NONCE_BYTES)
        if is_server:
            self._socket.sendall(_GREETING + mine)
            theirs, proof = self._exactly(_NONCE_BYTES), self._exactly(_PROOF_BYTES)
            nonces = mine + theirs
            if not hmac.compare_digest(proof, _proof(secret, b"client", nonces)):
                self._socket.sendall(_REFUSED)
                raise RefusedPeerError("it does not know the secret")
            self._socket.sendall(_proof(secret, b"server", nonces))
            return nonces
        if self._exactly(len(_GREETING)) != _GREETING:
            raise RefusedPeerError("what listens there is no netgym rendezvous")
        nonces = self._exactly(_NONCE_BYTES) + mine
        self._socket.sendall(mine + _proof(secret, b"client", nonces))
        if not hmac.compare_digest(self._exactly(_PROOF_BYTES), _proof(secret, b"server", nonces)):
            raise RefusedPeerError("it has another secret")
        return nonces

    @property
    def address(self) -> str:
        """This end's own address: the interface by which the other end is reached."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Any) -> None:
        """Send a plain message.

        Raises:
            FramesEndedError: the connection is no more.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            seal = _seal(self._sending, self._num_sent, payload)
            self._num_sent += 1
            try:
                self._socket.sendall(_HEAD.pack(len(payload), seal) + payload)
            except OSError as error:
                raise FramesEndedError(str(error)) from None

    def receive(self) -> Any:
        """The next message, waiting for it.

        Raises:
            FramesEndedError: the connection is no more, or what came was not sent by its other end.
        """
        try:
            length, seal = _HEAD.unpack(self._exactly(_HEAD.size))
            if length > _MOST_BYTES:
                raise FramesEndedError("a message that is too long")
            payload = self._exactly(length)
        except OSError as error:
            raise FramesEndedError(str(error)) from None
        expected = _seal(self._receiving, self._num_received, payload)
        self._num_received += 1
        if not hmac.compare_digest(seal, expected):
            raise FramesEndedError("a message that was changed on its way")
        return json.loads(payload)

    def _exactly(self, length: int) -> bytes:
        got = bytearray()
        while len(got) < length:
            part = self._socket.recv(min(length - len(got), 1 << 20))
            if not part:
                raise FramesEndedError("the connection was closed")
            got += part
        return bytes(got)

    def close(self) -> None:
        """End the connection; who receives on it hears so."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"netgym " + side + nonces, "sha256")


def _seal(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")[:_SEAL_BYTES]


def parse_address(text: str, where: str) -> tuple[str, int]:
    """Host and port of "host:port"; `where` begins the line of what is refused.

    Raises:
        InputError: it is something else.

    >>> parse_address("[::1]:29400", "here")
    ('::1', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{where}: {text!r} is no address: write HOST:PORT, such as 10.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)
