"""A collective under way, whoever carries it: what is sent where, and who has been told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.times.events import Execution

__all__ = ["Work"]


class Work:
    """One collective under way.

    Args:
        schedule: what is sent.
        hosts: the host of each member.
        group: names the connections it uses.
        on_done: called with each member's position at the instant it is through.

    Attributes:
        numbers: ids of its messages, set aside so that they are the same wherever it is carried.
        are_hosts_apart: whether no two members share one.
        execution: what carries it out on the network; None: it is timed in a sandbox.
    """

    def __init__(
        self,
        schedule: Schedule,
        hosts: tuple[int, ...],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        self.schedule = schedule
        self.hosts = hosts
        self.group = group
        self.are_hosts_apart = len(set(hosts)) == len(hosts)
        self.numbers = range(0)
        self.execution: Execution | None = None
        self._on_done = on_done
        self._told: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether all members have been told that they are through."""
        return len(self._told) == self.schedule.num_ranks

    def is_through(self, host: int) -> bool:
        """Whether all members on a host have been told that they are through."""
        return all(member in self._told for member, other in enumerate(self.hosts) if other == host)

    def tell(self, member: int) -> None:
        """This member is through."""
        if member not in self._told:
            self._told.add(member)
            self._on_done(member)

    def tell_nobody(self) -> None:
        """It is given up: nobody hears of it any more."""
        self._told.update(range(self.schedule.num_ranks))

    def go_live(self, execution: Execution) -> None:
        """The network carries it from now on."""
        self.execution = execution
        execution.on_done = self.tell
