"""The state of all transfers in flight, in arrays: one slot a transfer, slots used again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = ["Transfers"]

# Two instants count as one when they differ by no more than rounding: relative to how long the transfer has
# been under way, and to the clock. Both are free of scale: neither bytes nor bandwidth appear.
_OF_DURATION = 1e-12
_OF_CLOCK = 2.0**-50

# Slots whose earliest instant is kept, so that finding the next one looks at few of many.
_BLOCK = 256

# Up to so many slots plain loops are quicker than arrays.
_FEW = 64

_FLOATS = ("due", "timer", "begun", "since", "rate", "size", "remaining", "stop", "cap")


class Transfers:
    """Slots of transfers; every attribute is an array over slots.

    Attributes:
        number: the transfer's id.
        order: its place among all transfers in the order in which they were sent.
        path: index of its path.
        due: next instant at which something happens to it by itself, infinity for never. Free slots are never
            due.
        timer: an instant at which it is due whatever its rate, infinity for none.
        begun: when it was sent.
        since: the instant at which `remaining` held.
        rate: payload bytes per second since then.
        size: payload bytes in all.
        remaining: payload bytes that had not come through at `since`.
        stop: it is due when `remaining` has come down to this.
        cap: largest rate.
        held: slots that a dead link keeps from beginning, or from going on by their windows.
    """

    due: FloatArray
    timer: FloatArray
    begun: FloatArray
    since: FloatArray
    rate: FloatArray
    size: FloatArray
    remaining: FloatArray
    stop: FloatArray
    cap: FloatArray

    def __init__(self) -> None:
        self._free: list[int] = []
        self.held: set[int] = set()
        self._used = 0
        self._least: float | None = math.inf  # the earliest instant at which a slot is due; None: to be found
        self._block_due: FloatArray = np.zeros(0)
        self._stale: set[int] = set()  # blocks
        self.number: IntArray = np.zeros(0, dtype=np.int64)
        self.order: IntArray = np.zeros(0, dtype=np.int64)
        self.path: IntArray = np.zeros(0, dtype=np.int64)
        for name in _FLOATS:
            setattr(self, name, np.zeros(0))

    def take(self) -> int:
        """A free slot, not due and without cap."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._used
            if slot == len(self.number):
                self._grow(max(_BLOCK, 2 * slot))
            self._used += 1
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self.set_due(slot, math.inf)
        self.rate[slot] = 0.0
        self.stop[slot] = 0.0
        self.cap[slot] = math.inf
        self.held.discard(slot)
        self._free.append(slot)

    def hold(self, slot: int, until: float) -> None:
        """Let no byte of a slot come through until it is taken from `held`; it is due again at `until`."""
        self.held.add(slot)
        self.timer[slot] = until
        self.stop[slot] = 0.0
        self.cap[slot] = 0.0
        self.set_due(slot, until)

    def set_due(self, slot: int, instant: float) -> None:
        """Say when something next happens to a slot by itself."""
        self.due[slot] = instant
        self._stale.add(slot // _BLOCK)
        self._least = None

    def next_due(self) -> float:
        """The earliest instant at which a transfer is due; infinity if none is."""
        if self._least is None:
            self._least = self._find_least()
        return self._least

    def _find_least(self) -> float:
        if self._used <= _FEW:
            return min(self.due[: self._used].tolist(), default=math.inf)
        return float(self._due_by_block().min(initial=math.inf))

    def _due_by_block(self) -> FloatArray:
        """The earliest instant of each block of slots."""
        for block in self._stale:
            self._block_due[block] = self.due[block * _BLOCK : (block + 1) * _BLOCK].min()
        self._stale.clear()
        return self._block_due

    def due_at(self, now: float) -> list[int]:
        """The slots that are due by `now`, rounding aside."""
        most_slack = now * (_OF_CLOCK + _OF_DURATION)
        if self.next_due() - most_slack > now:
            return []
        if self._used <= _FEW:
            instants = zip(self.due[: self._used].tolist(), self.begun[: self._used].tolist(), strict=True)
            return [
                slot
                for slot, (due, begun) in enumerate(instants)
                if due - (now * _OF_CLOCK + (now - begun) * _OF_DURATION) <= now
            ]
        found: list[int] = []
        for block in np.flatnonzero(self._due_by_block() - most_slack <= now).tolist():
            part = slice(block * _BLOCK, (block + 1) * _BLOCK)
            slack = now * _OF_CLOCK + (now - self.begun[part]) * _OF_DURATION
            found += (np.flatnonzero(self.due[part] - slack <= now) + part.start).tolist()
        return found

    def remaining_at(self, slots: IntArray, now: float) -> FloatArray:
        """Payload bytes of the slots that have not come through by `now`."""
        left: FloatArray = np.maximum(
            self.remaining[slots] - self.rate[slots] * (now - self.since[slots]), 0.0
        )
        return left

    def drain(self, slot: int, now: float) -> tuple[float, bool]:
        """Bring one slot's `remaining` up to `now`. Returns it, and whether the transfer is through.

        At its stop it is set to exactly that, rounding aside.
        """
        left = float(self.remaining[slot] - self.rate[slot] * (now - self.since[slot]))
        slack = now * _OF_CLOCK + (now - float(self.begun[slot])) * _OF_DURATION
        stop = float(self.stop[slot])
        reached = left - stop <= 2 * slack * float(self.rate[slot])
        if reached:
            left = stop
        self.remaining[slot] = left
        self.since[slot] = now
        return left, reached and stop == 0.0

    def set_rates(self, slots: IntArray, rates: FloatArray, now: float) -> None:
        """Let slots drain at other rates from `now` on."""
        self.remaining[slots] = self.remaining_at(slots, now)
        self.since[slots] = now
        self.rate[slots] = rates
        with np.errstate(divide="ignore", invalid="ignore"):
            drained = now + (self.remaining[slots] - self.stop[slots]) / rates
        drained[rates == 0.0] = math.inf
        self.due[slots] = np.minimum(drained, self.timer[slots])
        self._stale.update((slots // _BLOCK).tolist())
        self._least = None

    def _grow(self, capacity: int) -> None:
        old = len(self.number)
        self._block_due = np.full(capacity // _BLOCK, math.inf)
        self._stale.update(range(capacity // _BLOCK))
        for name in ("number", "order", "path"):
            setattr(
                self, name, np.concatenate([getattr(self, name), np.zeros(capacity - old, dtype=np.int64)])
            )
        for name in _FLOATS:
            fill = math.inf if name in ("due", "timer", "cap") else 0.0
            setattr(self, name, np.concatenate([getattr(self, name), np.full(capacity - old, fill)]))
