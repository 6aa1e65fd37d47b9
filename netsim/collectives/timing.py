"""Times a collective that has a network to itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from netsim.clock import Clock
from netsim.collectives.play import play
from netsim.network import Network

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.collectives.schedules import Schedule
    from netsim.protocol import Protocol
    from netsim.topology import Topology

__all__ = ["Timing", "time_collective"]


@dataclass(frozen=True)
class Timing:
    """What a collective took.

    Attributes:
        seconds: of each repetition, from the common start until the last rank is through.
        rank_seconds: of the last repetition, by rank.
        link_bytes: payload that crossed each link in the last repetition, by link index.
    """

    seconds: list[float]
    rank_seconds: list[float]
    link_bytes: list[float]


def time_collective(
    topology: Topology,
    protocol: Protocol,
    made: Schedule,
    hosts: Sequence[int],
    *,
    repeat: int = 1,
    pause_seconds: float = 0.0,
) -> Timing:
    """Play a collective some times over; connections keep their state from one repetition to the next."""
    clock = Clock()
    network = Network(clock, topology, protocol)
    seconds: list[float] = []
    ends: list[float] = []
    before = network.link_bytes
    for repetition in range(repeat):
        if repetition and pause_seconds:
            clock.run(until=clock.now + pause_seconds)
        start, before = clock.now, network.link_bytes
        ends = [np.inf] * made.num_ranks
        one = play(network, made, hosts, on_done=_note(ends, clock))
        for member in range(made.num_ranks):
            one.arrive(member)
        clock.run()
        ends = [end - start for end in ends]
        seconds.append(max(ends))
    return Timing(seconds, ends, (network.link_bytes - before).tolist())


def _note(ends: list[float], clock: Clock) -> Callable[[int], None]:
    def note(member: int) -> None:
        ends[member] = clock.now

    return note
