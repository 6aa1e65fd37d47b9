"""Messages between processes that know one secret: nobody else is heard, and nothing can be changed on the way.

Who connects speaks first, and both ends show that they know the secret before anything else is read, with numbers that
are new each time (HMAC-SHA256; who connects shows it first, and learns no more than that it is refused). Every
message afterwards is JSON, signed with a key of its connection and direction, and counted: none can be forged,
altered, left out, sent twice or sent back. Messages are not encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from netsim.files.errors import NetsimError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PeerError", "Place", "SignedChannel", "StrangerError", "answer", "connect"]

_VERSION = 2
_NONCE_BYTES = _SEAL_BYTES = 32
_HEAD = struct.Struct("!I32s")  # how long a message is, and its seal
_MOST_BYTES = 4 << 20  # of one message
_GREETING_SECONDS = 10.0
_MOST_READ = 1 << 20

Place = tuple[str, int]
"""Address and port."""


class PeerError(NetsimError, RuntimeError):
    """Another process cannot be reached, is gone, or says what went wrong there."""


class StrangerError(PeerError):
    """Who is at the other end does not know the secret, or is something else altogether."""


class SignedChannel:
    """Signed messages over one connection; both ends have shown that they know the secret.

    Several threads may send; one receives.

    Args:
        opened: the connection, closed with the channel.
        name: of the other end, for errors.
        keys: of what this end sends, and of what it receives.

    Attributes:
        socket: the connection, for those who go on without messages.
        name: of the other end.
    """

    def __init__(self, opened: socket.socket, name: str, keys: tuple[bytes, bytes]) -> None:
        self.socket, self.name = opened, name
        self._sending, self._receiving = keys
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """This end's own address: the interface by which the other end is reached."""
        return str(self.socket.getsockname()[0])

    def give_up_sending_after(self, seconds: float) -> None:
        """Hold up nobody for an end that does not read: sending ends the connection after so long."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            PeerError: the connection is no more; where only part of it could be sent, it is closed.
        """
        content = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            seal = _seal(self._sending, self._num_sent, content)
            self._num_sent += 1
            try:
                self.socket.sendall(_HEAD.pack(len(content), seal) + content)
            except OSError as error:
                self.close()
                raise PeerError(f"{self.name}: the connection was lost ({_reason(error)})") from None

    def receive(self, seconds: float = math.inf) -> dict[str, Any]:
        """The next message, all of it waited for at most that long.

        Raises:
            PeerError: the connection is no more, or nothing has come.
            StrangerError: what came was not sent by its other end.
        """
        try:
            deadline = time.monotonic() + seconds
            length, seal = _HEAD.unpack(_read(self.socket, _HEAD.size, deadline))
            if length > _MOST_BYTES:
                raise StrangerError(
                    f"{self.name}: sent {length:,} bytes for a message, which nobody here does"
                )
            content = _read(self.socket, length, deadline)
        except TimeoutError:
            raise PeerError(f"{self.name}: said nothing for {seconds:.0f} s") from None
        except OSError as error:
            raise PeerError(f"{self.name}: the connection was lost ({_reason(error)})") from None
        if not hmac.compare_digest(seal, _seal(self._receiving, self._num_received, content)):
            raise StrangerError(f"{self.name}: a message was changed on its way")
        self._num_received += 1
        message = json.loads(content)
        assert isinstance(message, dict)
        return message

    def close(self) -> None:
        """End the connection; who receives on it hears so, at both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()


def connect(place: Place, secret: bytes, service: str, where: str, seconds: float) -> SignedChannel:
    """A channel to who listens at a place.

    Args:
        place: address and port.
        secret: known to both.
        service: what must listen there, such as "netsim probe".
        where: what errors call it.
        seconds: to be reached in.

    Raises:
        PeerError: nobody is there, or not ready.
        StrangerError: it is something else, or has another secret.
    """
    try:
        opened = socket.create_connection(place, timeout=seconds)
    except OSError as error:
        raise PeerError(f"{where}: cannot be reached: {_reason(error)}") from None
    return greet(opened, secret, service, where)


def greet(opened: socket.socket, secret: bytes, service: str, where: str) -> SignedChannel:
    """A channel over a connection that this end has made; raises as `connect` does."""
    with _or_closed(opened, f"{where}: is no {service}, or not ready"):
        deadline = _prepared(opened)
        greeting, mine = _greeting(service), secrets.token_bytes(_NONCE_BYTES)
        opened.sendall(greeting + mine)
        if _read(opened, len(greeting), deadline) != greeting:
            raise StrangerError(f"{where}: what listens there is no {service}, or one of another version")
        both = greeting + mine + _read(opened, _NONCE_BYTES, deadline)
        opened.sendall(_proof(secret, b"connects", both))
        if _read(opened, 1, deadline) != b"y":
            raise StrangerError(
                f"{where}: has another secret: give both the same (NETGYM_SECRET, or the file of NETGYM_SECRET_FILE)"
            )
        if not hmac.compare_digest(_read(opened, _SEAL_BYTES, deadline), _proof(secret, b"listens", both)):
            raise StrangerError(f"{where}: does not know the secret")
    to, fro = _keys(secret, both)
    return SignedChannel(opened, where, (to, fro))


def answer(opened: socket.socket, secret: bytes, service: str) -> SignedChannel:
    """A channel to who has connected; the connection is closed where there can be none.

    Raises:
        PeerError: it left before showing that it knows the secret, or took too long.
        StrangerError: it does not know the secret, or wants something else; it is told nothing else.
    """
    where = _peer(opened)
    with _or_closed(opened, f"{where}: left before showing that it knows the secret"):
        deadline = _prepared(opened)
        greeting, mine = _greeting(service), secrets.token_bytes(_NONCE_BYTES)
        if _read(opened, len(greeting), deadline) != greeting:
            raise StrangerError(f"{where}: speaks another protocol than {service}, or another version of it")
        both = greeting + _read(opened, _NONCE_BYTES, deadline) + mine
        opened.sendall(greeting + mine)
        proof = _read(opened, _SEAL_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"connects", both)):
            opened.sendall(b"n")
            raise StrangerError(f"{where}: does not show that it knows the secret")
        opened.sendall(b"y" + _proof(secret, b"listens", both))
    to, fro = _keys(secret, both)
    return SignedChannel(opened, where, (fro, to))


@contextlib.contextmanager
def _or_closed(opened: socket.socket, failure: str) -> Iterator[None]:
    """Greet within: else the connection is closed, and what went wrong with it is told as `failure`."""
    try:
        yield
    except OSError as error:
        opened.close()
        raise PeerError(f"{failure} ({_reason(error)})") from None
    except StrangerError:
        opened.close()
        raise


def _prepared(opened: socket.socket) -> float:
    """Have a connection send at once and never time out by itself; the instant at which the greeting must be over."""
    opened.settimeout(None)
    with contextlib.suppress(OSError):  # no TCP, as in tests
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return time.monotonic() + _GREETING_SECONDS


def _greeting(service: str) -> bytes:
    return f"{service} {_VERSION}\n".encode()


def _peer(opened: socket.socket) -> str:
    try:
        host, port = opened.getpeername()[:2]
    except (OSError, ValueError):  # it has left already, or has no such address
        return "who connected"
    return f"{host}:{port}"


def _proof(secret: bytes, side: bytes, both: bytes) -> bytes:
    return hmac.digest(secret, side + b" " + both, "sha256")


def _keys(secret: bytes, both: bytes) -> tuple[bytes, bytes]:
    """Of what goes to who listens, and of what comes from there."""
    return hmac.digest(secret, b"to " + both, "sha256"), hmac.digest(secret, b"fro " + both, "sha256")


def _seal(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")


def _read(opened: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """So many bytes, all by a deadline, however few come at a time; others may send meanwhile, with no limit."""
    content = bytearray()
    while len(content) < num_bytes:
        if deadline < math.inf:
            left = deadline - time.monotonic()
            if left <= 0 or not _is_readable(opened, left):
                raise TimeoutError("timed out")
        part = opened.recv(min(num_bytes - len(content), _MOST_READ))
        if not part:
            raise ConnectionResetError("it was closed")
        content += part
    return bytes(content)


def _is_readable(opened: socket.socket, seconds: float) -> bool:
    if opened.fileno() < 0:
        return True  # that it is closed is for `recv` to tell
    poll = select.poll()  # unlike select it takes descriptors of any number
    poll.register(opened, select.POLLIN)
    return bool(poll.poll(math.ceil(seconds * 1e3)))


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
