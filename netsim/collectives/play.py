"""Plays collectives on a network, by the fastest of the ways that give the right times.

A collective that has its links to itself need not be played message by message as time goes by. Its members'
arrivals are noted, and when the last is there, all completion times are found at once (`stage.py`). Until it
is over, the network carries nothing of it; whatever else starts or changes there first has it played by
events from its start.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from netsim.collectives.events import call_at
from netsim.collectives.rehearsal import execute
from netsim.collectives.stage import Stage
from netsim.fork import end_show, show

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.events import Execution
    from netsim.collectives.rehearsal import Outcome
    from netsim.collectives.schedules import Schedule
    from netsim.network import Network

__all__ = ["Play", "play"]

# Priorities in an instant: after SimPy's own events; and after the network's, which have 10.
_LATE = 5
_LAST = 11


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
        arrivals: when each member that is there entered, in order.
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
        self._network = network
        self._stage = Stage.of(network)
        self._on_done = on_done
        self._told: set[int] = set()
        self._deferred: list[int] | None = None
        self._execution: Execution | None = None
        self._shown: Execution | None = None  # for those who watch, while it is found out otherwise
        self._numbers = range(0)

    def arrive(self, member: int) -> None:
        """This member (a position in the group) enters now."""
        if self._execution is None:
            self._hold(member)
        if self._execution is not None:
            self._execution.arrive(member)
            return
        if self._shown is not None:
            self._shown.arrive(member)
        now = self._network.env.now
        self.arrivals[member] = now
        if len(self.arrivals) == self.schedule.num_ranks:
            self._settle()
        elif len(self.arrivals) == 1 and not self.schedule.binds_everyone:
            # Members may be through before others arrive: only if all arrive now can it be settled at once.
            call_at(self._network.env, now, self._go_on_alone, _LATE)

    def cancel(self) -> None:
        """End it where it is: what is under way is lost, and nobody is told any more.

        Others of its group that are under way at the same time lose what they have sent, too: end them as well.
        """
        if len(self._told) == self.schedule.num_ranks:
            return
        if self._execution is None and self.arrivals:
            self._stage.step_in()
        if self._execution is not None:
            self._execution.cancel()
        self._told.update(range(self.schedule.num_ranks))

    def is_through(self, host: int) -> bool:
        """Whether all members on a host have been told that they are through."""
        return all(member in self._told for member, other in enumerate(self.hosts) if other == host)

    # -- off the network ----------------------------------------------------------------------------------------

    def _hold(self, member: int) -> None:
        """See to it that it is kept off the network, or on it by events."""
        network = self._network
        if not self.arrivals:
            if not self._stage.admit(self):
                self._execution = execute(network, self.schedule, self.hosts, self.group, self._tell)
                return
            # Ids of messages are set aside, so that they are the same whether or not anybody watches.
            self._numbers = network.reserve(self.schedule.most_messages)
            if network.is_observed:
                self._shown = execute(show(network), self.schedule, self.hosts, self.group, _nobody)
                self._shown.numbers = iter(self._numbers)
        self._stage.check(self, self.hosts[member])

    def _settle(self) -> None:
        """All have arrived: find when each is through, and tell them then."""
        first = min(self.arrivals.values())
        outcome = self._stage.rehearsals.outcome(
            self.schedule,
            self.hosts,
            self.group,
            [self.arrivals[member] for member in range(self.schedule.num_ranks)],
        )
        # Where a link is dead there may be no end: then it waits here for something to change.
        complete = sum(len(members) for _, members in outcome.ends) == self.schedule.num_ranks
        last = len(outcome.ends) - 1 if complete else -1
        for number, (seconds, members) in enumerate(outcome.ends):
            end = partial(self._end, members, outcome if number == last else None, first)
            call_at(self._network.env, first + seconds, end, _LAST)

    def _end(self, members: tuple[int, ...], outcome: Outcome | None, first: float) -> None:
        """These members are through; with `outcome` all are."""
        if self._execution is not None:
            return
        if outcome is not None:
            self._stage.dismiss(self)
            outcome.leave_behind(self._network, first)
        for member in members:
            self._tell(member)

    def _tell(self, member: int) -> None:
        if self._deferred is not None:
            self._deferred.append(member)
        elif member not in self._told:
            self._told.add(member)
            self._on_done(member)

    def _go_on_alone(self) -> None:
        if self._execution is None and len(self.arrivals) < self.schedule.num_ranks:
            self._stage.step_in()

    # -- on the network, as the stage steps in --------------------------------------------------------------------

    def start_again(self, copied: Network, now: float) -> None:
        """Play on a copy, whose clock shows the first arrival or earlier, what happened before `now`."""
        if self._shown is not None:
            end_show(self._shown.network)
            self._shown = None
        self._execution = execute(copied, self.schedule, self.hosts, self.group, self._tell)
        self._execution.numbers = iter(self._numbers)
        self._deferred = []  # whoever is told may act on the network, which is not ready
        for member, instant in self.arrivals.items():
            if instant < now:
                call_at(copied.env, instant, partial(self._execution.arrive, member))

    def go_live(self) -> None:
        """Go on on the network, which has taken over from the copy."""
        assert self._execution is not None
        self._execution.move(self._network)
        told, self._deferred = self._deferred or [], None
        for member in told:
            self._tell(member)

    def arrive_again(self, now: float) -> None:
        """Let those in who arrived at `now`."""
        assert self._execution is not None
        for member, instant in self.arrivals.items():
            if instant == now:
                self._execution.arrive(member)


def _nobody(member: int) -> None:
    """Members of a collective that is only shown are not told."""
