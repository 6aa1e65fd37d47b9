"""Signed messages between processes that share a secret: strangers are refused, changed messages detected.

The connecting end speaks first, and both ends prove that they know the secret before anything else is read, with fresh
numbers (HMAC-SHA256; the connecting end proves it first, and learns no more than that it is refused). Every
message afterwards is JSON, signed with a key of its connection and direction, and counted: none can be forged,
altered, left out, sent twice or sent back. Messages are not encrypted, and nothing is unpickled.

The secret is what launchers share: the variable NETGYM_SECRET, a file that NETGYM_SECRET_FILE names, or the user's own
file, which is made when it is first needed. Plain sockets, those of torch's stores and gloo included, accept anyone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netsim.errors import InputError, NetsimError
from netsim.units import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PeerAddress",
    "PeerError",
    "SecretError",
    "SignedChannel",
    "StrangerError",
    "UnreachableError",
    "answer_peer",
    "connect_peer",
    "shared_secret",
    "user_secret",
]

_NUM_BYTES = 32
_LEAST_LENGTH = 16


def shared_secret() -> bytes:
    """Read the secret of this process's run: from the environment, else the user's own.

    Raises:
        InputError: it is too short, or its file cannot be read or can be read by others.
    """
    given = os.environ.get("NETGYM_SECRET")
    if given is not None:
        if len(given) < _LEAST_LENGTH:
            raise InputError(
                f"environment: NETGYM_SECRET has {len(given)} characters; give {_LEAST_LENGTH} or more that nobody "
                "can guess, such as `openssl rand -hex 32` prints"
            )
        return given.encode()
    path = os.environ.get("NETGYM_SECRET_FILE")
    return _read_secret(Path(path)) if path is not None else user_secret()


def user_secret() -> bytes:
    """Secret of this user's processes on this machine (or home), created at the first call.

    Raises:
        InputError: its file can be neither made nor read, or can be read by others.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(home) / "netgym" / "secret"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Written whole or not at all: ranks that start together read the same one.
            temporary = path.with_name(f".secret-{secrets.token_hex(8)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_NUM_BYTES) + "\n")
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
    except OSError as error:
        raise InputError(
            f"{printable(path)}: cannot be made ({error.strerror}): set NETGYM_SECRET_FILE to a file of yours with "
            "mode 0600, or NETGYM_SECRET"
        ) from error
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    where = printable(path)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(4096).strip()
    except OSError as error:
        raise InputError(f"{where}: the secret cannot be read: {error.strerror}") from error
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"{where}: the secret can be read by others: make it yours alone (chmod 600)")
    if len(content) < _LEAST_LENGTH:
        raise InputError(f"{where}: the secret is shorter than {_LEAST_LENGTH} bytes: write a longer one")
    return content


_VERSION = 2
_NONCE_BYTES = _SEAL_BYTES = 32
_HEAD = struct.Struct("!I32s")  # how long a message is, and its seal
_MOST_BYTES = 4 << 20  # of one message
_GREETING_SECONDS = 10.0
_MOST_READ = 1 << 20

PeerAddress = tuple[str, int]
"""Address and port."""


class PeerError(NetsimError, RuntimeError):
    """Another process cannot be reached, has ended, or reports an error."""


class StrangerError(PeerError):
    """The other end does not know the secret, or is another service."""


class SecretError(StrangerError):
    """The listening end has another secret."""


class UnreachableError(PeerError):
    """Nothing listens at an address."""


class SignedChannel:
    """Signed messages over one connection; both ends have shown that they know the secret.

    Several threads may send; one receives.

    Args:
        opened: the connection, closed with the channel.
        name: of the other end, for errors.
        keys: of what this end sends, and of what it receives.

    Attributes:
        socket: the connection, for use without messages.
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
        """Make `send` close the connection if the other end does not read for `seconds`."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, **message: Any) -> None:
        """Send `message` as one sealed frame of JSON; callable from several threads.

        Raises:
            PeerError: the connection was lost; it is closed.
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
        """Receive the next message, all of it within `seconds`.

        Raises:
            PeerError: the connection was lost, or nothing arrived in time.
            StrangerError: the message was not sent by the other end.
        """
        try:
            deadline = time.monotonic() + seconds
            length, seal = _HEAD.unpack(_read(self.socket, _HEAD.size, deadline))
            if length > _MOST_BYTES:
                raise StrangerError(
                    f"{self.name}: sent {length:,} bytes for a message, more than any peer sends"
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
        """End the connection; pending `receive` calls fail, at both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()


def connect_peer(
    place: PeerAddress,
    secret: bytes,
    service: str,
    where: str,
    seconds: float,
    greeting_seconds: float = _GREETING_SECONDS,
) -> SignedChannel:
    """Open a channel to the listener at a place.

    Args:
        place: address and port.
        secret: known to both.
        service: name of the service that must listen there, such as "netsim probe".
        where: its name in errors.
        seconds: time-out of the connection.
        greeting_seconds: time for both ends to prove that they know the secret.

    Raises:
        UnreachableError: nothing listens there.
        PeerError: it is not ready.
        SecretError: the listener has another secret.
        StrangerError: the listener is another service.
    """
    try:
        opened = socket.create_connection(place, timeout=seconds)
    except OSError as error:
        raise UnreachableError(f"{where}: cannot be reached: {_reason(error)}") from None
    return greet(opened, secret, service, where, greeting_seconds)


def greet(
    opened: socket.socket, secret: bytes, service: str, where: str, seconds: float = _GREETING_SECONDS
) -> SignedChannel:
    """Open a channel over a connection that this end has opened; raises as `connect_peer` does."""
    with _close_on_failure(opened, f"{where}: is no {service}, or not ready"):
        deadline = _prepare(opened, seconds)
        greeting, mine = _greeting(service), secrets.token_bytes(_NONCE_BYTES)
        opened.sendall(greeting + mine)
        if _read(opened, len(greeting), deadline) != greeting:
            raise StrangerError(
                f"{where}: the process that listens there is no {service}, or of another version"
            )
        both = greeting + mine + _read(opened, _NONCE_BYTES, deadline)
        opened.sendall(_proof(secret, b"connects", both))
        if _read(opened, 1, deadline) != b"y":
            raise SecretError(
                f"{where}: has another secret: give both the same (NETGYM_SECRET, or the file of NETGYM_SECRET_FILE)"
            )
        if not hmac.compare_digest(_read(opened, _SEAL_BYTES, deadline), _proof(secret, b"listens", both)):
            raise StrangerError(f"{where}: does not know the secret")
    to, fro = _keys(secret, both)
    return SignedChannel(opened, where, (to, fro))


def answer_peer(opened: socket.socket, secret: bytes, service: str) -> SignedChannel:
    """Open a channel to the process that has connected; close the connection on failure.

    Args:
        opened: the accepted connection.
        secret: known to both.
        service: name of the service here, such as "netsim probe".

    Raises:
        PeerError: the process left before proving that it knows the secret, or took too long.
        StrangerError: the process does not know the secret, or asks for another service; it gets no other answer.
    """
    where = _peer(opened)
    with _close_on_failure(opened, f"{where}: left before showing that it knows the secret"):
        deadline = _prepare(opened)
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
def _close_on_failure(opened: socket.socket, failure: str) -> Iterator[None]:
    """Close the connection if the greeting in the block fails; `failure` begins the error of a lost one."""
    try:
        yield
    except OSError as error:
        opened.close()
        raise PeerError(f"{failure} ({_reason(error)})") from None
    except StrangerError:
        opened.close()
        raise


def _prepare(opened: socket.socket, seconds: float = _GREETING_SECONDS) -> float:
    """Prepare a connection to send at once and never time out by itself; return the deadline of the greeting."""
    opened.settimeout(None)
    with contextlib.suppress(OSError):  # no TCP, as in tests
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return time.monotonic() + seconds


def _greeting(service: str) -> bytes:
    return f"{service} {_VERSION}\n".encode()


def _peer(opened: socket.socket) -> str:
    try:
        host, port = opened.getpeername()[:2]
    except (OSError, ValueError):  # it has left already, or has no such address
        return "the connecting process"
    return f"{host}:{port}"


def _proof(secret: bytes, side: bytes, both: bytes) -> bytes:
    return hmac.digest(secret, side + b" " + both, "sha256")


def _keys(secret: bytes, both: bytes) -> tuple[bytes, bytes]:
    """Keys of messages to the listening end, and from it."""
    return hmac.digest(secret, b"to " + both, "sha256"), hmac.digest(secret, b"fro " + both, "sha256")


def _seal(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")


def _read(opened: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Read `num_bytes` by a deadline; sending is not limited."""
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
        return True  # `recv` reports that it is closed
    poll = select.poll()  # unlike select it takes descriptors of any number
    poll.register(opened, select.POLLIN)
    return bool(poll.poll(math.ceil(seconds * 1e3)))


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
