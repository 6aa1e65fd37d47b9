"""A SimPy environment whose events can be placed at an absolute instant, in an order, and taken back."""

from __future__ import annotations

import math
from enum import IntEnum
from heapq import heapify, heappush
from typing import TYPE_CHECKING

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BY_RANKS", "Clock", "Order", "call_at", "cancel", "event_at", "on_grid", "to_nanosecond"]

_GRID_PER_SECOND = 2.0**30
_MOST_CANCELLED = 64


class Order(IntEnum):
    """Who has their say when in an instant; SimPy's own events are `RANKS` (0 and 1).

    Ranks act on the network as the weather has left it, so that comes first. A sandbox decides whether all members
    of a collective have entered at once when all ranks have had their turn. The network settles its transfers when
    whoever could start one has; who hears of a delivery may act in the same instant, and the network settles again.
    What was timed in a sandbox is told after what came over the network itself. A meeting includes who comes at the
    very instant of its deadline, for whatever reason: it is closed last.
    """

    WEATHER = -1
    RANKS = 1
    ENTRIES = 5
    NETWORK = 10
    SANDBOXES = 11
    MEETINGS = 1 << 20


BY_RANKS = frozenset((int(URGENT), int(NORMAL)))
"""The places in an instant of SimPy's own events, by which ranks go on."""


def on_grid(seconds: float) -> float:
    """The first instant of the kernel's grid (2**-30 s) that is not before `seconds`.

    Sums of grid instants are exact, so equal steps stay equal whatever the clock says. Infinity (never) is on it.
    Raises InputError for what is no time: a negative number, or none at all.
    """
    if not seconds >= 0:
        raise InputError(f"seconds must not be negative, got {seconds}")
    if seconds == math.inf:
        return seconds
    return math.ceil(seconds * _GRID_PER_SECOND) / _GRID_PER_SECOND


def to_nanosecond(seconds: float) -> float:
    """A time to a nanosecond, for comparing: those of people and grids fall on halves of one, so not on these."""
    return round(seconds + 1.7e-10, 9)


class Clock(simpy.Environment):
    """SimPy's environment plus `at` and `cancel`.

    `env.timeout(instant - env.now)` need not land on `instant`: the difference and the sum both round.
    Times are virtual seconds.

    Args:
        initial_time: what it shows first.

    Attributes:
        upcoming: what is to happen, the next first: instant, place in it, number, event; a heap to look at only.
    """

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)
        self.upcoming: Sequence[tuple[float, EventPriority, int, simpy.Event]] = self._queue
        self._cancelled: set[simpy.Event] = set()

    def at(
        self, instant: float, order: Order = Order.RANKS, call: Callable[[simpy.Event], None] | None = None
    ) -> simpy.Event:
        """An event that happens exactly at `instant` (not before now), in its `order`; `call` is called with it."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        if call is not None:
            event.callbacks = [call]
        heappush(self._queue, (max(instant, self.now), EventPriority(order), next(self._eid), event))
        return event

    def cancel(self, event: simpy.Event) -> None:
        """Let an event of `at` come to nothing.

        Those that are far ahead would stay in the queue, however long the run: when they are most of it, they go.
        """
        event.callbacks = [self._cancelled.discard]
        self._cancelled.add(event)
        if len(self._cancelled) > max(_MOST_CANCELLED, len(self._queue) // 2):
            self._queue[:] = [entry for entry in self._queue if entry[3] not in self._cancelled]
            heapify(self._queue)
            self._cancelled.clear()

    def goes_on_with(self, is_idle: Callable[[simpy.Event], bool]) -> bool:
        """Whether what comes next, if anything, is cancelled or, as `is_idle` tells, idle."""
        return not self._queue or (event := self._queue[0][3]) in self._cancelled or is_idle(event)

    def has_others(self, is_idle: Callable[[simpy.Event], bool]) -> bool:
        """Whether an event is to come that is neither cancelled nor, as `is_idle` tells, idle."""
        return any(not (event in self._cancelled or is_idle(event)) for *_, event in self._queue)


def event_at(
    env: simpy.Environment, instant: float, order: Order, call: Callable[[simpy.Event], None]
) -> simpy.Event:
    """Have something called with its event at an instant of any environment; exactly then on a `Clock`."""
    if isinstance(env, Clock):
        return env.at(instant, order, call)
    event = simpy.Event(env)
    event._ok = True
    event._value = None
    event.callbacks = [call]
    env.schedule(event, EventPriority(order), max(instant - env.now, 0.0))
    return event


def call_at(
    env: simpy.Environment, instant: float, call: Callable[[], None], order: Order = Order.RANKS
) -> simpy.Event:
    """Have something called at an instant of any environment."""
    return event_at(env, instant, order, lambda event: call())


def cancel(env: simpy.Environment, event: simpy.Event) -> None:
    """Let an event of `event_at` come to nothing, and be forgotten where the environment can."""
    if isinstance(env, Clock):
        env.cancel(event)
    else:
        event.callbacks = []
