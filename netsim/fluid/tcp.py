"""What TCP takes from the ideal network: the window of one connection, as a fluid.

Time is seen from the receiver: a window that leaves at t drains from t plus the latency on, and the next
window can follow one round trip after it.

**Slow start.** Round i may drain W_i bytes at whatever rate fairness gives; round i + 1 starts one round trip
after round i did, since that is when the acknowledgements are back. W_0 is 10 segments (RFC 6928) and doubles
with every round (RFC 5681 and 3465, with delayed acknowledgements). A receiver that acknowledges every second segment
from the very first on owes one at the end of the first round, so W_1 is 18; Linux acknowledges all of the first
ones (`quick_acks`), and W_1 is 20. A round that takes longer than a round trip to drain fills the
pipe: from then on the window limits nothing. A transfer of bandwidth B beyond P = B x RTT so takes
RTT (log2(P / W_0) - 1 + W_0 / P) longer than without slow start, and the last round costs its own bytes only.

**Window limit.** At most `window_bytes` per round trip: what the sender's buffer holds.

**Idling.** After more than the retransmission time-out (200 ms + RTT) without a byte the window is halved for
each time-out elapsed, down to the initial one (RFC 2861, Linux `tcp_cwnd_restart`); after an hour nothing is left of
what it has learnt. It grows only as far as it is used: to twice what was in flight, so by every byte of a round that
follows a full one (Linux `tcp_is_cwnd_limited`). A message without bytes counts as use.

**Loss.** A link that loses a share p of its packets takes one of every 1 / p. Each loss ends slow start or a
period of CUBIC: the window falls to 0.7 of what it was and grows as RFC 9438 (equations 1 and 4) says until the next
one. Over many losses the mean is the response function of that RFC (equation 5, and 3 for Reno-friendly
windows); a transfer too short for a loss does not meet one. Periods of a long transfer soon are alike; then as
many as there were go by at once, at the rate of their mean, so that its cost does not grow with its bytes.

**Queue.** A round of slow start arrives at twice the rate at which it drains, and must find room for half of it in
its share of the queue of the path's narrowest link; and so must what the pipe does not hold. Otherwise the queue
runs full (`netsim.fluid.overflow`), and CUBIC takes over. Slow start ends without a loss one round after the pipe is
full, since HyStart hears the queue grow (Ha and Rhee 2011): a queue that held that is not overrun later.

**Unequal round trips.** Windows of equal size give shares in inverse proportion to the round trip (RFC 9438,
5.1, aims at linear RTT-fairness), and the queue that all of them share counts as part of it: weight = 1 /
(RTT + queue).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from netsim.fluid.cubic import ALIKE, Period, cubic_segments, inflection_seconds
from netsim.fluid.overflow import KEPT, Bottleneck, Overflow, of_a_burst, of_a_standing_window
from netsim.fluid.window import WindowState

if TYPE_CHECKING:
    from netsim.topology.protocol import Protocol

__all__ = ["Grant", "Window", "share_weight"]

# A round trip is over, and a window used up, when no more than rounding is missing.
_ROUNDING = 1e-9
_SAME = 1.0 - _ROUNDING
# What remains of a message is known to so much of itself: less than that is nothing, or it would never be used up.
_OF_LEFT = 2.0**-48
# By how much a queue must be overrun, relatively: rates carry rounding, and round figures often fit exactly.
_OVERRUN = 1.0 + 1e-6

# What a full queue at a bottleneck commonly holds (a round trip across a continent or an ocean).
_QUEUE_SECONDS = 0.1

_PIECES = 8  # in which a period of growth is cut
_SETTLED = (
    16  # periods in which no window was in the way: by then one that falls from loss to loss would have been
)


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


class Window(WindowState):
    """Congestion window of one connection (all streams of it together); its arguments are those of `WindowState`."""

    def start(self, now: float, num_bytes: float) -> Grant:
        """A message of `num_bytes` begins to drain."""
        is_idle = self._is_idle(now)
        self._is_one = False
        if is_idle or now - self._began >= self._round_trip * _SAME:
            self._new_round(now)
            self._follows_full = False
            self._is_one = True
        self._left = num_bytes
        return self._grant(now)

    def go_on(self, now: float, left: float) -> Grant:
        """The last grant is used up and `left` bytes of the message remain."""
        self._use(now, left)
        if self._until_loss <= self._segment * _ROUNDING + self._left * _OF_LEFT:
            self._until_loss = self._loss_bytes
            # In slow start the window has grown by what was acknowledged of this round.
            slow = math.isnan(self._lost_at)
            # Of an overrun queue nothing is left to come: the window has fallen.
            self._overflow, self._missing = None, 0.0
            self._lose(now, self._window + self._used if slow else self._cubic(now - self._lost))
        elif self._blocked or now - self._began >= self._round_trip * _SAME:
            self._new_round(now)
            self._follows_full = self._is_one = True
        return self._grant(now)

    def end(self, now: float, left: float = 0.0) -> None:
        """The message is through, or given up with `left` bytes remaining."""
        self._use(now, left)

    def follow(self, round_trip_seconds: float, loss: float) -> None:
        """Its path has another round trip or loses another share of packets; `again` follows if it is in use."""
        self._round_trip = round_trip_seconds
        self._timeout = self._least_timeout + round_trip_seconds
        before, self._loss_bytes = self._loss_bytes, self._segment / loss if loss else math.inf
        if self._loss_bytes != before:
            self._until_loss = self._loss_bytes

    def again(self, now: float) -> Grant:
        """What the message under way may do now that the path has changed; `end` was told what remains."""
        return self._grant(now)

    def touch(self, now: float) -> None:
        """A message without bytes passes: the connection is in use, but no window is filled."""
        self._is_idle(now)
        self._last_used = now

    def _is_idle(self, now: float) -> bool:
        """Whether the connection was idle for long; if so, the window has shrunk, or is a new one's."""
        idle = now - self._last_used
        if idle <= self._timeout:
            return False
        if self._is_forgotten(now):
            self._window = self._largest = self._fresh_window
            self._threshold, self._lost_at, self._until_loss = math.inf, math.nan, self._loss_bytes
            self._has_filled = False
        else:
            self._restart(int(min(idle / self._timeout, 64)))
        self._overflow, self._missing = None, 0.0
        self._used = 0.0
        self._follows_full = False
        return True

    def _use(self, now: float, left: float) -> None:
        drained = self._left - left
        if self._coasts:
            self._end_coast(now, drained)
            self._left = left
        elif drained > 0:
            if not math.isnan(self._lost_at):
                self._since_loss += drained
                self._was_held |= drained >= self._cap * (now - self._granted) * ALIKE
            self._left = left
            self._used += drained
            self._until_loss -= drained
            self._last_used = now

    def _restart(self, halvings: int) -> None:
        if not math.isnan(self._lost_at):
            self._threshold = self._window
            self._lost_at = math.nan
        self._window = max(self._window / 2.0**halvings, min(self._initial, self._window))
        self._has_filled = False

    def _new_round(self, now: float) -> None:
        """A round trip is over: the window doubles, or is what CUBIC makes it by now."""
        used, rate = self._used, self._used / max(self._last_used - self._began, 1e-12)
        self._used = 0.0
        self._began = now
        self._blocked = False
        if self._overflow is not None:
            self._go_on_after(self._overflow, now)
        elif math.isnan(self._lost_at):
            self._grow(now, used, rate)
        else:
            self._recover(now, self._cubic(now - self._lost), used, rate)

    def _grow(self, now: float, used: float, rate: float) -> None:
        """Slow start, or what follows upon it without a loss."""
        # Linux lets the window grow to twice what was in flight: after a full round, by all that is sent.
        wanted = self._window + used if self._follows_full else max(self._window, 2 * used)
        if self._window == self._initial and used >= self._window * _SAME:
            wanted -= self._owed
        wanted = min(wanted, self._limit)
        pipe = rate * self._round_trip
        # Of the queue: a round arrives at twice the rate at which it drains.
        peak = min(wanted, self._left) / 2 if self._is_one else wanted / 2
        waits = not pipe > 0.98 * self._window > 1.02 * peak  # something, in the queue
        had_filled, self._has_filled = self._has_filled, self._has_filled or 0 < pipe < 0.98 * self._window
        if used and self._is_one and waits and not had_filled:
            share = self._share(rate)
            there = Bottleneck(rate, share, pipe, self._round_trip)
            held = share * _OVERRUN
            happens = of_a_burst if peak > held else of_a_standing_window if wanted - pipe > held else None
            if happens is not None:
                self._window = wanted
                self._overflow = happens(wanted, self._limit, self._left, self._segment, there)
                self._missing = self._overflow.rounds[0].missing
                return
        if wanted >= self._threshold > self._window:
            self._lose(now, self._threshold / KEPT)
        else:
            self._widen(wanted)

    def _recover(self, now: float, wanted: float, used: float, rate: float) -> None:
        """CUBIC's next window, as long as the queue holds what the pipe does not."""
        pipe, share = rate * self._round_trip, self._share(rate)
        waits = pipe <= 0.98 * self._window  # something, in the queue
        if used and self._is_one and waits and wanted - pipe > share * _OVERRUN:
            self._lose(now, min(wanted, pipe + share))
        else:
            self._widen(wanted)

    def _widen(self, wanted: float) -> None:
        self._window = wanted
        self._largest = max(self._largest, wanted)

    def _share(self, rate: float) -> float:
        """Bytes of the bottleneck's queue that are this connection's."""
        return min(rate / self._bytes_per_second, 1.0) * self._queue

    def _go_on_after(self, overflow: Overflow, now: float) -> None:
        """The next round after one that overran the queue; when all have been, the window falls."""
        if not overflow.rounds:
            self._overflow, self._missing = None, 0.0
            self._lose(now, overflow.window)
            return
        first, *others = overflow.rounds
        self._window, self._missing = first.window, first.missing
        self._began += first.later
        self._overflow = Overflow(tuple(others), overflow.window)

    def _lose(self, now: float, window: float) -> None:
        """A period of CUBIC begins, after a window of that size."""
        before = self._period
        self._period = Period(now - self._lost, self._since_loss, min(window, self._limit), self._was_held)
        is_alike = not math.isnan(self._lost_at) and self._period.is_like(before)
        self._num_alike = self._num_alike + 1 if is_alike else 0
        self._since_loss, self._was_held = 0.0, False
        self._granted = now
        self._threshold = math.inf
        self._lost_at = min(window, self._limit)
        self._lost = self._began = now
        self._used = 0.0
        self._window = self._cubic(0.0)

    def _cubic(self, seconds: float) -> float:
        if not self._round_trip:
            return self._limit
        segments = cubic_segments(seconds, self._lost_at / self._segment, self._round_trip)
        return min(segments * self._segment, self._limit)

    def _grant(self, now: float) -> Grant:
        left = self._left
        credit = min(self._window - self._used, max(left - self._missing, 0.0))
        may = min(credit, self._until_loss)
        if left <= may:
            return Grant(0.0, math.inf, math.inf)
        if not math.isnan(self._lost_at) and self._round_trip:
            return self._grant_piece(now)
        self._blocked = credit <= self._window * _ROUNDING + left * _OF_LEFT
        if self._blocked:
            return Grant(0.0, 0.0, self._began + self._round_trip)
        steady = self._window == self._limit and not self._used and self._loss_bytes == math.inf
        steady = steady and self._overflow is None
        if not steady or not self._round_trip:
            return Grant(left - may, math.inf, math.inf)
        # Full windows to come; a last burst drains as fast as the network lets it.
        full_windows = math.ceil(left / self._window) - 1
        return Grant(left - full_windows * self._window, self._window / self._round_trip, math.inf)

    def _grant_piece(self, now: float) -> Grant:
        """A while of growth by CUBIC, at the rate of its middle."""
        if now == self._lost and self._num_alike >= (2 if self._period.was_held else _SETTLED):
            num = min(int(self._left / self._period.num_bytes), self._num_alike)
            if num > 1:
                return self._grant_coast(num)
        elapsed = now - self._lost
        whole = inflection_seconds(self._lost_at / self._segment)
        to_loss = self._until_loss * self._round_trip / self._window
        piece = max(min(whole, 2 * to_loss) / _PIECES, self._round_trip)
        grown = self._cubic(elapsed) >= self._limit
        rate = self._cubic(elapsed + piece / 2) / self._round_trip
        self._granted, self._cap = now, rate
        return Grant(max(self._left - self._until_loss, 0.0), rate, math.inf if grown else now + piece)

    def _grant_coast(self, num: int) -> Grant:
        """So many periods like those before, as many as there were at most, at the rate of their mean.

        Where the window never held the sender up, it does not now: others may leave a larger share.
        """
        self._coasts = True
        period = self._period
        rate = period.num_bytes / period.seconds if period.was_held else self._lost_at / self._round_trip
        return Grant(self._left - num * period.num_bytes, rate, math.inf)

    def _end_coast(self, now: float, drained: float) -> None:
        """So many bytes later it is somewhere in a period again, at its beginning if all were granted."""
        self._coasts = False
        num, part = divmod(drained / self._period.num_bytes + _ROUNDING, 1.0)
        part = max(part - _ROUNDING, 0.0) if part > 2 * _ROUNDING else 0.0
        self._num_alike += int(num)
        self._last_used = self._began = now
        self._lost = now - part * self._period.seconds
        self._since_loss = part * self._period.num_bytes
        self._until_loss -= self._since_loss
        self._used = 0.0
        self._window = self._cubic(now - self._lost)
