"""Topologies from files: directions, routes, placement, loading by name, and what it costs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import netsim
from netsim import Background, Drift, HostEvent, LinkEvent, Topology, Trace, Weather, shipped_topologies
from netsim.cli.main import cli
from netsim.topology.graph import Host

EXAMPLE = """\
name: two-sites-and-a-home
source: invented
hosts:
  home: {device: rtx-4090}
routers: [exchange]
links:
  - {between: [home, exchange], up: 20 Mbit/s, down: 300 Mbit/s, latency: 10 ms, loss: 0.01 %}
  - {between: [exchange, us], bandwidth: 10 Gbit/s, latency: 8 ms}
  - {between: [home, eu], bandwidth: 1 Mbit/s, latency: 100 ms}
regions:
  us: {hosts: 4, nic: 10 Gbit/s, latency: 50 us, device: h100}
  eu: {hosts: 12, up: 1 Gbit/s, down: 2 Gbit/s}
wan:
  - {between: [us, eu], bandwidth: 800 Mbit/s, rtt: 80 ms}
routes:
  - {from: us.0, to: home, through: [us, eu]}
protocol: {preset: linux-tcp, streams: 8}
"""


@pytest.fixture
def example(tmp_path: Path) -> Topology:
    (tmp_path / "example.yaml").write_text(EXAMPLE)
    return Topology.load(tmp_path / "example.yaml")


def stops(topology: Topology, source: str, target: str) -> list[str]:
    route = topology.route(topology.host_index(source), topology.host_index(target))
    return [topology.links[link].target for link in route]


def test_hosts_come_in_natural_order(example: Topology) -> None:
    names = [host.name for host in example.hosts]
    assert names == [
        *[f"eu.{number}" for number in range(12)],
        "home",
        *[f"us.{number}" for number in range(4)],
    ]
    assert [host.index for host in example.hosts] == list(range(17))
    assert example.hosts[12] == Host("home", 12, None, "rtx-4090")
    assert example.hosts[13] == Host("us.0", 13, "us", "h100")
    assert example.regions == ("eu", "us")
    assert example.routers == ("eu", "exchange", "us")
    assert example.protocol == {"preset": "linux-tcp", "streams": 8}
    assert [example.region_of(host) for host in (0, 12, 13)] == ["eu", "home", "us"]


@pytest.mark.parametrize("command", ["validate", "show"])
def test_a_link_that_no_route_takes_is_named(command: str, example: Topology, tmp_path: Path) -> None:
    """Unless a route is given for it, as in the example."""
    assert example.unused_links is None
    path = tmp_path / "detour.yaml"
    path.write_text(EXAMPLE.partition("routes:")[0])
    printed = CliRunner().invoke(cli, [command, str(path)]).output
    assert (
        "link eu - home carries no route: eu to home goes by us, exchange (58 ms one way instead of 100 ms)"
        in printed
    )


def test_links_are_directed(example: Topology) -> None:
    by_ends = {(link.source, link.target): link for link in example.links}
    assert by_ends["home", "exchange"].bits_per_second == 20e6
    assert by_ends["exchange", "home"].bits_per_second == 300e6
    assert by_ends["exchange", "home"].loss == by_ends["home", "exchange"].loss == 1e-4
    assert by_ends["eu.3", "eu"].bits_per_second == 1e9
    assert by_ends["eu", "eu.3"].bits_per_second == 2e9
    assert by_ends["eu", "eu.3"].latency_seconds == 0
    assert by_ends["us", "eu"].latency_seconds == 0.04
    for link in example.links:
        assert example.links[link.index] is link
        assert example.bits_per_second[link.index] == link.bits_per_second
        assert example.latency_seconds[link.index] == link.latency_seconds
        assert example.loss[link.index] == link.loss


def test_routes(example: Topology) -> None:
    assert stops(example, "us.0", "home") == ["us", "eu", "home"]  # as the file says
    assert stops(example, "us.1", "home") == ["us", "exchange", "home"]
    assert stops(example, "eu.0", "eu.0") == []
    assert example.route_latency_seconds(0, 0) == 0


def test_placement_by_name(example: Topology) -> None:
    assert example.place(3, ["us.1", "home", "us.1"]) == (14, 12, 14)


def test_small_ones_are_valid() -> None:
    single = Topology.from_mapping({"hosts": ["a"]})
    assert single.place(3) == (0, 0, 0)
    assert single.bits_per_second.dtype == np.float64
    pair = Topology.from_mapping({"hosts": [1, 2], "links": [{"between": [1, 2], "bandwidth": "1 bit/s"}]})
    assert pair.route(0, 1) == (0,)
    assert pair.route(1, 0) == (1,)
    region = Topology.from_mapping({"regions": {"x": {"hosts": 1, "nic": "1 bit/s", "rtt": "0 s"}}})
    assert region.hosts[0].name == "x.0"


def test_routes_between_regions_hold_for_their_hosts(tmp_path: Path) -> None:
    form = yaml.safe_load(EXAMPLE)
    form["routes"] = [
        {"from": "eu", "to": "home", "through": ["eu"]},
        {"from": "eu.1", "to": "home", "through": ["eu", "us", "exchange"]},
    ]
    for routes in (form["routes"], form["routes"][::-1]):
        topology = Topology.from_mapping({**form, "routes": routes})
        assert stops(topology, "eu.0", "home") == ["eu", "home"]
        assert stops(topology, "eu.1", "home") == ["eu", "us", "exchange", "home"]
        assert stops(topology, "home", "eu.0") == ["exchange", "us", "eu", "eu.0"]


def test_latencies_that_are_equal_on_paper_tie() -> None:
    """10 ms + 20 ms and 30 ms differ in binary; fewer links must decide."""
    links = [
        ("a", "x", "10 ms"),
        ("x", "b", "20 ms"),
        ("a", "y", "15 ms"),
        ("y", "b", "15 ms"),
        ("a", "b", "30 ms"),
    ]
    form = {
        "hosts": ["a", "b"],
        "routers": ["x", "y"],
        "links": [
            {"between": [one, two], "bandwidth": "1 bit/s", "latency": time} for one, two, time in links
        ],
    }
    assert stops(Topology.from_mapping(form), "a", "b") == ["b"]
    form["links"] = form["links"][:-1]
    assert stops(Topology.from_mapping(form), "a", "b") == ["x", "b"]


def test_shipped_ones_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = Topology.load("wan-4-regions")
    assert Topology.load("topologies/wan-4-regions.yaml") == expected
    assert Topology.load(Path("wan-4-regions.yaml")) == expected
    (tmp_path / "lan.yaml").write_text("hosts: [mine]")
    assert Topology.load("lan.yaml").hosts[0].name == "mine"
    assert len(Topology.load("lan").hosts) == 8


def test_weather(tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("start_s,bits_per_second\n0,1e8\n60.5,2e7\n")
    (tmp_path / "net.yaml").write_text(
        """\
hosts: [a, b]
links: [{between: [b, a], bandwidth: 1 Gbit/s, latency: 1 ms}]
events:
  - {at: 10 s, link: [a, b], down: true, for: 5 s}
  - {at: 2 s, link: [b, a], direction: up, bandwidth: 1 Mbit/s}
  - {at: 1 min, host: b, crash: true, for: 30 s}
  - {at: 3 min, host: a, up: true}
traces:
  - {link: [a, b], bandwidth: day.csv}
  - {link: [a, b], direction: down, latency: [[0 s, 1 ms], [5 s, 7 ms]]}
background:
  - {from: a, to: b, bytes: 1 MB, every: 10 s, start: 5 s, stop: 1 h}
  - {from: b, to: a, rate: 10 Mbit/s}
drift:
  - {link: [a, b], kind: lognormal, sigma: 0.3, every: 10 s, seed: 7}
"""
    )
    topology = Topology.load(tmp_path / "net.yaml")
    assert [(link.source, link.target) for link in topology.links] == [("a", "b"), ("b", "a")]
    weather = topology.weather
    assert weather.events == (
        LinkEvent(at=2, link=("b", "a"), direction="up", bandwidth=1e6),
        LinkEvent(at="10 s", link=["a", "b"], down=True, for_=5),
        HostEvent(at=60, host="b", crash=True, for_="30 s"),
        HostEvent(at=180, host="a", up=True),
    )
    assert weather.traces == (
        Trace(link=("a", "b"), bandwidth=[(0, 1e8), (60.5, 2e7)]),
        Trace(link=("a", "b"), direction="down", latency=[("0 s", "1 ms"), (5.0, 0.007)]),
    )
    assert set(weather.background) == {
        Background(from_="a", to="b", bytes=1_000_000, every=10, start=5, stop="1 h"),
        Background(**{"from": "b", "to": "a", "rate": 1e7}),
    }
    assert weather.drift == (Drift(link=("a", "b"), kind="lognormal", every=10, sigma=0.3, seed=7),)
    assert weather
    assert not Topology.load("lan").weather
    assert Topology.from_mapping(topology.to_mapping(), "again").weather == weather


def pair(egress: str) -> dict[str, object]:
    link = {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "latency": "1 ms", "egress": egress}
    return {"name": "pair", "source": "test", "hosts": ["a", "b"], "links": [link], "protocol": "ideal"}


def test_a_collective_tells_what_its_traffic_costs() -> None:
    """Both halves of a ring cross once each way: 2 GB, 1 GB a direction, at 2 cents."""
    took = netsim.collective(pair("0.02 $/GB"), "all_reduce", num_bytes="1 GB", algorithm="ring")
    assert took.dollars == pytest.approx(0.04)
    assert netsim.collective(pair("0 $/GB"), "all_reduce", num_bytes="1 GB").dollars == 0
    result = CliRunner().invoke(
        cli, ["collective", "aws-12-regions-64-streams", "all_reduce", "--bytes", "1GB", "--json"]
    )
    assert json.loads(result.output)["dollars"] > 0


SHIPPED = sorted(shipped_topologies())


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
