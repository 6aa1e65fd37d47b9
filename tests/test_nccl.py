"""NCCL over sockets: bytes and steps of its ring and trees by hand, times in closed form, sockets."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import netsim
from netsim import Clock, Network, Protocol, Topology, schedule
from netsim.collectives.estimate import Estimator
from netsim.collectives.schedules.check import messages
from netsim.collectives.start import time_collective
from netsim.errors import UnknownNameError
from netsim.network.connections import Transfer
from netsim.network.engine import Outside

MIB = 1 << 20


def star(num: int, rate: str = "1 Gbit/s", latency: str = "10 ms", **more: Any) -> Topology:
    """Hosts whose own links out are the narrowest."""
    names = [f"h{index}" for index in range(num)]
    link = {"up": rate, "down": "100 Gbit/s", "latency": latency, **more}
    links = [{"between": [name, "switch"], **link} for name in names]
    return Topology.from_mapping({"hosts": names, "routers": ["switch"], "links": links})


def test_four_ranks_send_three_halves_by_the_ring_and_up_to_two_tensors_by_the_trees() -> None:
    """Ranks 1 and 2 are inside one tree each: a half up and two down, and a half as a leaf of the other."""
    sent = {
        name: schedule("all_reduce", 4, num_bytes=64 * MIB, algorithm=name).sent_bytes.tolist()
        for name in ("nccl-ring", "nccl-tree")
    }
    assert sent["nccl-ring"] == [96 * MIB] * 4
    assert sent["nccl-tree"] == [64 * MIB, 128 * MIB, 128 * MIB, 64 * MIB]


def test_a_ring_of_two_loops_has_slices_of_a_mebibyte_on_two_channels() -> None:
    made = schedule("all_reduce", 4, num_bytes=32 * MIB, algorithm="nccl-ring")
    (phase,) = made.phases
    assert phase.window == 2 * 2
    assert made.num_steps == 2 * 6 * 4
    assert {message.high - message.low for message, _ in messages(made)} == {MIB}
    adds = [phase.reduces(index) for index in range(24)]
    assert adds == [True] * 12 + [False] * 12


def test_trees_and_chains_pass_on_half_mebibytes_eight_at_once() -> None:
    for op, name, steps in (
        ("all_reduce", "nccl-tree", 4 * (8 + 8 * 5)),
        ("broadcast", "nccl-ring", 2 * (8 + 8 * 2)),
    ):
        made = schedule(op, 8 if name == "nccl-tree" else 4, num_bytes=8 * MIB, algorithm=name)
        assert {message.high - message.low for message, _ in messages(made)} == {MIB // 2}
        assert made.num_steps == steps


@given(st.integers(2, 200))
def test_no_member_is_inside_both_trees(num: int) -> None:
    """So none sends more than two tensors, and all together the 2 (n - 1) of any all_reduce."""
    sent = schedule("all_reduce", num, num_bytes=64 * MIB, algorithm="nccl-tree").sent_bytes
    assert sent.max() <= 2 * 64 * MIB
    assert sent.sum() == 2 * (num - 1) * 64 * MIB


@pytest.mark.parametrize("num", [2, 5])
def test_a_chain_pays_latency_and_one_chunk_a_hop(num: int) -> None:
    """Two channels alternate, so a hop begins when both have sent a chunk but for its own."""
    took = netsim.collective(
        star(num), "broadcast", num_bytes=64 * MIB, algorithm="nccl-ring", protocol="ideal"
    ).seconds
    chunk = MIB / 2 / 125e6
    assert took == pytest.approx(64 * MIB / 125e6 + (num - 1) * 0.02 + (num - 2) * chunk, rel=1e-6)


@pytest.mark.parametrize("num", [4, 16])
def test_a_ring_hides_the_latency_of_its_steps(num: int) -> None:
    """Four slices a step take 33.6 ms, and a delay of 20 ms and a slice less: only the last delay shows."""
    took = {
        name: netsim.collective(
            star(num), "all_reduce", num_bytes=num * 4 * MIB, algorithm=name, protocol="ideal"
        ).seconds
        for name in ("ring", "nccl-ring")
    }
    wire = 2 * (num - 1) * 4 * MIB / 125e6
    assert took["nccl-ring"] == pytest.approx(wire + 0.02, rel=1e-4)
    assert took["ring"] == pytest.approx(wire + 2 * (num - 1) * 0.02, rel=1e-6)


@given(st.integers(2, 9), st.sampled_from(["nccl-ring", "nccl-tree"]))
def test_a_barrier_is_the_all_reduce_of_one_number(num: int, name: str) -> None:
    """As in c10d's ProcessGroupNCCL."""
    barrier = schedule("barrier", num, algorithm=name)
    reduced = schedule("all_reduce", num, num_bytes=4, element_bytes=4, algorithm=name)
    assert barrier.sent_bytes.tolist() == reduced.sent_bytes.tolist()
    ways = [
        [(message[:3], has_arrived) for message, has_arrived in messages(made)] for made in (barrier, reduced)
    ]
    assert ways[0] == ways[1]
    taken = [
        netsim.collective(star(num), op, num_bytes=size, protocol="nccl-sockets").algorithm
        for op, size in (("barrier", None), ("all_reduce", 4))
    ]
    assert taken[0] == taken[1]


def test_two_channels_hide_less_of_a_long_delay_than_one_connection() -> None:
    """A round's four slices of 1 MiB take 33.6 ms. Those of one connection follow one another: the next round begins a
    slice and a delay of 40 ms later, after 48.4 ms. Two channels share the line: their first slices take twice as long.
    A loop's last round is awaited by its second slices, the third and fourth on the line.
    """
    fast = {"preset": "nccl-sockets", "window": "1 GiB", "queue": 1_000_000, "mtu": 60_000}
    seconds = [
        netsim.collective(
            star(4, latency="20 ms"),
            "all_reduce",
            num_bytes=4 * 64 * MIB,
            algorithm="nccl-ring",
            repeat=2,
            protocol=protocol,
        ).seconds
        for protocol in ("ideal", fast)
    ]
    slice_seconds = MIB / 125e6
    rounds, loops = 16 * 5, 16
    one = rounds * (slice_seconds + 0.04) + loops * (3 * slice_seconds + 0.04) + slice_seconds
    two = rounds * (2 * slice_seconds + 0.04) + loops * (4 * slice_seconds + 0.04)
    assert seconds == pytest.approx([one, two], rel=0.005)


@pytest.mark.parametrize(
    ("topology", "ranks_a_host", "num_bytes", "protocol"),
    [
        # The last loop is small.
        (star(14, latency="1 ms"), 1, 64 << 20, {"preset": "nccl-sockets", "window": "256 KiB"}),
        (star(10), 1, 150 << 20, {"preset": "linux-tcp", "window": "64 KiB", "connections": "per-transfer"}),
        (Topology.load("wan-4-regions"), 1, 4096, "nccl-sockets"),  # a lap crosses the long links
        (star(2), 8, 64 << 20, "nccl-sockets"),  # nothing limits messages inside a host
    ],
)
def test_the_first_steps_of_a_ring_give_the_seconds_of_all(
    topology: Topology, ranks_a_host: int, num_bytes: int, protocol: Any
) -> None:
    """All loops were taken for as large as the first, and all messages for those of one window: up to 3.4 times."""
    parsed, hosts = Protocol.parse(protocol), sorted([*range(len(topology.hosts))] * ranks_a_host)
    made = schedule("all_reduce", len(hosts), num_bytes=num_bytes, algorithm="nccl-ring")
    short, later, _ = Estimator(topology, parsed).first_steps(made, hosts)
    first, whole = (time_collective(topology, parsed, each, hosts).seconds[0] for each in (short, made))
    assert first + later == pytest.approx(whole, rel=0.03)


def test_one_stream_carries_both_channels() -> None:
    """Its window limits the rate, so that it takes about twice as long as two, in a collective as in a single send."""
    taken = {
        (op, streams): netsim.collective(
            star(2, latency="200 ms"),
            op,
            num_bytes=256 * MIB,
            protocol={"preset": "nccl-sockets", "streams": streams},
        ).seconds
        for op in ("broadcast", "sendrecv")
        for streams in (1, 2)
    }
    assert taken["broadcast", 1] == pytest.approx(taken["sendrecv", 1], rel=1e-3)
    assert taken["broadcast", 1] > 1.5 * taken["broadcast", 2]


@pytest.mark.parametrize("sockets", [1, 16])
def test_losses_cost_time_where_windows_together_fill_the_line(sockets: int) -> None:
    """A message waits for the repair of a packet, and for the socket that has fallen most."""
    taken = [
        netsim.collective(
            star(3, rate="100 Mbit/s", mtu=9001, loss=f"{percent} %"),
            "broadcast",
            num_bytes=64 * MIB,
            protocol={"preset": "nccl-sockets", "sockets_per_thread": sockets},
        ).seconds
        for percent in (0, 0.02, 0.2, 1)
    ]
    assert taken == sorted(taken)
    assert taken[2] > 1.01 * taken[0]
    assert taken[3] > 1.1 * taken[0]


def test_calls_with_losses_take_about_as_long_as_recorded() -> None:
    """Every other call of `losses.tsv`: the mean of five after a first."""
    text = (Path(__file__).parent / "golden" / "nccl" / "losses.tsv").read_text()
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    errors = []
    for op, *cells in rows[1::2]:
        hosts, megabits, milliseconds, sockets, mtu = map(int, cells[:5])
        link = {
            "up": f"{megabits} Mbit/s",
            "down": "2 Gbit/s",
            "mtu": mtu,
            "loss": f"{float(cells[5]) / 2} %",
        }
        share = 2 * (hosts - 1) / hosts if op == "all_reduce" else 1.0
        seconds = [
            netsim.collective(
                star(hosts, latency=f"{milliseconds / 4} ms", **link),
                op,
                num_bytes=int(megabits * 125_000 * 2 / share),
                algorithm="nccl-ring",
                protocol={"preset": "nccl-sockets", "socket_threads": 1, "sockets_per_thread": sockets},
                repeat=repeat,
            ).seconds
            for repeat in range(2, 7)
        ]
        recorded = list(map(float, cells[-5:]))
        errors.append(abs(statistics.mean(seconds) / statistics.mean(recorded) - 1))
    assert len(errors) == 10
    assert statistics.median(errors) < 0.13
    assert max(errors) < 0.3


class Repair:
    """A channel's message that has drained and waits until `until` for a lost packet; what its owner hears."""

    def __init__(self, *, hears_drops: bool = True) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, star(2, "100 Mbit/s", loss="1 %"), "nccl-sockets")
        self.heard: list[tuple[str, float]] = []
        self.transfer = self.send(hears_drops)
        while self.transfer.connection.first is self.transfer:  # until it has drained
            self.clock.run(until=self.clock.now + 1e-3)
        assert not self.heard
        self.until = self.transfer.key

    def send(self, hears_drops: bool = True, num_bytes: float = 200_000.0) -> Transfer:
        engine = self.network.engine
        owner = Outside(
            engine,
            lambda: self.hear("delivered"),
            None,
            (lambda: self.hear("dropped")) if hears_drops else None,
        )
        transfer = Transfer(engine.connect("ring", 0, 1, lane=-1), num_bytes, owner)
        engine.send(transfer)
        return transfer

    def hear(self, what: str) -> None:
        self.heard.append((what, self.clock.now))


def test_a_message_that_waits_for_a_repair_is_in_flight() -> None:
    repair = Repair()
    assert repair.network.num_in_flight == 1
    assert repair.network.can_move()
    repair.clock.run()
    assert repair.heard == [("delivered", repair.until)]
    assert repair.network.num_in_flight == 0


@pytest.mark.parametrize("host", [0, 1])
def test_a_crash_ends_a_message_that_waits_for_a_repair(host: int) -> None:
    repair = Repair()
    crashed_at = repair.clock.now
    repair.network.drop_transfers(host)
    repair.clock.run()
    assert repair.heard == [("dropped", crashed_at)]


def test_a_message_that_waits_for_a_repair_is_sent_again_after_a_crash() -> None:
    repair = Repair(hears_drops=False)
    fresh = repair.clock.now + 0.04  # a first byte takes 20 ms, and the second window 20 more
    repair.network.drop_transfers(1)
    repair.clock.run()
    ((what, at),) = repair.heard
    assert what == "delivered"
    assert at > fresh


@pytest.mark.parametrize("stop", ["pause", "link down"])
def test_a_repair_waits_while_a_host_is_paused_or_a_link_is_down(stop: str) -> None:
    """What is sent behind the message is delivered behind it."""
    repair = Repair()
    network, begun = repair.network, repair.clock.now
    repair.send(num_bytes=1000.0)
    if stop == "pause":
        network.pause(1)
    else:
        network.set_link_up(0, False)
    repair.clock.run(until=begun + 2)
    assert not repair.heard
    assert not network.can_move()
    if stop == "pause":
        network.resume(1)
    else:
        network.set_link_up(0, True)
    repair.clock.run()
    (_, first), (_, second) = repair.heard  # the later, small one does not overtake
    assert first == pytest.approx(2 + (repair.until if stop == "pause" else begun + 0.02))
    assert second >= first


def test_messages_that_wait_for_a_repair_end_with_their_collective() -> None:
    repair = Repair()
    repair.network.engine.end_connections("ring")
    repair.clock.run()
    assert repair.heard == []
    assert repair.network.num_in_flight == 0
    assert repair.network.dropped_bytes == 0


@pytest.mark.parametrize("connections", ["persistent", "per-transfer"])
def test_losses_between_two_hosts_are_the_same_whatever_others_send(connections: str) -> None:
    def delivered(num_others: int) -> list[float]:
        clock, instants = Clock(), list[float]()
        lines = star(4, "100 Mbit/s", loss="1 %")
        network = Network(clock, lines, {"preset": "nccl-sockets", "connections": connections})

        def send(source: int, target: int, on_delivered: Callable[[], None]) -> None:
            owner = Outside(network.engine, on_delivered, None, None)
            connection = network.engine.connect("ring", source, target, lane=-1)
            network.engine.send(Transfer(connection, 300_000.0, owner))

        for _ in range(num_others):
            send(2, 3, lambda: None)
        for _ in range(5):
            send(0, 1, lambda: instants.append(clock.now))
        clock.run()
        return instants

    assert delivered(3) == delivered(0)


def test_windows_that_lose_many_packets_keep_two() -> None:
    taken = netsim.collective(
        star(2, rate="68 Mbit/s", latency="4 ms", loss="5 %"),
        "all_reduce",
        num_bytes=4 * MIB,
        protocol="nccl-sockets",
    )
    least = 2 * 1448 * 2 / 16e-3  # two packets of both channels' sockets, each round trip
    assert taken.seconds < 4 * MIB / least


def test_sockets_are_threads_times_sockets_on_two_channels() -> None:
    by_cloud = {(1, 1): 2, (2, 8): 32, (4, 1): 8}  # NCCL's defaults, on AWS, on Google Cloud
    for (threads, sockets), streams in by_cloud.items():
        form = {"preset": "nccl-sockets", "socket_threads": threads, "sockets_per_thread": sockets}
        assert Protocol.parse(form).streams == streams
    given = Protocol.parse({"preset": "nccl-sockets", "streams": 16})
    assert (given.streams, given.channels) == (16, 2)
    assert Protocol.parse("nccl-sockets").card_bits_per_second == 10e9


def test_a_group_may_name_its_algorithm() -> None:
    took = netsim.collective(star(4), "all_reduce", num_bytes=MIB, algorithm="ring", protocol="nccl-sockets")
    assert took.algorithm == "ring"
    with pytest.raises(UnknownNameError, match="nccl-ring"):
        schedule("broadcast", 4, num_bytes=1, algorithm="nccl-tree")
