"""CUBIC (RFC 9438): windows that grow with the cube of the time since a loss, at least as fast as Reno's.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

import math
from typing import Final, final

from netsim.network.congestion import Avoidance, TcpSettings
from netsim.network.route import Route

CUBIC_BETA: Final = 0.7  # share of the window that a loss leaves
CUBIC_C: Final = 0.4  # segments per second cubed
RENO_GROWTH: Final = 3 * (1 - CUBIC_BETA) / (1 + CUBIC_BETA)  # segments per round trip


@final
class Cubic(Avoidance):
    """Window of RFC 9438 by the time since its last loss, or since slow start ended without one."""

    def __init__(self, tcp: TcpSettings, route: Route) -> None:
        super().__init__(tcp, route, CUBIC_BETA)

    def segments(self, seconds: float) -> float:
        largest = self.lost_at / self.route.segment
        if self.has_fallen:
            return cubic_segments(seconds, largest, self.route.round_trip)
        return segments_after_slow_start(
            seconds - inflection_seconds(largest), largest, self.route.round_trip
        )

    def growth_seconds(self) -> float:
        return inflection_seconds(self.lost_at / self.route.segment)


def cubic_segments(seconds: float, largest: float, round_trip_seconds: float) -> float:
    """CUBIC's window in segments, `seconds` after a loss at `largest` segments: RFC 9438, equations 1 and 4."""
    cubic = CUBIC_C * (seconds - inflection_seconds(largest)) ** 3 + largest
    reno = CUBIC_BETA * largest + RENO_GROWTH * seconds / round_trip_seconds
    return max(cubic, reno)


def segments_after_slow_start(seconds: float, window: float, round_trip_seconds: float) -> float:
    """CUBIC's window in segments, `seconds` after HyStart ended slow start at `window`; Reno begins there."""
    return window + max(CUBIC_C * seconds**3, RENO_GROWTH * seconds / round_trip_seconds)


def inflection_seconds(largest: float) -> float:
    """K of RFC 9438: seconds until the window is back at `largest` segments."""
    return math.cbrt(largest * (1 - CUBIC_BETA) / CUBIC_C)
