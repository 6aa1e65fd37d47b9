"""Estimates of collectives on a quiet network, for the choice of algorithms, for plans and for very large ones.

A collective of few messages is simulated whole. Of a long ring the first steps are simulated, until a step takes as
long as those before; of a crowd of simultaneous messages the busiest links are computed.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from netsim.collectives.closed_form import MessageRoutes, undisturbed_seconds
from netsim.collectives.schedules.algorithms import ALGORITHMS, build, find_algorithm
from netsim.collectives.schedules.schedule import ListedPhase, Phase
from netsim.collectives.start import Timing, link_bytes, time_collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Problem, Ranks, Schedule, Step
    from netsim.network.trace import Recorder
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import FloatArray, Topology

__all__ = ["Estimator"]

# Messages of a schedule that choices and plans simulate; more at once are a crowd.
_MOST_WHOLE = 20_000
# Messages at once between unlike hosts under windows, which all end at different instants.
_MOST_UNLIKE = 2_000
# Messages that `netsim.collective` simulates, half a minute of processor time; a message of a crowd takes ten times as
# long as one of a ring, since it has a connection of its own.
_MOST_ASKED, _MOST_ASKED_AT_ONCE = 5_000_000, 500_000
# Messages of a step of an algorithm that `auto` compares: to list more would take longer than the run.
_MOST_LISTED = 500_000
# A loss is an event: from this number on, time grows in proportion to the bytes. At least 1 MiB is simulated.
_MOST_LOSSES, _LEAST_BYTES = 100, 1 << 20

_FEWEST_STEPS = 2  # of a long phase, simulated first; then twice as many each time
_SAME_PACE = 1e-3  # relative difference of the seconds of a step
# Where sends are buffered, first steps fill every pipe so many times; of more messages, any pace is taken.
_FILLED, _MOST_FILLING = 4, 100_000

# Estimated times that differ by less are equal, and the table's earlier algorithm is taken.
_SAME = 1 + 1e-9
# A crowd that is not sooner than the best by more than its estimate's error is left out; a long one is not simulated.
_SURELY, _LONG_SECONDS = 0.99, 1.0
_MOST_RIVALS = 64  # whose bounds and seconds are remembered: contenders are compared again
# The second repetition has warm connections, as a training step does.
_REPETITIONS = 2


class _Rival(NamedTuple):
    """An algorithm in a comparison.

    Attributes:
        problem: the collective, by this algorithm.
        bound: lower bound of its seconds; infinite if it has too many messages to list.
        crowd_seconds: estimate by the busiest link if it is a crowd; else 0.
    """

    problem: Problem
    bound: float
    crowd_seconds: float


class Estimator:
    """Estimates collectives on a quiet network.

    Args:
        topology: the network; only `timing` takes one with weather.
        protocol: how transfers use it.

    Attributes:
        crowds: times of steps with too many messages to simulate.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self._protocol = topology, protocol
        self.crowds = _Crowds(topology, protocol)
        self._rival = lru_cache(_MOST_RIVALS)(self._bounded)
        self._rival_seconds = lru_cache(_MOST_RIVALS)(self._time_rival)

    def most_at_once(self, hosts: Sequence[int]) -> int:
        """Number of messages at once that are simulated between `hosts`; more are a crowd."""
        if not self._protocol.has_windows or self._protocol.rendezvous:
            return _MOST_WHOLE
        kinds = self._topology.host_kinds
        return _MOST_UNLIKE if len({kinds[host] for host in hosts}) ** 2 > _MOST_UNLIKE else _MOST_WHOLE

    def is_crowd(self, schedule: Schedule, hosts: Sequence[int] = (), most: int | None = None) -> bool:
        """True if a schedule has few steps with very many messages each.

        Args:
            schedule: the collective.
            hosts: the host of each member.
            most: largest number of messages that are simulated; None: `most_at_once`.
        """
        listed = all(isinstance(phase, ListedPhase) for phase in schedule.phases)
        return listed and schedule.num_messages > (self.most_at_once(hosts) if most is None else most)

    def fastest(self, problem: Problem, hosts: tuple[int, ...]) -> str:
        """Find the algorithm whose last member finishes first; only those that can win are simulated.

        Args:
            problem: the collective, by any algorithm.
            hosts: the host of each member.
        """
        names = self.candidates(problem, hosts)
        if len(names) == 1:
            return names[0]
        rivals = {name: self._rival(replace(problem, algorithm=name), hosts) for name in names}
        best, best_seconds = names[0], math.inf
        for name in sorted(names, key=lambda name: (rivals[name].crowd_seconds > 0, rivals[name].bound)):
            rival = rivals[name]
            if rival.bound > best_seconds * _SAME or rival.crowd_seconds > _SURELY * best_seconds:
                continue
            seconds = self._rival_seconds(rival, hosts)
            is_earlier = names.index(name) < names.index(best)
            if seconds * _SAME < best_seconds or (is_earlier and seconds <= best_seconds * _SAME):
                best, best_seconds = name, seconds
        return best

    def nearly_as_fast(
        self, problem: Problem, hosts: tuple[int, ...], names: Sequence[str], within: float
    ) -> list[str]:
        """Algorithms among `names` that take at most `within` times as long as the problem's, and all different.

        Args:
            problem: the collective, by the fastest algorithm.
            hosts: the host of each member.
            names: other algorithms.
            within: largest duration, relative to the problem's.
        """
        found, taken = [], [self._rival_seconds(self._rival(problem, hosts), hosts)]
        for name in names:
            rival = self._rival(replace(problem, algorithm=name), hosts)
            if rival.bound <= within * taken[0]:
                took = self._rival_seconds(rival, hosts)
                if took <= within * taken[0] and took not in taken:
                    taken.append(took)
                    found.append(name)
        return found

    def has_few(self, problem: Problem, most: float) -> bool:
        """True if a collective has at most so many messages; those of a step are counted before they are listed."""
        return self._messages_at_once(problem) <= most and build(problem).num_messages <= most

    @staticmethod
    def _messages_at_once(problem: Problem) -> int:
        algorithm = find_algorithm(problem.op, problem.algorithm)
        parties = len(set(problem.regions)) if algorithm.needs_regions else problem.num_ranks
        return algorithm.num_messages(parties)

    def candidates(self, problem: Problem, hosts: Sequence[int]) -> tuple[str, ...]:
        """Algorithms that `auto` compares: those on offer, one of those that are alike.

        Args:
            problem: the collective, by any algorithm.
            hosts: the host of each member.
        """
        every = {name: find_algorithm(problem.op, name) for name in ALGORITHMS[problem.op]}
        seen: dict[object, str] = {}
        for name, row in every.items():
            if problem.num_bytes <= row.most_bytes and row.is_offered and row.differs(problem):
                seen.setdefault(row, name)
        return tuple(seen.values())[: None if len(set(hosts)) > 1 else 1]

    def _bounded(self, problem: Problem, hosts: tuple[int, ...]) -> _Rival:
        if self._messages_at_once(problem) > _MOST_LISTED:
            return _Rival(problem, math.inf, 0.0)
        made = build(problem)
        bound = max(self._least(made, hosts), self._busiest(made, hosts))
        crowded = self.is_crowd(made, hosts)
        return _Rival(problem, bound, float(self.crowds.times(made, hosts)[0].max()) if crowded else 0.0)

    def _time_rival(self, rival: _Rival, hosts: tuple[int, ...]) -> float:
        """Estimate a rival; infinite if it has too many messages to list."""
        if rival.bound == math.inf or rival.crowd_seconds > _LONG_SECONDS:
            return rival.crowd_seconds or math.inf
        return self.seconds(rival.problem, hosts, _REPETITIONS)

    def seconds(self, problem: Problem, hosts: Sequence[int], repeat: int = 1) -> float:
        """Seconds from the members' common start until the last one finishes.

        Args:
            problem: the collective.
            hosts: the host of each member.
            repeat: number of repetitions; the last one is timed, on warm connections.
        """
        num_bytes = most = problem.num_bytes
        loss = float(self._topology.loss.max(initial=0.0))
        if loss and self._protocol.has_windows:
            segment = self._protocol.segment_bytes * self._protocol.streams
            most = min(max(int(_MOST_LOSSES * segment / loss), _LEAST_BYTES), num_bytes)
        if most == num_bytes:
            return self._of_schedule(build(problem), hosts, repeat)
        half, whole = (
            self._of_schedule(build(replace(problem, num_bytes=size)), hosts, repeat)
            for size in (most // 2, most)
        )
        return whole + (whole - half) * (num_bytes - most) / (most - most // 2)

    def _of_schedule(self, schedule: Schedule, hosts: Sequence[int], repeat: int) -> float:
        if self.is_crowd(schedule, hosts, _MOST_WHOLE):
            return float(self.crowds.times(schedule, hosts)[0].max())
        if schedule.num_messages <= _MOST_WHOLE:
            return self._simulate(schedule, hosts, repeat)
        short, later, _ = self.first_steps(schedule, hosts, repeat)
        return self._simulate(short, hosts, repeat) + later

    def _simulate(self, schedule: Schedule, hosts: Sequence[int], repeat: int = 1) -> float:
        return time_collective(self._topology, self._protocol, schedule, hosts, repeat=repeat).seconds[-1]

    def timing(
        self,
        schedule: Schedule,
        hosts: Sequence[int],
        *,
        repeat: int,
        calls: int = 1,
        pause_seconds: float,
        recorder: Recorder | None,
    ) -> tuple[Timing, str | None]:
        """Times of a schedule, and how they were estimated; simulated, and None, where it is not too large.

        With weather or a recorder every message is simulated.

        Args:
            schedule: the collective.
            hosts: the host of each member.
            repeat: number of repetitions.
            calls: of each repetition, see `time_collective`; where a call is estimated, they add up.
            pause_seconds: virtual time between repetitions.
            recorder: of a trace.
        """
        topology, protocol = self._topology, self._protocol
        is_free = not topology.weather and recorder is None
        if is_free and self.is_crowd(schedule, hosts, _MOST_ASKED_AT_ONCE):
            seconds, load = self.crowds.times(schedule, hosts)
            seconds, load = calls * seconds, calls * load
            timing = Timing(
                [float(seconds.max())] * repeat, seconds.tolist(), load.tolist(), [0.0] * len(load)
            )
            return timing, "by the busiest link of each step"
        simulated, later, why = schedule, 0.0, ""
        if is_free and schedule.num_messages > _MOST_ASKED and not protocol.is_plain:
            simulated, later, why = self.first_steps(schedule, hosts, repeat)
            later *= calls
        timing = time_collective(
            topology,
            protocol,
            simulated,
            hosts,
            repeat=repeat,
            calls=calls,
            pause_seconds=pause_seconds,
            recorder=recorder,
        )
        if simulated is schedule:
            return timing, None
        timing = Timing(
            [each + later for each in timing.seconds],
            [each + later for each in timing.rank_seconds],
            [calls * each for each in link_bytes(schedule, hosts, topology, protocol)],
            timing.background_link_bytes,
        )
        return timing, f"{simulated.num_steps} of {schedule.num_steps} steps simulated, {why}"

    def _busiest(self, schedule: Schedule, hosts: Sequence[int]) -> float:
        """Seconds in which the busiest link, and the narrowest window, let through what a schedule sends."""
        routes = MessageRoutes(hosts, self._topology, self._protocol)
        src, dst, each = schedule.pairs
        busiest = (routes.carried(routes.links(src, dst), each) / routes.capacity).max(initial=0.0)
        if self._protocol.connections == "per-transfer":  # each message has a window of its own
            return float(busiest)
        num_bytes, _, round_trips, window = self._pairs(schedule, hosts)
        return max(float(busiest), float(((num_bytes / window - 1) * round_trips).max(initial=0.0)))

    def _pairs(
        self, schedule: Schedule, hosts: Sequence[int]
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray | float]:
        """Bytes, rate, round trip and largest window of each pair of members that exchanges any bytes."""
        routes = MessageRoutes(hosts, self._topology, self._protocol)
        src, dst, num_bytes = schedule.pairs
        links = routes.links(src, dst)
        return num_bytes.astype(np.float64), routes.rate(links), *self.crowds.windows(routes, links)

    def _filling_steps(self, schedule: Schedule, hosts: Sequence[int]) -> float:
        """Steps of each phase after which windows and pipes limit a ring, and each piece has been around it."""
        protocol = self._protocol
        num_bytes, rate, round_trips, window = self._pairs(schedule, hosts)
        most = num_bytes.max(initial=0.0)
        lap = float(schedule.num_ranks * max((phase.window for phase in schedule.phases), default=1))
        if most <= protocol.initial_segments * protocol.segment_bytes * protocol.streams:
            return lap
        pipe = np.zeros(len(num_bytes))  # inside a host: its rate is infinite
        np.multiply(rate, round_trips, where=round_trips > 0, out=pipe)
        pipe = np.minimum(window, pipe)
        return max(lap, float(_FILLED * pipe.max() * schedule.num_steps / most))

    def _least(self, schedule: Schedule, hosts: Sequence[int]) -> float:
        """Lower bound of a schedule's seconds, as if messages did not share links."""
        alone = undisturbed_seconds(schedule, hosts, self._topology, self._protocol)
        return 0.0 if alone is None else float(alone.max())

    def is_long(self, schedule: Schedule) -> bool:
        """True if a schedule has too many messages to be simulated whole, under a protocol with windows."""
        return self._protocol.has_windows and schedule.num_messages > _MOST_WHOLE

    def first_steps(
        self, schedule: Schedule, hosts: Sequence[int], repeat: int = 1
    ) -> tuple[Schedule, float, str]:
        """First steps of a long schedule, the seconds of the others, and why no more; all steps if no pace settles.

        Where sends are buffered, the first steps of a ring have not met its longest links. Where they take as long as
        the recurrence of the closed form says, it gives the others, too.

        Args:
            schedule: of members on `hosts`.
            hosts: host of each member.
            repeat: number of repetitions.
        """
        num_steps, pace, before, least_before = _FEWEST_STEPS, 0.0, 0.0, 0.0
        short, left = schedule, 0
        is_buffered = self._protocol.buffers_sends
        filling = self._filling_steps(schedule, hosts) if is_buffered else 0.0
        while (found := _truncate(schedule, num_steps)) is not None:
            seconds = self._simulate(found[0], hosts, repeat)
            least = self._least(found[0], hosts)
            ahead_before = before - least_before
            now = (seconds - before) / (num_steps if before == 0.0 else num_steps / 2)
            is_even = abs(now - pace) <= _SAME_PACE * pace
            is_least = is_buffered and abs(seconds - least - ahead_before) <= _SAME_PACE * (seconds - before)
            is_settled = num_steps >= filling and (is_even or is_least)
            if before and (is_settled or (is_buffered and found[0].num_messages > _MOST_FILLING)):
                whole, later = self._least(schedule, hosts), 0.0
                if is_even or not is_least:
                    # The steps of the last loop of NCCL's rings may have fewer bytes than those before.
                    sizes = [float(each.pairs[2].sum()) for each in (schedule, found[0], short)]
                    grown, least_grown = sizes[1] - sizes[2], least - least_before
                    share = max(
                        (sizes[0] - sizes[2]) / grown if grown else math.inf,
                        (whole - least_before) / least_grown if least_grown > 0 else math.inf,
                    )
                    later = min(left * now, share * (seconds - before))
                why = "until a step took as long as those before, within 0.1 %"
                if not is_settled:
                    why = f"before their pace had settled: twice as many have more than {_MOST_FILLING:,} messages"
                elif not is_even:
                    why = "until more of them took as long as without shared links, within 0.1 %"
                if is_buffered:
                    bound = max(whole + ahead_before, self._busiest(schedule, hosts))
                    later = max(later, bound - before)
                return short, later, why
            (short, left), before, least_before, pace = found, seconds, least, now
            num_steps *= 2
        return schedule, 0.0, ""


def _truncate(schedule: Schedule, num_steps: int) -> tuple[Schedule, int] | None:
    """Cut each long phase of a schedule to `num_steps`; also return the number of steps left out of each.

    None if no phase is longer, long phases differ in length, or their steps differ.
    """
    lengths, phases = set[int](), list[Phase]()
    for phase in schedule.phases:
        cut = phase
        if phase.num_steps > num_steps:
            if phase.fixed_pairs() is None:
                return None
            lengths.add(phase.num_steps)
            cut = copy(phase)
            cut.num_steps = num_steps
        phases.append(cut)
    return (replace(schedule, phases=tuple(phases)), lengths.pop() - num_steps) if len(lengths) == 1 else None


class _Crowds:
    """Times of crowds on a quiet network, by the busiest link of each step.

    Args:
        topology: the network, without weather.
        protocol: how transfers use it.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self._protocol = topology, protocol
        self._back = np.array(
            [topology.link_between[link.target, link.source].index for link in topology.links], int
        )
        first: dict[object, int] = {}  # link with these figures
        alike = [first.setdefault(link.figures, link.index) for link in topology.links]
        processes = [-1] * (2 * len(topology.hosts) + 1)  # and no link
        self._alike = np.array([*alike, *processes])

    def times(
        self, schedule: Schedule, hosts: Sequence[int], early: Sequence[float] = ()
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds from the last member's start to each one's end; and payload across each link, shape (links,).

        Args:
            schedule: the crowd.
            hosts: the host of each member.
            early: seconds by which each member starts before the last one; empty: all start at once.
        """
        routes = MessageRoutes(hosts, self._topology, self._protocol)
        done, total = np.zeros(schedule.num_ranks), np.zeros(len(routes.capacity))
        done[: len(early)] -= np.array(early)
        for phase in schedule.phases:
            for index in range(phase.num_steps):
                step = phase.step(index)
                links = routes.links(step.src, step.dst)
                load = routes.carried(links, step.num_bytes)
                latency = routes.latency(links)
                last = done.max()
                before = last - done if (done < last).any() else done[:0]
                delivered = last + self._delivered(step, routes, links, load, latency, before)
                if self._protocol.buffers_sends:
                    np.maximum.at(done, step.dst, delivered)
                    np.maximum.at(done, step.src, delivered - latency)
                else:
                    done[:] = delivered.max(initial=last)  # all begin the next step when this one ends
                total += load
        return np.maximum(done, 0.0), total[: len(self._topology.links)]

    def windows(self, routes: MessageRoutes, links: Ranks) -> tuple[FloatArray, FloatArray | float]:
        """Round trip of each route, and the bytes in flight that windows allow."""
        protocol, topology = self._protocol, self._topology
        round_trips = routes.latency(links) + routes.latency(links, topology.latency_seconds[self._back])
        if topology.measured_streams.any() or any(link.stream_bits_per_second for link in topology.links):
            # Thousands of routes have few kinds.
            kinds, kind = np.unique(
                np.column_stack([self._alike[links], round_trips]), axis=0, return_inverse=True
            )
            windows = [
                protocol.transfer_window([topology.links[int(link)] for link in route if link >= 0], trip)
                for *route, trip in kinds.tolist()
            ]
            return round_trips, np.array(windows)[kind.reshape(-1)]
        return round_trips, protocol.transfer_window((), 0.0)

    def _delivered(
        self,
        step: Step,
        routes: MessageRoutes,
        links: Ranks,
        load: FloatArray,
        latency: FloatArray,
        early: FloatArray,
    ) -> FloatArray:
        """Seconds until each message of a step is delivered, by the busiest link of its route."""
        protocol, rate = self._protocol, routes.capacity
        acks = np.zeros(len(load))
        acks[: len(self._back)] = load[self._back] * protocol.ack_share * protocol.payload_share
        round_trips, window = self.windows(routes, links)
        starts = latency - early[step.src] if len(early) else latency
        slowest = starts + step.num_bytes * round_trips / window
        # A link is busy from its first byte, or a late member's, on.
        if not len(early):
            first = np.full(len(load) + 1, np.inf)
            for place in links.T:
                np.minimum.at(first, place, starts)
            ends = first[:-1] + (load + acks) / rate
        else:
            crossing, width = links.ravel(), links.shape[1]
            order = np.lexsort((np.repeat(starts, width), crossing))
            order = order[crossing[order] >= 0]
            crossing, message = crossing[order], order // width
            upto = np.cumsum(step.num_bytes[message])
            last = np.searchsorted(crossing, crossing, side="right") - 1
            left = upto[last] - upto + step.num_bytes[message]
            ends = np.zeros(len(load))
            np.maximum.at(ends, crossing, starts[message] + left / rate[crossing])
            ends += acks / rate
        ends[load <= 0] = 0.0
        busiest = np.append(ends, 0.0)[links].max(axis=1, initial=0.0)
        delivered: FloatArray = np.maximum(busiest, slowest) + protocol.software_seconds
        return delivered
