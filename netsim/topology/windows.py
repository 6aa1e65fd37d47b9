"""Where a sender's window, and no link, limits a transfer, and what would help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.files.units import format_bits_per_second, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["WindowLimit", "window_limit"]


@dataclass(frozen=True)
class WindowLimit:
    """A way on which the window lets less through than its narrowest link would.

    Attributes:
        source, target: names of hosts.
        round_trip_seconds: of the way.
        window_bits_per_second: what all streams' windows let through, payload.
        link_bits_per_second: what the narrowest link carries, payload.
        streams: how many would fill it, with windows as they are.
        window_bytes: which window would fill it, with as many streams as there are.
    """

    source: str
    target: str
    round_trip_seconds: float
    window_bits_per_second: float
    link_bits_per_second: float
    streams: int
    window_bytes: int

    @property
    def share(self) -> float:
        """Of what the links carry, what the window lets through."""
        return self.window_bits_per_second / self.link_bits_per_second

    def __str__(self) -> str:
        mebibytes = math.ceil(self.window_bytes / 2**20)
        return (
            f"limited by the window from {self.source} to {self.target}:"
            f" {format_bits_per_second(self.window_bits_per_second)} at a round trip of"
            f" {format_seconds(self.round_trip_seconds)}, of"
            f" {format_bits_per_second(self.link_bits_per_second)} that the links carry;"
            f" streams: {self.streams} or window: {mebibytes} MiB would fill them"
        )


def window_limit(
    topology: Topology, protocol: Protocol, messages: Iterable[tuple[int, int, float]]
) -> WindowLimit | None:
    """The way on which a window limits most, of those whose messages are longer than it; None where none does.

    Args:
        topology: the network.
        protocol: whose `window_bytes` and `streams` hold.
        messages: (from, to, bytes) with indices of hosts, the largest message of each way being enough.

    >>> from netsim import Protocol, Topology
    >>> topology = Topology.from_mapping({"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "10 Gbit/s", "rtt": "40 ms"}]})
    >>> limit = window_limit(topology, Protocol.parse("linux-tcp"), [(0, 1, 1e9)])
    >>> limit.streams, limit.window_bytes
    (12, 47820344)
    >>> window_limit(topology, Protocol.parse("ideal"), [(0, 1, 1e9)])
    """
    window = protocol.window_bytes * protocol.streams
    if not math.isfinite(window):
        return None
    worst: tuple[float, WindowLimit] | None = None
    for src, dst, num_bytes in messages:
        route = topology.route(src, dst)
        if num_bytes <= window or not route:
            continue
        round_trip = topology.route_latency_seconds(src, dst) + topology.route_latency_seconds(dst, src)
        link = min(topology.links[index].bits_per_second for index in route) * protocol.payload_share
        if not round_trip or window * 8 / round_trip >= link:
            continue
        share = window * 8 / round_trip / link
        if worst is not None and worst[0] <= share:
            continue
        needed = link / 8 * round_trip
        worst = (
            share,
            WindowLimit(
                topology.hosts[src].name,
                topology.hosts[dst].name,
                round_trip,
                window * 8 / round_trip,
                link,
                math.ceil(needed / protocol.window_bytes),
                math.ceil(needed / protocol.streams),
            ),
        )
    return worst[1] if worst is not None else None
