"""Which ranks reach each other at present, and downloads from one to another."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from netsim.network.network import Network, Waiting

__all__ = ["AGAIN", "Reach"]

#: Instead of a rank: begin the download anew.
AGAIN = -1


class _Download(NamedTuple):
    """What is on its way to a rank; `is_cut`: a dead link kept it from beginning."""

    attempt: int
    transfer: int
    on_done: Callable[[int | None], None]
    is_cut: bool


class Reach:
    """The ways between ranks, as the network is now.

    Args:
        network: None: everybody reaches everybody, in no time.
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
        """Those of `ranks` that all reach each other, on hosts that are up; () if there is none.

        Who reaches fewest is left out first, the last of equals.
        """
        if self._network is None:
            return tuple(ranks)
        dead, downtime = self._network.dead_links, self._network.downtime
        left = [rank for rank in ranks if downtime.since(self._hosts[rank]) is None]
        while dead and left:
            friends = {
                rank: sum(self._is_open(rank, other, dead) for other in left if other != rank)
                for rank in left
            }
            loneliest = min(left, key=lambda rank: (friends[rank], -rank))
            if friends[loneliest] == len(left) - 1:
                break
            left.remove(loneliest)
        return tuple(left)

    def without_slowest(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """`ranks` but for those whose widest way to and from another is the narrowest; () if all are alike."""
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
        """Bring so many bytes to `rank` from the source with the widest open way, of equals the nearest.

        `on_done` is told the source when all are there, perhaps before this returns; None where no source can
        ever be reached; AGAIN where it is to be begun anew: a host has crashed, a connection is given up, or
        there was no way to begin with and now there may be one.
        """
        network = self._network
        if network is None:
            on_done(sources[0])
            return
        dead = network.dead_links
        cuts = {source: dead.intersection(self._both_ways(rank, source)) for source in sources}
        hopeful = [source for source, cut in cuts.items() if not cut or self._may_come_back(cut)]
        if not hopeful:
            on_done(None)
            return
        source = min(hopeful, key=lambda source: self._distance(source, rank, dead))
        attempt = self._num_attempts = self._num_attempts + 1
        transfer = network.send(
            self._hosts[source],
            self._hosts[rank],
            num_bytes,
            partial(self._end, rank, attempt, source),
            connection=("download", rank),
            on_dropped=partial(self._end, rank, attempt, AGAIN),
        )
        self._downloads[rank] = _Download(attempt, transfer, on_done, is_cut=bool(cuts[source]))

    def look_again(self) -> None:
        """The network has changed: downloads that could not begin do so anew."""
        for rank, download in list(self._downloads.items()):
            if download.is_cut:
                self._stop(rank, AGAIN)

    def give_up(self, rank: int) -> None:
        """`rank`'s download, if it has one, can never end: tell it so."""
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
        """A connection is given up: a download begins anew, and has other ways to end."""
        if any(waiting.number == download.transfer for download in self._downloads.values()):
            network.end_transfer(waiting.number)
        else:
            others(waiting)

    def _route(self, source: int, target: int) -> tuple[int, ...]:
        assert self._network is not None
        return self._network.topology.route(self._hosts[source], self._hosts[target])

    def _both_ways(self, one: int, other: int) -> tuple[int, ...]:
        return (*self._route(one, other), *self._route(other, one))

    def _is_open(self, one: int, other: int, dead: frozenset[int]) -> bool:
        return dead.isdisjoint(self._both_ways(one, other))

    def _width(self, source: int, target: int) -> float:
        """Payload bytes per second of the narrowest link on the way."""
        if self._network is None:
            return math.inf
        widths = self._network.payload_bytes_per_second
        return min((widths[link] for link in self._route(source, target)), default=math.inf)

    def _distance(self, source: int, target: int, dead: frozenset[int]) -> tuple[bool, float, float, int]:
        assert self._network is not None
        latency = self._network.topology.route_latency_seconds(self._hosts[source], self._hosts[target])
        return (not self._is_open(source, target, dead), -self._width(source, target), latency, source)
