"""The network's interface: order, connections, callbacks, faults, observers; times are exact."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import simpy
from worlds import star

import netsim
from netsim import Clock, Network, Protocol, Topology
from netsim.errors import DeadlockError, InputError
from netsim.network.clock import call_at
from netsim.network.network import BackgroundConnection
from netsim.topology.protocol import PRESETS
from netsim.transfers import time_flows

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


def test_within_a_host_delivery_is_at_once_but_after_send_returns(
    clock: Clock, network: Network, log: Log
) -> None:
    network.send(A, A, MEGABYTE, log.on("there"), on_sent=log.on("sent"))
    assert log.lines == []
    clock.run()
    assert log.lines == [(0.0, "sent"), (0.0, "there")]
    assert network.link_bytes.sum() == 0


def test_an_aborted_transfer_gives_way(clock: Clock, network: Network, log: Log) -> None:
    doomed = network.send(A, B, 2 * MEGABYTE, log.on("never"))
    network.send(A, B, MEGABYTE, log.on("next"))
    clock.run(until=0.52)
    assert network.abort(doomed) == pytest.approx(500_000)
    clock.run()
    assert log.lines == [(1.52, "next")]
    assert network.link_bytes.max() == pytest.approx(1_500_000)
    network.credit([A, B], [(0, 1, 250_000)])
    assert network.link_bytes.max() == pytest.approx(1_750_000)
    with pytest.raises(InputError, match=r"no transfer 0 is in flight"):
        network.abort(doomed)


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


@pytest.mark.parametrize("is_warm", [False, True], ids=["first", "after a message without a limit"])
def test_a_limit_of_the_sender_belongs_to_its_transfer(clock: Clock, log: Log, is_warm: bool) -> None:
    network = Network(clock, TOPOLOGY, "linux-tcp")
    if is_warm:
        network.send(A, B, 1000, log.on("before"))
        clock.run()
    begin = clock.now
    network.send(A, B, MEGABYTE, log.on("limited"), most_bytes_per_second=1e5)
    clock.run()
    assert clock.now - begin == pytest.approx(10 + LATENCY)
    begin = clock.now
    network.send(A, B, MEGABYTE, log.on("unlimited"))
    clock.run()
    assert clock.now - begin < 1.5


def test_a_transfer_that_is_sent_again_keeps_its_id(clock: Clock, network: Network, log: Log) -> None:
    number = network.send(A, B, MEGABYTE, log.on("there"))
    clock.run(until=0.5)
    network.drop_transfers(B)
    assert network.is_in_flight(number)
    assert network.transfers_waiting() == []
    clock.run(until=1.02)
    assert network.abort(number) == pytest.approx(500_000)
    clock.run()
    assert log.lines == []


def test_weather_of_a_topology_is_applied_or_left_out_but_never_forgotten(clock: Clock, log: Log) -> None:
    event = {"link": ["a", "switch"], "at": "520 ms", "bandwidth": "4 Mbit/s"}
    topology = star(events=[event])
    with pytest.raises(InputError, match=r"nothing applies the weather .* netsim.Faults\(network\)"):
        Network(Clock(), topology).send(A, B, MEGABYTE, log.on("never"))
    calm = Network(clock, topology, weather=False)
    calm.send(A, B, MEGABYTE, log.on("calm"))
    clock.run()
    log.env = windy = Clock()
    network = Network(windy, topology)
    netsim.Faults(network)
    network.send(A, B, MEGABYTE, log.on("windy"))
    windy.run()
    assert log.lines == [(1.02, "calm"), (1.52, "windy")]


def test_what_never_happens_is_reported_by_the_clock(clock: Clock, network: Network) -> None:
    network.set_link_up(0, False)
    with pytest.raises(DeadlockError, match=r"nothing is left to happen at 0 s"):
        clock.run(network.transfer(A, B, MEGABYTE))


# --- the page on the network model --------------------------------------------------------------------------

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "network.md").read_text().split())


def line(bandwidth: str, latency: str, num_hosts: int = 2) -> Topology:
    return star(num_hosts, bandwidth, latency)


def seconds(topology: Topology, num_bytes: float, protocol: Any) -> float:
    return float(time_flows(topology, [(0.0, "h0", "h1", num_bytes)], protocol)[0])


def test_the_transfers_reckoned_by_hand() -> None:
    path = line("100 Mbit/s", "12.5 ms")
    rate, rtt = 100e6 / 8 * 1448 / 1514, 0.05
    windows = [14_480, 26_064, 52_128, 104_256, 208_512, 417_024]
    assert windows[-1] < rate * rtt < 2 * windows[-1]
    for num_bytes in (1_000_000, 100_000_000):
        by_hand = 0.025 + num_bytes / rate + 6 * rtt - sum(windows) / rate
        assert seconds(path, num_bytes, "linux-tcp") == pytest.approx(by_hand, rel=1e-9)
    rounds = " + ".join(f"{each:,}" for each in windows)
    assert f"B = {rate / 1e6:.3f} MB/s. 1 MB by hand: r = 6 rounds of {rounds} bytes" in PAGE
    assert f"P = {rate * rtt:,.0f};" in PAGE
    assert f"6 RTT - {sum(windows):,} / B = {seconds(path, 1_000_000, 'linux-tcp') * 1e3:.1f} ms" in PAGE
    assert f"Under `ideal` it is {seconds(path, 1_000_000, 'ideal') * 1e3:.0f} ms" in PAGE
    large = [seconds(path, 100_000_000, name) for name in ("linux-tcp", "ideal")]
    assert f"100 MB take {large[0]:.3f} s, under `ideal` {large[1]:.3f} s" in PAGE


def test_the_limit_of_the_window() -> None:
    path = line("10 Gbit/s", "50 ms")
    rate = 4e9 * 8 / (seconds(path, 8e9, "linux-tcp") - seconds(path, 4e9, "linux-tcp"))
    assert f"Over 200 ms that is {rate / 1e6:.0f} Mbit/s" in PAGE


def test_the_table_of_protocols() -> None:
    page = (Path(__file__).parents[1] / "docs" / "network.md").read_text()
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in re.findall(r"^\|.*\|$", page, re.MULTILINE)
        )
    }
    assert {name.strip("`") for name in rows[""]} == set(PRESETS)
    for column, name in enumerate(rows[""]):
        protocol = PRESETS[name.strip("`")]
        cells = {title: row[column] for title, row in rows.items() if len(row) == len(PRESETS)}
        assert cells["bandwidth counts"] == (
            "payload" if protocol.payload_share == 1 else "bytes on the wire"
        )
        assert cells["windows, loss, queue"].startswith("yes" if protocol.has_windows else "no")
        assert ("any window" in cells["windows, loss, queue"]) == (
            protocol.has_windows and protocol.queue_packets is None
        )
        assert cells["a message begins"] == (
            "when the receiver is ready" if protocol.rendezvous else "when it is sent"
        )
        assert cells["weight of a transfer"].startswith("`streams`" if protocol.rtt_bias else "1")
        assert float(cells["software per message"].split()[0]) == pytest.approx(
            protocol.software_seconds * 1e3
        )
        assert int(cells["collectives of a group at once"]) == protocol.collectives_in_flight
        together = f"{protocol.core_bits_per_second / 1e9:g} Gbit/s together"
        assert cells["the process of a rank sends and receives"] == together.replace(
            "inf Gbit/s together", "any rate"
        )
        takes = {
            "": "the fastest",
            "gloo": "gloo's own",
            "hivemind": "`direct`",
            "nccl": "NCCL's choice",
        }
        assert cells["`auto` takes"] == takes[protocol.library]
        gives_up = f"after {protocol.give_up_seconds:g} s" if protocol.give_up_seconds < math.inf else "never"
        assert cells["gives up on a dead link"] == gives_up


def test_when_linux_gives_up() -> None:
    timeouts = [0.2 * 2**number for number in range(16)]
    assert sum(min(each, 120.0) for each in timeouts) == pytest.approx(PRESETS["linux-tcp"].give_up_seconds)
    assert "0.2 + 0.4 + ... + 102.4 + 6 x 120 = 924.6 s" in PAGE


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp"])
def test_a_list_of_transfers_takes_what_a_program_that_sends_them_takes(protocol: str) -> None:
    """Bit for bit, with starts at one instant, and transfers that take the idle connection of an earlier one."""
    topology, draw = Topology.load("wan-4-regions"), Random(3)
    rows = [
        (draw.randrange(40) / 4, *draw.sample(range(6), 2), float(10 ** draw.randint(3, 7)))
        for _ in range(120)
    ]
    clock = Clock()
    network = Network(clock, topology, protocol)
    finish = dict[int, float]()
    idle, opened = defaultdict[tuple[int, int], set[int]](set), Counter[tuple[int, int]]()

    def send(number: int) -> None:
        _, src, dst, num_bytes = rows[number]
        if not idle[src, dst]:
            idle[src, dst].add(opened[src, dst])
            opened[src, dst] += 1
        connection = min(idle[src, dst])
        idle[src, dst].remove(connection)

        def deliver() -> None:
            finish[number] = clock.now
            idle[src, dst].add(connection)

        network.send(src, dst, num_bytes, deliver, connection=connection)

    for number in sorted(range(len(rows)), key=lambda number: rows[number][0]):
        call_at(clock, rows[number][0], partial(send, number))
    clock.run()
    assert time_flows(topology, rows, protocol).tolist() == [finish[number] for number in range(len(rows))]
    assert max(opened.values()) < len(rows) / 10


def test_a_process_limits_what_its_hosts_links_carry() -> None:
    """2 Mbit/s in and out together are 1 Mbit/s each way, whatever faster the link becomes; a slower link counts."""
    protocol = {"preset": "ideal", "core": "2 Mbit/s"}
    env = Clock()
    network = Network(env, TOPOLOGY, protocol)
    log = Log(env)
    network.send(A, B, MEGABYTE, log.on("limited"))
    for link in TOPOLOGY.route(A, B):
        network.set_capacity(link, 16e6)
    env.run()
    network.set_capacity(0, 0.5e6)
    network.send(A, B, MEGABYTE, log.on("slow"))
    env.run()
    assert log.lines == [(pytest.approx(8 + LATENCY), "limited"), (pytest.approx(24 + 2 * LATENCY), "slow")]


def triangle(rate: str) -> Topology:
    ends = ["a", "b"], ["a", "c"], ["b", "c"]
    return Topology.from_mapping(
        {
            "hosts": list("abc"),
            "links": [{"between": two, "bandwidth": rate, "latency": "0 s"} for two in ends],
        }
    )


def test_a_process_sends_no_more_over_two_links_and_others_traffic_is_not_its(clock: Clock, log: Log) -> None:
    """15 Gbit/s in all over links of 25, beside 10 Gbit/s of other processes on one of them."""
    network = Network(clock, triangle("25 Gbit/s"), {"preset": "ideal", "core": "30 Gbit/s"})
    others = BackgroundConnection(0, 0)
    network.send(0, 1, 2.5e9, log.on("others"), connection=others, most_bytes_per_second=1.25e9)
    for target in (1, 2):
        network.send(0, target, 1.875e9, log.on("own"))
    clock.run()
    assert log.lines == [(pytest.approx(2.0), name) for name in ("others", "own", "own")]


def test_a_collective_takes_as_long_as_processes_with_several_links() -> None:
    """Each of three sends 1.875 GB to each other, over links of 25 Gbit/s, at 15 Gbit/s in all."""
    protocol = {"preset": "ideal", "core": "30 Gbit/s"}
    times = netsim.collective(triangle("25 Gbit/s"), "all_to_all", num_bytes=1.875e9 * 3, protocol=protocol)
    assert times.seconds == pytest.approx(2.0)


def test_each_rank_of_a_host_has_a_process() -> None:
    """Four processes of 4 Gbit/s each way on two hosts send as much as links of 8 Gbit/s carry."""
    fast, slow = star(2, "100 Gbit/s", "0 s"), star(2, "8 Gbit/s", "0 s")
    times = [
        netsim.collective(
            there, "all_to_all", num_bytes="100 MB", ranks=[0, 0, 1, 1], protocol=protocol
        ).seconds
        for there, protocol in ((fast, {"preset": "ideal", "core": "8 Gbit/s"}), (slow, "ideal"))
    ]
    assert times[0] == pytest.approx(times[1])


def test_an_averaging_by_hivemind() -> None:
    """100 Mbit each way at 1.25 Gbit/s, and the time of its two messages."""
    topology = star(2, "10 Gbit/s", "0 s")
    seconds = netsim.collective(topology, "all_reduce", num_bytes=12_500_000, protocol="hivemind").seconds
    assert seconds == pytest.approx(4 + 0.08, abs=0.01)
