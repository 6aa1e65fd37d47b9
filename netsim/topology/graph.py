"""Hosts, links and the shortest routes between them: the plain graph under a topology."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        return tuple([getattr(self, figure) for figure in _FIGURES])


_FIGURES = [each.name for each in fields(Link) if each.name not in ("index", "source", "target")]


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sort key by which numbers inside names are compared as numbers.

    >>> sorted(["h10", "h2", "h01", "h1"], key=natural_key)
    ['h01', 'h1', 'h2', 'h10']
    """
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if position % 2 else part for position, part in enumerate(parts)), name


class ShortestRoutes:
    """Routes of least latency, then fewest links, then least node order, computed on request and cached.

    Nodes are numbers whose order is the order of their names. Latencies are compared in whole picoseconds:
    10 ms + 20 ms must tie with 30 ms, unlike sums of binary fractions. Nodes with a single neighbour (all hosts of a
    star) are left out of the search, so that it covers only the network between routers.
    """

    def __init__(self, names: Iterable[str], links: Sequence[Link]) -> None:
        """`names` of all nodes, and links between them, one direction each."""
        self._node = {name: number for number, name in enumerate(sorted(names, key=natural_key))}
        self._out: list[list[tuple[int, int, int]]] = [[] for _ in self._node]  # target, cost, link
        self._into: list[list[tuple[int, int]]] = [[] for _ in self._node]  # source, cost
        self._link: dict[tuple[int, int], int] = {}
        for index, link in enumerate(links):
            source, target = self._node[link.source], self._node[link.target]
            cost = round(link.latency_seconds * _PICOSECONDS) * _OF_LATENCY + 1
            self._out[source].append((target, cost, index))
            self._into[target].append((source, cost))
            self._link[source, target] = index
        for outgoing in self._out:
            outgoing.sort()
        # The only neighbour of a node, unless the two are connected to no other.
        self._only: list[int | None] = [
            out[0][0] if len(out) == 1 and len(self._out[out[0][0]]) > 1 else None for out in self._out
        ]
        self._costs: dict[int, dict[int, int]] = {}  # by target
        self._cores: dict[tuple[int, int], tuple[int, ...]] = {}

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
        cores = self._cores
        if target not in self._costs:
            self._costs[target] = self._towards(target)
            cores[target, target] = ()
        costs, node, path = self._costs[target], source, []
        while (node, target) not in cores:
            if node not in costs:  # files are checked for this when loaded; hand-made topologies are not
                raise InputError("no route between two hosts: add a link between them")
            path.append(node)
            for neighbour, cost, _ in self._out[node]:
                if costs.get(neighbour, -1) == costs[node] - cost:
                    node = neighbour
                    break
        rest = cores[node, target]
        for previous in reversed(path):
            rest = cores[previous, target] = (self._link[previous, node], *rest)
            node = previous
        return rest

    def _towards(self, target: int) -> dict[int, int]:
        """Least cost from each node to `target`: Dijkstra's algorithm, backwards."""
        costs: dict[int, int] = {}
        heap = [(0, target)]
        while heap:
            cost, node = heapq.heappop(heap)
            if node not in costs:
                costs[node] = cost
                for source, more in self._into[node]:
                    if self._only[source] is None and source not in costs:
                        heapq.heappush(heap, (cost + more, source))
        return costs
