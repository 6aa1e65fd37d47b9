"""Reachability between ranks on the simulated network, and downloads."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from netsim.network.network import Network, Waiting
    from netsim.topology.graph import Link

__all__ = ["AGAIN", "Reach", "largest_mesh"]

#: Source of a download that must begin again.
AGAIN = -1


class _Download(NamedTuple):
    """Download to a rank; `is_cut`: a dead link kept it from beginning."""

    attempt: int
    transfer: int
    source: int
    on_done: Callable[[int | None], object]
    is_cut: bool


class Reach:
    """Reachability between ranks on the network at present, and downloads.

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

    def answering(self, ranks: Collection[int]) -> tuple[int, ...]:
        """`together` of those of `ranks` that are `alive`."""
        return self.together(self.alive(ranks))

    def alive(self, ranks: Collection[int]) -> list[int]:
        """Ranks among `ranks` on hosts that are up and have a link that is up, or no links; they may meet or not."""
        up, network = self._up(ranks), self._network
        if network is None or not network.dead_links:
            return up
        topology, dead = network.topology, network.dead_links

        def ends(links: Iterable[Link]) -> set[str]:
            return {name for link in links for name in (link.source, link.target)}

        cut_off = ends(topology.links) - ends(link for link in topology.links if link.index not in dead)
        return [rank for rank in up if topology.hosts[self._hosts[rank]].name not in cut_off]

    def _up(self, ranks: Collection[int]) -> list[int]:
        network = self._network
        if network is None:
            return sorted(ranks)
        return sorted(rank for rank in ranks if network.downtime.since(self._hosts[rank]) is None)

    def together(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The largest set of `ranks` on hosts that are up in which each reaches each other; () if there is none."""
        up = self._up(ranks)
        if self._network is None or not self._network.dead_links:
            return tuple(up)
        dead = self._network.dead_links
        broken: dict[int, set[int]] = {rank: set() for rank in up}
        for one, other in combinations(up, 2):
            if not self._is_open(one, other, dead):
                broken[one].add(other)
                broken[other].add(one)
        return largest_mesh(up, broken)

    def without_slowest(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """`ranks` without those whose widest route is the narrowest of all; () if all are equally wide."""
        if len(ranks) < 2:
            return ()
        widths = {
            rank: max(
                min(self._width(rank, other), self._width(other, rank)) for other in ranks if other != rank
            )
            for rank in ranks
        }
        return tuple(rank for rank in ranks if widths[rank] > min(widths.values()))

    def download(
        self, rank: int, sources: Sequence[int], num_bytes: int, on_done: Callable[[int | None], object]
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
        """Restart downloads that could not begin before the network changed."""
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
        """Restart a download whose connection is given up; pass other transfers on."""
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
        """Payload bytes per second that the route carries."""
        if self._network is None:
            return math.inf
        return self._network.route_bytes_per_second(self._hosts[source], self._hosts[target])

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
    import networkx as nx

    nodes = sorted(ranks)
    alike: dict[frozenset[int], list[int]] = {}  # ranks that miss the same others are in or out together
    for rank in nodes:
        alike.setdefault(frozenset(broken.get(rank, ())).intersection(nodes), []).append(rank)
    members = {group[0]: group for group in alike.values()}
    reaching: nx.Graph[int] = nx.Graph()
    for first, group in members.items():
        # The number of ranks counts first; then each rank outweighs all higher ones.
        weight = sum((1 << len(nodes)) + (1 << len(nodes) >> nodes.index(rank)) // 2 for rank in group)
        reaching.add_node(first, weight=weight)
    missed = {group[0]: others for others, group in alike.items()}
    reaching.add_edges_from((one, two) for one, two in combinations(missed, 2) if two not in missed[one])
    clique, _ = nx.max_weight_clique(reaching)
    return tuple(sorted(rank for first in clique for rank in members[first]))
