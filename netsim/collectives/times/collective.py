"""Collectives on a network, by the fastest of the ways that give the right times.

A collective that has its links to itself need not be simulated message by message as time goes by: it is timed in a
sandbox (`domains.py`). As long as it is there, the network carries nothing of it; whatever else starts or changes
on its links has it simulated by events from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.collectives.times.domains import Domains
from netsim.collectives.times.sandbox import execute
from netsim.collectives.times.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.times.domain import Domain
    from netsim.collectives.times.events import Execution
    from netsim.fluid.network import Network

__all__ = ["Collective", "start_collective"]


def start_collective(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> Collective:
    """Start one collective among members on `hosts`; nothing happens before they arrive.

    Args:
        network: on whose links and clock it runs.
        schedule: what is sent.
        hosts: the host of each member; members may share one.
        group: names the connections it uses; collectives of one group share them, and their state.
        on_done: called with a member's position at the instant it is through, which may be before others
        arrive (the root of a broadcast), and within `arrive` where nothing is to be waited for.
    """
    return Collective(network, schedule, tuple(hosts[: schedule.num_ranks]), group, on_done)


class Collective(Work):
    """One collective on a network, whose members arrive one by one."""

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        hosts: tuple[int, ...],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        super().__init__(schedule, hosts, group, on_done)
        self._network = network
        self._domains = Domains.of(network)
        self._domain: Domain | None = None  # where it is as long as it is off the network
        self._watched: Execution | None = None  # for those who watch, meanwhile

    def arrive(self, member: int) -> None:
        """This member (a position in the group) enters now."""
        domain = self._domain
        if domain is None and self.execution is None:
            self._begin(self.hosts[member])
        elif domain is None or len(self._domains.domains) > 1:
            self._domains.check(domain, self.hosts[member])
        if self.execution is not None:
            self.execution.arrive(member)
            return
        if self._watched is not None:
            self._watched.arrive(member)
        assert self._domain is not None
        self._domain.enter(self, member)

    def cancel(self) -> None:
        """End it where it is: what is under way is lost, and nobody is told any more.

        Others of its group that are under way at the same time lose what they have sent, too: end them as well.
        """
        if self.is_over:
            return
        if self._domain is not None:
            self._domain.bring_on()
        if self.execution is not None:
            self.execution.cancel()
        self.tell_nobody()

    def go_live(self, execution: Execution) -> None:
        """The network carries it from now on."""
        self._domain = self._watched = None
        super().go_live(execution)

    def _begin(self, host: int) -> None:
        """See to it that it is kept off the network, or on it by events."""
        network = self._network
        self._domain = self._domains.admit(self, host)
        if self._domain is None:
            self.execution = execute(network, self.schedule, self.hosts, self.group, self.tell)
            return
        self.numbers = network.reserve(self.schedule.most_messages)
        if network.is_observed:
            self._watched = execute(self._domain.watched, self.schedule, self.hosts, self.group, _nobody)
            self._watched.numbers = self.numbers


def _nobody(member: int) -> None:
    """Members of a collective that is only watched are not told."""
