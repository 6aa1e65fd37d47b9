"""What a TCP connection knows of its path: the state of its congestion window, moved, compared and forgotten.

How it grows and shrinks is told in `netsim.fluid.tcp`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from netsim.fluid.clock import to_nanosecond
from netsim.fluid.cubic import Period

if TYPE_CHECKING:
    from collections.abc import Hashable

    from netsim.fluid.overflow import Overflow
    from netsim.topology.protocol import Protocol

__all__ = ["WindowState"]

# Idle for longer, nothing is left of what a connection has learnt: as long as Linux keeps it (TCP_METRICS_TIMEOUT).
_FORGOTTEN_SECONDS = 3600.0


class WindowState:
    """State of the congestion window of one connection (all streams of it together).

    Args:
        protocol: sizes and limits.
        round_trip_seconds: of the connection's path.
        loss: share of packets that the path loses.
        bytes_per_second: payload that the narrowest link of the path carries.
        queue_packets: that the queue of that link holds; None: enough for any window.
    """

    # What follows from the protocol and from what the path is like at present: equal for all windows of a path.
    TERMS = (
        *("_round_trip", "_least_timeout", "_timeout", "_limit", "_initial", "_segment"),
        *("_fresh_window", "_minds_buffer", "_loss_bytes", "_queue", "_owed"),
    )

    def __init__(
        self,
        protocol: Protocol,
        round_trip_seconds: float,
        loss: float,
        bytes_per_second: float,
        queue_packets: float | None,
    ) -> None:
        self._round_trip = round_trip_seconds
        self._least_timeout = protocol.minimum_timeout_seconds
        self._timeout = self._least_timeout + round_trip_seconds
        self._limit = protocol.window_bytes * protocol.streams
        self._initial = min(protocol.initial_window_bytes * protocol.streams, self._limit)
        self._segment = protocol.segment_bytes * protocol.streams  # one of each stream
        self._fresh_window = self._initial if protocol.slow_start else self._limit
        self._minds_buffer = protocol.rendezvous
        self._loss_bytes = self._segment / loss if loss else math.inf  # from one loss to the next
        self._queue = math.inf if queue_packets is None else queue_packets * protocol.segment_bytes
        # What the acknowledgement of one segment would have let go, missing from the first doubling.
        self._owed = 0.0 if protocol.quick_acks else 2 * self._segment
        self._bytes_per_second = bytes_per_second  # when the connection was made
        self._window = self._fresh_window
        self._threshold = math.inf  # where slow start ends
        self._began = -math.inf  # when the current round did
        self._used = 0.0  # bytes drained in it
        self._is_one = False  # whether all of it is of one message, without a pause
        self._follows_full = False  # whether it follows a full round of the same burst
        self._blocked = False  # until the round trip is over
        self._left = 0.0  # bytes of the message under way, when last told
        self._last_used = math.inf
        self._largest = self._window  # ever
        self._until_loss = self._loss_bytes
        self._has_filled = False  # the pipe, before the current round
        self._overflow: Overflow | None = None  # what follows upon it
        self._missing = 0.0  # bytes of the message that the queue dropped, until they are sent again
        self._lost_at = math.nan  # window at the last loss; a number while CUBIC rules
        # From one loss to the next, while CUBIC rules:
        self._lost = 0.0  # when the last one was
        self._period = Period(0.0, 0.0, 0.0, True)  # the last one that is over
        self._num_alike = 0  # of them in a row, but for rounding
        self._since_loss = 0.0  # bytes
        self._was_held = False  # by the window, not by the network alone
        self._granted, self._cap = 0.0, 0.0  # when a piece of one was, and its rate
        self._coasts = False  # through many at once

    @property
    def last_used(self) -> float:
        """When a byte last came through; infinity for never."""
        return self._last_used

    def buffer_bytes(self, now: float) -> float:
        """What the sender's socket takes in before it has left: twice the largest window so far (Linux)."""
        largest = self._fresh_window if self._is_forgotten(now) else self._largest
        return min(2 * largest, self._limit)

    def moved(self, seconds: float) -> Self:
        """The same window on a clock that shows so much more."""
        moved = object.__new__(type(self))
        moved.__dict__ = vars(self).copy()
        moved._began += seconds
        moved._last_used += seconds
        moved._lost += seconds
        moved._granted += seconds
        return moved

    def is_as_new(self, instant: float) -> bool:
        """Whether messages from `instant` on meet what they would on a new connection."""
        return self.idle_state(instant) in (None, self._new_buffer_bytes)

    @property
    def _new_buffer_bytes(self) -> float:
        return min(2 * self._fresh_window, self._limit)

    def idle_state(self, instant: float) -> Hashable:
        """What sets an idle one apart from a new one of its path; None where nothing does."""
        idle = instant - self._last_used
        if self._last_used != math.inf and idle <= _FORGOTTEN_SECONDS:
            has_lost = self._until_loss != self._loss_bytes or not math.isnan(self._lost_at)
            if idle <= self._timeout or has_lost or self._threshold < math.inf:
                return self.state(instant)
            if not self._initial <= self._window <= self._initial * 2.0 ** int(min(idle / self._timeout, 64)):
                return self.state(instant)
        # Who waits for the socket's buffer alone goes on sooner once that has grown.
        return self.buffer_bytes(instant) if self._minds_buffer else None

    def state(self, instant: float) -> tuple[object, ...]:
        """What sets it apart from others of its path; times count from `instant`, to a nanosecond."""
        since_loss: tuple[object, ...] = ()  # nothing as long as CUBIC does not rule
        if not math.isnan(self._lost_at):
            since_loss = (
                self._lost_at,
                to_nanosecond(self._lost - instant),
                self._period,
                self._num_alike,
                self._since_loss,
                self._was_held,
                to_nanosecond(self._granted - instant),
                self._cap,
            )
        return (
            self._bytes_per_second,
            self._window,
            self._threshold,
            to_nanosecond(self._began - instant),
            self._used,
            self._is_one,
            self._follows_full,
            self._blocked,
            self._left,
            to_nanosecond(self._last_used - instant),
            self._largest,
            self._until_loss,
            self._has_filled,
            self._overflow,
            self._missing,
            self._coasts,
            since_loss,
        )

    def _is_forgotten(self, now: float) -> bool:
        return now - self._last_used > _FORGOTTEN_SECONDS
