"""Weather without an end: background traffic, and capacities that drift."""

from __future__ import annotations

import hashlib
import math
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from netsim.network.network import BackgroundConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from netsim.network.network import Network
    from netsim.topology.weather import Background, Drift

__all__ = ["BackgroundTraffic", "drift_factors"]

# A steady sender's transfer is as long as this at its own rate, and is followed by another.
_STEADY_SECONDS = 1e6
# Most transfers of one entry at once. Offered more than a link carries they would grow without bound, and every
# share would shrink to nothing: then no run ends.
_MOST_AT_ONCE = 100


class BackgroundTraffic:
    """An entry of background traffic on a network.

    Args:
        network: on which it is sent.
        background: the entry.
        entry: its number, for the names of connections.
    """

    def __init__(self, network: Network, background: Background, entry: int) -> None:
        self._network = network
        self._background = background
        self._entry = entry
        self._steady: int | None = None
        self._idle: list[int] = []  # connections
        self._num_connections = 0

    def send(self) -> None:
        """Start the steady transfer, or send one of the periodic ones unless a link on its route is dead."""
        background = self._background
        if background.num_bytes is None:
            self._send_steadily()
            return
        num_in_flight = self._num_connections - len(self._idle)
        is_dead = self._network.is_dead_end(background.source, background.target)
        if is_dead or num_in_flight == _MOST_AT_ONCE:
            return
        if self._idle:
            connection = heappop(self._idle)
        else:
            connection = self._num_connections
            self._num_connections += 1
        free = partial(heappush, self._idle, connection)
        self._network.send(
            background.source,
            background.target,
            background.num_bytes,
            free,
            connection=BackgroundConnection(self._entry, connection),
            on_dropped=free,
        )

    def stop(self) -> None:
        """End the steady transfer."""
        if self._steady is not None and self._network.is_in_flight(self._steady):
            self._network.abort(self._steady)
        self._steady = None

    def _send_steadily(self) -> None:
        background, network = self._background, self._network
        rate = (background.bits_per_second or 0.0) / 8 * network.protocol.payload_share
        self._steady = network.send(
            background.source,
            background.target,
            rate * _STEADY_SECONDS,
            self._send_steadily,
            connection=BackgroundConnection(self._entry, 0),
            on_dropped=self._send_again,
            most_bytes_per_second=rate,
        )

    def _send_again(self) -> None:
        """Send again after a crash, on the host's return, unless it stops at this instant."""
        if self._steady is not None:
            self._send_steadily()


def drift_factors(drift: Drift, link: str) -> Iterator[tuple[float, float]]:
    """Endless instants in seconds and the factors that hold from then on.

    Lognormal: a factor of mean 1 at every interval, the first at 0. Regime: the first of the levels at 0; each
    holds for an exponential time, and then any other follows with equal chance (a Markov chain in continuous
    time).

    Args:
        drift: of which kind, and its seed.
        link: names the link; each has a stream of its own.
    """
    digest = hashlib.sha256(link.encode()).digest()
    random = np.random.default_rng([drift.seed, *np.frombuffer(digest, dtype=np.uint32).tolist()])
    if drift.kind == "lognormal":
        assert drift.sigma is not None
        sigma = drift.sigma
        count = 0
        while True:
            yield count * drift.every_seconds, math.exp(sigma * random.standard_normal() - sigma**2 / 2)
            count += 1
    assert drift.levels is not None
    instant, level = 0.0, 0
    while True:
        yield instant, drift.levels[level]
        instant += drift.every_seconds * random.standard_exponential()
        level = (level + 1 + int(random.integers(len(drift.levels) - 1))) % len(drift.levels)
