"""Hosts, links and the shortest routes between them: the plain graph under a topology."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Host", "Link", "ShortestRoutes", "Storage", "natural_key"]

_PICOSECONDS = 1e12
_OF_LATENCY = 1 << 32  # cost of a picosecond, where a link costs 1


@dataclass(frozen=True, slots=True)
class Storage:
    """An object store, or a relay of one.

    Attributes:
        latency_seconds: from a request's last byte to the first one of its answer.
        dollars_per_put, dollars_per_get: price of an upload and of a download.
        dollars_per_byte: price of a byte that leaves it.
    """

    latency_seconds: float = 0.0
    dollars_per_put: float = 0.0
    dollars_per_get: float = 0.0
    dollars_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that ranks can be placed on, or an object store; `index` is its position in natural name order.

    `devices` is the number that it computes on; None: as many as it has ranks. `store` is None on a machine.
    """

    name: str
    index: int
    region: str | None
    device: str | None
    devices: int | None = None
    store: Storage | None = None

    def slowdown(self, num_ranks: int) -> float:
        """Factor by which a step takes longer if `num_ranks` share the devices.

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
        queue_packets: packets that the queue before it holds; None: as the protocol says, any on a
            sender's own link.
        dollars_per_byte: price of a byte, paid by the sender.
        measured_streams: streams whose common goodput the bandwidth is; None: a rate on the wire.
        mtu_bytes: largest packet that it carries, IP header included; None: as the protocol says.
        stream_bits_per_second: rate of one stream, counted as the bandwidth is; None: as its window allows.
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
    mtu_bytes: int | None = None
    stream_bits_per_second: float | None = None

    @property
    def name(self) -> str:
        """Its ends, as `a->b`."""
        return f"{self.source}->{self.target}"

    @property
    def figures(self) -> tuple[object, ...]:
        """Values of all fields but index and ends; links of equal figures behave alike."""
        return _figures_of(self)


_figures_of: Callable[[Link], tuple[object, ...]] = attrgetter(
    *[each.name for each in fields(Link) if each.name not in ("index", "source", "target")]
)


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sort key by which numbers inside names are compared as numbers.

    >>> sorted(["h10", "h2", "h01", "h1"], key=natural_key)
    ['h01', 'h1', 'h2', 'h10']
    """
    parts: list[str | int] = re.split(r"([0-9]+)", name)
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts), name


class ShortestRoutes:
    """Routes of least latency, then fewest links, then least node order, computed on request and cached.

    Nodes are numbers whose order is the order of their names. Latencies are compared in whole picoseconds:
    10 ms + 20 ms must tie with 30 ms, unlike sums of binary fractions. Nodes with a single neighbour (all hosts of a
    star) are left out of the search, so that it covers only the network between routers.
    """

    def __init__(self, names: Iterable[str], links: Sequence[Link]) -> None:
        """`names` of all nodes, and links between them, one direction each."""
        self._node = {name: number for number, name in enumerate(sorted(names, key=natural_key))}
        out_of: list[list[int]] = [[] for _ in self._node]  # targets
        self._into: list[list[tuple[int, int]]] = [[] for _ in self._node]  # source, cost
        self._link: dict[tuple[int, int], int] = {}
        for index, link in enumerate(links):
            source, target = self._node[link.source], self._node[link.target]
            cost = round(link.latency_seconds * _PICOSECONDS) * _OF_LATENCY + 1
            out_of[source].append(target)
            self._into[target].append((source, cost))
            self._link[source, target] = index
        # The only neighbour of a node, unless the two are connected to no other.
        self._only: list[int | None] = [
            out[0] if len(out) == 1 and len(out_of[out[0]]) > 1 else None for out in out_of
        ]
        self._end = [self._node[link.target] for link in links]
        self._hops: dict[int, dict[int, int]] = {}  # by target

    def route(self, start: str, end: str) -> tuple[int, ...]:
        """The links from one node to another, in order; () from a node to itself."""
        source, target = self._node[start], self._node[end]
        if source == target:
            return ()
        first, last = self._only[source], self._only[target]
        if first == target or last == source:
            return (self._link[source, target],)
        head = () if first is None else (self._link[source, first],)
        tail = () if last is None else (self._link[last, target],)
        inner = self._core(source if first is None else first, target if last is None else last)
        return head + inner + tail

    def _core(self, source: int, target: int) -> tuple[int, ...]:
        hops = self._hops.get(target)
        if hops is None:
            hops = self._hops[target] = self._towards(target)
        links = []
        node = source
        while node != target:
            if node not in hops:  # files are checked for this when loaded; hand-made topologies are not
                raise InputError("no route between two hosts: add a link between them")
            links.append(hops[node])
            node = self._end[hops[node]]
        return tuple(links)

    def _towards(self, target: int) -> dict[int, int]:
        """The first link from each node to `target`: Dijkstra's algorithm, backwards."""
        hops: dict[int, int] = {}
        heap = [(0, target, target)]
        while heap:
            cost, node, following = heapq.heappop(heap)
            if node not in hops:
                hops[node] = self._link.get((node, following), -1)
                for source, more in self._into[node]:
                    if self._only[source] is None and source not in hops:
                        heapq.heappush(heap, (cost + more, source, node))
        return hops
