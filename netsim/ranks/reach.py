"""Reachability between ranks at present, and downloads from one to another."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from netsim.network.network import Network, Waiting

__all__ = ["AGAIN", "SLOW_TIMES", "Reach", "largest_mesh"]

#: Instead of a rank: begin the download again.
AGAIN = -1

#: Who was too slow for averages, twice, is not waited for while it downloads, for this many times what that has cost.
SLOW_TIMES = 10


class _Download(NamedTuple):
    """A download under way to a rank; `is_cut`: a dead link kept it from beginning."""

    attempt: int
    transfer: int
    source: int
    on_done: Callable[[int | None], None]
    is_cut: bool


class Reach:
    """Routes between ranks, as the network is now.

    Args:
        network: None: every rank reaches every other, in no time.
        hosts: the host of each rank.
        may_come_back: whether one of these dead links may carry anything again.
    """

    def __init__(
        self,
        network: Network | None,
        hosts: Sequence[int],
        may_come_back: Callable[[Collection[int]], bool],
    ) -> None:
        self._network, self._hosts, self._may_come_back = network, hosts, may_come_back
        self._downloads: dict[int, _Download] = {}
        self._num_attempts = 0
        if network is not None:
            network.on_give_up = partial(self._given_up, network, network.on_give_up)

    def together(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The most of `ranks` that all reach each other, on hosts that are up; () if there is none."""
        if self._network is None:
            return tuple(ranks)
        dead, downtime = self._network.dead_links, self._network.downtime
        up = sorted(rank for rank in ranks if downtime.since(self._hosts[rank]) is None)
        if not dead:
            return tuple(up)
        broken: dict[int, set[int]] = {rank: set() for rank in up}
        for one, other in combinations(up, 2):
            if not self._is_open(one, other, dead):
                broken[one].add(other)
                broken[other].add(one)
        return largest_mesh(up, broken)

    def without_slowest(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """`ranks` but for those whose widest route to and from another is the narrowest; () if all are alike."""
        widths = {
            rank: max(
                min(self._width(rank, other), self._width(other, rank)) for other in ranks if other != rank
            )
            for rank in ranks
            if len(ranks) > 1
        }
        return tuple(rank for rank in ranks if widths and widths[rank] > min(widths.values()))

    def download(
        self, rank: int, sources: Sequence[int], num_bytes: int, on_done: Callable[[int | None], None]
    ) -> None:
        """Download `num_bytes` to `rank` from the source with the widest open route, of equals the nearest.

        `on_done` is called with the source on arrival, perhaps before this returns; with None where no source can ever
        be reached; with AGAIN to begin again: a host has crashed, a connection is given up, or the route was dead at
        the start and may be open now.
        """
        network = self._network
        if network is None:
            on_done(sources[0])
            return
        dead = network.dead_links
        cuts = {source: dead.intersection(self._both_directions(rank, source)) for source in sources}
        reachable = [source for source, cut in cuts.items() if not cut or self._may_come_back(cut)]
        if not reachable:
            on_done(None)
            return
        source = min(reachable, key=lambda source: self._distance(source, rank, dead))
        attempt = self._num_attempts = self._num_attempts + 1
        transfer = network.send(
            self._hosts[source],
            self._hosts[rank],
            num_bytes,
            partial(self._end, rank, attempt, source),
            connection=("download", rank),
            on_dropped=partial(self._end, rank, attempt, AGAIN),
        )
        self._downloads[rank] = _Download(attempt, transfer, source, on_done, is_cut=bool(cuts[source]))

    def is_downloading(self, rank: int) -> bool:
        """Return whether a download to `rank` makes progress."""
        download = self._downloads.get(rank)
        if self._network is None or download is None:
            return False
        is_up = self._network.downtime.since(self._hosts[rank]) is None
        return is_up and self._is_open(rank, download.source, self._network.dead_links)

    def look_again(self) -> None:
        """Begin downloads again that could not begin before the network changed."""
        for rank, download in list(self._downloads.items()):
            if download.is_cut:
                self._stop(rank, AGAIN)

    def give_up(self, rank: int) -> None:
        """End the download of `rank`, if any, with None."""
        if rank in self._downloads:
            self._stop(rank, None)

    def _stop(self, rank: int, outcome: int | None) -> None:
        assert self._network is not None
        download = self._downloads[rank]
        if self._network.is_in_flight(download.transfer):
            self._network.abort(download.transfer)
        self._end(rank, download.attempt, outcome)

    def _end(self, rank: int, attempt: int, outcome: int | None) -> None:
        download = self._downloads.get(rank)
        if download is not None and download.attempt == attempt:  # else it was started again at this instant
            del self._downloads[rank]
            download.on_done(outcome)

    def _given_up(self, network: Network, others: Callable[[Waiting], None], waiting: Waiting) -> None:
        """Begin the download of a connection that is given up again; pass others on."""
        if any(waiting.number == download.transfer for download in self._downloads.values()):
            network.end_transfer(waiting.number)
        else:
            others(waiting)

    def _route(self, source: int, target: int) -> tuple[int, ...]:
        assert self._network is not None
        return self._network.topology.route(self._hosts[source], self._hosts[target])

    def _both_directions(self, one: int, other: int) -> tuple[int, ...]:
        return (*self._route(one, other), *self._route(other, one))

    def _is_open(self, one: int, other: int, dead: frozenset[int]) -> bool:
        return dead.isdisjoint(self._both_directions(one, other))

    def _width(self, source: int, target: int) -> float:
        """Payload bytes per second of the narrowest link on the route."""
        if self._network is None:
            return math.inf
        widths = self._network.payload_bytes_per_second
        return min((widths[link] for link in self._route(source, target)), default=math.inf)

    def _distance(self, source: int, target: int, dead: frozenset[int]) -> tuple[bool, float, float, int]:
        assert self._network is not None
        latency = self._network.topology.route_latency_seconds(self._hosts[source], self._hosts[target])
        return (not self._is_open(source, target, dead), -self._width(source, target), latency, source)


def largest_mesh(ranks: Collection[int], broken: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """The largest set of ranks in which each reaches each other; of equal sets the one with the lower numbers.

    Args:
        ranks: candidates.
        broken: the ranks that a rank does not reach, listed for both ends.

    >>> largest_mesh(range(4), {1: [2], 2: [1]})
    (0, 1, 3)
    """
    here = set(ranks)
    cut = {rank: frozenset(here.intersection(broken.get(rank, ()))) for rank in sorted(here)}
    twins: dict[frozenset[int], list[int]] = {}  # ranks that miss the same others are in or out together
    for rank, others in cut.items():
        twins.setdefault(others, []).append(rank)
    alike = {members[0]: members for members in twins.values()}
    graph = {first: frozenset(cut[first] & alike.keys()) for first in alike}
    sizes = {first: len(members) for first, members in alike.items()}
    return tuple(sorted(rank for first in _heaviest(graph, sizes) for rank in alike[first]))


_Graph = dict[int, frozenset[int]]


def _heaviest(graph: _Graph, sizes: Mapping[int, int]) -> set[int]:
    """The heaviest set of nodes without an edge between two of them; of equal ones the one with the lower numbers."""
    kept: set[int] = set()
    left = dict(graph)
    while left:
        part, pending = set[int](), [min(left)]
        while pending:
            node = pending.pop()
            if node not in part:
                part.add(node)
                pending += left[node]
        connected = {node: left.pop(node) for node in part}
        kept |= part if len(part) == 1 else _heaviest_of_part(connected, sizes)
    return kept


def _heaviest_of_part(graph: _Graph, sizes: Mapping[int, int]) -> set[int]:
    node = max(graph, key=lambda node: (len(graph[node]), -node))
    with_it = {node} | _heaviest(_without(graph, {node, *graph[node]}), sizes)
    without = _heaviest(_without(graph, {node}), sizes)
    weights = [sum(sizes[each] for each in found) for found in (with_it, without)]
    if weights[0] != weights[1]:
        return with_it if weights[0] > weights[1] else without
    return with_it if min(with_it ^ without) in with_it else without


def _without(graph: _Graph, nodes: set[int]) -> _Graph:
    return {node: others - nodes for node, others in graph.items() if node not in nodes}
