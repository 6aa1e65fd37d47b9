"""Plays collectives on a network, by the fastest of the ways that give the right times.

A collective that has the network to itself need not be played message by message as time goes by. Its
members' arrivals are noted, and when the last is there, all completion times are found at once: from memory,
if the same was played before in the same state of the network; by a recurrence, if no link is shared;
otherwise by events on a copy of the network, ahead of time. Until it is over, the real network carries
nothing of it. Whatever else starts or changes there first has the collective played up to that instant on a
copy, which the real network then takes over: from there on it goes message by message, as if it always had.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from netsim.clock import Clock
from netsim.collectives.events import call_at
from netsim.collectives.rehearsal import Rehearsals, execute
from netsim.fork import end_show, fork, show, take_over, unseen

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
    return Play(network, schedule, tuple(hosts), group, on_done)


class Play:
    """One collective under way on a network."""

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        hosts: tuple[int, ...],
        group: Hashable,
        on_done: Callable[[int], None],
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.hosts = hosts
        self.group = group
        self._on_done = on_done
        self._arrivals: dict[int, float] = {}
        self._told: set[int] = set()
        self._deferred: list[int] | None = None
        self._execution: Execution | None = None
        self._shown: Execution | None = None  # for those who watch, while it is found out otherwise

    def arrive(self, member: int) -> None:
        """This member (a position in the group) enters now."""
        if self._execution is not None:
            self._execution.arrive(member)
            return
        if not self._arrivals and not self._hold():
            self._execution = execute(self.network, self.schedule, self.hosts, self.group, self._on_done)
            self._execution.arrive(member)
            return
        if self._shown is not None:
            self._shown.arrive(member)
        now = self.network.env.now
        self._arrivals[member] = now
        if len(self._arrivals) == self.schedule.num_ranks:
            self._settle()
        elif len(self._arrivals) == 1 and not self.schedule.binds_everyone:
            # Members may be through before others arrive: only if all arrive now can it be settled at once.
            call_at(self.network.env, now, self._go_on_alone, _LATE)

    @property
    def _most_messages(self) -> int:
        """Messages it may send, the two notes of a rendezvous included."""
        return 3 * self.schedule.num_messages

    # -- alone on the network ----------------------------------------------------------------------------------

    def _hold(self) -> bool:
        """Have the network to itself, if nobody else is on it."""
        network = self.network
        if network.before_change is not None:
            network.before_change()
        if network.num_in_flight:
            return False
        network.before_change = self._step_in
        if network.is_observed:
            shown = show(network, self._most_messages)
            self._shown = execute(shown, self.schedule, self.hosts, self.group, _nobody)
        return True

    def _settle(self) -> None:
        """All have arrived: find when each is through, and tell them then."""
        first = min(self._arrivals.values())
        network = self.network
        if network.rehearsals is None:
            network.rehearsals = Rehearsals(network)
        arrivals = [self._arrivals[member] for member in range(self.schedule.num_ranks)]
        outcome = network.rehearsals.outcome(self.schedule, self.hosts, self.group, arrivals)
        # Where a link is dead there may be no end: then it waits here for something to change.
        complete = sum(len(members) for _, members in outcome.ends) == self.schedule.num_ranks
        last = len(outcome.ends) - 1 if complete else -1
        for number, (seconds, members) in enumerate(outcome.ends):
            end = partial(self._end, members, outcome if number == last else None, first)
            call_at(self.network.env, first + seconds, end, _LAST)

    def _end(self, members: tuple[int, ...], outcome: Outcome | None, first: float) -> None:
        """These members are through; with `outcome` all are."""
        if self._execution is not None:
            return
        if outcome is not None:
            self.network.before_change = None
            outcome.leave_behind(self.network, first)
        for member in members:
            self._tell(member)

    def _tell(self, member: int) -> None:
        if self._deferred is not None:
            self._deferred.append(member)
        elif member not in self._told:
            self._told.add(member)
            self._on_done(member)

    def _go_on_alone(self) -> None:
        if self._execution is None and len(self._arrivals) < self.schedule.num_ranks:
            self._step_in()

    def _step_in(self) -> None:
        """Somebody else is about to use the network: be on it, as if by events from the start."""
        network, now = self.network, self.network.env.now
        network.before_change = None
        if self._shown is not None:
            end_show(network, self._shown.network, self._most_messages)
        first = min(self._arrivals.values())
        copied = fork(network, Clock(first))
        execution = execute(copied, self.schedule, self.hosts, self.group, self._tell)
        for member, instant in self._arrivals.items():
            if instant < now:
                call_at(copied.env, instant, partial(execution.arrive, member))
        self._deferred = []  # whoever is told may act on the network, which is not ready
        if first < now:
            copied.env.run(until=now)
        take_over(network, copied)
        execution.move(network)
        self._execution = execution
        told, self._deferred = self._deferred, None
        for member in told:
            self._tell(member)
        with unseen(network):
            for member, instant in self._arrivals.items():
                if instant == now:
                    execution.arrive(member)


def _nobody(member: int) -> None:
    """Members of a collective that is only shown are not told."""
