"""Topologies: order never matters, routes are the shortest, workers are spread evenly."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from typing import Any

import networkx as nx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from netsim import Topology, shipped_topologies
from netsim.testing import TopologyMapping, topologies, weather
from netsim.topology.graph import natural_key


@st.composite
def forms(draw: st.DrawFn, max_hosts: int = 12) -> TopologyMapping:
    """Files with all keys but routes, some with weather; of more than ten hosts natural order is not that of text."""
    form = draw(topologies(2, max_hosts, is_detailed=True))
    return TopologyMapping(form | draw(weather(form))) if draw(st.booleans()) else form


def _shuffled(value: Any, order: random.Random, key: str = "") -> Any:
    """The same file in another order: keys, entries of lists, and the ends of links where that changes nothing."""
    if isinstance(value, dict):
        entries = [(name, _shuffled(entry, order, name)) for name, entry in value.items()]
        order.shuffle(entries)
        mapping = dict(entries)
        if "between" in mapping and order.random() < 0.5:
            mapping["between"] = mapping["between"][::-1]
            if "up" in mapping:
                mapping["up"], mapping["down"] = mapping["down"], mapping["up"]
        return mapping
    if isinstance(value, list):
        entries = [_shuffled(entry, order) for entry in value]
        if key in ("links", "routers", "wan", "routes", "events", "traces", "drift"):
            order.shuffle(entries)
        return entries
    return value


@given(forms(), st.randoms(use_true_random=False))
def test_order_changes_nothing(data: dict[str, Any], order: random.Random) -> None:
    topology, other = Topology.from_mapping(data), Topology.from_mapping(_shuffled(data, order))
    assert other == topology
    assert other.to_mapping() == topology.to_mapping()
    names = [host.name for host in topology.hosts]
    assert names == sorted(names, key=natural_key)
    pairs = itertools.permutations(range(len(topology.hosts)), 2)
    assert all(topology.route(*pair) == other.route(*pair) for pair in pairs)


@pytest.mark.parametrize("name", sorted(shipped_topologies()))
def test_order_changes_nothing_in_shipped_files(name: str) -> None:
    data = yaml.safe_load(shipped_topologies()[name].read_text())
    topology = Topology.load(name)
    for seed in range(4):
        assert Topology.from_mapping(_shuffled(data, random.Random(seed))) == topology


@given(forms())
def test_the_plain_form_loads_back(data: dict[str, Any]) -> None:
    topology = Topology.from_mapping(data)
    form = topology.to_mapping()
    assert Topology.from_mapping(form) == topology
    assert Topology.from_mapping(json.loads(json.dumps(form))) == topology
    assert Topology.from_mapping(form).to_mapping() == form
    assert pickle.loads(pickle.dumps(topology)) == topology


@given(forms(4))
def test_routes_are_the_shortest(data: dict[str, Any]) -> None:
    """Against networkx: all simple paths, the least by latency, then links, then names."""
    topology = Topology.from_mapping(data)
    graph = nx.DiGraph()
    for link in topology.links:
        graph.add_edge(
            link.source, link.target, index=link.index, microseconds=round(link.latency_seconds * 1e6)
        )
    for one, other in itertools.permutations(topology.hosts, 2):
        best = min(
            nx.all_simple_paths(graph, one.name, other.name),
            key=lambda path: (
                nx.path_weight(graph, path, "microseconds"),
                len(path),
                [natural_key(name) for name in path],
            ),
        )
        route = topology.route(one.index, other.index)
        assert route == tuple(graph.edges[edge]["index"] for edge in itertools.pairwise(best))
        latency = topology.route_latency_seconds(one.index, other.index)
        assert latency == pytest.approx(nx.path_weight(graph, best, "microseconds") / 1e6)


@given(forms(), st.data())
def test_workers_are_spread_evenly(data: dict[str, Any], draw: st.DataObject) -> None:
    topology = Topology.from_mapping(data)
    num_workers = draw.draw(st.integers(1, 3 * len(topology.hosts)))
    placed = topology.place(num_workers)
    per_host = [placed.count(host.index) for host in topology.hosts]
    assert len(placed) == num_workers
    assert max(per_host) - min(per_host) <= 1
    regions = [topology.region_of(host) for host in placed]
    assert len([region for region, _ in itertools.groupby(regions)]) == len(set(regions))
    sizes = {
        region: sum(topology.region_of(host.index) == region for host in topology.hosts) for region in regions
    }
    counts = {region: regions.count(region) % sizes[region] for region in sizes}
    spare = [count for region, count in counts.items() if count]
    if num_workers < len(topology.hosts) and len(spare) == len(counts):
        assert max(spare) - min(spare) <= 1 or any(counts[region] == sizes[region] for region in counts)
