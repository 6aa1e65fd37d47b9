"""Collectives on a copy of a network: one state that goes on by itself, and can be copied and compared."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from netsim.collectives.times.events import Execution, described, rebound
from netsim.collectives.times.opening import unknown
from netsim.collectives.times.rendezvous import RendezvousExecution
from netsim.fluid.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.times.opening import Known, Opening
    from netsim.fluid.network import Network
    from netsim.fluid.snapshot import Snapshot, Windows

__all__ = ["Sandbox", "execute"]

# Ids of messages set aside for each collective: more than any has.
_BLOCK = 1 << 40


def execute(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    group: Hashable,
    on_done: Callable[[int], None],
) -> Execution:
    """The execution by events that the network's protocol asks for."""
    kind = RendezvousExecution if network.protocol.rendezvous else Execution
    return kind(network, schedule, hosts, group, on_done)


class Sandbox:
    """Collectives that are under way together, on a copy of a network with a clock of its own.

    Args:
        network: of which it takes links and connections; the clock begins at zero.

    Attributes:
        executions: the collectives under way, in the order in which they began.
        known: connections that it knows.
    """

    def __init__(self, network: Network) -> None:
        self._network = network.fork(Clock())
        self.executions: list[Execution] = []
        self.known: Known = frozenset()
        self._num_opened = 0
        self._done: list[tuple[int, int]] = []

    @property
    def untold(self) -> tuple[tuple[int, int], ...]:
        """Places and members that are through, of which no step has told."""
        return tuple(self._done)

    @property
    def now(self) -> float:
        """What its clock shows, in seconds."""
        return float(self._network.env.now)

    @property
    def next_end(self) -> float:
        """When something happens next, or is to be told; infinity for never."""
        return self.now if self._done else float(self._network.env.peek())

    @property
    def is_over(self) -> bool:
        """Whether all members of all collectives are through, and steps have told of each."""
        return not self._done and not any(execution.num_left for execution in self.executions)

    def open(self, opening: Opening, network: Network, instant: float) -> int:
        """One more collective begins. Returns its place.

        Connections that are not known yet are as on `network`, whose clock shows `instant` when it is now here.
        """
        group, new = opening.group, unknown(self.known, opening.group, opening.pairs)
        if new is None or new:
            self._network.put_windows(group, network.windows_of(group, new), self.now - instant)
            self.known |= {(group, None)} if new is None else {(group, pair) for pair in new}
        execution = execute(self._network, opening.schedule, opening.hosts, group, _nobody)
        self._adopt(execution)
        execution.numbers = range(self._num_opened * _BLOCK, (self._num_opened + 1) * _BLOCK)
        self._num_opened += 1
        return len(self.executions) - 1

    def _adopt(self, execution: Execution) -> None:
        execution.on_done = partial(self._note, execution)
        self.executions.append(execution)

    def _note(self, execution: Execution, member: int) -> None:
        self._done.append((self.executions.index(execution), member))

    def enter(self, place: int, member: int) -> None:
        """A member of the collective at this place enters now."""
        self.executions[place].arrive(member)

    def step(self) -> tuple[tuple[int, int], ...]:
        """All that happens at the next instant. Returns places of collectives and their members that are through."""
        env = self._network.env
        instant = self.next_end
        assert instant < math.inf, "nothing is left to happen"
        while not self._done and env.peek() == instant:
            env.step()
        while self._done and env.peek() == env.now:
            env.step()
        done, self._done = tuple(self._done), []
        return done

    def advance(self, instant: float, num_ends: int = 0) -> None:
        """Go on until members were through at so many instants, then to an instant, before all that happens then."""
        while num_ends:
            num_ends -= bool(self.step())
        if instant > self.now:
            self._network.env.run(until=instant)

    def prune(self) -> tuple[int, ...]:
        """Forget collectives of which nothing is left and all is told. Returns the places that stay."""
        untold = {place for place, _ in self._done}
        busy = {each for place, each in enumerate(self.executions) if each.num_left or place in untold}
        if len(busy) == len(self.executions):
            return tuple(range(len(busy)))
        busy.update(described(call)[0] for call in self._network.snapshot().calls())
        kept = tuple(place for place, each in enumerate(self.executions) if each in busy)
        for execution in self.executions:
            if execution not in busy:
                back = [(src, dst, -num_bytes) for src, dst, num_bytes in execution.schedule.pair_bytes]
                self._network.credit(execution.hosts, back)
        self.executions = [self.executions[place] for place in kept]
        self._done = [(kept.index(place), member) for place, member in self._done]
        return kept

    # -- the state -------------------------------------------------------------------------------------------

    def copied(self) -> Sandbox:
        """Another one in the same state, on a clock that begins at zero."""
        other = Sandbox(self._network)
        other.known, other._num_opened, other._done = self.known, self._num_opened, self._done.copy()
        for execution in self._restored_on(other._network, int):
            other._adopt(execution)
        return other

    def take_over(self, network: Network, numbers: Sequence[range]) -> list[Execution]:
        """Have a network carry what this one does, with these ids for the messages of each collective.

        Both clocks show the same instant, each in its own way. Returns the executions that go on there.
        """
        blocks = {
            execution.numbers.start // _BLOCK: ids
            for execution, ids in zip(self.executions, numbers, strict=True)
            if execution.numbers is not None
        }
        executions = self._restored_on(network, lambda number: blocks[number // _BLOCK][number % _BLOCK])
        for execution, ids in zip(executions, numbers, strict=True):
            execution.numbers = ids
        return executions

    def _restored_on(self, network: Network, renumber: Callable[[int], int]) -> list[Execution]:
        shift = network.env.now - self.now
        owners = {execution: execution.copied(network, shift) for execution in self.executions}
        network.restore(self._network.snapshot(), partial(rebound, owners=owners), renumber)
        return list(owners.values())

    def key(self) -> Hashable:
        """What sets it apart from others on the same links; times count from now."""
        places = {execution: place for place, execution in enumerate(self.executions)}

        def describe(call: Callable[[], None]) -> Hashable:
            execution, *what = described(call)
            return (places[execution], *what)

        snapshot: Snapshot = self._network.snapshot()
        parts = [(each.schedule, each.hosts, each.group, each.state(self.now)) for each in self.executions]
        return tuple(parts), tuple(self._done), self.known, snapshot.key(describe)

    def windows(self, instant: float) -> dict[Hashable, Windows]:
        """The windows of all connections by group, when nothing is left to happen; times count from `instant`."""
        self._network.env.run()
        return {
            group: {ends: window.moved(-instant) for ends, window in self._network.windows_of(group).items()}
            for group in {group for group, _ in self.known}
        }

    def host_bytes(self) -> Iterator[tuple[int, int, float]]:
        """Source host, target host and payload bytes that have come through by now."""
        return self._network.host_bytes()


def _nobody(member: int) -> None:
    """Not told yet."""
