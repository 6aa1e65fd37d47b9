"""Plays collectives on a network, by the fastest of the ways that give the right times.

A collective that has its links to itself need not be played message by message as time goes by: the stage
knows or finds out when its members are through (`stage.py`). As long as it is there, the network carries
nothing of it; whatever else starts or changes on its links has it played by events from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.collectives.times.ensemble import execute
from netsim.collectives.times.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.times.events import Execution
    from netsim.collectives.times.strand import Strand
    from netsim.fluid.network import Network

__all__ = ["Play", "play"]


def play(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> Play:
    """Start one collective among members on `hosts`; nothing happens before they arrive.

    Args:
        network: on whose links and clock it is played.
        schedule: what is sent.
        hosts: the host of each member; members may share one.
        group: names the connections it uses; collectives of one group share them, and their state.
        on_done: called with a member's position at the instant it is through, which may be before others
        arrive (the root of a broadcast), and within `arrive` where nothing is to be waited for.
    """
    return Play(network, schedule, tuple(hosts[: schedule.num_ranks]), group, on_done)


class Play:
    """One collective under way on a network.

    Attributes:
        schedule, hosts, group: what is played, where, and over whose connections.
        arrivals: when each member that is there entered, in order, while it is off the network.
        numbers: ids of its messages, set aside so that they are the same whether or not anybody watches.
        strand: where it is as long as it is off the network.
    """

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        hosts: tuple[int, ...],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        self.schedule = schedule
        self.hosts = hosts
        self.group = group
        self.arrivals: dict[int, float] = {}
        self.numbers = range(0)
        self.strand: Strand | None = None
        self._network = network
        self._stage = Stage.of(network)
        self._on_done = on_done
        self._told: set[int] = set()
        self._execution: Execution | None = None
        self._shown: Execution | None = None  # for those who watch, while it is off the network

    def arrive(self, member: int) -> None:
        """This member (a position in the group) enters now."""
        host = self.hosts[member]
        if self.arrivals:
            self._stage.check(self, host)
        elif self._execution is None:
            self._begin(host)
        if self._execution is not None:
            self._execution.arrive(member)
            return
        if self._shown is not None:
            self._shown.arrive(member)
        assert self.strand is not None
        self.arrivals[member] = self._network.env.now
        self.strand.enter(self, member)

    def cancel(self) -> None:
        """End it where it is: what is under way is lost, and nobody is told any more.

        Others of its group that are under way at the same time lose what they have sent, too: end them as well.
        """
        if len(self._told) == self.schedule.num_ranks:
            return
        if self.strand is not None:
            self.strand.bring_on()
        if self._execution is not None:
            self._execution.cancel()
        self._told.update(range(self.schedule.num_ranks))

    def is_through(self, host: int) -> bool:
        """Whether all members on a host have been told that they are through."""
        return all(member in self._told for member, other in enumerate(self.hosts) if other == host)

    def tell(self, member: int) -> None:
        """This member is through."""
        if member not in self._told:
            self._told.add(member)
            self._on_done(member)

    def go_live(self, execution: Execution) -> None:
        """Go on on the network, which carries it from now on."""
        self.strand = self._shown = None
        self.arrivals = {}
        self._execution = execution
        execution.on_done = self.tell

    def _begin(self, host: int) -> None:
        """See to it that it is kept off the network, or on it by events."""
        network = self._network
        self.strand = self._stage.admit(self, host)
        if self.strand is None:
            self._execution = execute(network, self.schedule, self.hosts, self.group, self.tell)
            return
        self.numbers = network.reserve(self.schedule.most_messages)
        if network.is_observed:
            self._shown = execute(self.strand.shown, self.schedule, self.hosts, self.group, _nobody)
            self._shown.numbers = self.numbers


def _nobody(member: int) -> None:
    """Members of a collective that is only shown are not told."""
