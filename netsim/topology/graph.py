"""Hosts, links and the shortest routes between them: the plain graph under a topology."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Host", "Link", "ShortestRoutes", "natural_key"]

_PICOSECONDS = 1e12
_Distance = tuple[int, int]  # picoseconds, links


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that ranks can be placed on; `index` is its position in natural name order.

    `devices` is the number that it computes on; None: as many as it has ranks.
    """

    name: str
    index: int
    region: str | None
    device: str | None
    devices: int | None = None

    def slowdown(self, num_ranks: int) -> float:
        """Factor by which a step takes longer where so many ranks share the devices.

        >>> Host("a", 0, None, None, 2).slowdown(6), Host("a", 0, None, None).slowdown(6)
        (3.0, 1.0)
        """
        return 1.0 if self.devices is None else max(1.0, num_ranks / self.devices)


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link between two hosts or routers.

    Attributes:
        index: position in the topology.
        source, target: names of the nodes at its ends.
        bits_per_second: bandwidth.
        latency_seconds: one-way propagation delay.
        loss: fraction of packets that are lost.
        queue_packets: packets that the queue before it holds; None: as the protocol says.
        dollars_per_byte: price of a byte, paid by the sender.
        measured_streams: streams whose common goodput the bandwidth is; None: a rate on the wire.
    """

    index: int
    source: str
    target: str
    bits_per_second: float
    latency_seconds: float
    loss: float
    queue_packets: int | None = None
    dollars_per_byte: float = 0.0
    measured_streams: int | None = None

    @property
    def name(self) -> str:
        """Its ends, as `a->b`."""
        return f"{self.source}->{self.target}"


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key in which numbers inside names count as numbers.

    >>> sorted(["h10", "h2", "h01", "h1"], key=natural_key)
    ['h01', 'h1', 'h2', 'h10']
    """
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if position % 2 else part for position, part in enumerate(parts)), name


class ShortestRoutes:
    """Routes of least latency, then fewest links, then least node order, found when asked for and kept.

    Nodes are numbers whose order is the order of their names. Latencies are compared in whole picoseconds:
    10 ms and 20 ms must tie with 30 ms, which sums of binary fractions do not. Nodes with a single neighbour
    (all hosts of a star) are left out of the search, so that its cost is that of the network between routers.
    """

    def __init__(self, num_nodes: int, links: Sequence[tuple[int, int, float]]) -> None:
        """`links` are (source, target, latency in seconds), one direction each; their positions name them."""
        self._out: list[list[tuple[int, int, int]]] = [[] for _ in range(num_nodes)]
        self._into: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
        self._link: dict[tuple[int, int], int] = {}
        for index, (source, target, latency_seconds) in enumerate(links):
            picoseconds = round(latency_seconds * _PICOSECONDS)
            self._out[source].append((target, picoseconds, index))
            self._into[target].append((source, picoseconds))
            self._link[source, target] = index
        for outgoing in self._out:
            outgoing.sort()
        # The only neighbour of a node, unless the two are connected to no other.
        self._only: list[int | None] = [
            out[0][0] if len(out) == 1 and len(self._out[out[0][0]]) > 1 else None for out in self._out
        ]
        self._next_links: dict[int, list[tuple[int, int]]] = {}  # target -> for each node (next node, link)
        self._cores: dict[tuple[int, int], tuple[int, ...]] = {}

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The links from one node to another, in order; () from a node to itself."""
        if source == target:
            return ()
        start, end = self._only[source], self._only[target]
        if start == target or end == source:
            return (self._link[source, target],)
        head = () if start is None else (self._link[source, start],)
        tail = () if end is None else (self._link[end, target],)
        inner = self._core(source if start is None else start, target if end is None else end)
        return head + inner + tail

    def _core(self, source: int, target: int) -> tuple[int, ...]:
        if source == target:
            return ()
        known = self._cores.get((source, target))
        if known is None:
            if target not in self._next_links:
                self._next_links[target] = self._towards(target)
            hops, node, path = self._next_links[target], source, []
            while node != target:
                node, link = hops[node]
                if link < 0:  # files are checked for this when loaded; hand-made topologies are not
                    raise InputError("no route between two hosts: add a link between them")
                path.append(link)
            known = self._cores[source, target] = tuple(path)
        return known

    def _towards(self, target: int) -> list[tuple[int, int]]:
        """Next node and link of each node towards `target`: Dijkstra backwards, then least neighbours."""
        nowhere = (1 << 200, 0)
        distances: list[_Distance] = [nowhere] * len(self._out)
        distances[target] = (0, 0)
        heap = [(0, 0, target)]
        while heap:
            picoseconds, num_links, node = heapq.heappop(heap)
            if (picoseconds, num_links) > distances[node]:
                continue
            for source, latency in self._into[node]:
                distance = (picoseconds + latency, num_links + 1)
                if self._only[source] is None and distance < distances[source]:
                    distances[source] = distance
                    heapq.heappush(heap, (*distance, source))
        return [self._forward(node, distances) for node in range(len(self._out))]

    def _forward(self, node: int, distances: list[_Distance]) -> tuple[int, int]:
        picoseconds, num_links = distances[node]
        for neighbour, latency, link in self._out[node]:
            if distances[neighbour] == (picoseconds - latency, num_links - 1):
                return neighbour, link
        return node, -1  # the target itself, and nodes that the search left out
