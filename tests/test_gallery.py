"""Every topology that ships: one row each, found by looking."""

from __future__ import annotations

import itertools

import pytest

from netsim.topology import Topology, shipped_topologies
from netsim.topology.weather import Weather

SHIPPED = sorted(shipped_topologies())


def test_the_promised_ones_ship() -> None:
    assert {
        "aws-12-regions-64-streams",
        "aws-12-regions-single-stream",
        "cluster",
        "gcp-10-regions",
        "home-broadband",
        "home-tiers",
        "intellect-1",
        "intellect-1-usa",
        "intellect-1-usa-eu",
        "lan",
        "opendiloco-4-sites",
        "two-datacenters",
        "wan-10-regions",
        "wan-4-regions",
    } <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_is_complete(name: str) -> None:
    topology = Topology.load(name)
    assert topology.name == name
    assert len(topology.hosts) >= 8
    assert len(topology.source) > 80
    assert topology.weather == Weather()
    for one, other in itertools.permutations(range(len(topology.hosts)), 2):
        assert topology.route(one, other)
        assert topology.route_latency_seconds(one, other) > 0


@pytest.mark.parametrize(
    "name", [name for name in SHIPPED if len(Topology.load(name).regions) > 3 and name != "cluster"]
)
def test_traffic_between_regions_goes_direct(name: str) -> None:
    """Pairs were measured end to end, so a way through a third region would be a figure nobody measured."""
    topology = Topology.load(name)
    for one, other in itertools.permutations(range(len(topology.hosts)), 2):
        assert len(topology.route(one, other)) == 2 + (topology.region_of(one) != topology.region_of(other))


def test_eight_workers_spread_over_the_four_regions() -> None:
    topology = Topology.load("wan-4-regions")
    regions = [topology.region_of(host) for host in topology.place(8)]
    assert regions == ["asia", "asia", "eu", "eu", "us-east", "us-east", "us-west", "us-west"]
