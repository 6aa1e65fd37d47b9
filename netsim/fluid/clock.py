"""A SimPy environment whose events can be placed at an absolute instant."""

from __future__ import annotations

import math
from heapq import heappush

import simpy
from simpy.events import NORMAL, EventPriority

from netsim.files.errors import InputError

__all__ = ["Clock", "on_grid"]

_GRID_PER_SECOND = 2.0**30


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


class Clock(simpy.Environment):
    """SimPy's environment plus `at`.

    `env.timeout(instant - env.now)` need not land on `instant`: the difference and the sum both round.
    """

    def at(self, instant: float, priority: EventPriority = NORMAL) -> simpy.Event:
        """An event that happens exactly at `instant` (seconds, not before now)."""
        event = self.event()
        event._ok = True
        event._value = None
        heappush(self._queue, (max(instant, self.now), priority, next(self._eid), event))
        return event
