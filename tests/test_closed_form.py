"""The closed form of collectives whose messages share no link: equal to the live network, and to SimGrid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_collectives import draw_call, ends, star, started, topologies

from netsim import Clock, Network, Protocol, Topology, schedule
from netsim.collectives.closed_form import contention_free_seconds, undisturbed_seconds

IDEAL = Protocol.parse("ideal")
WAN = {
    "ab": (200, 40),
    "ac": (200, 90),
    "ad": (100, 150),
    "bc": (200, 70),
    "bd": (300, 110),
    "cd": (200, 130),
}


def four_regions(num: int) -> Topology:
    """Four regions of equal size; 10 Gbit/s network cards, one pipe for each pair of regions."""
    region = {"hosts": num // 4, "nic": "10 Gbit/s", "latency": "0.05 ms"}
    wan = [
        {"between": list(pair), "bandwidth": f"{mbit} Mbit/s", "latency": f"{milliseconds} ms"}
        for pair, (mbit, milliseconds) in WAN.items()
    ]
    return Topology.from_mapping({"regions": dict.fromkeys("abcd", region), "wan": wan, "protocol": "ideal"})


@settings(max_examples=60)
@given(data=st.data(), protocol=st.sampled_from(["ideal", {"preset": "ideal", "software": "1 ms"}]))
def test_where_no_messages_meet_it_gives_the_times_of_the_live_network(
    data: st.DataObject, protocol: Any
) -> None:
    topology = data.draw(topologies())
    made, _ = draw_call(data, len(topology.hosts), 0.0)
    hosts = data.draw(st.permutations(range(len(topology.hosts))))
    found = contention_free_seconds(made, hosts, topology, Protocol.parse(protocol))
    (wanted,) = ends(started, Network(Clock(), topology, protocol), [(made, [0.0] * made.num_ranks)], hosts)
    if found is not None:
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=40)
@given(data=st.data())
def test_no_transfer_finishes_before_the_undisturbed_time(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    made, _ = draw_call(data, len(topology.hosts), 0.0)
    hosts = range(len(topology.hosts))
    least = undisturbed_seconds(made, hosts, topology, IDEAL)
    arrivals = [0.0] * made.num_ranks
    (live,) = ends(started, Network(Clock(), topology, "ideal"), [(made, arrivals)], hosts)
    if least is not None:
        assert (least <= np.array(live) * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize(
    ("topology", "num", "seconds"),
    [
        (star, 64, 4.095),
        (star, 256, 11.79375),
        (four_regions, 64, 34.6626),
        (four_regions, 256, 92.4885),
        # SimGrid was given 1,024 chunks of ceil(1e8 / 1024) bytes; ours add up to 1e8: 768 bytes less.
        (four_regions, 1024, 323.08909776),
    ],
)
def test_rings_take_what_simgrid_says(topology: Callable[[int], Topology], num: int, seconds: float) -> None:
    made = schedule("all_reduce", num, num_bytes=100_000_000)
    found = contention_free_seconds(made, range(num), topology(num), IDEAL)
    assert found.max() == pytest.approx(seconds, rel=1e-6 if num == 1024 else 1e-9)


def test_messages_that_meet_on_a_link_are_noticed() -> None:
    topology = four_regions(16)
    hosts = [rank % 4 * 4 + rank // 4 for rank in range(16)]
    ring = schedule("all_reduce", 16, num_bytes=1600)
    assert contention_free_seconds(ring, hosts, topology, IDEAL) is None
    direct = schedule("all_to_all", 16, num_bytes=25600)
    assert contention_free_seconds(direct, range(16), topology, IDEAL) is None
