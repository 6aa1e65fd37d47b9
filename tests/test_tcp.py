"""What TCP takes from the ideal network: closed forms for one connection, shares for several, queues."""

from __future__ import annotations

import math
from typing import Any

import pytest
from worlds import chain, use_sources

from netsim import Clock, Network, Topology
from netsim.network.tail_drop import Burst, meet
from netsim.network.tcp_cubic import segments_after_slow_start
from netsim.transfers import time_flows

SEGMENT = 1448
INITIAL = 10 * SEGMENT
PAYLOAD = 1448 / 1514
DEEP = {"preset": "linux-tcp", "queue": 1_000_000}


def pair(mbit: float = 100, round_trip: str = "100 ms", loss: str = "0 %") -> Topology:
    """A link behind a router, which both ends' own lines feed much faster."""
    link = {"between": ["r", "b"], "bandwidth": f"{mbit} Mbit/s", "rtt": round_trip, "loss": loss}
    line = {"between": ["a", "r"], "bandwidth": "100 Tbit/s", "latency": "0 s"}
    mapping = {"hosts": {"a": {}, "b": {}}, "routers": ["r"], "links": [line, link], "protocol": "ideal"}
    return Topology.from_mapping(mapping)


def four_hosts(latency: str) -> Topology:
    links = [{"between": [host, "r"], "bandwidth": "100 Mbit/s", "latency": latency} for host in "abcd"]
    return Topology.from_mapping({"hosts": [*"abcd"], "routers": ["r"], "links": links})


def seconds(topology: Topology, num_bytes: float, protocol: Any = "linux-tcp") -> float:
    return float(time_flows(topology, [(0.0, "a", "b", num_bytes)], protocol)[0])


def test_small_messages_take_whole_rounds() -> None:
    topology = pair(mbit=100_000)
    # Windows of 10, 18, 36, ... segments; Linux's receivers acknowledge the first segments at once: 10, 20, 40, ...
    for num_segments, rounds in [(1, 0), (10, 0), (11, 1), (28, 1), (29, 2), (64, 2), (65, 3), (691, 6)]:
        assert seconds(topology, num_segments * SEGMENT) == pytest.approx(0.05 + 0.1 * rounds, abs=1e-3)
    for num_segments, rounds in [(10, 0), (11, 1), (30, 1), (31, 2), (70, 2), (71, 3)]:
        assert seconds(topology, num_segments * SEGMENT, "gloo") == pytest.approx(
            0.05 + 0.1 * rounds, abs=1e-3
        )


@pytest.mark.parametrize("mbit", [10, 50, 100])
@pytest.mark.parametrize("num_bytes", [5_000_000, 20_000_000])
def test_slow_start_costs_what_the_closed_form_says(mbit: float, num_bytes: int) -> None:
    rate = mbit * 1e6 / 8 * PAYLOAD
    pipe = rate * 0.1
    # Whole rounds below the pipe, each of which leaves the link idle for the rest of a round trip.
    windows = [INITIAL, *(18 * SEGMENT * 2**i for i in range(20) if 18 * SEGMENT * 2**i < pipe)]
    idle = sum(0.1 - window / rate for window in windows)
    smooth = 0.1 * (math.log2(pipe / INITIAL) - 1 + INITIAL / pipe)
    taken = seconds(pair(mbit), num_bytes, DEEP)
    assert taken == pytest.approx(0.05 + num_bytes / rate + idle, rel=1e-9)
    # Smaller windows than doubled ones by a tenth: 0.15 of a round trip more.
    assert idle == pytest.approx(smooth + 0.015, abs=0.02)


def test_a_window_limits_the_rate() -> None:
    topology = pair(mbit=10_000)
    rate = 2**20 / 0.1
    taken = seconds(topology, 100e6, DEEP | {"window": "1 MiB"})
    assert taken == pytest.approx(100e6 / rate + 0.6, rel=0.02)
    streams = seconds(topology, 100e6, DEEP | {"window": "1 MiB", "streams": 4})
    assert streams == pytest.approx(100e6 / rate / 4 + 0.6, rel=0.02)


def test_a_warm_connection_needs_no_slow_start_until_it_idles() -> None:
    clock = Clock()
    network = Network(clock, pair(), "linux-tcp")
    times: list[float] = []

    def process() -> Any:
        for pause in (0.0, 0.01, 0.35, 10.0):
            yield clock.timeout(pause)
            begin = clock.now
            yield network.transfer(0, 1, 1_000_000)
            times.append(clock.now - begin)

    clock.run(clock.process(process()))
    cold, warm, halved, idle = times
    line_rate = 0.05 + 1_000_000 / (100e6 / 8 * PAYLOAD)
    assert warm == pytest.approx(line_rate, rel=0.01)
    assert idle == pytest.approx(cold, rel=1e-9)
    assert warm < halved < idle


def test_a_pause_halves_the_window_at_which_hystart_ended_slow_start() -> None:
    """A window of 834 kB exceeds half of the pipe, 597 kB, and ends slow start at their sum; Reno adds little."""
    network = Network(clock := Clock(), pair(), DEEP)

    def process() -> Any:
        yield network.transfer(0, 1, 20_000_000)
        yield clock.timeout(0.35)
        begin = clock.now
        yield network.transfer(0, 1, 4_000_000)
        return clock.now - begin

    rate = 100e6 / 8 * PAYLOAD
    ended = 18 * SEGMENT * 2**5 + rate * 0.1 / 2
    idle = 0.1 - ended / 2 / rate  # of the first round
    assert clock.run(clock.process(process())) == pytest.approx(0.05 + 4_000_000 / rate + idle, abs=0.001)


@pytest.mark.parametrize(("loss", "round_trip"), [(1e-3, 0.1), (1e-4, 0.2), (1e-3, 0.01), (1e-2, 0.05)])
def test_many_losses_come_to_the_response_function(loss: float, round_trip: float) -> None:
    """RFC 9438, equations 5 and 3: the mean window in segments."""
    cubic = (0.4 * 3.7 / (4 * 0.3)) ** 0.25 * round_trip**0.75 / loss**0.75
    reno = math.sqrt(3 * 0.3 / 1.7 * 1.7 / (2 * 0.3 * loss))
    expected = max(cubic, reno) * SEGMENT / round_trip
    topology = pair(mbit=100_000, round_trip=f"{round_trip} s", loss=f"{loss * 100} %")
    protocol = {"preset": "linux-tcp", "window": "1 GiB"}
    period = SEGMENT / loss
    taken = seconds(topology, 200 * period, protocol) - seconds(topology, 100 * period, protocol)
    assert 100 * period / taken == pytest.approx(expected, rel=0.1)


def test_a_short_queue_costs_a_window() -> None:
    topology = pair(mbit=1000)
    deep = seconds(topology, 100_000_000, DEEP)
    short = seconds(topology, 100_000_000, {"preset": "linux-tcp", "queue": 1000})
    assert 1.1 * deep < short < 1.6 * deep
    assert seconds(topology, 100_000_000) == short  # what Linux's interfaces have
    # The window of 2,304 segments puts 1,152 into the queue.
    assert seconds(topology, 100_000_000, {"preset": "linux-tcp", "queue": 1152}) == deep


def test_a_hosts_own_line_holds_its_senders_back() -> None:
    """Nothing is lost there, whatever a queue holds; behind it something is, and in a shaper that the file states."""

    def last(flows: list[str], queue: int, stated: int | None = None) -> float:
        line = {"bandwidth": "100 Mbit/s", "latency": "20 ms", "queue": stated}
        links = [{"between": [host, "sw"], **line} for host in "abc"]
        topology = Topology.from_mapping({"hosts": ["a", "b", "c"], "routers": ["sw"], "links": links})
        sent = [(0.0, source, target, 5_000_000) for source, target in flows]
        return float(max(time_flows(topology, sent, {"preset": "linux-tcp", "queue": queue})))

    for flows in (["ab"], ["ab", "ab"], ["ab", "ac"]):
        assert last(flows, 10) == last(flows, 100_000), flows
        assert last(flows, 100_000, stated=10) > last(flows, 100_000), flows
    assert last(["ac", "bc"], 10) > last(["ac", "bc"], 100_000)


def test_a_hosts_own_short_queue_refuses_packets() -> None:
    """Messages wait for the share of two packets a socket that it does not hold, once for all on a connection."""

    def last(queue: int, num_messages: int, num_packets: int = 4) -> float:
        line = {"between": ["a", "b"], "bandwidth": "50 Mbit/s", "rtt": "20 ms", "queue": queue}
        clock = Clock()
        network = Network(clock, Topology.from_mapping({"hosts": ["a", "b"], "links": [line]}))
        for connection in range(16):
            for _ in range(num_messages):
                network.send(0, 1, num_packets * SEGMENT, lambda: None, connection=connection)
        clock.run()
        return clock.now

    rate = 50e6 / 8 * PAYLOAD
    refused = (1 - 20 / 32) * (0.2 + 0.02 + 20 * SEGMENT / rate)
    for num in (1, 2):
        assert last(32, num) == pytest.approx(0.01 + 16 * num * 4 * SEGMENT / rate)
        assert last(20, num) == pytest.approx(last(32, num) + refused)
    assert last(20, 1, 1) == last(32, 1, 1)  # a packet each


def test_messages_sent_again_after_a_crash_are_refused_again() -> None:
    line = {"between": ["a", "b"], "bandwidth": "50 Mbit/s", "rtt": "20 ms", "queue": 20}
    ended = []
    for crashes in (False, True):
        clock = Clock()
        network = Network(clock, Topology.from_mapping({"hosts": ["a", "b"], "links": [line]}))
        for connection in range(16):
            network.send(0, 1, 4 * SEGMENT, lambda: None, connection=connection)
        if crashes:
            clock.run(until=0.05)
            network.engine.drop_at(0)
        clock.run()
        ended.append(clock.now)
    assert ended[1] == pytest.approx(ended[0] + 0.05)


@pytest.mark.parametrize(
    ("at", "paced"), [(3.0, 1.2 * 2 * 0.08 * 100e6 / 8 * PAYLOAD), (0.5, 2 * 320 * SEGMENT)]
)
def test_small_frames_wait_behind_other_connections_bursts(at: float, paced: float) -> None:
    """Two of each socket wait at the host's own line, each a millisecond at 1.2 windows a round trip, or at 2."""
    arrived: list[float] = []
    for num_bytes in (0, 50_000_000):
        network = Network(Clock(), four_hosts("20 ms"), "gloo")

        def send_note(event: object, network: Network = network) -> None:
            network.send(0, 2, 0, lambda: arrived.append(network.env.now))

        network.send(0, 1, num_bytes, lambda: None)
        network.env.at(at, call=send_note)
        network.env.run()
    burst = paced / 0.08 / 1024 // SEGMENT * SEGMENT
    assert arrived[1] - arrived[0] == pytest.approx(2 * burst / (100e6 / 8 * PAYLOAD))


def test_a_note_waits_only_for_what_its_line_has_not_carried_yet() -> None:
    """Also where nothing of it has arrived."""
    arrived: list[float] = []
    for num_bytes in (0, 8192):
        network = Network(Clock(), four_hosts("0.1 ms"), "gloo")

        def send_note(event: object, network: Network = network) -> None:
            network.send(0, 2, 0, lambda: arrived.append(network.env.now))

        network.send(0, 1, num_bytes, lambda: None)
        network.env.at(0.25e-3, call=send_note)
        network.env.run()
    assert arrived[1] - arrived[0] == pytest.approx(8192 / (100e6 / 8 * PAYLOAD) - 0.25e-3)


def test_a_hosts_line_serves_sockets_by_their_small_queues() -> None:
    """One whose window is narrow has less than a third of it beside one whose window fills the pipe."""
    took = []
    for num_bytes in (1_000_000, 2_000_000):
        network = Network(Clock(), four_hosts("4 ms"), "gloo")

        def send(event: object, network: Network = network, num_bytes: int = num_bytes) -> None:
            network.send(0, 2, num_bytes, lambda: took.append(network.env.now))

        for source, target in [(0, 1), (2, 3)]:
            network.send(source, target, 50_000_000, lambda: None)
        network.env.at(1.0, call=send)
        network.env.run()
    assert took[1] - took[0] > 3 * 1_000_000 / (100e6 / 8 * PAYLOAD)


def test_a_window_does_not_shrink_between_messages() -> None:
    """HyStart ended slow start at some 36 segments; since then the first message has opened the window."""
    network = Network(Clock(), four_hosts("4 ms"), "gloo")
    ended: list[float] = []

    def send(event: object) -> None:
        network.send(0, 2, 500_000 if ended else 3_000_000, end)

    def end() -> None:
        ended.append(network.env.now)
        if len(ended) == 1:
            network.env.at(ended[0] + 0.1, call=send)

    for source, target in [(0, 1), (2, 3)]:
        network.send(source, target, 9_000_000, lambda: None)
    network.env.at(0.5, call=send)
    network.env.run()
    assert ended[1] - ended[0] - 0.1 == pytest.approx(0.008 + 500_000 / (100e6 / 8 * PAYLOAD), rel=0.05)


def test_a_new_connection_beside_a_warm_one_leaves_slow_start() -> None:
    """HyStart hears the bursts of warm ones at the sender's line, and at that of its acknowledgements."""
    took = []
    for others in ([(0, 1)], [(0, 1), (2, 3)]):
        network = Network(Clock(), four_hosts("16 ms"), "gloo")
        ended: list[float] = []

        def send(event: object, network: Network = network, ended: list[float] = ended) -> None:
            network.send(0, 2, 3_000_000, lambda: ended.append(network.env.now))

        for source, target in others:
            network.send(source, target, 100_000_000, lambda: None)
        network.env.at(5.0, call=send)
        network.env.run()
        took.append(ended[0] - 5.0)
    assert took[1] > 1.1 * took[0]


def test_turns_at_a_line_end_with_the_others_data() -> None:
    """A narrow window continues once the message beside it has ended."""
    network = Network(Clock(), four_hosts("4 ms"), "gloo")
    ended: list[float] = []

    def send_both(event: object) -> None:
        network.send(0, 1, 100_000, lambda: None)
        network.send(0, 2, 300_000, end)

    def end() -> None:
        ended.append(network.env.now)
        if len(ended) == 1:
            network.env.at(ended[0] + 0.1, call=send_both)

    for source, target in [(0, 1), (2, 3)]:
        network.send(source, target, 8_000_000, lambda: None)
    network.env.at(0.5, call=lambda event: network.send(0, 2, 1_500_000, end))
    network.env.run()
    assert ended[1] - ended[0] - 0.1 - 400_000 / (100e6 / 8 * PAYLOAD) < 0.03


def test_slow_start_grows_to_twice_what_was_in_flight() -> None:
    """In the pipe, and in the sender's line: two bursts."""
    network = Network(Clock(), four_hosts("4 ms"), "gloo")
    network.send(0, 1, 5_000_000, lambda: None)
    network.env.run()
    (window,) = [each.window for each in network.engine.connections.kept()]
    assert window is not None
    payload = 100e6 / 8 * PAYLOAD
    in_line = 2 * (2 * 2 * payload / 1024 // SEGMENT) * SEGMENT
    largest = window.buffer_bytes(network.env.now) / 2
    assert largest == pytest.approx(2 * (0.016 * payload + in_line), rel=0.05)


def test_the_socket_takes_a_message_once_the_window_has_grown() -> None:
    clock = Clock()
    network = Network(clock, pair(), "gloo")
    times: list[float] = []

    def send() -> None:
        network.send(0, 1, 500_000, lambda: None, on_sent=lambda: times.append(clock.now))

    send()
    clock.run()
    assert 0.2 < times[0] < clock.now
    begin = clock.now
    send()
    clock.run()
    assert times[1] == begin


def lossy(num_bytes: float, loss: str, latency: str, bandwidth: str, num: int = 1) -> tuple[float, int]:
    """Seconds of as many transfers at once over a line that loses packets, and how many events they take."""
    clock = Clock()
    network = Network(clock, chain("ab", bandwidth, latency, loss), "linux-tcp")
    done: list[float] = []
    for connection in range(num):
        network.send(0, 1, num_bytes, lambda: done.append(clock.now), connection=connection)
    while len(done) < num:
        clock.run(until=clock.now + 1e6)
        assert network.engine.counts.num_events < 20_000 * num, "the cost grows with the bytes"
    return max(done), network.engine.counts.num_events


LOSSY = [
    ("0.01 %", "20 ms", "1 Gbit/s", 1),
    ("0.1 %", "40 ms", "100 Mbit/s", 3),
    ("0.01 %", "5 ms", "100 Mbit/s", 3),
]


@pytest.mark.parametrize(("loss", "latency", "bandwidth", "num"), LOSSY)
def test_what_a_long_transfer_over_a_lossy_line_costs_does_not_grow_with_its_bytes(
    loss: str, latency: str, bandwidth: str, num: int
) -> None:
    """And all of many gigabytes end, however little of them a packet is."""
    _, few = lossy(2e9, loss, latency, bandwidth, num)
    _, many = lossy(4e10, loss, latency, bandwidth, num)
    lossy(4e13, loss, latency, bandwidth, num)
    assert many <= 1.25 * few + 100


@pytest.mark.parametrize(("loss", "latency", "bandwidth", "num"), LOSSY)
def test_periods_that_go_by_at_once_take_what_they_take_one_by_one(
    monkeypatch: pytest.MonkeyPatch, loss: str, latency: str, bandwidth: str, num: int
) -> None:
    quick, _ = lossy(1e9, loss, latency, bandwidth, num)
    monkeypatch.setattr(use_sources(monkeypatch).Period, "is_like", lambda self, other: False)
    slow, _ = lossy(1e9, loss, latency, bandwidth, num)
    assert quick == pytest.approx(slow, rel=1e-4)


def test_bursts_fill_a_queue_together() -> None:
    """A queue of 1,000 bytes drains 100 a second; hosts' lines carry 600."""
    alone = Burst(0.0, 5000.0, 0, 600.0)
    assert meet([alone], 1000.0, 100.0) == (600.0, 1200.0, 2.0)
    other = Burst(0.0, 5000.0, 1, 600.0)
    feed, heard, full_at = meet([alone, other], 1000.0, 100.0)
    assert (feed, heard, full_at) == pytest.approx((1200.0, 6000 / 11, 10 / 11))
    same_line = Burst(0.0, 5000.0, 0, 600.0)
    assert meet([alone, same_line], 1000.0, 100.0) == pytest.approx((600.0, 600.0, 2.0))
    late = Burst(0.5, 5000.0, 1, 600.0)
    assert meet([late, alone], 1000.0, 100.0)[1] < heard < meet([alone, late], 1000.0, 100.0)[1]
    short = Burst(0.0, 60.0, 1, 600.0)
    assert meet([alone, short], 1000.0, 100.0) == pytest.approx((1200.0, 600 * 1.88, 1.88))
    assert meet([alone], 1000.0, 600.0) == (600.0, math.inf, math.inf)


def test_bursts_that_end_as_the_queue_fills_are_over_or_not_once() -> None:
    """Rounding placed the last byte after the instant and before it in turns, without end."""
    began = 76.81458492140825
    lines = Burst(began, math.inf, 0, 432008670.6220366), Burst(began, 339585.545064094, 2, 432008670.6220366)
    assert meet([*lines], 565975.9084407757, 144002890.20734552)[1] == pytest.approx(339585.545, rel=1e-6)


@pytest.mark.parametrize("round_trip", [0.012, 0.1])
def test_after_slow_start_a_window_grows_by_half_a_segment_a_round_trip(round_trip: float) -> None:
    """TCP_INFO of a sender over 12 ms: 61 segments as HyStart ends slow start, 90 of them fifty round trips later."""
    assert segments_after_slow_start(0.0, 61.0, round_trip) == 61.0
    later = segments_after_slow_start(50 * round_trip, 61.0, round_trip)
    assert later == pytest.approx(max(61 + 50 * 0.53, 61 + 0.4 * (50 * round_trip) ** 3), rel=0.01)
