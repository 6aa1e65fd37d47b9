"""Queues between sites under the protocol `gloo`: bursts overrun them, notes and acknowledgements wait in them."""

from __future__ import annotations

from typing import Any

import pytest

from netsim import Clock, Network, Topology, schedule, start_collective
from netsim.network.cubic import segments_after_slow_start

RATE = 20e6 / 8 * 1448 / 1514  # payload of the link between the sites


def two_sites(queue: int | None, own_queue: int | None = None) -> Topology:
    """Two sites of two hosts with 200 Mbit/s, joined by 20 Mbit/s and 40 ms."""
    access: dict[str, Any] = {"bandwidth": "200 Mbit/s"}
    if own_queue is not None:
        access["queue"] = own_queue
    between: dict[str, Any] = {"between": ["swa", "swb"], "bandwidth": "20 Mbit/s", "latency": "40 ms"}
    if queue is not None:
        between["queue"] = queue
    hosts = ["a0", "a1", "b0", "b1"]
    lines = [{"between": [host, f"sw{host[0]}"], **access} for host in hosts]
    mapping = {"hosts": {host: {} for host in hosts}, "routers": ["swa", "swb"], "links": [*lines, between]}
    return Topology.from_mapping(mapping)


def send(network: Network, calls: list[tuple[int, int, int]]) -> list[float]:
    """Seconds from a common start until each of the messages (source, target, bytes) has arrived; then 50 ms pass."""
    clock = network.env
    start = clock.now
    ends = [0.0] * len(calls)
    for number, (source, target, num_bytes) in enumerate(calls):

        def on_done(member: int, number: int = number) -> None:
            ends[number] = max(ends[number], clock.now)

        made = schedule("sendrecv", 2, num_bytes=num_bytes, algorithm="gloo", element_bytes=4)
        one = start_collective(network, made, (source, target), group="all", on_done=on_done)
        one.arrive(0)
        one.arrive(1)
    clock.run()
    clock.run(until=clock.now + 0.05)
    return [end - start for end in ends]


def warm(topology: Topology, num_bytes: int = 200_000) -> Network:
    """A network whose connections between a0 and b0, and between b1 and a1, have large windows."""
    network = Network(Clock(), topology, "gloo")
    for _ in range(4):
        send(network, [(0, 2, num_bytes)])
    return network


def test_a_note_waits_behind_the_data_of_others() -> None:
    """a1's note that it is ready for b1 comes behind what a0 has just sent to b0."""
    alone = send(warm(two_sites(100_000)), [(3, 1, 4)])[0]
    free = send(warm(two_sites(None)), [(0, 2, 200_000), (3, 1, 4)])[1]
    queued = send(warm(two_sites(100_000)), [(0, 2, 200_000), (3, 1, 4)])[1]
    assert free == pytest.approx(alone, rel=1e-3), "without a queue nothing waits"
    assert queued == pytest.approx(alone, rel=1e-3), (
        "a0's data come a round trip after its note, and so after a1's"
    )
    network = warm(two_sites(100_000))
    clock = network.env
    ends: list[float] = []
    large = schedule("sendrecv", 2, num_bytes=200_000, algorithm="gloo", element_bytes=4)
    small = schedule("sendrecv", 2, num_bytes=4, algorithm="gloo", element_bytes=4)
    one = start_collective(network, large, (0, 2), group="all", on_done=lambda member: None)
    two = start_collective(network, small, (3, 1), group="all", on_done=lambda member: ends.append(clock.now))
    one.arrive(0)
    one.arrive(1)
    clock.run(until=clock.now + 0.06)  # b0's note has arrived, 200 kB stand in the queue
    began = clock.now
    two.arrive(0)
    two.arrive(1)
    clock.run()
    waited = max(ends) - began - alone
    assert 0.3 * 200_000 / RATE < waited < 200_000 / RATE


def test_a_burst_that_overruns_the_queue_is_sent_again_and_its_window_falls() -> None:
    """A warm window of 200 kB after a pause meets a queue of 50 packets; one of 1,000 packets holds it."""
    held = send(warm(two_sites(1_000)), [(0, 2, 200_000)])[0]
    free = send(warm(two_sites(None)), [(0, 2, 200_000)])[0]
    overrun = send(warm(two_sites(50)), [(0, 2, 200_000)])[0]
    assert held == pytest.approx(free, rel=1e-9)
    assert overrun > held + 0.08, "at least a round trip more"


def test_a_hosts_own_line_drops_nothing() -> None:
    """Linux keeps what a line does not carry yet in the sockets."""

    def star(**settings: int) -> Topology:
        line = {"bandwidth": "20 Mbit/s", "latency": "20 ms", **settings}
        links = [{"between": [host, "sw"], **line} for host in ("a", "b")]
        return Topology.from_mapping({"hosts": {"a": {}, "b": {}}, "routers": ["sw"], "links": links})

    times = [
        [send(network, [(0, 1, 500_000)]) for _ in range(3)]
        for network in (Network(Clock(), star(), "gloo"), Network(Clock(), star(queue=10), "gloo"))
    ]
    assert times[0] == times[1]


def test_acknowledgements_wait_behind_data_of_the_other_direction() -> None:
    """Messages larger than the window, both ways at once, take longer than one way alone."""
    alone = send(warm(two_sites(60), 400_000), [(0, 2, 2_000_000)])[0]
    both = send(warm(two_sites(60), 400_000), [(0, 2, 2_000_000), (3, 1, 2_000_000)])[0]
    free = [
        send(warm(two_sites(None), 400_000), calls)[0]
        for calls in ([(0, 2, 2_000_000)], [(0, 2, 2_000_000), (3, 1, 2_000_000)])
    ]
    assert both / alone > 1.03 * free[1] / free[0]


@pytest.mark.parametrize("round_trip", [0.012, 0.1])
def test_after_slow_start_a_window_grows_by_half_a_segment_a_round_trip(round_trip: float) -> None:
    """TCP_INFO of a sender over 12 ms: 61 segments as HyStart ends slow start, 90 of them fifty round trips later."""
    assert segments_after_slow_start(0.0, 61.0, round_trip) == 61.0
    later = segments_after_slow_start(50 * round_trip, 61.0, round_trip)
    assert later == pytest.approx(max(61 + 50 * 0.53, 61 + 0.4 * (50 * round_trip) ** 3), rel=0.01)
