"""Completion times without events, for rings whose messages never have to share a link.

Where each message has its links to itself, its delivery is known when it is posted: latency plus bytes over
the narrowest link. Then a schedule is a recurrence in maxima and sums over steps, one array operation a
step:

    posted[i] = max(arrival, done[i - window])        (the whole phase before, for the first steps of a phase)
    delivered[i] = max(posted[i] + latency, delivered[i - 1] on the same connection) + bytes / rate
    done[i] = max(delivered[i] of own sends, delivered[i] of own receives)

That no link is shared is checked, not assumed: the rates of all pairs that ever exchange messages fit into every link
at once, as in a ring placed region by region. For other schedules, and for protocols that buffer sends, the recurrence
is a lower bound, in which nobody waits for sends that a buffer takes.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from netsim.collectives.schedules.ring import RingPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Bytes, Phase, Ranks, Schedule
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["MessageRoutes", "after_entry", "contention_free_seconds", "undisturbed_seconds"]

Seconds = npt.NDArray[np.float64]

# Rates may exceed a link by rounding, and of two messages on a link one may begin where the other ends.
_ROUNDING = 1e-9

# Of phases with more steps than this, only latencies count towards the bound.
_LONG = 10_000

# Largest number of routes that are looked up one by one.
_FEW = 64


def _pad(routes: Sequence[Sequence[int]]) -> Ranks:
    """Link indices by route and place on it, -1 behind its end; shape (routes, most links)."""
    longest = max(map(len, routes), default=0)
    return np.array(list(zip_longest(*routes, fillvalue=-1)), np.int64).reshape(longest, len(routes)).T


class MessageRoutes:
    """Routes between members of a collective, in arrays of link indices; -1 pads shorter routes.

    Where the protocol limits processes, those of each host that send and those that receive are links of a route, too.

    Args:
        hosts: the host of each member.
        topology: the network, without weather.
        protocol: how transfers use it.

    Attributes:
        capacity: payload bytes per second of each link, then of each host's processes that send, and that receive.
    """

    def __init__(self, hosts: Sequence[int], topology: Topology, protocol: Protocol) -> None:
        self._hosts, self._topology = np.asarray(hosts, np.int64), topology
        self._software_seconds = protocol.software_seconds
        limits = protocol.process_limits(topology)
        processes = [*limits, *limits] if min(limits) < np.inf else []
        self.capacity = np.array([*protocol.payload_bytes_per_second(topology), *processes])

    def links(self, src: Ranks, dst: Ranks) -> Ranks:
        """Links of the route of each pair of members; shape (pairs, most links)."""
        sources, targets = self._hosts[src], self._hosts[dst]
        links, num_links = self._wires(src, sources, targets), len(self._topology.links)
        if len(self.capacity) == num_links:
            return links
        processes = np.column_stack([sources, targets + len(self._topology.hosts)]) + num_links
        processes[sources == targets] = -1
        return np.column_stack([links, processes])

    def _wires(self, src: Ranks, sources: Ranks, targets: Ranks) -> Ranks:
        """Links of the topology on each route.

        Hosts with one link each share the route between their routers, which is looked up once.
        """
        is_few = len(src) <= _FEW
        out, into, router = self._only_links if not is_few else (sources, sources, sources)
        if is_few or (router[sources] < 0).any() or (router[targets] < 0).any():
            ends = zip(sources.tolist(), targets.tolist(), strict=True)
            return _pad([self._topology.route(*pair) for pair in ends])
        _, first, place = np.unique(
            router[sources] * len(router) + router[targets], return_index=True, return_inverse=True
        )
        pairs = zip(sources[first].tolist(), targets[first].tolist(), strict=True)
        inner = _pad([self._topology.route(*pair)[1:-1] for pair in pairs])
        links = np.column_stack([out[sources], inner[place], into[targets]])
        links[sources == targets] = -1
        return links

    @cached_property
    def _only_links(self) -> tuple[Ranks, Ranks, Ranks]:
        """By host, its only link out, its only link in, and the router behind; -1 for hosts with other links."""
        topology = self._topology
        table = np.full((3, len(topology.hosts)), -1, np.int64)
        routers = {name: number for number, name in enumerate(topology.routers)}
        for host, access in enumerate(() if topology.explicit_routes else topology.access_links):
            if access is not None and access[0].target in routers:
                table[:, host] = access[0].index, access[1].index, routers[access[0].target]
        return table[0], table[1], table[2]

    def latency(self, links: Ranks, of_links: Seconds | None = None) -> Seconds:
        """Latency of each route in seconds.

        Args:
            links: of the routes.
            of_links: latency of each link; None: the topology's.
        """
        seconds = self._topology.latency_seconds if of_links is None else of_links
        table = np.zeros(len(self.capacity) + 1)  # of processes, and of no link: 0
        table[: len(seconds)] = seconds
        total = np.zeros(len(links))
        for place in links.T:  # in their order, as sums round
            total += table[place]
        return total

    def delay(self, links: Ranks) -> Seconds:
        """Seconds from the start of a message on each route to its first byte: latency, and the protocol's software."""
        return self.latency(links) + np.where((links >= 0).any(axis=1), self._software_seconds, 0.0)

    def rate(self, links: Ranks) -> Seconds:
        """Payload bytes per second of each route."""
        rates: Seconds = np.append(self.capacity, np.inf)[links].min(axis=1, initial=np.inf)
        return rates

    def carried(self, links: Ranks, num_bytes: Bytes | Seconds) -> Seconds:
        """Bytes across each link, of one message on each route."""
        load = np.zeros(len(self.capacity) + 1)  # the last one is no link
        for place in links.T:
            load += np.bincount(place % len(load), weights=num_bytes, minlength=len(load))
        return load[:-1]


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
    routes = MessageRoutes(hosts, topology, protocol)
    pairs: set[tuple[int, int]] = set()
    for phase in schedule.phases:
        fixed = phase.fixed_pairs()
        if fixed is None:
            return None
        pairs.update(zip(fixed[0].tolist(), fixed[1].tolist(), strict=True))
    links = routes.links(*np.array(list(pairs), np.int64).reshape(-1, 2).T)
    if (routes.carried(links, routes.rate(links)) > routes.capacity * (1 + _ROUNDING)).any():
        return None
    return _seconds(schedule, routes, is_bound=False, waits=not protocol.buffers_sends)


def undisturbed_seconds(
    schedule: Schedule, hosts: Sequence[int], topology: Topology, protocol: Protocol
) -> Seconds | None:
    """Lower bound of the instant at which each member finishes, as if messages did not share links.

    All members enter at 0. None for the rare schedule that is too irregular.
    """
    routes = MessageRoutes(hosts, topology, protocol)
    return _seconds(schedule, routes, is_bound=True, waits=not protocol.buffers_sends)


def after_entry(
    schedule: Schedule, hosts: Sequence[int], topology: Topology, protocol: Protocol
) -> tuple[Seconds, Seconds]:
    """Lower bounds of what follows a member's entry, however early others have entered.

    Returns:
        Seconds that each link takes to carry what the member sends, and what others send once they have received what
        depends on it; shape (members, links). And seconds until each member finishes, as if messages did not share
        links; shape (members that enter, members that finish), minus infinity where one does not wait for the other.
    """
    routes, num = MessageRoutes(hosts, topology, protocol), schedule.num_ranks
    steps = [schedule.step(index) for index in range(schedule.num_steps)]
    src, dst, num_bytes = (
        np.concatenate([getattr(step, name) for step in steps]) for name in ("src", "dst", "num_bytes")
    )
    links = routes.links(src, dst)
    lasts = routes.delay(links) + num_bytes / routes.rate(links)
    lasts[num_bytes == 0] = -np.inf  # it may be left out
    crossed = np.zeros((num, len(routes.capacity) + 1))  # the last one is no link
    done = {0: np.where(np.eye(num, dtype=bool), 0.0, -np.inf)}  # instants by number of steps
    end = oldest = 0
    # Gates are not in order where loops of a ring begin.
    least = [*accumulate(reversed(schedule.gates), min)][::-1]
    for index, (step, gate) in enumerate(zip(steps, schedule.gates, strict=True)):
        begin, end = end, end + len(step.src)
        for old in range(oldest, least[index]):  # no later step looks so far back
            del done[old]
        oldest = least[index]
        posted = done[gate][:, step.src]
        over = np.zeros((len(step.src), crossed.shape[1]))
        for place in links[begin:end].T:
            over[np.arange(len(over)), place] += step.num_bytes
        crossed += np.isfinite(posted).astype(np.float64) @ over
        done[index + 1] = done[index].copy()
        np.maximum.at(done[index + 1].T, step.dst, (posted + lasts[begin:end]).T)
    return crossed[:, :-1] / routes.capacity, done[schedule.num_steps]


def _seconds(schedule: Schedule, routes: MessageRoutes, *, is_bound: bool, waits: bool) -> Seconds | None:
    """Instants by member; with `waits` its sends are done when they are delivered, else at once."""
    done = np.zeros(schedule.num_ranks)
    for phase in schedule.phases:
        pairs = phase.fixed_pairs()
        if pairs is not None and is_bound and (phase.num_gaps or phase.num_steps > _LONG):
            rounds = max(phase.num_steps - phase.num_gaps, 0) // phase.window
            delay = routes.delay(routes.links(*pairs))
            if waits:
                done[pairs[0]] += rounds * delay
            elif isinstance(phase, RingPhase):  # once around the ring, a piece crosses every link
                laps, rest = divmod(rounds, len(delay))
                done += laps * delay.sum() + np.sort(delay)[:rest].sum()
        elif pairs is not None and len(pairs[0]) == schedule.num_ranks and not phase.num_gaps:
            done = _ring_seconds(phase, pairs, done, routes, waits)
        elif phase.window == 1:
            done = _rounds_seconds(phase, done, routes, waits)
        else:
            return None
    return done


def _ring_seconds(
    phase: Phase, pairs: tuple[Ranks, Ranks], start: Seconds, routes: MessageRoutes, waits: bool
) -> Seconds:
    """Every member sends one message a step, always to the same neighbour."""
    src, dst = pairs
    links = routes.links(src, dst)
    latency, rate = routes.delay(links), routes.rate(links)
    into = np.argsort(dst)[src]  # position of the pair that ends where each begins
    done = [start[src]] * phase.window  # by position
    delivered = np.full(len(src), -np.inf)
    for index in range(phase.num_steps):
        num_bytes = phase.num_bytes(index)
        gate = done[(phase.gate(index) - 1) % phase.window]
        delivered = np.maximum(gate + latency, delivered) + num_bytes / rate
        received = delivered[into]
        ended = np.maximum(delivered, received) if waits else received
        # Steps are done in order: a later one is not done before an earlier one.
        done[index % phase.window] = np.maximum(ended, done[index % phase.window - 1])
    result: Seconds = np.maximum.reduce(done)[np.argsort(src)]
    return result


def _rounds_seconds(phase: Phase, start: Seconds, routes: MessageRoutes, waits: bool) -> Seconds:
    """Plain rounds of any messages."""
    done = start.copy()
    for index in range(phase.num_steps):
        step = phase.step(index)
        links = routes.links(step.src, step.dst)
        delivered = done[step.src] + routes.delay(links) + step.num_bytes / routes.rate(links)
        if waits:
            np.maximum.at(done, step.src, delivered)
        np.maximum.at(done, step.dst, delivered)
    return done
