"""What changes on a network while a simulation runs, as plain data; `Topology.weather` holds it.

Links are named by their indices in the topology, one direction each, hosts by theirs. All lists are in the order
in which they apply, whatever order the file had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Background", "Drift", "HostEvent", "LinkEvent", "Trace", "Weather", "random_crashes"]


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """At one instant, links go down or come up, or get another rate, latency or loss.

    Attributes:
        at_seconds: when.
        links: link indices it holds for.
        is_up: False goes down, True comes up, None where the event is about something else.
        bits_per_second, latency_seconds, loss: the new value; None where the event is about something else.
        for_seconds: how long, then what the file has holds again; None for good.
    """

    at_seconds: float
    links: tuple[int, ...]
    is_up: bool | None = None
    bits_per_second: float | None = None
    latency_seconds: float | None = None
    loss: float | None = None
    for_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HostEvent:
    """At one instant a host crashes (for some seconds, or for good) or returns."""

    at_seconds: float
    host: int
    is_up: bool
    for_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A link's rate or latency over time, constant between the given instants; before the first, as in the file.

    Attributes:
        links: link indices it holds for.
        quantity: what `values` are.
        times_seconds: ascending instants at which a new value begins.
        values: bits per second (0: nothing moves) or seconds.
    """

    links: tuple[int, ...]
    quantity: Literal["bits_per_second", "latency_seconds"]
    times_seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Background:
    """Traffic of others: steady at `bits_per_second` (its fair share at most), or a transfer every so often."""

    source: int
    target: int
    bits_per_second: float | None = None
    num_bytes: int | None = None
    every_seconds: float | None = None
    start_seconds: float = 0.0
    stop_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """Random change of links' rates, as factors of what else holds.

    Attributes:
        links: link indices; each draws its own factors.
        kind: lognormal draws a factor exp(sigma x - sigma^2 / 2), x standard normal, of mean 1, at every interval;
            regime stays at one of `levels` for an exponential time of mean `every_seconds`, then takes another.
        every_seconds, sigma, levels, seed: as the kind needs them.
    """

    links: tuple[int, ...]
    kind: Literal["lognormal", "regime"]
    every_seconds: float
    sigma: float | None = None
    levels: tuple[float, ...] | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Weather:
    """All that changes on a network while it runs; false where nothing does."""

    link_events: tuple[LinkEvent, ...] = ()
    host_events: tuple[HostEvent, ...] = ()
    traces: tuple[Trace, ...] = ()
    background: tuple[Background, ...] = ()
    drift: tuple[Drift, ...] = ()

    def with_seed(self, seed: int) -> Weather:
        """The same with other draws: `seed` is added to what each drift has."""
        drift = tuple(replace(each, seed=each.seed + seed) for each in self.drift)
        return replace(self, drift=drift) if seed and drift else self

    def __bool__(self) -> bool:
        return bool(self.link_events or self.host_events or self.traces or self.background or self.drift)


def random_crashes(
    hosts: Sequence[int], mean_seconds: float, repair_seconds: float, until_seconds: float, seed: int
) -> list[HostEvent]:
    """Crashes of each host until `until_seconds`: exponential times of mean `mean_seconds` between them.

    A host's draws depend on (seed, place among `hosts`) alone, and it cannot crash while it is being repaired.

    >>> [round(event.at_seconds) for event in random_crashes([0], 100.0, 10.0, 300.0, seed=1)]
    [107, 148]
    """
    events = []
    for place, host in enumerate(hosts):
        generator = np.random.default_rng([seed, place])
        at = float(generator.exponential(mean_seconds))
        while at < until_seconds:
            events.append(HostEvent(at, host, False, repair_seconds))
            at += repair_seconds + float(generator.exponential(mean_seconds))
    return sorted(events, key=lambda event: (event.at_seconds, event.host))
