"""Collectives in plans: long ones extrapolated from their first steps, crowds of messages timed by their busiest link.

Plans tolerate an error of a thousandth, and a ring of hundreds of ranks under TCP is millions of events. Training
simulates every message.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from netsim import start_collective
from netsim.collectives.estimate import Estimator
from netsim.collectives.start import start_all_to_all
from netsim.ranks import call_at

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from netsim import Network
    from netsim.collectives.schedules.schedule import Schedule
    from netsim.ranks import Cancel

__all__ = ["Abridged"]


class Gathering:
    """A collective that starts when its last member arrives.

    Args:
        network: network whose clock it uses.
        num_members: number of members.
        begun: called when all have arrived, with the seconds by which each preceded the last; returns the remaining
            seconds of each.
        on_done: called with every member when it finishes.
    """

    def __init__(
        self,
        network: Network,
        num_members: int,
        begun: Callable[[tuple[float, ...]], Sequence[float]],
        on_done: Callable[[int], None],
    ) -> None:
        self._env, self._num_members, self._begun, self._on_done = network.env, num_members, begun, on_done
        self._num_expected = num_members
        self._arrivals = [0.0] * num_members

    def arrive(self, member: int) -> None:
        """Count a member's arrival."""
        self._num_expected -= 1
        self._arrivals[member] = self._env.now
        if not self._num_expected:
            now = self._env.now
            remaining = self._begun(tuple(now - each for each in self._arrivals))
            for each in range(self._num_members):
                call_at(self._env, now + remaining[each], partial(self._finish, each))

    def cancel(self) -> None:
        """Cancel it: `on_done` is no longer called."""
        self._num_members = 0

    def _finish(self, member: int) -> None:
        if self._num_members:
            self._on_done(member)


class Abridged:
    """Starts collectives on a quiet network; under TCP, simulates only the first steps of long ones.

    The time of the other steps is extrapolated from a trial and added at the end. A crowd takes the time of its busiest
    links, which carry a member's messages from its arrival on.

    Args:
        network: network without weather on which they run.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._estimator = Estimator(network.topology, network.protocol)
        self._first_steps = cache(self._estimator.first_steps)
        self._crowds: dict[Hashable, tuple[NDArray[float64], NDArray[float64]]] = {}

    def start(
        self, plan: Schedule, hosts: tuple[int, ...], group: Hashable, on_done: Callable[[int], None]
    ) -> tuple[Callable[[int], None], Cancel]:
        """Start a collective, abridged where it is long; return functions that let a member enter and that cancel it.

        Args:
            plan: messages of the collective.
            hosts: the host of each member; members may share one.
            group: connections that it uses, as for `netsim.start_collective`.
            on_done: called with a member's position at the instant it finishes.
        """
        network, num_ranks = self._network, plan.num_ranks - plan.num_copies
        if self._estimator.is_crowd(plan, hosts):
            gathering = Gathering(
                network, num_ranks, partial(self._begin_crowd, hosts, plan, lambda: plan), on_done
            )
            return gathering.arrive, gathering.cancel
        if self._estimator.is_long(plan):
            short, later, _ = self._first_steps(plan, hosts)
            sent = {(src, dst): num_bytes for src, dst, num_bytes in short.pair_bytes}
            network.credit(
                hosts, [(src, dst, whole - sent.get((src, dst), 0)) for src, dst, whole in plan.pair_bytes]
            )
            plan, then = short, on_done

            def on_done(member: int) -> None:
                call_at(network.env, network.env.now + later, partial(then, member))

        started = start_collective(network, plan, hosts, group=group, on_done=on_done)
        return started.arrive, started.cancel

    def start_all_to_all(
        self,
        hosts: tuple[int, ...],
        whole: Callable[[tuple[tuple[int, ...], ...]], Schedule],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> tuple[Callable[[int, Sequence[int]], None], Cancel]:
        """Start an all_to_all, timed as a crowd where it has many messages.

        Args:
            hosts: the host of each member; members may share one.
            whole: makes the schedule of the bytes from member to member, one row a sender.
            group, on_done: see `start`.

        Returns:
            A function that lets a member enter with the bytes that it has for each member, and one that cancels.
        """
        if len(hosts) * (len(hosts) - 1) <= self._estimator.most_at_once(hosts):
            return start_all_to_all(self._network, hosts, group=group, on_done=on_done)
        rows: dict[int, tuple[int, ...]] = {}

        def begun(early: tuple[float, ...]) -> Sequence[float]:
            sizes = tuple(rows[member] for member in range(len(hosts)))
            return self._begin_crowd(hosts, sizes, lambda: whole(sizes), early)

        gathering = Gathering(self._network, len(hosts), begun, on_done)

        def enter(member: int, row: Sequence[int]) -> None:
            rows[member] = tuple(row)
            gathering.arrive(member)

        return enter, gathering.cancel

    def _begin_crowd(
        self, hosts: tuple[int, ...], sizes: Hashable, made: Callable[[], Schedule], early: tuple[float, ...]
    ) -> Sequence[float]:
        """Remaining seconds of each member of a crowd, whose members arrived `early` seconds before the last."""
        key = (hosts, sizes, early)
        if key not in self._crowds:
            self._crowds[key] = self._estimator.crowds.times(made(), hosts, early)
        seconds, link_bytes = self._crowds[key]
        self._network.credit_links(link_bytes)
        return seconds.tolist()  # type: ignore[no-any-return]
