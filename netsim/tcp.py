"""What TCP takes from the ideal network: the window of one connection, as a fluid.

Time is seen from the receiver: a window that leaves at t drains from t plus the latency on, and the next
window can follow one round trip after it.

**Slow start.** Round i may drain W_i = 10 segments x 2^i at whatever rate fairness gives; round i + 1 starts
one round trip after round i did, since that is when the acknowledgements are back (RFC 6928 for the initial
window, RFC 5681 and 3465 for doubling with delayed acknowledgements). A round that takes longer than a round
trip to drain fills the
pipe: from then on the window limits nothing. A transfer of bandwidth B beyond P = B x RTT so takes
RTT (log2(P / W_0) - 1 + W_0 / P) longer than without slow start, and the last round costs its own bytes only.

**Window limit.** At most `window_bytes` per round trip: what the sender's buffer holds.

**Idling.** After more than the retransmission time-out (200 ms + RTT) without a byte the window is halved for
each time-out elapsed, down to the initial one (RFC 2861, Linux `tcp_cwnd_restart`). It grows only as far as
it is used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from netsim.protocol import Protocol

__all__ = ["Grant", "Window", "share_weight"]

# A round trip is over, and a window used up, when no more than rounding is missing.
_ROUNDING = 1e-9
_SAME = 1.0 - _ROUNDING

# What a full queue at a bottleneck commonly holds (a round trip across a continent or an ocean).
_QUEUE_SECONDS = 0.1


class Grant(NamedTuple):
    """What a transfer may do until it asks again.

    Attributes:
        stop: it asks again when so many of its bytes remain; 0: when it is through.
        cap: largest rate until then, bytes per second.
        timer: it asks again at this instant at the latest.
    """

    stop: float
    cap: float
    timer: float


def share_weight(protocol: Protocol, round_trip_seconds: float) -> float:
    """Share of a transfer relative to others, by the round trip of its path."""
    if not protocol.rtt_bias:
        return float(protocol.streams)
    return protocol.streams / (round_trip_seconds + _QUEUE_SECONDS)


class Window:
    """Congestion window of one connection (all streams of it together).

    Args:
        protocol: sizes and limits.
        round_trip_seconds: of the connection's path.
    """

    __slots__ = ("_began", "_initial", "_last_used", "_limit", "_round_trip", "_timeout", "_used", "_window")

    def __init__(self, protocol: Protocol, round_trip_seconds: float) -> None:
        self._round_trip = round_trip_seconds
        self._timeout = protocol.minimum_timeout_seconds + round_trip_seconds
        self._limit = protocol.window_bytes * protocol.streams
        self._initial = min(protocol.initial_window_bytes * protocol.streams, self._limit)
        self._window = self._initial if protocol.slow_start else self._limit
        self._began = -math.inf  # when the current round did
        self._used = 0.0  # bytes drained in it
        self._last_used = math.inf

    def start(self, now: float, num_bytes: float) -> Grant:
        """A message of `num_bytes` begins to drain."""
        idle = now - self._last_used
        if idle > self._timeout:
            halvings = min(int(idle / self._timeout), 64)
            self._window = max(self._window / 2.0**halvings, min(self._initial, self._window))
            self._new_round(now)
        elif now - self._began >= self._round_trip * _SAME:
            self._new_round(now)
        return self._grant(now, num_bytes)

    def go_on(self, now: float, left: float) -> Grant:
        """The last grant is used up and `left` bytes remain."""
        if now - self._began >= self._round_trip * _SAME:
            self._new_round(now)
        return self._grant(now, left)

    def use(self, now: float, num_bytes: float) -> None:
        """So many bytes have drained since the last call."""
        self._used += num_bytes
        self._last_used = now

    def _new_round(self, now: float) -> None:
        self._window = min(max(self._window, 2 * self._used), self._limit)
        self._used = 0.0
        self._began = now

    def _grant(self, now: float, left: float) -> Grant:
        credit = self._window - self._used
        if left <= credit:
            return Grant(0.0, math.inf, math.inf)
        if credit <= self._window * _ROUNDING:
            return Grant(0.0, 0.0, self._began + self._round_trip)
        if self._window < self._limit or self._used or not self._round_trip:
            return Grant(left - credit, math.inf, math.inf)
        # Full windows to come: as many as leave a last burst, which drains as fast as the network lets it.
        full_windows = math.ceil(left / self._window) - 1
        return Grant(left - full_windows * self._window, self._window / self._round_trip, math.inf)
