"""What the weather of a topology does in the course of time, simulated by itself: for people to look at.

    history = simulate_weather(Topology.load("stormy.yaml"), until_seconds=60.0)
    history.links[3]        # [(0.0, 100e6), (10.0, 0.0), (15.0, 100e6)]

The weather asks nobody: what it does in a run is what it does here, up to the same instant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from netsim.network.clock import Clock
from netsim.network.network import Network
from netsim.weather.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from netsim.network.network import Outage
    from netsim.topology.topology import Topology

__all__ = ["WeatherHistory", "simulate_weather"]

_MOST_CHANGES = 20_000


@dataclass(frozen=True)
class WeatherHistory:
    """What changed.

    Attributes:
        links: link index -> (instant, bits per second that it carries from then on), from 0 s; only of links that
            ever change.
        outages: crashes of hosts; without an end where they last until the end.
        until_seconds: to where it was simulated; sooner than asked for where too much happens to be shown.
    """

    links: Mapping[int, Sequence[tuple[float, float]]]
    outages: Sequence[Outage]
    until_seconds: float


def simulate_weather(
    topology: Topology, until_seconds: float, most_changes: int = _MOST_CHANGES
) -> WeatherHistory:
    """Simulate the weather of `topology`, without the traffic of others, for so many seconds or changes at most."""
    clock = Clock()
    network = Network(clock, replace(topology, weather=replace(topology.weather, background=())))
    watcher = _HistoryWatcher(network)
    network.observe(watcher)
    Faults(network)
    while clock.peek() <= until_seconds and watcher.num_changes < most_changes:
        clock.step()
    is_cut = watcher.num_changes >= most_changes
    downtime = network.downtime
    return WeatherHistory(
        {link: watcher.links[link] for link in sorted(watcher.links)},
        [*downtime.outages, *downtime.under_way()],
        min(float(clock.now), until_seconds) if is_cut else until_seconds,
    )


class _HistoryWatcher:
    """Keeps what links carry; nothing is sent here."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.links: dict[int, list[tuple[float, float]]] = {}
        self.num_changes = 0

    def transfer_started(
        self, transfer: int, source: int, target: int, num_bytes: float, connection: Hashable
    ) -> None: ...

    def transfer_ended(self, transfer: int, delivered_bytes: float) -> None: ...

    def rates_changed(self, transfers: Sequence[int], bytes_per_second: Sequence[float]) -> None: ...

    def capacity_changed(self, link: int, bits_per_second: float) -> None:
        now = float(self._network.env.now)
        points = self.links.setdefault(link, [(0.0, self._network.topology.links[link].bits_per_second)])
        if points[-1][0] == now:
            points.pop()  # what holds for no time
        points.append((now, bits_per_second))
        self.num_changes += 1
