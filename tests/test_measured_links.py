"""Links measured end to end: as many streams take what was measured, whatever the loss and the window."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import netsim
from netsim import Protocol, Topology, shipped_topologies
from netsim.topology.protocol import PRESETS, enough_streams, spare_streams, window_limit

GOODPUT = 240e6


def pair(streams: int | None = 1, **link: Any) -> Topology:
    entry = {"between": ["a", "b"], "bandwidth": "240 Mbit/s", "rtt": "38 ms", "loss": "0.1 %", **link}
    if streams is not None:
        entry["measured"] = {"streams": streams}
    return Topology.from_mapping({"hosts": ["a", "b"], "links": [entry], "protocol": "ideal"})


def seconds(topology: Topology, protocol: Any, num_bytes: float = 1e9) -> float:
    return netsim.collective(topology, "sendrecv", num_bytes=int(num_bytes), protocol=protocol).seconds


@given(
    goodput=st.floats(1e6, 2e10),
    rtt=st.floats(1e-4, 0.3),
    loss=st.sampled_from([0.0, 1e-5, 1e-3, 0.02]),
    streams=st.integers(1, 16),
    protocol=st.sampled_from(["linux-tcp", "gloo"]),
    num_apart=st.sampled_from([1, 2]),
)
def test_as_many_streams_take_what_was_measured(
    goodput: float, rtt: float, loss: float, streams: int, protocol: str, num_apart: int
) -> None:
    """Within 2 % once started, in one transfer or in several at once that have as many streams together."""
    link = {"bandwidth": f"{goodput} bit/s", "rtt": f"{rtt} s", "loss": f"{loss * 100} %"}
    topology = pair(streams * num_apart, **link)
    clock = netsim.Clock()
    network = netsim.Network(clock, topology, {"preset": protocol, "streams": streams, "core": "1 Tbit/s"})
    filling = goodput / 8 * rtt
    size = goodput / 8 * (1.0 + 40 * rtt)
    start_up = rtt * (math.log2(max(filling / 14480, 1.0)) + 4)
    for number in range(num_apart):
        network.send(0, 1, size, lambda: None, connection=number)
    clock.run()
    wanted = num_apart * size * 8 / goodput
    assert wanted * 0.98 <= clock.now <= (wanted + start_up) * 1.02


@given(
    streams=st.integers(1, 12),
    is_measured=st.booleans(),
    rtt=st.sampled_from(["0.2 ms", "5 ms", "90 ms"]),
    protocol=st.sampled_from(["linux-tcp", "gloo", "nccl-sockets"]),
)
def test_streams_get_the_rate_of_one_up_to_the_rate_in_all(
    streams: int, is_measured: bool, rtt: str, protocol: str
) -> None:
    """Whether the provider limits a stream or one was measured, and whatever the preset's window."""
    link = {"rtt": rtt, "bandwidth": "2 Gbit/s", "loss": "0 %", "queue": 10**6, "stream": "260 Mbit/s"}
    topology = pair(8 if is_measured else None, **link)
    settings = {"preset": protocol, "streams": streams}
    if not is_measured:
        settings["window"] = "64 MiB"
    rate = 2e9 * 8 / (seconds(topology, settings, 4e9) - seconds(topology, settings, 2e9))
    one, whole = (
        each * (1 if is_measured else Protocol.parse(settings).payload_share) for each in (260e6, 2e9)
    )
    assert rate == pytest.approx(min(streams * one, whole), rel=0.02)
    limit = window_limit(topology, Protocol.parse(settings), [(0, 1, 4e9)])
    assert (limit is None) == (streams >= 8)
    assert limit is None or (limit.streams, limit.is_stream_rate) == (8, not is_measured)
    enough = enough_streams(topology, Protocol.parse(settings), [0, 1])
    assert enough is not None
    assert enough.streams == 8
    assert (spare_streams(topology, Protocol.parse(settings), [0, 1]) is None) == (streams <= 8)


def test_the_rate_of_a_stream_has_its_directions_and_its_limits() -> None:
    topology = pair(None, stream={"up": "3 Gbit/s", "down": "1 Gbit/s"})
    assert {link.source: link.stream_bits_per_second for link in topology.links} == {"a": 3e9, "b": 1e9}
    assert Topology.from_mapping(topology.to_mapping()).links == topology.links
    quick, slow = pair(8, stream="150 Mbit/s"), {"preset": "linux-tcp", "window": "128 KiB"}
    assert seconds(quick, slow) == pytest.approx(1e9 / (2**17 / 0.038), rel=0.01)
    assert seconds(quick, "ideal") == seconds(pair(8), "ideal")
    with pytest.raises(ValueError, match="2 streams of 100 Mbit/s cannot have had the measured 240 Mbit/s"):
        pair(2, stream="100 Mbit/s")


def test_a_window_of_ones_own_is_kept_to() -> None:
    small = {"preset": "linux-tcp", "window": "256 KiB"}
    limit = window_limit(pair(), Protocol.parse(small), [(0, 1, 1e9)])
    assert limit.window_bits_per_second == pytest.approx(2**18 * 8 / 0.038)
    assert seconds(pair(), small) == pytest.approx(1e9 / (2**18 / 0.038), rel=0.01)
    assert window_limit(pair(), PRESETS["linux-tcp"], [(0, 1, 1e9)]) is None


def test_bounds_and_estimates_count_payload() -> None:
    took = netsim.collective(pair(), "all_reduce", num_bytes="1 GB", protocol="linux-tcp")
    assert took.bound_seconds == pytest.approx(1e9 * 8 / GOODPUT, rel=0.01)
    assert took.bound_seconds < took.seconds < 1.05 * took.bound_seconds


def test_a_measured_link_comes_back_as_it_was() -> None:
    region = {"hosts": 2, "nic": "1 Gbit/s", "measured": {"streams": 4}}
    topology = Topology.from_mapping(
        {
            "regions": {"us": region, "eu": {"hosts": 1, "nic": "1 Gbit/s"}},
            "wan": [{"between": ["us", "eu"], "bandwidth": "1 Gbit/s", "measured": {"up": 64, "down": 1}}],
            "protocol": "ideal",
        }
    )
    again = Topology.from_mapping(topology.to_mapping())
    assert again == replace(topology, name=again.name)
    streams = {(link.source, link.target): link.measured_streams for link in topology.links}
    assert (streams["us.0", "us"], streams["eu.0", "eu"], streams["us", "eu"], streams["eu", "us"]) == (
        4,
        None,
        64,
        1,
    )


@pytest.mark.parametrize("name", sorted(shipped_topologies()))
def test_shipped_networks_say_how_their_figures_were_measured(name: str) -> None:
    """Links between sites are measured, those of cards and access lines are as their makers list them."""
    nominal = {"cluster", "home-broadband", "home-tiers", "lan"}
    streams = {
        link.measured_streams for link in Topology.load(name).links if ".0" not in link.source + link.target
    }
    measured = {each for each in streams if each is not None}
    assert bool(measured) == (name not in nominal)
    if measured:
        many = name in ("aws-12-regions-64-streams", "gcp-10-regions", "two-datacenters")
        assert measured == {64 if many else 1}


@pytest.mark.parametrize(
    "protocol",
    [
        "linux-tcp",
        pytest.param("gloo", marks=pytest.mark.thorough),
        pytest.param("nccl-sockets", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", sorted(shipped_topologies()))
def test_a_transfer_over_a_shipped_network_gets_what_was_measured(name: str, protocol: str) -> None:
    """With as many streams as the measurement had, within 2 % once started, on each kind of route.

    A process of gloo sends no more than half of what its core moves, however fast the measured link.
    """
    topology = Topology.load(name)
    routes: dict[Any, tuple[str, str]] = {}
    for source, target in itertools.permutations(topology.hosts, 2):
        links = [topology.links[index] for index in topology.route(source.index, target.index)]
        if any(link.measured_streams for link in links):
            kind = tuple(
                (link.bits_per_second, link.latency_seconds, link.measured_streams) for link in links
            )
            routes.setdefault(kind, (source.name, target.name))
    for kind, ends in routes.items():
        settings = {"preset": protocol, "streams": max(streams for _, _, streams in kind if streams)}
        parsed = Protocol.parse(settings)
        rates = [rate if streams else rate * parsed.payload_share for rate, _, streams in kind]
        rate = min(*rates, parsed.core_bits_per_second / 2) / 8
        once, twice = (
            netsim.flows(topology, [(0.0, *ends, size)], settings).finish_seconds[0]
            for size in (100 * rate, 200 * rate)
        )
        assert 100 * rate / (twice - once) == pytest.approx(rate, rel=0.02), ends
