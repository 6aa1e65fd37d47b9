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
from hypothesis import assume, given
from hypothesis import strategies as st

from netsim import Topology, shipped_topologies
from netsim.errors import InputError
from netsim.topology.graph import natural_key

RATES = ["1 Gbit/s", "200 Mbit/s", "1e8 bit/s"]
LATENCIES = ["0 s", "1 ms", "2 ms", "3 ms", "0.5 ms"]  # few values, so that ties are common


@st.composite
def topologies(draw: st.DrawFn) -> dict[str, Any]:
    """Files with hosts, routers, regions and links among them, connected; some with routes and weather."""
    num_nodes = draw(st.integers(2, 8))
    nodes = [
        f"n{number}" for number in range(7, 7 + num_nodes)
    ]  # n7 ... n14: natural order is not that of text
    num_routers = draw(st.integers(0, num_nodes - 1))
    sizes = draw(st.lists(st.integers(1, 3), max_size=2))
    regions = {
        name: {
            "hosts": size,
            "nic": draw(st.sampled_from(RATES)),
            "latency": draw(st.sampled_from(LATENCIES)),
        }
        for name, size in zip(("us", "eu"), sizes, strict=False)
    }
    ends = [*nodes, *regions]
    pairs = {(ends[draw(st.integers(0, position - 1))], ends[position]) for position in range(1, len(ends))}
    pairs |= set(draw(st.lists(st.sampled_from(list(itertools.combinations(ends, 2))), max_size=8)))
    links = [_link(draw, pair) for pair in sorted(pairs) if pair[::-1] not in pairs or pair[0] < pair[1]]
    hosts = {
        name: draw(st.sampled_from([{}, {"device": "h100"}, {"region": "far"}]))
        for name in nodes[num_routers:]
    }
    data = {
        "name": "drawn",
        "hosts": hosts,
        "routers": nodes[:num_routers],
        "links": links,
        "regions": regions,
    }
    one, other = links[0]["between"]
    if draw(st.booleans()):
        data["events"] = [
            {"at": "1 s", "link": [one, other], "down": True, "for": "2 s"},
            {"at": "1 s", "host": nodes[-1], "crash": True},
            {"at": "0.5 s", "link": [other, one], "direction": "up", "loss": "3 %"},
        ]
        data["traces"] = [{"link": [one, other], "bandwidth": [["0 s", "1 Mbit/s"], ["1 min", "0 bit/s"]]}]
        data["drift"] = [{"link": [one, other], "kind": "lognormal", "every": "1 s", "sigma": 0.1}]
    return data


def _link(draw: st.DrawFn, pair: tuple[str, str]) -> dict[str, Any]:
    link: dict[str, Any] = {"between": list(pair), "latency": draw(st.sampled_from(LATENCIES))}
    if draw(st.booleans()):
        return {**link, "bandwidth": draw(st.sampled_from(RATES))}
    return {
        **link,
        "up": draw(st.sampled_from(RATES)),
        "down": draw(st.sampled_from(RATES)),
        "loss": "0.07 %",
        "queue": draw(st.integers(1, 10_000)),
    }


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


@given(topologies(), st.randoms(use_true_random=False))
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
    for seed in range(20):
        assert Topology.from_mapping(_shuffled(data, random.Random(seed))) == topology


@given(topologies())
def test_the_plain_form_loads_back(data: dict[str, Any]) -> None:
    topology = Topology.from_mapping(data)
    form = topology.to_mapping()
    assert Topology.from_mapping(form) == topology
    assert Topology.from_mapping(json.loads(json.dumps(form))) == topology
    assert Topology.from_mapping(form).to_mapping() == form
    assert pickle.loads(pickle.dumps(topology)) == topology


@pytest.mark.parametrize("name", sorted(shipped_topologies()))
def test_the_plain_form_of_shipped_ones_loads_back(name: str) -> None:
    topology = Topology.load(name)
    assert Topology.from_mapping(topology.to_mapping()) == topology


@given(topologies())
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


@given(topologies(), st.data())
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


@given(topologies(), st.data())
def test_every_misspelt_key_finds_the_right_one(data: dict[str, Any], draw: st.DataObject) -> None:
    link = data["links"][0]
    key = draw.draw(st.sampled_from(sorted(key for key in link if len(key) > 3)))
    position = draw.draw(st.integers(0, len(key) - 1))
    typo = key[:position] + draw.draw(st.sampled_from(["", key[position] * 2, "x"])) + key[position + 1 :]
    assume(typo not in ("up", "rtt", *link))
    data["links"][0] = {typo if name == key else name: value for name, value in link.items()}
    with pytest.raises(InputError, match=f"did you mean '{key}'"):
        Topology.from_mapping(data)
