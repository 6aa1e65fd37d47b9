"""Long collectives by their first steps, and crowds of messages by the links that have most to carry.

A ring's steps soon take equally long, so a few tell what all of them take.

For plans, where a thousandth does not matter and a ring of hundreds under TCP is millions of events; never
for training.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from netsim.collectives.closed_form import Lines, QuietNetwork
from netsim.collectives.schedules.schedule import ListedPhase, Phase, Step
from netsim.collectives.start import start_all_to_all, start_collective
from netsim.collectives.timing import time_collective
from netsim.network.clock import call_at

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Bytes, Ranks, Schedule
    from netsim.collectives.start import Collective
    from netsim.network.network import Network
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import FloatArray, Topology

__all__ = ["Abridged", "Gathering", "are_many", "is_crowd"]

# Under TCP, what sends more messages than this is not simulated to its end.
_MOST_WINDOWED_MESSAGES = 20_000

# What sends more than this is not simulated but for its slowest pairs, where pairs do not share links.
_MOST_STEPWISE_MESSAGES = 50_000
_SLOWEST_PAIRS = 8

_FEWEST_STEPS = 2  # of a phase, by which its pace is judged first; then twice as many, and so on
_SAME_PACE = 1e-3


class _Beginning(Phase):
    """The first steps of a phase."""

    def __init__(self, whole: Phase, num_steps: int) -> None:
        self._whole, self.num_steps = whole, num_steps
        self.window, self.reduce, self.has_gaps = whole.window, whole.reduce, whole.has_gaps

    def step(self, index: int) -> Step:
        """As the phase has it."""
        return self._whole.step(index)

    def num_bytes(self, index: int) -> Bytes:
        """As the phase has them."""
        return self._whole.num_bytes(index)

    def fixed_pairs(self) -> tuple[Ranks, Ranks] | None:
        """As the phase has them."""
        return self._whole.fixed_pairs()


class _Some(Phase):
    """A phase with the messages of some senders alone."""

    def __init__(self, whole: Phase, senders: Ranks) -> None:
        self._whole, self._senders = whole, senders
        self.num_steps, self.window, self.reduce = whole.num_steps, whole.window, whole.reduce
        self.has_gaps = True

    def step(self, index: int) -> Step:
        """As the phase has it, of these senders."""
        step = self._whole.step(index)
        kept = np.isin(step.src, self._senders)
        return Step(step.src[kept], step.dst[kept], step.offset[kept], step.num_bytes[kept])

    def fixed_pairs(self) -> tuple[Ranks, Ranks] | None:
        """As the phase has them, of these senders."""
        pairs = self._whole.fixed_pairs()
        if pairs is None:
            return None
        kept = np.isin(pairs[0], self._senders)
        return pairs[0][kept], pairs[1][kept]


def _beginning(schedule: Schedule, num_steps: int) -> tuple[Schedule, int] | None:
    """The schedule with so many steps in each of its long phases, and how many are left out there.

    None where no phase is longer, or the steps of a long one differ.
    """
    long = [phase for phase in schedule.phases if phase.num_steps > num_steps]
    lengths = {phase.num_steps for phase in long}
    if len(lengths) != 1 or any(phase.fixed_pairs() is None for phase in long):
        return None
    phases = tuple(_Beginning(phase, num_steps) if phase in long else phase for phase in schedule.phases)
    return replace(schedule, phases=phases), lengths.pop() - num_steps


def _is_long(schedule: Schedule, protocol: Protocol) -> bool:
    """Whether it is abridged: too many messages, under a protocol that is simulated message by message."""
    return protocol.has_windows and schedule.num_messages > _MOST_WINDOWED_MESSAGES


class Gathering:
    """A collective that begins when its last member has come, and is over for all at once.

    Args:
        network: on whose clock.
        num_members: how many.
        begun: called when all have come; what it takes, in seconds.
        on_done: called with every member when it is through.
    """

    def __init__(
        self,
        network: Network,
        num_members: int,
        begun: Callable[[], float],
        on_done: Callable[[int], None],
    ) -> None:
        self._env, self._num_members, self._begun, self._on_done = network.env, num_members, begun, on_done
        self._num_away = num_members

    def arrive(self, member: int) -> None:
        """A member is there."""
        self._num_away -= 1
        if not self._num_away:
            at = self._env.now + self._begun()
            for each in range(self._num_members):
                call_at(self._env, at, partial(self._through, each))

    def cancel(self) -> None:
        """End it: `on_done` is not called any more."""
        self._num_members = 0

    def _through(self, member: int) -> None:
        if self._num_members:
            self._on_done(member)


class Abridged:
    """Starts collectives on a quiet network, of long ones under TCP their first steps alone.

    The time of the others is computed from a trial, and added at the end. Crowds take what `_Crowd` computes,
    from when their last member has come.

    Args:
        topology: the network, without weather.
        protocol: how transfers use it.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self._protocol = topology, protocol
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Schedule, Schedule, float]] = {}
        self._crowd = _Crowd(topology, protocol)
        self._wholes: dict[tuple[int, tuple[int, ...]], tuple[Schedule, float | None]] = {}
        self._crowds: dict[Hashable, tuple[float, FloatArray, Hashable]] = {}

    def start(
        self,
        network: Network,
        schedule: Schedule,
        hosts: Sequence[int],
        *,
        group: Hashable = None,
        on_done: Callable[[int], None],
    ) -> Collective | Gathering:
        """As `netsim.collectives.start_collective`."""
        if is_crowd(schedule):
            through_at = partial(
                self._begun, network, tuple(hosts), (id(schedule), schedule), lambda: schedule
            )
            return Gathering(network, len(hosts), through_at, on_done)
        if not _is_long(schedule, self._protocol):
            return start_collective(network, schedule, hosts, group=group, on_done=on_done)
        seconds = self._by_slowest(schedule, tuple(hosts))
        if seconds is not None:
            begun = partial(self._credited, network, schedule, tuple(hosts), seconds)
            return Gathering(network, len(hosts), begun, on_done)
        _, short, later = self._reckoned(schedule, tuple(hosts))
        sent = {(src, dst): num_bytes for src, dst, num_bytes in short.pair_bytes}
        network.credit(
            hosts, [(src, dst, whole - sent.get((src, dst), 0)) for src, dst, whole in schedule.pair_bytes]
        )

        def through(member: int) -> None:
            call_at(network.env, network.env.now + later, partial(on_done, member))

        return start_collective(network, short, hosts, group=group, on_done=through)

    def start_all_to_all(
        self,
        network: Network,
        hosts: Sequence[int],
        whole: Callable[[tuple[tuple[int, ...], ...]], Schedule],
        *,
        group: Hashable = None,
        on_done: Callable[[int], None],
    ) -> tuple[Callable[[int, Sequence[int]], None], Callable[[], None]]:
        """As `netsim.collectives.start_all_to_all`; `whole` makes the schedule of these bytes from member to member."""
        if not are_many(len(hosts) * (len(hosts) - 1)):
            return start_all_to_all(network, hosts, group=group, on_done=on_done)
        rows: dict[int, tuple[int, ...]] = {}

        def begun() -> float:
            sizes = tuple(rows[member] for member in range(len(hosts)))
            return self._begun(network, tuple(hosts), sizes, lambda: whole(sizes))

        gathering = Gathering(network, len(hosts), begun, on_done)

        def enter(member: int, row: Sequence[int]) -> None:
            rows[member] = tuple(row)
            gathering.arrive(member)

        return enter, gathering.cancel

    def _begun(
        self, network: Network, hosts: tuple[int, ...], sizes: Hashable, made: Callable[[], Schedule]
    ) -> float:
        """A crowd begins, which `sizes` tells from others: what it takes."""
        key = (hosts, sizes)
        if key not in self._crowds:
            self._crowds[key] = (*self._crowd.times(made(), hosts), sizes)
        seconds, link_bytes, _ = self._crowds[key]
        network.credit_links(link_bytes)
        return seconds

    @staticmethod
    def _credited(network: Network, schedule: Schedule, hosts: tuple[int, ...], seconds: float) -> float:
        network.credit(hosts, schedule.pair_bytes)
        return seconds

    def _by_slowest(self, schedule: Schedule, hosts: tuple[int, ...]) -> float | None:
        """What a very long ring takes, by the pace of its slowest pairs; None where all of it is to be looked at.

        Where pairs share no links, the slowest one never waits for the others, once they have begun. Its neighbours go
        along, as their acknowledgements take of its lines.
        """
        key = (id(schedule), hosts)
        if key not in self._wholes:
            self._wholes[key] = (schedule, self._slowest_seconds(schedule, hosts))
        return self._wholes[key][1]

    def _slowest_seconds(self, schedule: Schedule, hosts: tuple[int, ...]) -> float | None:
        pairs = [phase.fixed_pairs() for phase in schedule.phases]
        if schedule.num_messages <= _MOST_STEPWISE_MESSAGES or any(each is None for each in pairs):
            return None
        topology, protocol = self._topology, self._protocol
        rate = topology.bits_per_second / 8 * protocol.payload_share
        lines = Lines(QuietNetwork.of(topology, protocol), hosts)
        src, dst = next(each for each in pairs if each is not None)
        _, there, most = lines.of(src, dst)
        if not lines.fit_at_once(rate) or any((each[1] != dst).any() for each in pairs if each is not None):
            return None
        _, back, _ = lines.of(dst, src)
        window = protocol.window_bytes * protocol.streams
        most = np.minimum(most, window / np.maximum(there + back, 1e-9))
        largest = max(schedule.phases, key=lambda phase: phase.num_steps).num_bytes(0).max(initial=0)
        slowest = np.argsort(-(there + largest / most), kind="stable")[:_SLOWEST_PAIRS]
        senders = np.unique(np.concatenate([src[slowest], dst[slowest], src[np.isin(dst, src[slowest])]]))
        some = replace(schedule, phases=tuple(_Some(phase, senders) for phase in schedule.phases))
        short, later = self._cut(some, hosts)
        return time_collective(topology, protocol, short, hosts).seconds[-1] + later

    def _reckoned(self, schedule: Schedule, hosts: tuple[int, ...]) -> tuple[Schedule, Schedule, float]:
        """The schedule (kept, for its identity), what of it is simulated, and what the rest takes."""
        key = (id(schedule), hosts)
        if key not in self._known:
            short, later = self._cut(schedule, hosts)
            self._known[key] = (schedule, short, later)
        return self._known[key]

    def _cut(self, schedule: Schedule, hosts: tuple[int, ...]) -> tuple[Schedule, float]:
        """What of a schedule is simulated, and what the rest takes."""
        num_steps, pace, before = _FEWEST_STEPS, 0.0, 0.0
        short, left = schedule, 0
        while (found := _beginning(schedule, num_steps)) is not None:
            seconds = time_collective(self._topology, self._protocol, found[0], hosts).seconds[-1]
            now = (seconds - before) / (num_steps if before == 0.0 else num_steps / 2)
            if before and abs(now - pace) <= _SAME_PACE * pace:
                return short, left * now
            (short, left), before, pace = found, seconds, now
            num_steps *= 2
        return schedule, 0.0


# What sends more at once is a crowd.
_FEWEST_OF_A_CROWD = 20_000


def are_many(num_messages: int) -> bool:
    """Whether so many messages at once are a crowd."""
    return num_messages > _FEWEST_OF_A_CROWD


def is_crowd(schedule: Schedule) -> bool:
    """Whether a schedule is of few steps with very many messages each."""
    listed = all(isinstance(phase, ListedPhase) for phase in schedule.phases)
    return listed and are_many(schedule.num_messages)


class _Routes(NamedTuple):
    """Routes of messages: links by message and place on the route (-1: no link), and round trips."""

    links: Ranks
    latency: FloatArray
    round_trip: FloatArray


class _Crowd:
    """Times of crowds on a quiet network.

    Args:
        topology: the network, without weather.
        protocol: how transfers use it.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self._protocol = topology, protocol
        self._rate = topology.bits_per_second / 8 * protocol.payload_share
        back = {(link.target, link.source): link.index for link in topology.links}
        self._back = np.array([back.get((link.source, link.target), -1) for link in topology.links], np.int64)

    def times(self, schedule: Schedule, hosts: Sequence[int]) -> tuple[float, FloatArray]:
        """Seconds from all members' common start to the end; and payload across each link, shape (links,)."""
        seconds, total = 0.0, np.zeros(len(self._rate))
        for phase in schedule.phases:
            for index in range(phase.num_steps):
                step = phase.step(index)
                ways = self._ways(step, np.asarray(hosts, np.int64))
                load = self._carried(ways, step.num_bytes)
                seconds += self._step_seconds(step, ways, load)
                total += load
        return seconds, total

    def _step_seconds(self, step: Step, ways: _Routes, load: FloatArray) -> float:
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

    def _carried(self, ways: _Routes, num_bytes: Ranks) -> FloatArray:
        load = np.zeros(len(self._rate) + 1)  # the last one is no link
        for place in ways.links.T:
            load += np.bincount(place % len(load), weights=num_bytes, minlength=len(load))
        return load[:-1]

    def _ways(self, step: Step, hosts: Ranks) -> _Routes:
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

    def _looked_up(self, sources: Ranks, targets: Ranks) -> _Routes:
        routes = [
            self._topology.route(*pair) for pair in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
        links = np.full((len(routes), max(map(len, routes), default=0)), -1, np.int64)
        for row, route in zip(links, routes, strict=True):
            row[: len(route)] = route
        return self._timed(links)

    def _timed(self, links: Ranks) -> _Routes:
        there = np.append(self._topology.latency_seconds, 0.0)
        back = np.append(np.where(self._back >= 0, there[self._back], 0.0), 0.0)
        latency = there[links].sum(axis=1)
        return _Routes(links, latency, latency + back[links].sum(axis=1))


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
