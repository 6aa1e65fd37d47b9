"""Collectives that may meet each other on links and nobody else, timed in a sandbox as virtual time goes by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from netsim.collectives.times.states import GRID_PER_SECOND, Entries, State, to_ticks
from netsim.collectives.times.trajectory import Trajectory
from netsim.fluid.clock import Order, cancel, event_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import simpy

    from netsim.collectives.times.memory import Memory
    from netsim.collectives.times.opening import Known, Opening
    from netsim.collectives.times.sandbox import Sandbox
    from netsim.collectives.times.work import Work
    from netsim.fluid.network import Network

__all__ = ["Domain"]


class Domain:
    """A contention domain off the network, from when its first collective begins until all are over.

    Who enters at one instant does so together. A single collective in which nobody is through before the last member
    has entered waits for that one.

    Args:
        network: on whose clock they live.
        memory: what is remembered of them.
        quiet: the state in which nobody is there.
        opening: all that a collective that begins adds to what is known, at an instant.
        on_over: called when nothing is left of it, or the network has taken it over.

    Attributes:
        works: the collectives, in the order in which they began.
        links: all links that they can use.
    """

    def __init__(
        self,
        network: Network,
        memory: Memory,
        quiet: State,
        opening: Callable[[Work, Known, float], Opening],
        on_over: Callable[[Domain], None],
    ) -> None:
        self.works: list[Work] = []
        self.links: frozenset[int] = frozenset()
        self._network = network
        self._opening = opening
        self._on_over = on_over
        self._way = Trajectory(network, memory, quiet)
        self._entering: list[tuple[float, Work, int]] = []  # who has entered and is to be followed
        self._num_followed = 0  # collectives that are part of the state
        self._gathers = False  # waits for the last member of its only collective
        self._told = 0  # ends of the state
        self._is_over = False
        self._turn: simpy.Event | None = None  # when what comes next is looked for
        self._turn_at, self._order = 0.0, Order.SANDBOXES
        self._watched: Network | None = None  # for those who watch, while all is found out otherwise
        self._look: tuple[Sandbox, float, float] | None = (
            None  # into which one looks, from when on each clock
        )

    @property
    def watched(self) -> Network:
        """A network for those who watch."""
        if self._watched is None:
            self._watched = self._network.watched()
        return self._watched

    def is_busy(self, host: int) -> bool:
        """Whether a member on a host takes part in something that it is not through."""
        return any(host in work.hosts and not work.is_through(host) for work in self.works)

    def enter(self, work: Work, member: int) -> None:
        """A member of a collective enters now."""
        now, works, entering = self._network.env.now, self.works, self._entering
        if work not in works:
            works.append(work)
            self._gathers = len(works) == 1 and work.schedule.binds_everyone
        entering.append((now, work, member))
        self._look = None
        if not self._gathers:
            self._plan(now, Order.ENTRIES)
        elif len(entering) == work.schedule.num_ranks:
            self._gathers = False
            self._follow()

    def bring_on(self) -> None:
        """Have the network carry all of it from now on, as if it had been there from the start."""
        network, way = self._network, self._way
        self._follow()
        sandbox = way.sandbox(network.env.now - way.instant, self._told)
        self._keep(sandbox.prune())
        left = [(self.works[place], member) for place, member in sandbox.untold]
        if self._watched is not None:
            self._watched.end_watch()
        self._end()
        executions = sandbox.take_over(network, [work.numbers for work in self.works])
        for work, execution in zip(self.works, executions, strict=True):
            work.go_live(execution)
        for work, member in left:
            work.tell(member)

    def host_bytes(self) -> Iterator[tuple[int, int, float]]:
        """Source host, target host and payload bytes of its collectives that have come through by now."""
        now, way = self._network.env.now, self._way
        if self._look is None:
            entries, instant = self._entries(), way.instant
            if entries is not None:
                instant = self._entering[0][0]
            self._look = (*way.preview(entries, instant, self._told), instant)
        sandbox, began, instant = self._look
        sandbox.advance(began + now - instant)
        return sandbox.host_bytes()

    # -- from state to state -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Who has entered leads to the next state."""
        entries = self._entries()
        if entries is None:
            return
        instant = self._entering[0][0]
        self._entering, self._look = [], None
        self._keep(self._way.enter(entries, instant))
        self._told = 0
        self._plan(max(self._next_instant(), self._network.env.now))

    def _entries(self) -> Entries | None:
        if not self._entering:
            return None
        way, works = self._way, self.works
        instants, where, members = self._in_order()
        origin = instants[0] if way.is_quiet else way.instant
        if instants[0] == instants[-1]:  # as most of them: all together
            seconds = (instants[0] - origin,) * len(instants)
            ticks = (to_ticks(seconds[0]),) * len(instants)
        else:
            seconds = tuple([instant - origin for instant in instants])
            ticks = tuple([to_ticks(each) for each in seconds])
        if not way.is_quiet:
            seconds = tuple([each / GRID_PER_SECOND for each in ticks])
        openings: tuple[Opening, ...] = ()
        if self._num_followed < len(works):
            openings = tuple(
                self._opening(works[place], way.state.known, instants[where.index(place)])
                for place in range(self._num_followed, len(works))
            )
        return Entries(self._told, seconds, ticks, where, members, openings)

    def _in_order(self) -> tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]:
        """When who enters where, in the order of time; at one instant, where that cannot matter, in that of members.

        It matters where a host enters what began later first: on one connection its messages leave in that order.
        """
        entering, works = self._entering, self.works
        if len(entering) == 1:
            ((instant, work, member),) = entering
            return (instant,), (works.index(work),), (member,)
        if len(works) == 1 and entering[0][0] == entering[-1][0]:  # as most do: no need to look any closer
            together = [member for _, _, member in entering]
            if works[0].are_hosts_apart:
                together.sort()
            return (entering[0][0],) * len(entering), (0,) * len(entering), tuple(together)
        places = {work: place for place, work in enumerate(works)}
        rows = [
            (instant, places[work], member if work.are_hosts_apart else 0, member)
            for instant, work, member in entering
        ]
        last: dict[tuple[float, int], int] = {}  # by instant and host: what it entered last
        for instant, work, member in entering:
            host, place = (instant, work.hosts[member]), places[work]
            if last.setdefault(host, place) > place:
                break
            last[host] = place
        else:
            rows.sort()
        instants, where, _, members = zip(*rows, strict=True)
        return instants, where, members

    def _keep(self, kept: tuple[int, ...]) -> None:
        """Go on with the collectives of these places and with new ones; the others are over."""
        if len(kept) < self._num_followed:
            for place, work in enumerate(self.works[: self._num_followed]):
                if place not in kept:
                    self._network.credit(work.hosts, work.schedule.pair_bytes)
            self.works = [*(self.works[place] for place in kept), *self.works[self._num_followed :]]
        self._num_followed = len(self.works)

    # -- the clock ---------------------------------------------------------------------------------------------

    def _plan(self, instant: float, order: Order = Order.SANDBOXES) -> None:
        """See to it that what comes next is looked for at an instant."""
        if self._turn is not None:
            if self._turn_at == instant and order == self._order:
                return
            cancel(self._network.env, self._turn)
        self._turn_at, self._order = instant, order
        if instant == math.inf:
            self._turn = None
            return
        self._turn = event_at(self._network.env, instant, order, self._on_turn)

    def _on_turn(self, event: simpy.Event) -> None:
        """Follow who has entered, or tell who is through by now; and come back when the next one is."""
        self._turn = None
        if self._entering:
            self._follow()
            return
        now = max(self._network.env.now, self._turn_at)
        while self._turn is None and not self._is_over:
            instant, state = self._next_instant(), self._way.state
            if instant > now:
                self._plan(instant)
                return
            if self._told < len(state.ends):
                self._tell(state)
            else:
                self._way.find_out()
                self._finish_if_over(state)

    def _next_instant(self) -> float:
        """When somebody is through next, as far as it is known, or there is more to find out."""
        state = self._way.state
        is_known = self._told < len(state.ends)
        return self._way.instant + (state.ends[self._told][0] if is_known else state.known_until)

    def _tell(self, state: State) -> None:
        _, done = state.ends[self._told]
        self._told += 1
        works = self.works  # as they are before those that are over go
        self._finish_if_over(state)
        for place, member in done:
            works[place].tell(member)

    def _finish_if_over(self, state: State) -> None:
        """If all are through: leave bytes and connections on the network as if all had been there."""
        if not state.is_over or self._told < len(state.ends):
            return
        self._keep(())
        for group, windows in state.windows.items():
            self._network.put_windows(group, windows, self._way.instant)
        self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._turn is not None:
            cancel(self._network.env, self._turn)
            self._turn = None
        self._on_over(self)
