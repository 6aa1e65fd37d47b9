"""Finding the rhythm of a strategy, and from where on a run repeats itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["period_of", "repeats_from"]


def period_of(series: Sequence[Hashable]) -> int | None:
    """The least number of steps after which `series` repeats itself, its first such stretch left out; None: none.

    >>> period_of([0, 0, 5, 0, 0, 5, 0, 0, 5]), period_of([1, 2, 3, 4])
    (3, None)
    """
    alike = _alike_from(series[::-1])
    for period in range(1, len(series) // 3 + 1):
        if alike[period] >= len(series) - 2 * period:
            return period
    return None


def _alike_from(series: Sequence[Hashable]) -> list[int]:
    """For each place, how many values from there on equal those from the beginning on (the Z function; linear time)."""
    number = len(series)
    alike = [number, *[0] * (number - 1)] if number else []
    first = last = 0  # the match found so far that reaches farthest
    for place in range(1, number):
        count = min(last - place, alike[place - first]) if place < last else 0
        while place + count < number and series[count] == series[place + count]:
            count += 1
        alike[place] = count
        if place + count > last:
            first, last = place, place + count
    return alike


def repeats_from(seconds: Sequence[float], tolerance: float = 1e-4) -> int | None:
    """The first of these rounds from which all take equally long, if at least two do; else None.

    Equal is what differs by less than the share `tolerance`: windows of TCP go on growing for a while.

    >>> repeats_from([3.0, 2.5, 2.5]), repeats_from([3.0, 2.5])
    (1, None)
    """
    last = seconds[-1]
    first = len(seconds)
    while first and abs(seconds[first - 1] - last) <= tolerance * last:
        first -= 1
    return first if len(seconds) - first >= 2 else None
