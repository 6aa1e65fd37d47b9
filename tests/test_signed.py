"""Signed channels: authentication, and refusal of any other input."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rendezvous import together

from netsim.files import signed
from netsim.files.signed import PeerError, SignedChannel, StrangerError, answer_peer, connect_peer, greet

SECRET = b"known to these tests"
SERVICE = "a test"


@contextmanager
def channels() -> Iterator[tuple[SignedChannel, SignedChannel]]:
    """Who has connected, and who has answered."""
    ours, theirs = socket.socketpair()
    caller, called = together(
        lambda: greet(ours, SECRET, SERVICE, "b"), lambda: answer_peer(theirs, SECRET, SERVICE)
    )
    with ours, theirs:
        yield caller, called


def answered(*parts: bytes, secret: bytes = SECRET) -> tuple[Exception, bytes]:
    """What the listening end raises for who sends this, and what that one gets to read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for part in parts:
            ours.sendall(part)
        ours.shutdown(socket.SHUT_WR)
        (raised,) = together(lambda: answer_peer(theirs, secret, SERVICE))
        got = b""
        with suppress(ConnectionResetError):  # what was sent has not even been read
            while part := ours.recv(1000):
                got += part
    return raised, got


def test_messages_go_both_ways_in_order() -> None:
    with channels() as (caller, called):
        for number in range(3):
            caller.send(number=number)
            called.send(back=[number, None, "x"])
        assert [called.receive(5.0) for _ in range(3)] == [{"number": number} for number in range(3)]
        assert [caller.receive() for _ in range(3)] == [{"back": [number, None, "x"]} for number in range(3)]


@pytest.mark.parametrize(
    ("knows", "serves", "message"),
    [
        (b"another one", SERVICE, "does not show that it knows the secret"),
        (SECRET, "another test", "speaks another protocol than a test"),
    ],
)
def test_both_ends_refuse_each_other(knows: bytes, serves: str, message: str) -> None:
    ours, theirs = socket.socketpair()
    caller, called = together(
        lambda: greet(ours, knows, serves, "b"), lambda: answer_peer(theirs, SECRET, SERVICE)
    )
    assert isinstance(called, StrangerError)
    assert message in str(called)
    assert isinstance(caller, PeerError)  # a stranger where it learns of it, else gone
    assert str(caller).startswith("b: ")
    assert (ours.fileno(), theirs.fileno()) == (-1, -1)


@given(st.binary(max_size=300))
def test_garbage_is_refused_without_an_answer(garbage: bytes) -> None:
    raised, got = answered(garbage)
    assert isinstance(raised, PeerError)
    assert got == b""


def test_what_was_said_on_one_connection_is_worth_nothing_on_another() -> None:
    """All that a caller once sent, its messages too, is sent again to the same listener by somebody who has read it."""
    ours, theirs = socket.socketpair()
    there, here = socket.socketpair()
    received = bytearray()

    def carry(source: socket.socket, target: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while part := source.recv(1000):
                if keep:
                    received.extend(part)
                target.sendall(part)

    for source, target, keep in ((theirs, there, True), (there, theirs, False)):
        threading.Thread(target=carry, args=(source, target, keep), daemon=True).start()
    caller, called = together(
        lambda: greet(ours, SECRET, SERVICE, "b"), lambda: answer_peer(here, SECRET, SERVICE)
    )
    caller.send(do="pay")
    assert called.receive(5.0) == {"do": "pay"}
    for each in (ours, theirs, there, here):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    raised, _ = answered(bytes(received))
    assert isinstance(raised, StrangerError)
    assert "does not show that it knows the secret" in str(raised)


def raw_message(caller: SignedChannel) -> bytes:
    """The bytes of the next message of a channel, which stay on it as if they had never been sent."""
    ours, theirs = socket.socketpair()
    before, caller.socket = caller.socket, ours
    caller.send(do="this")
    caller.socket = before
    with ours, theirs:
        return theirs.recv(1000)


@given(st.data())
def test_a_changed_bit_is_noticed(data: st.DataObject) -> None:
    with channels() as (caller, called):
        raw = bytearray(raw_message(caller))
        bit = data.draw(st.integers(8 * 4, 8 * len(raw) - 1))  # behind the length
        raw[bit // 8] ^= 1 << bit % 8
        caller.socket.sendall(raw)
        with pytest.raises(StrangerError, match="changed on its way"):
            called.receive(5.0)


@pytest.mark.parametrize("kind", ["twice", "left out", "sent back"])
def test_messages_are_counted_one_way_each(kind: str) -> None:
    with channels() as (caller, called):
        raw = raw_message(caller)
        if kind == "left out":
            caller.send(do="that")
        elif kind == "twice":
            caller.socket.sendall(raw)
            assert called.receive(5.0) == {"do": "this"}
            caller.socket.sendall(raw)
        else:
            called.socket.sendall(raw)
        with pytest.raises(StrangerError, match="changed on its way"):
            (caller if kind == "sent back" else called).receive(5.0)


class Trickling(socket.socket):
    """A connection on which there is always one more byte, and a second passes until it is read."""

    seconds = 0.0

    def recv(self, most: int, flags: int = 0) -> bytes:
        type(self).seconds += 1.0
        return b"a"


def test_a_slow_sender_does_not_hold_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for all of a greeting, or of a message, however steadily its bytes come."""
    monkeypatch.setattr(signed, "time", SimpleNamespace(monotonic=lambda: Trickling.seconds))
    ours, theirs = socket.socketpair()
    slow = Trickling(fileno=theirs.detach())
    with ours, slow:
        ours.sendall(b"a")  # so that there is something to read
        channel = SignedChannel(slow, "b", (b"", b""))
        with pytest.raises(PeerError, match=r"^b: said nothing for 10 s$"):
            channel.receive(10.0)
        assert Trickling.seconds == 10.0
        monkeypatch.setattr(signed, "_greeting", lambda service: b"a" * 50)
        with pytest.raises(PeerError, match="left before showing that it knows the secret"):
            answer_peer(slow, SECRET, SERVICE)
        assert Trickling.seconds == 10.0 + signed._GREETING_SECONDS


def test_an_end_that_has_gone() -> None:
    with channels() as (caller, called):
        (got, _) = together(caller.receive, called.close)  # who waits hears of it
        assert isinstance(got, PeerError)
        with pytest.raises(PeerError, match=r"^b: the connection was lost"):
            [caller.send(do="this") for _ in range(2)]


def test_what_listens_may_be_something_else_or_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()

        def serve() -> None:
            opened, _ = listener.accept()
            opened.recv(100)
            opened.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            opened.close()

        raised, _ = together(lambda: connect_peer(place, SECRET, SERVICE, "b", 5.0), serve)
    assert isinstance(raised, StrangerError)
    assert str(raised) == "b: the process that listens there is no a test, or of another version"
    with pytest.raises(PeerError, match=r"^b: cannot be reached: Connection refused$"):
        connect_peer(place, SECRET, SERVICE, "b", 5.0)
