"""Long collectives by their first steps: a ring's steps soon take equally long, so a few tell what all of them take.

For plans, where a thousandth does not matter and a ring of hundreds under TCP is millions of events; never
for training.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from netsim.collectives.schedules.schedule import Phase
from netsim.collectives.times.collective import start_collective
from netsim.collectives.times.timing import time_collective
from netsim.fluid.clock import call_at

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Bytes, Ranks, Schedule, Step
    from netsim.collectives.times.collective import Collective
    from netsim.fluid.network import Network
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["Abridged"]

# Under TCP, what sends more messages than this is not simulated to its end.
_MOST_WINDOWED_MESSAGES = 2_500

_FEWEST_STEPS = 2  # of a phase, by which its pace is judged first; then twice as many, and so on
_SAME_PACE = 1e-3


class _Beginning(Phase):
    """The first steps of a phase."""

    def __init__(self, whole: Phase, num_steps: int) -> None:
        self._whole, self.num_steps = whole, num_steps
        self.window, self.reduce = whole.window, whole.reduce
        self.skip_empty, self.has_gaps = whole.skip_empty, whole.has_gaps

    def step(self, index: int) -> Step:
        """As the phase has it."""
        return self._whole.step(index)

    def num_bytes(self, index: int) -> Bytes:
        """As the phase has them."""
        return self._whole.num_bytes(index)

    def fixed_pairs(self) -> tuple[Ranks, Ranks] | None:
        """As the phase has them."""
        return self._whole.fixed_pairs()


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
    """Whether it is worth reckoning: too many messages, under a protocol that is simulated message by message."""
    return protocol.has_windows and schedule.num_messages > _MOST_WINDOWED_MESSAGES


class Abridged:
    """Starts collectives on a quiet network, of long ones under TCP their first steps alone.

    What the others take is reckoned from a trial, and added at the end.

    Args:
        topology: the network, without weather.
        protocol: how transfers use it.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self._protocol = topology, protocol
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Schedule, Schedule, float]] = {}

    def start(
        self,
        network: Network,
        schedule: Schedule,
        hosts: Sequence[int],
        *,
        group: Hashable = None,
        on_done: Callable[[int], None],
    ) -> Collective:
        """As `netsim.collectives.start_collective`."""
        if not _is_long(schedule, self._protocol):
            return start_collective(network, schedule, hosts, group=group, on_done=on_done)
        _, short, later = self._reckoned(schedule, tuple(hosts))
        sent = {(src, dst): num_bytes for src, dst, num_bytes in short.pair_bytes}
        network.credit(
            hosts, [(src, dst, whole - sent.get((src, dst), 0)) for src, dst, whole in schedule.pair_bytes]
        )

        def through(member: int) -> None:
            call_at(network.env, network.env.now + later, partial(on_done, member))

        return start_collective(network, short, hosts, group=group, on_done=through)

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
