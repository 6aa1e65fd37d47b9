"""The compiled loop against the network it stands for, on small networks full of ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.face import flows
from netsim.face.flows import Flow
from netsim.topology import Topology
from netsim.topology.protocol import Protocol

compiled = pytest.importorskip("netsim.fluid.compiled", reason="needs numba", exc_type=ImportError)

Case = tuple[Topology, list[Flow]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A ring of hosts with some chords; transfers that begin, share and end together more often than not."""
    num = draw(st.integers(2, 7))
    chords = draw(st.lists(st.sampled_from(list(itertools.combinations(range(num), 2))), max_size=3))
    pairs = {(i, i + 1) for i in range(num - 1)} | {(0, num - 1)} | set(chords)
    rate = st.sampled_from(["1 Mbit/s", "2 Mbit/s", "3 Mbit/s", "10 Mbit/s"])
    links = [
        {
            "between": [f"h{a}", f"h{b}"],
            "up": draw(rate),
            "down": draw(rate),
            "latency": draw(st.sampled_from(["0 s", "1 ms", "250 ms"])),
        }
        for a, b in sorted(pairs)
    ]
    host = st.integers(0, num - 1)
    start = st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, 1.25])
    size = st.sampled_from([0.0, 1e3, 1e5, 1e5, 2.5e5, 1e6])
    rows = draw(st.lists(st.builds(Flow, start, host, host, size), min_size=1, max_size=25))
    return Topology.from_mapping({"hosts": {f"h{i}": {} for i in range(num)}, "links": links}), rows


@given(cases())
def test_transfers_arrive_when_the_network_says(case: Case) -> None:
    topology, rows = case
    ideal = Protocol.parse("ideal")
    expected = flows._time_on_network(topology, rows, ideal, None, None)
    compiled_finish = flows._time_compiled(topology, ideal, rows)
    np.testing.assert_allclose(compiled_finish, expected, rtol=1e-9, atol=1e-12)


def test_what_meets_a_link_without_capacity_never_arrives() -> None:
    capacity, links = np.array([0.0, 10.0]), np.array([[0, 1, 2], [1, 2, 2], [2, 2, 2]])
    finish = compiled.run_messages(
        capacity,
        links,
        np.array([0, 1, 1, 2]),
        np.zeros(4),
        np.array([10.0, 20.0, 10.0, 5.0]),
        np.arange(4.0),
    )
    assert finish.tolist() == [math.inf, 4.0, 4.0, 3.0]
