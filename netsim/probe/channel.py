"""Connections between the hosts of a probe: nobody is let in who does not know their secret, nothing is unpickled.

Both ends show that they know it before anything else is read (a challenge with fresh numbers, HMAC-SHA256, the one
that connects first), and every message afterwards is JSON, numbered and signed with a key of this connection alone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from netsim.files.errors import NetsimError

__all__ = ["PeerError", "Place", "SignedChannel", "StrangerError", "answer", "connect"]

_GREETING = b"netsim-probe 1\n"
_NUM_BYTES = 32
_MOST_BYTES = 1 << 20
_GREETING_SECONDS = 10.0

Place = tuple[str, int]
"""Address and port."""


class PeerError(NetsimError, RuntimeError):
    """Another host of a probe cannot be reached, is gone, or says what went wrong there."""


class StrangerError(PeerError):
    """Who is at the other end does not know the secret."""


class SignedChannel:
    """Signed messages over one connection; both ends have shown that they know the secret.

    Args:
        opened: the connection, closed with the channel.
        name: of the other end, for errors.
        key: of this connection.
        is_caller: whether this end has connected.
    """

    def __init__(self, opened: socket.socket, name: str, key: bytes, is_caller: bool) -> None:
        self.socket, self.name, self._key = opened, name, key
        self._ways = (b"to", b"fro") if is_caller else (b"fro", b"to")
        self._numbers = [0, 0]

    def send(self, **message: Any) -> None:
        """Send a message. Raises PeerError where the other end is gone."""
        content = json.dumps(message).encode()
        packed = struct.pack("!I", len(content)) + content + self._seal(0, content)
        try:
            self.socket.sendall(packed)
        except OSError as error:
            raise PeerError(f"{self.name}: the connection was lost ({_reason(error)})") from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message, waited for at most that long. Raises PeerError."""
        try:
            with _limited(self.socket, seconds) as deadline:
                (length,) = struct.unpack("!I", _read(self.socket, 4, deadline))
                if length > _MOST_BYTES:
                    raise StrangerError(
                        f"{self.name}: sent {length:,} bytes for a message: it is no netsim probe"
                    )
                content = _read(self.socket, length, deadline)
                seal = _read(self.socket, _NUM_BYTES, deadline)
        except TimeoutError:
            raise PeerError(f"{self.name}: said nothing for {seconds:.0f} s") from None
        except OSError as error:
            raise PeerError(f"{self.name}: the connection was lost ({_reason(error)})") from None
        if not hmac.compare_digest(seal, self._seal(1, content)):
            raise StrangerError(f"{self.name}: a message was changed on its way")
        message = json.loads(content)
        assert isinstance(message, dict)
        return message

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def _seal(self, way: int, content: bytes) -> bytes:
        number = struct.pack("!Q", self._numbers[way])
        self._numbers[way] += 1
        return hmac.digest(self._key, self._ways[way] + number + content, "sha256")


def connect(place: Place, secret: bytes, name: str, seconds: float) -> SignedChannel:
    """A channel to a host that listens. Raises PeerError: it is not there, is no probe, or has another secret."""
    where = f"{name} ({place[0]}:{place[1]})"
    try:
        opened = socket.create_connection(place, timeout=seconds)
    except OSError as error:
        raise PeerError(f"{where}: cannot be reached: {_reason(error)}") from None
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _limited(opened, _GREETING_SECONDS) as deadline:
            mine = secrets.token_bytes(_NUM_BYTES)
            opened.sendall(_GREETING + mine)
            if _read(opened, len(_GREETING), deadline) != _GREETING:
                raise PeerError(f"{where}: what listens there is no netsim probe, or one of another version")
            both = mine + _read(opened, _NUM_BYTES, deadline)
            opened.sendall(hmac.digest(secret, b"connects" + both, "sha256"))
            if _read(opened, 1, deadline) != b"y":
                raise StrangerError(
                    f"{where}: has another secret: give both the same (NETGYM_SECRET, or its file)"
                )
            proof = _read(opened, _NUM_BYTES, deadline)
            if not hmac.compare_digest(proof, hmac.digest(secret, b"listens" + both, "sha256")):
                raise StrangerError(f"{where}: does not know the secret")
    except PeerError:
        opened.close()
        raise
    except OSError as error:
        opened.close()
        raise PeerError(f"{where}: is no netsim probe, or not ready ({_reason(error)})") from None
    return SignedChannel(opened, where, hmac.digest(secret, b"key" + both, "sha256"), True)


def answer(opened: socket.socket, secret: bytes) -> SignedChannel:
    """A channel to who has connected. Raises StrangerError: they do not know the secret; they are told nothing else."""
    host, port = opened.getpeername()[:2]
    where = f"{host}:{port}"
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _limited(opened, _GREETING_SECONDS) as deadline:
            if _read(opened, len(_GREETING), deadline) != _GREETING:
                raise StrangerError(f"{where}: is no netsim probe, or one of another version")
            mine = secrets.token_bytes(_NUM_BYTES)
            both = _read(opened, _NUM_BYTES, deadline) + mine
            opened.sendall(_GREETING + mine)
            proof = _read(opened, _NUM_BYTES, deadline)
            if not hmac.compare_digest(proof, hmac.digest(secret, b"connects" + both, "sha256")):
                opened.sendall(b"n")
                raise StrangerError(f"{where}: has another secret")
            opened.sendall(b"y" + hmac.digest(secret, b"listens" + both, "sha256"))
    except OSError as error:
        raise StrangerError(
            f"{where}: left before showing that it knows the secret ({_reason(error)})"
        ) from None
    return SignedChannel(opened, where, hmac.digest(secret, b"key" + both, "sha256"), False)


@contextlib.contextmanager
def _limited(opened: socket.socket, seconds: float) -> Any:
    """The instant at which reading ends, however few bytes come at a time; no limit afterwards."""
    opened.settimeout(seconds)
    try:
        yield time.monotonic() + seconds
    finally:
        with contextlib.suppress(OSError):
            opened.settimeout(None)


def _read(opened: socket.socket, num_bytes: int, deadline: float) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        opened.settimeout(left)
        part = opened.recv(num_bytes - len(content))
        if not part:
            raise ConnectionResetError("it was closed")
        content += part
    return bytes(content)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
