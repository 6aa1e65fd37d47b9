"""Times a collective that has a network to itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.closed_form import QuietNetwork, contention_free_seconds
from netsim.collectives.start import start_collective
from netsim.network.clock import Clock
from netsim.network.network import Network
from netsim.network.recorder import Recorder, Span
from netsim.weather.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["Timing", "time_collective"]


@dataclass(frozen=True)
class Timing:
    """What a collective took.

    Attributes:
        seconds: of each repetition, from the common start until the last rank is through.
        rank_seconds: of the last repetition, by rank.
        link_bytes: its payload that crossed each link in the last repetition, by link index; what a crash had it
            send twice counts twice.
        background_link_bytes: likewise, the payload of background traffic meanwhile.
    """

    seconds: list[float]
    rank_seconds: list[float]
    link_bytes: list[float]
    background_link_bytes: list[float]


def time_collective(
    topology: Topology,
    protocol: Protocol,
    made: Schedule,
    hosts: Sequence[int],
    *,
    repeat: int = 1,
    pause_seconds: float = 0.0,
    recorder: Recorder | None = None,
) -> Timing:
    """Simulate a collective some times over; connections keep their state from one repetition to the next.

    The topology's weather applies; `recorder` keeps what happens. Raises DeadlockError where it can never end.
    """
    if protocol.is_plain and not topology.weather and recorder is None:
        ends = contention_free_seconds(
            made, hosts, np.zeros(made.num_ranks), QuietNetwork.of(topology, protocol)
        )
        if ends is not None:
            link_bytes = _link_bytes(made, hosts, topology)
            nothing = [0.0] * len(link_bytes)
            return Timing([float(ends.max())] * repeat, ends.tolist(), link_bytes, nothing)
    return _simulated(topology, protocol, made, hosts, repeat, pause_seconds, recorder)


def _link_bytes(made: Schedule, hosts: Sequence[int], topology: Topology) -> list[float]:
    """Payload across each link."""
    totals = [0.0] * len(topology.links)
    for src, dst, num_bytes in made.pair_bytes:
        for link in topology.route(hosts[src], hosts[dst]):
            totals[link] += num_bytes
    return totals


def _simulated(
    topology: Topology,
    protocol: Protocol,
    made: Schedule,
    hosts: Sequence[int],
    repeat: int,
    pause_seconds: float,
    recorder: Recorder | None,
) -> Timing:
    """Time it on a live network."""
    clock = Clock()
    network = Network(clock, topology, protocol)
    if recorder is not None:
        recorder.watch(network)
    faults = Faults(network)
    seconds: list[float] = []
    ends: list[float] = []
    before = others_before = network.link_bytes
    for repetition in range(repeat):
        if repetition and pause_seconds:
            clock.run(until=clock.now + pause_seconds)
        start, before, others_before = clock.now, network.link_bytes, network.background_link_bytes
        ends = [np.inf] * made.num_ranks
        waiting = _Waiting(ends, clock)
        if recorder is not None:
            recorder.unfinished_spans = partial(waiting.spans, made, start)
        one = start_collective(network, made, hosts, on_done=waiting.note)
        for member in range(made.num_ranks):
            one.arrive(member)
        faults.run_until(waiting.is_empty)
        if recorder is not None:
            recorder.spans += waiting.spans(made, start)
            recorder.unfinished_spans = list
        ends = [end - start for end in ends]
        seconds.append(max(ends))
    background = network.background_link_bytes - others_before
    own = network.link_bytes - before - background
    own[own < 0.5] = 0.0  # rounding of sums: nothing of ours has crossed that link
    return Timing(seconds, ends, own.tolist(), background.tolist())


class _Waiting:
    """Notes when each member is through."""

    def __init__(self, ends: list[float], clock: Clock) -> None:
        self._ends = ends
        self._clock = clock
        self._num_left = len(ends)

    def note(self, member: int) -> None:
        self._ends[member] = self._clock.now
        self._num_left -= 1

    def spans(self, made: Schedule, start: float) -> list[Span]:
        """What each member has done since the start: until it was through, or until now."""
        ends = (end if end < np.inf else self._clock.now for end in self._ends)
        return [
            Span(member, "communication", made.op, start, end, made.num_bytes)
            for member, end in enumerate(ends)
        ]

    def is_empty(self) -> bool:
        return not self._num_left
