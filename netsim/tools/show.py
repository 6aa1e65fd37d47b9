"""`netsim show`: a topology as tables."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from netsim.files.units import format_bits_per_second, format_fraction, format_seconds
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from netsim.topology.graph import Link

__all__ = ["command"]

_MANY_HOSTS = 10  # more are shown by region
_MANY_COLUMNS = 24
_MANY_ROWS = 60
_PLAIN_WIDTH = 160  # columns of output that goes to a file or a pipe


@click.command("show")
@click.argument("topology")
def command(topology: str) -> None:
    """Print hosts, links and the matrix of bandwidth and latency of a TOPOLOGY (a file, or a shipped name)."""
    network = Topology.load(topology)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(Text(network.name, style="bold"))
    if network.source:
        console.print(Text(f"source: {network.source.strip()}", style="dim"))
    if network.protocol is not None:
        console.print(Text(f"protocol: {network.protocol}"))
    console.print(_hosts(network))
    console.print(_links(network))
    note, tables = _matrices(network)
    console.print(Text(note, style="bold"))
    for table in tables:
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    return table


def _hosts(network: Topology) -> Table:
    """Each host; alike ones of a region in one row."""
    rows: dict[tuple[str | None, str | None, str], list[str]] = {}
    for host in network.hosts:
        key = (host.region, host.device, "" if host.region else host.name)
        rows.setdefault(key, []).append(host.name)
    table = _table(f"{len(network.hosts):,} hosts", "hosts", "number", "region", "device")
    for (region, device, _), names in list(rows.items())[:_MANY_ROWS]:
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        table.add_row(shown, f"{len(names):,}", region or "-", device or "-")
    if len(rows) > _MANY_ROWS:
        table.add_row(f"and {len(rows) - _MANY_ROWS:,} more")
    return table


def _links(network: Topology) -> Table:
    """Each connection once; alike ones of a region's hosts to one place in one row."""
    index = {(link.source, link.target): link for link in network.links}
    region = {host.name: host.region for host in network.hosts}
    rows: Counter[tuple[str, ...]] = Counter()
    for link in network.links:
        back = index[link.target, link.source]
        # From the host's side where one end is a host in a region, else in canonical order.
        sides = (region.get(link.source) is None, link.index), (region.get(link.target) is None, back.index)
        if sides[0] < sides[1]:
            group = region.get(link.source)
            rows[(f"{group}.*" if group else link.source, link.target, *_figures(link, back))] += 1
    title = f"{len(network.links) // 2:,} links"
    # Few files know queues.
    queue = ("queue",) if any(link.queue_packets for link in network.links) else ()
    table = _table(title, "from", "to", "number", "bandwidth", "and back", "latency", "loss", *queue)
    for (source, target, *figures), number in list(rows.items())[:_MANY_ROWS]:
        table.add_row(source, target, f"{number:,}", *figures[: 4 + len(queue)])
    if len(rows) > _MANY_ROWS:
        table.add_row(f"and {len(rows) - _MANY_ROWS:,} more")
    return table


def _figures(link: Link, back: Link) -> tuple[str, ...]:
    rates = (format_bits_per_second(link.bits_per_second), format_bits_per_second(back.bits_per_second))
    queue = "" if link.queue_packets is None else f"{link.queue_packets:,}"
    return (*rates, format_seconds(link.latency_seconds), format_fraction(link.loss), queue)


def _matrices(network: Topology) -> tuple[str, list[Table]]:
    """Narrowest link and one-way latency of the route from each row to each column, and what these are."""
    hosts = [host.index for host in network.hosts]
    names = [host.name for host in network.hosts]
    note = "Routes from host (row) to host (column)"
    partners = dict(zip(hosts, hosts, strict=True))
    if len(hosts) > _MANY_HOSTS:
        places: dict[str, list[int]] = {}
        for host in hosts:
            places.setdefault(network.region_of(host), []).append(host)
        names, hosts = list(places), [members[0] for members in places.values()]
        partners = {members[0]: members[-1] for members in places.values()}
        note = "Routes from region (row) to region (column), by the first host of each"
    if len(hosts) > _MANY_COLUMNS:
        note += f"; the first {_MANY_COLUMNS} of {len(hosts):,}"
        names, hosts = names[:_MANY_COLUMNS], hosts[:_MANY_COLUMNS]

    def matrix(title: str, cell: Callable[[int, int], str]) -> Table:
        table = _table(title, "", *names)
        for name, row in zip(names, hosts, strict=True):
            ends = [(row, column if column != row else partners[row]) for column in hosts]
            table.add_row(name, *["-" if one == other else cell(one, other) for one, other in ends])
        return table

    def rate(one: int, other: int) -> str:
        return f"{min(network.bits_per_second[link] for link in network.route(one, other)) / 1e6:.6g}"

    def latency(one: int, other: int) -> str:
        return f"{network.route_latency_seconds(one, other) * 1e3:.4g}"

    return note, [matrix("narrowest link, Mbit/s", rate), matrix("one-way latency, ms", latency)]
