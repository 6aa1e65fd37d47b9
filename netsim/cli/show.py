"""`netsim validate` and `netsim show`: a topology checked, and as tables."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import click

from netsim.cli.terminal import given, plain_console, takes
from netsim.errors import InputError
from netsim.topology.devices import device_name
from netsim.topology.protocol import Protocol, enough_streams
from netsim.topology.topology import Topology
from netsim.units import format_bits_per_second, format_count, format_fraction, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.table import Table

    from netsim.topology.graph import Link

    _Places = Mapping[str, tuple[int, int]]
    _OfRoute = Callable[[Topology, int, int], float]

__all__ = ["show_command", "validate_command"]

T = TypeVar("T")

_MANY_HOSTS = 10  # more are shown by region
_MANY_ROWS = 60
_MOST_ROUTED = 100  # places between which JSON has all routes
_WHERE_GIVEN = ("mtu_bytes", "measured_streams", "stream_bits_per_second")
_LINK_KEYS = (
    *("bits_per_second", "latency_seconds", "loss", "queue_packets"),
    *_WHERE_GIVEN,
    "dollars_per_byte",
)
_PLAIN_WIDTH = 160  # columns of output that goes to a file or a pipe


@click.command("validate")
@takes()
def validate_command(file: str = given(is_argument=True, required=True)) -> None:
    """Check a topology FILE; every error names file, line and key."""
    topology = Topology.load(file)
    counts = {"host": topology.hosts, "region": topology.regions, "link": topology.links}
    text = ", ".join(format_count(len(entries), noun) for noun, entries in counts.items())
    click.echo(f"{file}: valid: {text} (one direction each)")
    if topology.unused_links is not None:
        click.echo(f"warning: {file}: {topology.unused_links}", err=True)
    _warn_of_unknown_devices(file, topology)


def _warn_of_unknown_devices(file: str, topology: Topology) -> None:
    """Warn of devices that the table lacks: compute times by FLOPs need them."""
    unlike = {host.device: host.name for host in reversed(topology.hosts) if host.device is not None}
    for device, host in reversed(unlike.items()):
        try:
            device_name(device, f"host {host}: ")
        except InputError as error:
            click.echo(f"warning: {file}: {error}", err=True)


@click.command("show")
@takes()
def show_command(topology: str = given(is_argument=True, required=True), as_json: bool = given()) -> None:
    """Print hosts and links of a TOPOLOGY (a file, or a shipped name); as JSON, its routes too."""
    network = Topology.load(topology)
    if as_json:
        click.echo(json.dumps(_as_mapping(network)))
        return
    from rich.text import Text  # here and below: `validate` and JSON do without it

    console = plain_console(_PLAIN_WIDTH)
    console.print(Text(network.name, style="bold"))
    if network.source:
        console.print(Text(f"source: {network.source.strip()}", style="dim"))
    if network.protocol is not None:
        console.print(Text(f"protocol: {network.protocol}"))
    console.print(_hosts(network))
    console.print(_links(network))
    protocol = Protocol.resolve(network.protocol)
    if len(places := _places(network)[1]) <= _MOST_ROUTED:
        ends = [host for pair in places.values() for host in dict.fromkeys(pair)]
        most = enough_streams(network, replace(protocol, streams=1), ends)
        if most is not None and most.streams > 1:
            count = format_count(most.streams, "stream")
            console.print(f"{protocol.name}: {count} {most.fills}; more bring nothing", soft_wrap=True)
    if network.unused_links is not None:
        console.print(Text(network.unused_links), soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Table with the first rows of many."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for number, row in enumerate(listed := list(rows)):
        if number == _MANY_ROWS:
            table.add_row(f"and {len(listed) - _MANY_ROWS:,} more")
            break
        table.add_row(*row)
    return table


def _hosts(network: Topology) -> Table:
    """Each host; alike ones of a region in one row."""
    rows: dict[tuple[str | None, str | None, str], list[str]] = {}
    for host in network.hosts:
        key = (host.region, host.device, "" if host.region else host.name)
        rows.setdefault(key, []).append(host.name)
    shown = (
        (" ... ".join(dict.fromkeys((names[0], names[-1]))), f"{len(names):,}", region or "-", device or "-")
        for (region, device, _), names in rows.items()
    )
    return _table(format_count(len(network.hosts), "host"), ("hosts", "number", "region", "device"), shown)


def _links(network: Topology) -> Table:
    """Each connection once; alike ones of a region's hosts to one place in one row."""
    region = {host.name: host.region for host in network.hosts}
    rows: Counter[tuple[str, ...]] = Counter()
    for link in network.links:
        back = network.link_between[link.target, link.source]
        # From the host's side where one end is a host in a region, else in canonical order.
        sides = (region.get(link.source) is None, link.index), (region.get(link.target) is None, back.index)
        if sides[0] < sides[1]:
            group = region.get(link.source)
            rows[(f"{group}.*" if group else link.source, link.target, *_figures(link, back))] += 1
    optional = ("queue", "mtu", "measured with", "one stream")  # few files have them
    columns = ("from", "to", "number", "bandwidth", "and back", "latency", "loss", *optional)
    table = [(*row[:2], f"{number:,}", *row[2:]) for row, number in rows.items()]
    kept = [
        place
        for place, name in enumerate(columns)
        if name not in optional or any(row[place] for row in table)
    ]
    shown = ([row[place] for place in kept] for row in table)
    return _table(format_count(len(network.links) // 2, "link"), [columns[place] for place in kept], shown)


def _figures(link: Link, back: Link) -> tuple[str, ...]:
    def each(values: Iterable[T | None], write: Callable[[T], str]) -> str:
        """The values of both directions; one where they are equal."""
        return " and ".join(write(value) for value in dict.fromkeys(values) if value is not None)

    both = link, back
    return (
        *(format_bits_per_second(way.bits_per_second) for way in both),
        format_seconds(link.latency_seconds),
        format_fraction(link.loss),
        each([link.queue_packets], "{:,}".format),
        each([link.mtu_bytes], "{:,}".format),
        each((way.measured_streams for way in both), lambda num: format_count(num, "stream")),
        each((way.stream_bits_per_second for way in both), format_bits_per_second),
    )


def _places(network: Topology) -> tuple[str, dict[str, tuple[int, int]]]:
    """Kind of rows and columns; of each its representative host, and the peer in its own cell."""
    hosts = [host.index for host in network.hosts]
    if len(hosts) <= _MANY_HOSTS:
        return "host", {network.hosts[host].name: (host, host) for host in hosts}
    regions: dict[str, list[int]] = {}
    for host in hosts:
        regions.setdefault(network.region_of(host), []).append(host)
    return "region", {name: (members[0], members[-1]) for name, members in regions.items()}


def _routes(network: Topology, places: _Places, of_route: _OfRoute) -> list[list[float | None]]:
    """Value of the route from each place to each; None to itself where it has one host."""
    rows: list[list[float | None]] = []
    for row, partner in places.values():
        ends = [(row, column if column != row else partner) for column, _ in places.values()]
        rows.append([None if one == other else of_route(network, one, other) for one, other in ends])
    return rows


def _as_mapping(network: Topology) -> dict[str, object]:
    """Numbers in bit/s and seconds; `docs/topology.md` lists the keys."""
    what, places = _places(network)
    routes: dict[str, object] | None = None

    def narrowest(topology: Topology, one: int, other: int) -> float:
        return min(topology.links[link].bits_per_second for link in topology.route(one, other))

    if len(places) <= _MOST_ROUTED:
        routes = {
            "between": list(places),
            "of": f"{what}s",
            "bits_per_second": _routes(network, places, narrowest),
            "latency_seconds": _routes(network, places, Topology.route_latency_seconds),
        }
    return {
        "name": network.name,
        "source": network.source,
        "protocol": network.protocol,
        "hosts": [
            {"name": host.name, "region": host.region, "device": host.device, "devices": host.devices}
            for host in network.hosts
        ],
        "routers": network.routers,
        "links": [
            {
                "from": link.source,
                "to": link.target,
                **{
                    key: each for key in _LINK_KEYS if (each := getattr(link, key)) or key not in _WHERE_GIVEN
                },
            }
            for link in network.links
        ],
        "routes": routes,
    }
