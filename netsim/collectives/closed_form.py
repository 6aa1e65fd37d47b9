"""Completion times without events, for rings whose messages never have to share a link.

Where each message has its links to itself, its delivery is known when it is posted: latency plus bytes over
the narrowest link. Then a schedule is a recurrence in maxima and sums over steps, one array operation a
step:

    posted[i] = max(arrival, done[i - window])        (the whole phase before, for the first steps of a phase)
    delivered[i] = max(posted[i] + latency, delivered[i - 1] on the same connection) + bytes / rate
    done[i] = max(delivered[i] of own sends, delivered[i] of own receives)

That no link is shared is checked, not assumed: the rates of all pairs that ever exchange messages fit into every link
at once, as in a ring placed region by region. For other schedules the recurrence is a lower bound.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Phase, Ranks, Schedule
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["PairRoutes", "contention_free_seconds", "padded", "undisturbed_seconds"]

Seconds = npt.NDArray[np.float64]

# Rates may exceed a link by rounding, and of two messages on a link one may begin where the other ends.
_ROUNDING = 1e-9

# Of phases with more steps than this, those that repeat the pace of others are left out. Shorter ones take no time.
_LONG = 10_000
_COMPARED = 16  # times the window: steps from one comparison to the next


def padded(routes: Sequence[Sequence[int]]) -> Ranks:
    """Link indices by route and place on it, -1 behind its end; shape (routes, most links)."""
    longest = max(map(len, routes), default=0)
    return np.array(list(zip_longest(*routes, fillvalue=-1)), np.int64).reshape(longest, len(routes)).T


class PairRoutes:
    """Latency and rate of every pair of members that exchanges messages, found when first asked for.

    Args:
        hosts: the host of each member.
        topology: the network, without weather.
        protocol: how transfers use it.

    Attributes:
        capacity: payload bytes per second of each link.
        links, rate: link indices of each pair, and payload bytes per second, by its number.
    """

    def __init__(self, hosts: Sequence[int], topology: Topology, protocol: Protocol) -> None:
        self._hosts, self._topology = hosts, topology
        self._software_seconds = protocol.software_seconds
        self.capacity = protocol.payload_bytes_per_second(topology)
        self.links: list[tuple[int, ...]] = []
        self.rate: list[float] = []
        self._latency: list[float] = []
        self._number: dict[tuple[int, int], int] = {}

    def of(self, src: Ranks, dst: Ranks) -> tuple[Ranks, Seconds, Seconds]:
        """Number, latency in seconds and bytes per second of each pair."""
        number = np.fromiter(map(self._find, src.tolist(), dst.tolist()), np.int64, len(src))
        return number, np.array(self._latency)[number], np.array(self.rate)[number]

    def _find(self, src: int, dst: int) -> int:
        number = self._number.setdefault((src, dst), len(self.links))
        if number == len(self.links):
            links = self._topology.route(self._hosts[src], self._hosts[dst])
            self.links.append(links)
            latency = sum(float(self._topology.latency_seconds[link]) for link in links)
            self._latency.append(latency + (self._software_seconds if links else 0.0))
            self.rate.append(min((float(self.capacity[link]) for link in links), default=np.inf))
        return number

    def fit_at_once(self) -> bool:
        """Return whether all pairs found so far could send at their full rate at the same time."""
        links = np.array([link for route in self.links for link in route], np.int64)
        rates = np.repeat(self.rate, [len(route) for route in self.links])
        load = np.bincount(links, weights=rates, minlength=len(self.capacity))
        return bool((load <= self.capacity * (1 + _ROUNDING)).all())


def contention_free_seconds(
    schedule: Schedule, hosts: Sequence[int], topology: Topology, protocol: Protocol
) -> Seconds | None:
    """Instant at which each member finishes, or None where messages might meet on a link, or pairs change.

    All members enter at 0.

    Args:
        schedule: what is sent.
        hosts: the host of each member.
        topology: the network, without weather.
        protocol: how transfers use it.
    """
    routes = PairRoutes(hosts, topology, protocol)
    for phase in schedule.phases:
        pairs = phase.fixed_pairs()
        if pairs is None:
            return None
        routes.of(*pairs)
    return _seconds(schedule, routes) if routes.fit_at_once() else None


def undisturbed_seconds(
    schedule: Schedule, hosts: Sequence[int], topology: Topology, protocol: Protocol
) -> Seconds | None:
    """Earliest instant at which each member finishes, if messages did not slow each other down.

    All members enter at 0. None for the rare schedule that is too irregular to say.
    """
    return _seconds(schedule, PairRoutes(hosts, topology, protocol))


def _seconds(schedule: Schedule, routes: PairRoutes) -> Seconds | None:
    done = np.zeros(schedule.num_ranks)
    for phase in schedule.phases:
        pairs = phase.fixed_pairs()
        if pairs is not None and len(pairs[0]) == schedule.num_ranks and not phase.has_gaps:
            done = _ring_seconds(phase, pairs, done, routes)
        elif phase.window == 1:
            done = _rounds_seconds(phase, done, routes)
        else:
            return None
    return done


def _ring_seconds(phase: Phase, pairs: tuple[Ranks, Ranks], start: Seconds, routes: PairRoutes) -> Seconds:
    """Every member sends one message a step, always to the same neighbour."""
    src, dst = pairs
    _, latency, rate = routes.of(src, dst)
    into = np.argsort(dst)[src]  # position of the pair that ends where each begins
    done = [start[src]] * phase.window  # by position
    delivered = np.full(len(src), -np.inf)
    index, detector = 0, _PaceDetector(phase)
    while index < phase.num_steps:
        num_bytes = phase.num_bytes(index)
        delivered = np.maximum(done[index % phase.window] + latency, delivered) + num_bytes / rate
        both = np.maximum(delivered, delivered[into])
        # Steps are done in order: a later one is not done before an earlier one.
        done[index % phase.window] = np.maximum(both, done[index % phase.window - 1])
        index += 1
        if detector.is_due(index):
            num_steps, later = detector.ahead(index, [*done, delivered])
            index += num_steps
            done, delivered = [each + later for each in done], delivered + later
    result: Seconds = np.maximum.reduce(done)[np.argsort(src)]
    return result


class _PaceDetector:
    """Detects, in long phases, the step from which all members proceed at one pace.

    A recurrence in maxima and sums whose steps are alike and have put off everybody by the same time goes on so: what
    follows of these steps is one multiplication.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._is_long = phase.num_steps > _LONG
        self._every = _COMPARED * phase.window
        self._before: list[Seconds] = []
        self._alike_until = 0

    def is_due(self, index: int) -> bool:
        """True if the pace is compared after so many steps."""
        return self._is_long and index % self._every == 0 and index < self._phase.num_steps

    def ahead(self, index: int, state: list[Seconds]) -> tuple[int, float]:
        """Steps that can be skipped after so many, and the seconds that they take."""
        before, self._before = self._before, [each.copy() for each in state]
        until, self._alike_until = self._alike_until, index + self._phase.num_alike(index)
        if not before or until < index:
            return 0, 0.0
        delay = float(state[0][0] - before[0][0])
        if any(np.ptp(now - then) > _ROUNDING * delay for now, then in zip(state, before, strict=True)):
            return 0, 0.0
        times = (until - index) // self._every
        if times > 0:
            self._before = []
        return times * self._every, times * delay


def _rounds_seconds(phase: Phase, start: Seconds, routes: PairRoutes) -> Seconds:
    """Plain rounds of any messages."""
    done = start.copy()
    for index in range(phase.num_steps):
        step = phase.step(index)
        _, latency, rate = routes.of(step.src, step.dst)
        delivered = done[step.src] + latency + step.num_bytes / rate
        np.maximum.at(done, step.src, delivered)
        np.maximum.at(done, step.dst, delivered)
    return done
