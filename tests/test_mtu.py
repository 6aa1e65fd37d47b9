"""Sizes of packets: headers' share of a line, and windows in segments, by the MTU of links and protocols."""

from __future__ import annotations

from typing import Any

import pytest
from forks import benchmark
from hypothesis import given
from hypothesis import strategies as st

import netsim
from netsim import Topology
from netsim.topology.file import plain_form

AWS = 9001


def pair(mtu: int | None = None, protocol: Any = "linux-tcp", **link: Any) -> Topology:
    entry = {"between": ["a", "b"], "bandwidth": "1 Gbit/s", **link}
    if mtu is not None:
        entry["mtu"] = mtu
    return Topology.from_mapping({"hosts": ["a", "b"], "links": [entry], "protocol": protocol})


def seconds(topology: Topology, num_bytes: int, protocol: Any = None) -> float:
    return netsim.collective(topology, "sendrecv", num_bytes=num_bytes, protocol=protocol).seconds


def num_rounds(topology: Topology, num_bytes: int) -> int:
    """Round trips of 80 ms before the last bytes leave."""
    return round((seconds(topology, num_bytes) - 0.04) / 0.08)


@given(mtu=st.integers(576, 65_535), num_bytes=st.integers(10**6, 10**9))
def test_a_line_carries_the_payload_of_full_frames(mtu: int, num_bytes: int) -> None:
    """52 of each packet's bytes are headers, and 14 more of its frame: by link or protocol, and not without headers."""
    wanted = num_bytes * (mtu + 14) / (mtu - 52) / (1e9 / 8)
    assert seconds(pair(mtu), num_bytes) == pytest.approx(wanted, rel=1e-9)
    assert seconds(pair(protocol={"mtu": mtu}), num_bytes) == pytest.approx(wanted, rel=1e-9)
    assert seconds(pair(mtu), num_bytes, "ideal") == num_bytes / (1e9 / 8)


@pytest.mark.parametrize("links", [("mtu", None), (None, "mtu")])
def test_windows_are_of_segments_that_the_whole_route_carries(links: tuple[str | None, str | None]) -> None:
    """Ten segments leave first, and a loss of 1 % keeps a window of as many segments: of the route's least MTU."""

    def topology(mtu: int | None, **figures: str) -> Topology:
        entry = {"bandwidth": "10 Gbit/s", "rtt": "40 ms", "mtu": 3000, **figures}
        two = [dict(entry, between=list(ends)) for ends in ("ar", "rb")]
        for given_, each in zip(links, two, strict=True):
            if given_ and mtu is not None:
                each["mtu"] = mtu
        return Topology.from_mapping({"hosts": ["a", "b"], "routers": ["r"], "links": two})

    def rounds(mtu: int, num_bytes: int) -> int:
        return num_rounds(topology(mtu), num_bytes)

    assert rounds(3000, 10 * 2948) == rounds(1500, 10 * 1448) == 0
    assert rounds(3000, 10 * 2948 + 1) == rounds(1500, 10 * 1448 + 1) == rounds(1500, 10 * 2948) == 1
    lost = [seconds(topology(mtu, loss="1 %"), 20_000_000) for mtu in (1500, 3000)]
    assert lost[0] / lost[1] == pytest.approx(2948 / 1448, rel=0.1)


@pytest.mark.parametrize("streams", [1, 16])
def test_a_receive_window_opens_one_round_late(streams: int) -> None:
    """64 KiB a stream in each of two round trips and 128 KiB in each of two more, then slow start's; once only."""
    topology = pair(AWS, {"preset": "linux-tcp", "streams": streams}, bandwidth="100 Gbit/s", rtt="80 ms")
    first = streams * 65536
    for num, windows in enumerate((1, 2, 4, 6, 10, 18)):
        assert num_rounds(topology, windows * first) == num
        assert num_rounds(topology, windows * first + streams) == num + 1
    calls = netsim.collective(topology, "sendrecv", num_bytes=6 * first, repeat=2, pause_seconds=60)
    assert calls.repeat_seconds[1] < calls.repeat_seconds[0] - 0.07


def test_congestion_avoidance_opens_the_receive_window_too() -> None:
    """It ends at a share of the line, and grows once that is free; after a pause 2 MB go at the rate of the line."""
    line = {"between": ["r", "b"], "bandwidth": "1 Gbit/s", "rtt": "80 ms", "mtu": AWS}
    own = [dict(line, between=[host, "r"], bandwidth="100 Gbit/s", rtt="0 s") for host in "ac"]
    topology = Topology.from_mapping({"hosts": ["a", "b", "c"], "routers": ["r"], "links": [*own, line]})
    protocol = {"preset": "linux-tcp", "window": "256 MiB", "queue": 1000}
    network = netsim.Network(clock := netsim.Clock(), topology, protocol)
    for number in range(40):
        network.send(2, 1, 10_000_000, lambda: None, connection=number)

    def process() -> Any:
        yield clock.timeout(1.0)
        yield network.transfer(0, 1, 1_000_000_000)
        yield clock.timeout(0.4)
        begin = clock.now
        yield network.transfer(0, 1, 2_000_000)
        return clock.now - begin

    rate = 1e9 / 8 * (AWS - 52) / (AWS + 14)
    assert clock.run(clock.process(process())) == pytest.approx(0.04 + 2_000_000 / rate, rel=1e-6)


def test_a_receive_window_that_will_open_keeps_its_connection() -> None:
    """Connections that are as new are closed where there are a thousand: three windows would take a round more."""
    network = netsim.Network(clock := netsim.Clock(), pair(AWS, bandwidth="100 Gbit/s", rtt="80 ms"))

    def process() -> Any:
        yield network.transfer(0, 1, 65536 + 1)
        yield clock.timeout(1.0)
        for number in range(1, 1100):
            network.send(0, 1, 1, lambda: None, connection=number)
        begin = clock.now
        yield network.transfer(0, 1, 3 * 65536)
        return clock.now - begin

    assert clock.run(clock.process(process())) == pytest.approx(0.04 + 0.08, abs=0.001)


def test_acknowledgements_take_a_share_of_the_way_back_by_segments() -> None:
    """One of 66 bytes for every two segments: 2.3 % of payload at 1,500 bytes, 0.4 % at 9,001."""
    for mtu in (1500, AWS):
        clock = netsim.Clock()
        network = netsim.Network(clock, pair(mtu), "linux-tcp")
        for ends in ((0, 1), (1, 0)):
            network.send(*ends, 10**9, lambda: None)
        clock.run()
        share = 1 + 66 / (2 * (mtu - 52)) * (mtu - 52) / (mtu + 14)
        assert clock.now == pytest.approx(8 * (mtu + 14) / (mtu - 52) * share, rel=2e-3)


def test_it_is_written_as_it_was_read() -> None:
    written = plain_form(pair(AWS))
    assert written["links"][0]["mtu"] == AWS
    assert Topology.from_mapping(written).links == pair(AWS).links


@pytest.mark.rates
def test_probe_finds_the_mtu_of_a_line() -> None:
    shaped, probing = benchmark("shaped_links"), benchmark("probe")
    if reason := shaped.why_not():
        pytest.skip(reason)
    wan = [("a", "b", "80 Mbit/s", "40 Mbit/s", "20 ms")]
    set_up = {"name": "set", **probing.regions({"a": probing.FREE, "b": probing.FREE}, wan)}
    set_up["wan"][0]["mtu"] = 1380
    with shaped.ShapedLinks(Topology.from_mapping(set_up)) as net:
        text = probing.probe(net, ["--seconds", "0.5", "--streams", "2"], 120.0)
    assert ", mtu: 1380" in text
