"""Crowds of direct messages by the links that have most to carry: for plans, where so many are not simulated.

Where every member sends to many others at once, the link with most to carry for its rate is full from the first byte to
the last, as those that cross it get less there than elsewhere. So what it has to carry, over its rate, is what the
crowd takes, after the latency of what comes there first; unless a window lets a message through more slowly.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from netsim.collectives.schedules.schedule import ListedPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Ranks, Schedule, Step
    from netsim.fluid.fairness import FloatArray
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["Crowd", "are_many", "is_crowd"]

# What sends more at once is a crowd.
_MOST_MESSAGES = 20_000


def are_many(num_messages: int) -> bool:
    """Whether so many messages at once are a crowd."""
    return num_messages > _MOST_MESSAGES


def is_crowd(schedule: Schedule) -> bool:
    """Whether a schedule is of few steps with very many messages each."""
    listed = all(isinstance(phase, ListedPhase) for phase in schedule.phases)
    return listed and are_many(schedule.num_messages)


class _Ways(NamedTuple):
    """How messages go: the links of each, by message and place on the way (-1: no link), and their round trips."""

    links: Ranks
    latency: FloatArray
    round_trip: FloatArray


class Crowd:
    """Reckons what crowds take on a quiet network.

    Args:
        topology: the network, without weather.
        protocol: how transfers use it.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self._protocol = topology, protocol
        self._rate = topology.bits_per_second / 8 * protocol.payload_share
        back = {(link.target, link.source): link.index for link in topology.links}
        self._back = np.array([back.get((link.source, link.target), -1) for link in topology.links], np.int64)

    def reckoned(self, schedule: Schedule, hosts: Sequence[int]) -> tuple[float, FloatArray]:
        """What it takes in seconds, all members entering at once; and payload across each link, shape (links,)."""
        seconds, total = 0.0, np.zeros(len(self._rate))
        for phase in schedule.phases:
            for index in range(phase.num_steps):
                step = phase.step(index)
                ways = self._ways(step, np.asarray(hosts, np.int64))
                load = self._carried(ways, step.num_bytes)
                seconds += self._step_seconds(step, ways, load)
                total += load
        return seconds, total

    def _step_seconds(self, step: Step, ways: _Ways, load: FloatArray) -> float:
        protocol, has_back = self._protocol, self._back >= 0
        acks = np.zeros_like(load)
        acks[self._back[has_back]] = load[has_back] * protocol.ack_share * protocol.payload_share
        # A link begins with what comes there first, and goes on to its end with what is there by then.
        first = np.full(len(load) + 1, np.inf)
        for place in ways.links.T:
            np.minimum.at(first, place, ways.latency)
        used = load > 0
        busiest = (first[:-1] + (load + acks) / self._rate)[used].max(initial=0.0)
        window = protocol.window_bytes * protocol.streams
        limited = step.num_bytes * ways.round_trip / window if window < np.inf else 0.0
        slowest = (ways.latency + limited).max(initial=0.0)
        return max(float(busiest), float(slowest)) + protocol.software_seconds

    def _carried(self, ways: _Ways, num_bytes: Ranks) -> FloatArray:
        load = np.zeros(len(self._rate) + 1)  # the last one is no link
        for place in ways.links.T:
            load += np.bincount(place % len(load), weights=num_bytes, minlength=len(load))
        return load[:-1]

    def _ways(self, step: Step, hosts: Ranks) -> _Ways:
        """Hosts with one line have it at both ends of every way, and what lies between is looked up once."""
        topology = self._topology
        doors = _doors(topology, set(hosts.tolist()))
        sources, targets = hosts[step.src], hosts[step.dst]
        if doors is None:
            return self._looked_up(sources, targets)
        out, into, router = doors
        pairs, place = np.unique(router[sources] * len(router) + router[targets], return_inverse=True)
        inner: list[tuple[int, ...]] = []
        for first in np.unique(place, return_index=True)[1]:
            src, dst = int(sources[first]), int(targets[first])
            inner.append(topology.route(src, dst)[1:-1] if src != dst else ())
        longest = max(map(len, inner), default=0)
        middle = np.full((len(pairs), longest), -1, np.int64)
        for row, between in zip(middle, inner, strict=True):
            row[: len(between)] = between
        links = np.column_stack([out[sources], middle[place], into[targets]])
        links[sources == targets] = -1
        return self._timed(links)

    def _looked_up(self, sources: Ranks, targets: Ranks) -> _Ways:
        routes = [
            self._topology.route(*pair) for pair in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
        links = np.full((len(routes), max(map(len, routes), default=0)), -1, np.int64)
        for row, route in zip(links, routes, strict=True):
            row[: len(route)] = route
        return self._timed(links)

    def _timed(self, links: Ranks) -> _Ways:
        there = np.append(self._topology.latency_seconds, 0.0)
        back = np.append(np.where(self._back >= 0, there[self._back], 0.0), 0.0)
        latency = there[links].sum(axis=1)
        return _Ways(links, latency, latency + back[links].sum(axis=1))


def _doors(topology: Topology, hosts: set[int]) -> tuple[Ranks, Ranks, Ranks] | None:
    """Of each host its only link out, its only one in, and the router behind; None where some host has more."""
    if topology.explicit_routes:
        return None
    out, into = defaultdict(list), defaultdict(list)
    for link in topology.links:
        out[link.source].append(link)
        into[link.target].append(link)
    routers = {name: number for number, name in enumerate(topology.routers)}
    table = np.zeros((3, len(topology.hosts)), np.int64)
    for host in hosts:
        name = topology.hosts[host].name
        if len(out[name]) != 1 or len(into[name]) != 1 or out[name][0].target not in routers:
            return None
        table[:, host] = out[name][0].index, into[name][0].index, routers[out[name][0].target]
    return table[0], table[1], table[2]
