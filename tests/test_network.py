"""The network's interface: order, connections, callbacks, faults, observers; times are exact."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import simpy
from worlds import star

from netsim import Clock, Network, Protocol, Topology
from netsim.errors import InputError

# a - switch - b, c: 8 Mbit/s each way, 10 ms from the host to the switch: 1 MB takes 1.02 s.
TOPOLOGY = star()
A, B, C = range(3)
MEGABYTE = 1_000_000
LATENCY = 0.02


class Log:
    """What happened when, as a list of (instant, name)."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.lines: list[tuple[float, str]] = []

    def on(self, name: str) -> Any:
        return partial(self._add, name)

    def _add(self, name: str) -> None:
        self.lines.append((round(self.env.now, 9), name))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def network(clock: Clock) -> Network:
    return Network(clock, TOPOLOGY)


@pytest.fixture
def log(clock: Clock) -> Log:
    return Log(clock)


def test_processes_of_simpy_share_its_clock(clock: Clock, network: Network) -> None:
    def process() -> Any:
        yield network.transfer(A, B, MEGABYTE)
        yield clock.timeout(1)
        yield network.transfer(B, A, 0)

    clock.run(clock.process(process()))
    assert clock.now == pytest.approx(2.04, rel=1e-12)


def test_messages_of_one_connection_leave_whole_and_in_order(
    clock: Clock, network: Network, log: Log
) -> None:
    network.send(A, B, MEGABYTE, log.on("long"))
    network.send(A, B, 1000, log.on("short"))
    network.send(A, B, 0, log.on("empty"))
    network.send(A, B, 1000, log.on("aside"), connection="other")
    clock.run()
    # The one on its own connection shares the link until it is through: 2,000 bytes have passed then.
    assert log.lines == [(0.022, "aside"), (1.021, "long"), (1.022, "short"), (1.022, "empty")]


def test_what_follows_on_a_connection_does_not_wait_its_latency_again(
    clock: Clock, network: Network, log: Log
) -> None:
    network.send(A, B, MEGABYTE, log.on("first"))
    clock.run(until=1.01)
    network.send(A, B, 1000, log.on("second"))
    clock.run()
    assert log.lines == [(1.02, "first"), (1.031, "second")]


def test_callbacks_of_one_instant_come_in_order_of_sending(clock: Clock, network: Network, log: Log) -> None:
    for name, target in [("1", B), ("2", C), ("3", B), ("4", C)]:
        network.send(A, target, 1000, log.on(name), connection=name)
    clock.run()
    assert log.lines == [(0.024, name) for name in "1234"]


def test_within_a_host_delivery_is_at_once_but_after_send_returns(
    clock: Clock, network: Network, log: Log
) -> None:
    network.send(A, A, MEGABYTE, log.on("there"), on_sent=log.on("sent"))
    assert log.lines == []
    clock.run()
    assert log.lines == [(0.0, "sent"), (0.0, "there")]
    assert network.link_bytes.sum() == 0


def test_a_callback_may_send_on_in_the_same_instant(clock: Clock, network: Network, log: Log) -> None:
    network.send(A, B, MEGABYTE, lambda: network.send(B, C, MEGABYTE, log.on("there")) and None)
    clock.run()
    assert log.lines == [(2.04, "there")]


def test_an_aborted_transfer_gives_way(clock: Clock, network: Network, log: Log) -> None:
    doomed = network.send(A, B, 2 * MEGABYTE, log.on("never"))
    network.send(A, B, MEGABYTE, log.on("next"))
    clock.run(until=0.52)
    assert network.abort(doomed) == pytest.approx(500_000)
    clock.run()
    assert log.lines == [(1.52, "next")]
    assert network.link_bytes.max() == pytest.approx(1_500_000)
    with pytest.raises(InputError, match=r"no transfer 0 is in flight"):
        network.abort(doomed)


def test_an_abort_behind_others_or_before_the_latency_is_over_frees_nothing_else(
    clock: Clock, network: Network, log: Log
) -> None:
    network.send(A, B, MEGABYTE, log.on("first"))
    doomed = network.send(A, B, MEGABYTE, log.on("never"))
    network.send(A, B, MEGABYTE, log.on("last"))
    assert network.abort(doomed) == 0
    clock.run()
    assert log.lines == [(1.02, "first"), (2.02, "last")]


@pytest.mark.parametrize("num", [63, 64, 65, 66, 300])
def test_one_more_transfer_than_were_ever_in_flight_does_not_stop_the_clock(
    clock: Clock, network: Network, log: Log, num: int
) -> None:
    """However many are due at once, each is once."""
    for connection in range(num):
        network.send(A, B, MEGABYTE, log.on("first"), connection=connection)
    clock.run(until=1.0)
    network.send(A, B, MEGABYTE, log.on("last"), connection=0)
    budget = 100_000
    while clock.peek() < math.inf and budget:
        clock.step()
        budget -= 1
    assert budget, "the same instant again and again"
    assert [name for _, name in log.lines] == ["first"] * num + ["last"]
    assert clock.now == pytest.approx(LATENCY + num + 1)


@pytest.mark.parametrize("is_early", [False, True], ids=["at once", "before its turn"])
def test_a_cancelled_transfer_notifies_no_owner(clock: Clock, log: Log, is_early: bool) -> None:
    """Also of what was to be told at the end of this instant: that the socket's buffer has taken it in."""
    network = Network(clock, TOPOLOGY, "linux-tcp")
    number = network.send(A, B, 1, log.on("delivered"), on_sent=log.on("sent"))
    if is_early:
        clock.step()
    network.abort(number)
    clock.run()
    assert log.lines == [(0.0, "sent")] * is_early


def test_a_message_lost_before_its_sender_heard_of_it_tells_him_when_it_is_sent_again(
    clock: Clock, log: Log
) -> None:
    """A crash at the instant of sending: both callbacks are those of the message that is sent again."""
    network = Network(clock, TOPOLOGY, "linux-tcp")
    network.send(A, B, 1, log.on("delivered"), on_sent=log.on("sent"))
    network.drop_transfers(B)
    clock.run()
    assert [name for _, name in log.lines] == ["sent", "delivered"]


def test_protocol_of_the_file_holds_unless_another_is_named() -> None:
    assert Network(Clock(), TOPOLOGY).protocol == Protocol.parse("ideal")
    mapping = TOPOLOGY.to_mapping() | {"protocol": "gloo"}
    topology = Topology.from_mapping(mapping)
    assert Network(Clock(), topology).protocol.name == "gloo"
    assert Network(Clock(), topology, "linux-tcp").protocol.name == "linux-tcp"
    assert Network(Clock(), topology, {"streams": 8}).protocol == Protocol.parse(
        {"preset": "gloo", "streams": 8}
    )


def test_a_clock_has_one_network(clock: Clock) -> None:
    Network(clock, TOPOLOGY)
    with pytest.raises(InputError, match="its clock has another network already"):
        Network(clock, TOPOLOGY)


def test_the_default_protocol_is_tcp() -> None:
    topology = Topology.from_mapping(TOPOLOGY.to_mapping() | {"protocol": None})
    assert Network(Clock(), topology).protocol == Protocol.parse("linux-tcp")
    streams = {"preset": "linux-tcp", "streams": 8}
    assert Network(Clock(), topology, {"streams": 8}).protocol == Protocol.parse(streams)
