"""SimPy's clock with a network under it, which advances by itself between two events of SimPy."""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from enum import IntEnum
from heapq import heapify, heappop, heappush
from numbers import Real
from typing import TYPE_CHECKING, Any

import simpy
from simpy.core import EmptySchedule, StopSimulation
from simpy.events import NORMAL, URGENT, EventPriority

from netsim.errors import DeadlockError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netsim.network.engine import Engine

__all__ = ["BY_RANKS", "Clock", "Order", "call_at", "on_grid", "raised_gc_threshold"]

_GRID_PER_SECOND = 2.0**30
_MOST_CANCELLED = 64
_NEW_OBJECTS = 700  # Python's own threshold


class Order(IntEnum):
    """Turns within an instant; SimPy's own events are `RANKS` (0 and 1).

    Ranks act on the network as the weather has left it, so that comes first. The network settles its transfers when
    every rank has had its turn; code that is called for a delivery may act at the same instant, and the network
    settles again. A meeting includes arrivals at the very instant of its deadline, for whatever reason: it is
    closed last.
    """

    INTERRUPTED = -2  # what an event had still to call when it stopped `Clock.run`
    WEATHER = -1  # no progress by itself: nobody's wait ends with it
    RANKS = 1
    NETWORK = 10
    MEETINGS = 1 << 20


_NETWORK = int(Order.NETWORK)  # comparing with a member of the enumeration takes longer

BY_RANKS = frozenset((int(URGENT), int(NORMAL)))
"""Priorities of SimPy's own events, by which ranks proceed."""


def on_grid(seconds: float) -> float:
    """The first instant of the kernel's grid (2**-30 s) that is not before `seconds`.

    Sums of grid instants are exact, so equal steps stay equal whatever the clock says. Infinity (never) is on it.
    Raises InputError for a negative number or NaN.
    """
    if not seconds >= 0:
        raise InputError(f"seconds must not be negative, got {seconds}")
    if seconds == math.inf:
        return seconds
    return math.ceil(seconds * _GRID_PER_SECOND) / _GRID_PER_SECOND


class Clock(simpy.Environment):
    """SimPy's environment whose time advances to its next event or to the network's, whichever is first.

    Times are virtual seconds. Beyond SimPy's interface it has `at` and `cancel`: `env.timeout(instant - env.now)`
    need not land on `instant`, since the difference and the sum both round.

    Args:
        initial_time: its first instant.

    Attributes:
        upcoming: SimPy's events to come, the next first: instant, order in it, number, event; a heap to look at only.
    """

    def __init__(self, initial_time: float = 0.0) -> None:
        if not isinstance(initial_time, Real) or not math.isfinite(initial_time):
            raise InputError(f"Clock: initial_time must be a finite number of seconds, got {initial_time!r}")
        super().__init__(initial_time)
        self.upcoming: Sequence[tuple[float, EventPriority, int, simpy.Event]] = self._queue
        self._cancelled: set[simpy.Event] = set()
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """Advance a network's `engine` with this clock; raises InputError if it has a network already."""
        if self._engine is not None:
            raise InputError("Network: its clock has another network already; give each a netsim.Clock()")
        engine.now = self._now
        self._engine = engine

    @property
    def _network_due(self) -> float:
        return self._engine.next_due() if self._engine is not None else math.inf

    def show(self, instant: float) -> None:
        """Set the time to the `instant` of a network, for code that it calls."""
        self._now = instant

    def run(self, until: float | simpy.Event | None = None) -> Any:
        """Run until no event is left, to an instant, or until an event has happened.

        Returns the value of the event. Raises InputError for an instant that is not to come, DeadlockError where
        nothing is left to happen before the event.
        """
        if until is None or isinstance(until, simpy.Event):
            try:
                return super().run(until)
            except RuntimeError as error:
                if not isinstance(until, simpy.Event) or until.triggered:
                    raise
                line = (
                    f"Clock.run: nothing is left to happen at {self._now:.10g} s, before the event of `until`"
                )
                raise DeadlockError(line) from error
        if not isinstance(until, Real) or math.isnan(until):
            raise InputError(f"Clock.run: until={until!r} is no instant and no event")
        if until <= self._now:
            raise InputError(f"Clock.run: until={until!r} is not after the present instant, {self._now!r} s")
        return super().run(until)

    def step(self) -> None:
        """Advance the network to the next event of SimPy, or until it has called code above it; else handle that event.

        An event has a step of its own, so that a caller can test before it whether the run can still make progress.
        """
        queue = self._queue
        # The network has lived up to now, and has its turn in this instant when SimPy's own events have had theirs.
        goes_on = queue and queue[0][0] == self._now and queue[0][1] <= _NETWORK
        if not goes_on and self._advance_network():
            return
        # SimPy's own step, without its overhead for every event.
        self._now, _, _, event = heappop(queue)
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
        try:
            for callback in callbacks:
                callback(event)
        except StopSimulation:
            event.callbacks = callbacks[callbacks.index(callback) + 1 :]
            self.schedule(event, EventPriority(Order.INTERRUPTED))
            raise
        if not event._ok and not hasattr(event, "_defused"):
            raise type(event._value)(*event._value.args) from event._value

    def _advance_network(self) -> bool:
        """Advance the network to the next event of SimPy; False if that is the next to happen."""
        queue, engine = self._queue, self._engine
        until, is_included = (queue[0][0], queue[0][1] > _NETWORK) if queue else (math.inf, False)
        due = engine.next_due() if engine is not None else math.inf  # a property costs a call each event
        lives = due < until or (due == until and is_included)
        if not lives and not queue:
            raise EmptySchedule
        if engine is not None:
            if lives:
                engine.advance(until, is_included)
            else:
                engine.now = until
        return lives

    def settle(self) -> bool:
        """Complete this instant for the network; False if events of SimPy come first."""
        queue, engine = self._queue, self._engine
        while not (queue and queue[0][0] <= self._now and queue[0][1] <= _NETWORK):
            if engine is not None:
                engine.advance(self._now, True)
            if engine is None or not engine.has_called_out:
                return True
        return False

    def peek(self) -> float:
        """The instant of the next event, SimPy's or a network's; infinity if there is none."""
        queue, due = self._queue, self._network_due
        return min(queue[0][0], due) if queue else due

    def at(
        self, instant: float, order: Order = Order.RANKS, call: Callable[[simpy.Event], None] | None = None
    ) -> simpy.Event:
        """An event that happens exactly at `instant` (not before now), in its `order`; `call` is called with it."""
        if not isinstance(instant, Real) or math.isnan(instant):
            raise InputError(f"Clock.at: instant must be a number of seconds, got {instant!r}")
        event = simpy.Event(self)
        if call is not None:
            event.callbacks = [call]
        self.wake(event, instant, order)
        return event

    def wake(self, event: simpy.Event, instant: float, order: Order = Order.RANKS) -> None:
        """Have an `event` of this clock happen at `instant` (not before now), in its `order`."""
        event._ok = True
        event._value = None
        entry = (instant if instant > self._now else self._now, order, next(self._eid), event)
        heappush(self._queue, entry)  # type: ignore[misc] # a call for SimPy's type of `order` takes as long as the rest

    def cancel(self, event: simpy.Event) -> None:
        """Make an event of `at` do nothing; the queue is purged when most of it was cancelled."""
        event.callbacks = [self._cancelled.discard]
        self._cancelled.add(event)
        if len(self._cancelled) > max(_MOST_CANCELLED, len(self._queue) // 2):
            self._queue[:] = [entry for entry in self._queue if entry[3] not in self._cancelled]
            heapify(self._queue)
            self._cancelled.clear()

    def only_weather_is_next(self) -> bool:
        """Return whether no event that a rank waits for comes before the network's next one."""
        if not self._queue:
            return True
        instant, order, _, event = self._queue[0]
        due = self._network_due
        if due < instant or (due == instant and order > Order.NETWORK):
            return True
        return not self._is_progress(order, event)

    def has_progress(self) -> bool:
        """Return whether an event of SimPy that is no weather and has a callback is scheduled."""
        return any(self._is_progress(order, event) for _, order, _, event in self._queue)

    def _is_progress(self, order: int, event: simpy.Event) -> bool:
        return order != Order.WEATHER and bool(event.callbacks) and event not in self._cancelled


def call_at(
    clock: Clock, instant: float, call: Callable[[], None], order: Order = Order.RANKS
) -> simpy.Event:
    """Have `call` called at an instant."""
    return clock.at(instant, order, lambda event: call())


@contextmanager
def raised_gc_threshold(times: int = 1_000, *, is_last: bool = False) -> Iterator[None]:
    """Raise the garbage collector's threshold within the block, to `times` Python's own.

    After the block the threshold is lower than the number of new objects, which are searched at once. Where the block
    `is_last` in its process, they become old without a search.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: never, as the caller wants it
        gc.set_threshold(max(before[0], times * _NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        if is_last:
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)
