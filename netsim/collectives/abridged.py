"""Collectives of plans: long ones by their first steps, crowds of messages by the links with most to carry.

Plans tolerate a thousandth, and a ring of hundreds under TCP is millions of events; training simulates every message.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from netsim.collectives.estimate import Estimator, are_many, is_crowd
from netsim.collectives.start import start_all_to_all, start_collective
from netsim.network.clock import call_at

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.start import Collective
    from netsim.network.network import Network
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import FloatArray, Topology

__all__ = ["Abridged", "Gathering"]


class Gathering:
    """A collective that begins when its last member arrives, and ends for all at once.

    Args:
        network: on whose clock.
        num_members: how many.
        begun: called when all have come; returns its seconds.
        on_done: called with every member when it finishes.
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
        """Count a member's arrival."""
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
        self._estimator = Estimator(topology, protocol)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Schedule, Schedule, float]] = {}
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
        """Start one collective, abridged where it is long.

        Args:
            network: on whose links and clock it runs.
            schedule: messages of the collective.
            hosts: the host of each member; members may share one.
            group: connections that it uses, as for `netsim.start_collective`.
            on_done: called with a member's position at the instant it finishes.

        Returns:
            The collective, whose members `arrive`, and which `cancel` ends.
        """
        if is_crowd(schedule):
            through_at = partial(
                self._begun, network, tuple(hosts), (id(schedule), schedule), lambda: schedule
            )
            return Gathering(network, len(hosts), through_at, on_done)
        if not self._estimator.is_long(schedule):
            return start_collective(network, schedule, hosts, group=group, on_done=on_done)
        seconds = self._by_slowest(schedule, tuple(hosts))
        if seconds is not None:
            begun = partial(self._credited, network, schedule, tuple(hosts), seconds)
            return Gathering(network, len(hosts), begun, on_done)
        _, short, later = self._shortened(schedule, tuple(hosts))
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
        """Start an all_to_all, timed as a crowd where it has many messages.

        Args:
            network: on whose links and clock it runs.
            hosts: the host of each member; members may share one.
            whole: makes the schedule of the bytes from member to member, one row a sender.
            group: connections that it uses, as for `netsim.start_all_to_all`.
            on_done: called with a member's position at the instant it finishes.

        Returns:
            A function that lets a member enter with the bytes that it has for each member, and one that cancels.
        """
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
        """Seconds of a crowd that begins now, identified by its `sizes`."""
        key = (hosts, sizes)
        if key not in self._crowds:
            self._crowds[key] = (*self._estimator.crowd.times(made(), hosts), sizes)
        seconds, link_bytes, _ = self._crowds[key]
        network.credit_links(link_bytes)
        return seconds

    @staticmethod
    def _credited(network: Network, schedule: Schedule, hosts: tuple[int, ...], seconds: float) -> float:
        network.credit(hosts, schedule.pair_bytes)
        return seconds

    def _by_slowest(self, schedule: Schedule, hosts: tuple[int, ...]) -> float | None:
        """Seconds of a very long ring by its slowest pairs; None for others."""
        key = (id(schedule), hosts)
        if key not in self._wholes:
            self._wholes[key] = (schedule, self._estimator.slowest_pairs_seconds(schedule, hosts))
        return self._wholes[key][1]

    def _shortened(self, schedule: Schedule, hosts: tuple[int, ...]) -> tuple[Schedule, Schedule, float]:
        """Schedule (kept for its identity), its first steps, and the seconds of the rest."""
        key = (id(schedule), hosts)
        if key not in self._known:
            short, later = self._estimator.first_steps(schedule, hosts)
            self._known[key] = (schedule, short, later)
        return self._known[key]
