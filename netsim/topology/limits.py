"""Limits of transfers that a network and its protocol have, each with the network in which it is relieved."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from netsim.units import format_bits_per_second, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netsim.topology.graph import Host, Link
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["TransferLimit", "transfer_limits"]

_FASTER = 2.0
_LIKE = 1.25  # times: links whose rates, and processes whose loads, differ by less are one limit
_MOST_NAMED = 2
_LEAST_WINDOW = 2  # packets of a stream


class TransferLimit(NamedTuple):
    """A limit of transfers.

    Attributes:
        by: the resource in words.
        remedy: what relieves it, with options as they are typed.
        topology, protocol: the network with twice the resource, or half the delay.
        busy_seconds: in which the resource carries the given bytes; None: it delays them.
    """

    by: str
    remedy: str
    topology: Topology
    protocol: Protocol
    busy_seconds: float | None = None


def transfer_limits(
    topology: Topology, protocol: Protocol, link_bytes: Sequence[float], most_links: int
) -> Iterator[TransferLimit]:
    """Limits of transfers on a network, the cheapest remedy first: each kind that the simulation has.

    Args:
        topology: the network.
        protocol: how transfers use it, with its ranks' processes (`Protocol.for_ranks`).
        link_bytes: payload across each link.
        most_links: groups of links of about one rate, the busiest for their rate.
    """
    if protocol.has_windows:
        streams = protocol.streams * 2
        remedy = f"--set protocol.streams={streams} (streams a transfer, instead of {protocol.streams})"
        yield TransferLimit("window", remedy, topology, replace(protocol, streams=streams))
        yield from _refusals(topology, protocol)
    yield from _processes(topology, protocol, link_bytes)
    rates = protocol.payload_bytes_per_second(topology)
    busy = [
        (num_bytes / rate, link)
        for num_bytes, rate, link in zip(link_bytes, rates, topology.links, strict=True)
        if num_bytes and rate
    ]
    groups: list[tuple[float, list[Link]]] = []
    for seconds, link in sorted(busy, key=lambda each: -each[0]):
        like = (
            group
            for _, group in groups
            if 1 / _LIKE < link.bits_per_second / group[0].bits_per_second < _LIKE
        )
        if (group := next(like, None)) is not None:
            group.append(link)
        else:
            groups.append((seconds, [link]))
    for seconds, group in groups[:most_links]:
        name = _name_of_links(group)
        faster = _with_links(
            topology, group, lambda link: replace(link, bits_per_second=link.bits_per_second * _FASTER)
        )
        yield TransferLimit(name, f"twice the bandwidth on {name}", faster, protocol, seconds)
    nearer = _with_links(
        topology, topology.links, lambda link: replace(link, latency_seconds=link.latency_seconds / _FASTER)
    )
    yield TransferLimit("latency", "sites half as far, or fewer and larger messages", nearer, protocol)
    if (software := protocol.software_seconds) > 0:
        remedy = (
            f"fewer messages (longer rounds, larger buckets), of which each takes {format_seconds(software)}, or a "
            "protocol without it, such as by --set protocol.preset=linux-tcp"
        )
        quick = replace(protocol, software_seconds=software / _FASTER)
        yield TransferLimit(f"software of {protocol.name}", remedy, topology, quick)
    if any(host.store is not None for host in topology.hosts):
        prompt = replace(topology, hosts=tuple(map(_prompt, topology.hosts)))
        remedy = "a store that answers in half the time, or fewer and larger objects"
        yield TransferLimit("latency of stores", remedy, prompt, protocol)


def _refusals(topology: Topology, protocol: Protocol) -> Iterator[TransferLimit]:
    """Packets that a host's own short queue refuses: it holds less than the least windows of streams to all others."""
    machines = {host.name for host in topology.hosts}
    least = _LEAST_WINDOW * protocol.streams * (len(machines) - 1)
    short = [
        link
        for link in topology.links
        if link.source in machines and (link.queue_packets or math.inf) < least
    ]
    if short:
        packets = max(link.queue_packets or 0 for link in short)
        remedy = (
            f"a longer queue there, such as `queue: {2 * packets}`, which refuses fewer packets, or fewer connections "
            "at once"
        )
        longer = _with_links(
            topology, short, lambda link: replace(link, queue_packets=2 * (link.queue_packets or 0))
        )
        yield TransferLimit(f"queue of {_name_of_links(short)}", remedy, longer, protocol)


def _processes(
    topology: Topology, protocol: Protocol, link_bytes: Sequence[float]
) -> Iterator[TransferLimit]:
    """The core of ranks' processes, where a host's links carry more."""
    carried, widths = defaultdict[tuple[str, bool], float](float), defaultdict[tuple[str, bool], float](float)
    for link, num_bytes, rate in zip(
        topology.links, link_bytes, protocol.payload_bytes_per_second(topology), strict=True
    ):
        for end in ((link.source, True), (link.target, False)):
            carried[end] += num_bytes
            widths[end] += rate
    limits = {
        host.name: limit
        for host, limit in zip(topology.hosts, protocol.process_limits(topology), strict=True)
    }
    busy: dict[str, float] = {}
    for (name, out), num_bytes in carried.items():
        if num_bytes and widths[name, out] > (limit := limits.get(name, math.inf)):
            busy[name] = max(busy.get(name, 0.0), num_bytes / limit)
    if busy:
        most = max(busy.values())
        names = _few([name for name, seconds in busy.items() if seconds * _LIKE > most], "hosts")
        core = format_bits_per_second(protocol.core_bits_per_second)
        remedy = (
            f"more ranks on a host, whose processes send and receive {core} each, or a protocol without this limit, "
            "such as by --set protocol.preset=linux-tcp"
        )
        faster = replace(protocol, core_bits_per_second=protocol.core_bits_per_second * _FASTER)
        yield TransferLimit(f"core of {names}", remedy, topology, faster, most)


def _prompt(host: Host) -> Host:
    store = host.store
    if store is None:
        return host
    return replace(host, store=replace(store, latency_seconds=store.latency_seconds / _FASTER))


def _with_links(topology: Topology, links: Sequence[Link], change: Callable[[Link], Link]) -> Topology:
    chosen = {link.index for link in links}
    return replace(
        topology, links=tuple(change(link) if link.index in chosen else link for link in topology.links)
    )


def _name_of_links(links: Sequence[Link]) -> str:
    pairs = list(dict.fromkeys(" - ".join(sorted((link.source, link.target))) for link in links))
    if len(pairs) == 1:
        return f"link {pairs[0]}"
    return _few(pairs, f"links of about {format_bits_per_second(links[0].bits_per_second)}")


def _few(names: Sequence[str], what: str) -> str:
    """One name, or the number of names and the first of them.

    >>> _few(["a"], "hosts"), _few(["a", "b", "c"], "hosts")
    ('a', '3 hosts (a, b and 1 more)')
    """
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)} {what} ({', '.join(names[:_MOST_NAMED])}{more})"
