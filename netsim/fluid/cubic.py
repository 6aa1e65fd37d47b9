"""CUBIC after a loss: how the window grows until the next one, and when two such periods are alike (RFC 9438)."""

from __future__ import annotations

import math
from typing import NamedTuple

from netsim.fluid.overflow import KEPT

__all__ = ["ALIKE", "Period", "cubic_segments", "inflection_seconds"]

_GROWTH = 0.4  # segments per second cubed: C of RFC 9438
_RENO_GROWTH = 3 * (1 - KEPT) / (1 + KEPT)  # segments per round trip
ALIKE = 1.0 - 1e-5  # times a period's figure is less than that of one like it


def cubic_segments(seconds: float, largest: float, round_trip_seconds: float) -> float:
    """CUBIC's window so long after a loss at `largest` segments: RFC 9438, equations 1 and 4."""
    cubic = _GROWTH * (seconds - inflection_seconds(largest)) ** 3 + largest
    reno = KEPT * largest + _RENO_GROWTH * seconds / round_trip_seconds
    return max(cubic, reno)


def inflection_seconds(largest: float) -> float:
    """K of RFC 9438: when the window is back at `largest`."""
    return math.cbrt(largest * (1 - KEPT) / _GROWTH)


class Period(NamedTuple):
    """From one loss to the next: seconds, bytes, the window in bytes at the second, and if it ever held bytes up."""

    seconds: float
    num_bytes: float
    window: float
    was_held: bool

    def is_like(self, other: Period) -> bool:
        """Whether it is the same but for rounding, and what is left of how it began; or no window is in the way."""
        if not (self.was_held or other.was_held):
            return True
        return all(min(pair) > max(pair) * ALIKE for pair in zip(self[:3], other[:3], strict=True))
