"""TCP's limit on the ideal network: the window of one connection, as a fluid.

Time is seen from the receiver: a window that leaves at t drains from t plus the latency on, and the next
window can follow one round trip after it.

**Slow start.** Round i may drain W_i bytes at whatever rate fairness gives; round i + 1 starts one round trip
after round i did, since that is when the acknowledgements are back. W_0 is 10 segments (RFC 6928) and doubles
with every round (RFC 5681 and 3465, with delayed acknowledgements). A receiver that acknowledges every second segment
from the very first on owes one at the end of the first round, so W_1 is 18; Linux acknowledges all of the first
ones (`quick_acks`), and W_1 is 20. A round that takes longer than a round trip to drain fills the
pipe: from then on the window limits nothing. A transfer of bandwidth B beyond P = B x RTT so takes
RTT (log2(P / W_0) - 1 + W_0 / P) longer than without slow start, and the last round costs its own bytes only.

**Receive window.** A receiver allows 64 KiB a stream at first, then twice what a round trip brought, and up to three
times that while it doubles; it measures one round late (Linux's dynamic right-sizing). Slow start outruns it with
segments above 3,300 bytes: of 8,949 bytes rounds are 64, 64, 128 and 128 KiB before they double. With smaller ones the
receiver keeps pace. Its buffer never shrinks.

**Window limit.** At most `window_bytes` per round trip: what the sender's buffer holds.

**Idling.** After more than the retransmission time-out (200 ms + RTT) without a byte the window is halved for
each time-out elapsed, down to the initial one (RFC 2861, Linux `tcp_cwnd_restart`); after an hour nothing is left of
its past. HyStart has ended slow start when acknowledgements came in a row for half a round trip, and CUBIC has gone on
from there: without a rendezvous it is that window which is halved, though nothing before the pause was limited by it. A
window grows only as it is used: to twice what was in flight, so by every byte of a round that follows a full one (Linux
`tcp_is_cwnd_limited`). A message without bytes counts as use.

**Loss.** A link that loses a share p of its packets takes one of every 1 / p. Each loss ends slow start or a
period of CUBIC: the window falls to 0.7 of what it was and grows as RFC 9438 (equations 1 and 4) says until the next
one. Over many losses the mean is the response function of that RFC (equation 5, and 3 for Reno-friendly
windows); a transfer too short for a loss does not meet one. Periods of a long transfer soon are alike; then as
many as there were go by at once, at the rate of their mean, so that its cost does not grow with its bytes.

**Queue.** A round of slow start arrives at twice the rate at which it drains, and must find room for half of it in
its share of the queue of the path's narrowest link; and so must what the pipe does not hold. Otherwise the queue
runs full (below), and CUBIC takes over. The sender's own link has no such queue: while it is full, the rest waits
in the socket (Linux's TCP small queues). Slow start ends without a loss one round after the pipe is
full, since HyStart hears the queue grow (Ha and Rhee 2011): a queue that held that is not overrun later.

**Unequal round trips.** Windows of equal size give shares in inverse proportion to the round trip (RFC 9438,
5.1, aims at linear RTT-fairness), and the queue that all of them share counts as part of it: weight = 1 /
(RTT + queue).

**Overrun queue.** A window arrives at twice the rate at which the bottleneck drains (each acknowledgement of two
segments lets four go), so a queue of Q bytes is full after 2 Q of it, and loses half of what follows. The sender
learns of that in the next round, in which it goes on growing by all that was acknowledged before, and then falls to
0.7 of what the window has become (RFC 9438), while the lost bytes are sent again (RFC 6675). If by then the window
exceeds the socket's buffer, nothing new leaves until the first hole is filled: for a round trip the queue only
drains. Then all that the window allows leaves at once, since nothing paces it (as in ns-3, and in Linux without
`fq`); a queue that cannot take that loses the rest, and another round trip goes by, with the time that the
retransmissions take at the bottleneck's rate. A queue that runs full while a window stands in it, more than the
pipe holds, loses what does not fit in the same way.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

import math
from math import inf
from typing import Final, final

from netsim.network.congestion import (
    PIECES,
    ROUNDING,
    Avoidance,
    CongestionControl,
    QueueState,
    TcpSettings,
)
from netsim.network.route import Route
from netsim.network.tail_drop import OVERRUN, Bottleneck, TailDrop

# A round trip is over, and a window used up, when no more than rounding is missing.
ROUND_TOLERANCE: Final = 1.0 - ROUNDING
# Remaining bytes are exact to this share of themselves: less than that is nothing, or it would never be used up.
BYTES_TOLERANCE: Final = 2.0**-48
QUEUE_SECONDS: Final = 0.1  # a full queue at a bottleneck: a round trip across a continent or an ocean
RECEIVE_BYTES: Final = 65536.0  # of a stream's first receive window: half of tcp_rmem's default, 128 KiB
HYSTART_SEGMENTS: Final = 16  # of a round, whose delays HyStart takes: eight acknowledgements
# Idle for longer, a connection has forgotten all it learnt: as long as Linux keeps it (TCP_METRICS_TIMEOUT).
FORGOTTEN_SECONDS: Final = 3600.0


def share_weight(streams: float, rtt_bias: bool, round_trip_seconds: float) -> float:
    """Weight of a transfer relative to others, by the round trip of its route."""
    if not rtt_bias:
        return streams
    return streams / (round_trip_seconds + QUEUE_SECONDS)


@final
class RoundTrip:
    """The present round trip.

    Attributes:
        began: when it did.
        used: bytes drained in it.
        turn: seconds until its acknowledgements are back.
        is_one: all of it left without a pause.
        follows_full: it follows a full round of the same burst.
        is_blocked: nothing may leave until it is over.
    """

    def __init__(self, turn: float) -> None:
        self.began = -inf
        self.used = 0.0
        self.turn = turn
        self.is_one = False
        self.follows_full = False
        self.is_blocked = False

    def is_over(self, now: float) -> bool:
        return now - self.began >= self.turn * ROUND_TOLERANCE


@final
class SlowStart:
    """End of slow start.

    Attributes:
        threshold: bytes of the window at which it ends.
        last: bytes at which it ended last, by HyStart or a loss.
        has_exited: HyStart has ended it, once a connection.
        has_filled: the window has filled the pipe before the present round.
        ended: bytes of the window as acknowledgements have come in a row for half a round trip, where HyStart ends it.
        ended_at: instant of that.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset to the state of a new connection."""
        self.threshold = inf
        self.last = inf
        self.has_exited = False
        self.has_filled = False
        self.ended = inf
        self.ended_at = inf


@final
class ReceiveWindow:
    """Bytes that the receiver allows in a round, by Linux's dynamic right-sizing (`tcp_rcv_space_adjust`).

    Attributes:
        window: of the present round.
        coming: of the next round.
        copied: most bytes that the application has read in a round trip.
    """

    def __init__(self, window: float, copied: float) -> None:
        self.window = self.coming = window
        self.copied = min(copied, window)

    def after(self, used: float) -> float:
        """Return the window that follows a round of `used` bytes; they widen the one after it (`tcp_rcvbuf_grow`)."""
        self.window = self.coming
        if self.coming < inf and used >= self.copied * ROUND_TOLERANCE:
            self.coming = max(self.coming, 2 * used * (1 + 2 * (used / self.copied - 1)))
            self.copied = used
        return self.window


@final
class FreshWindow:
    """Windows of a new connection, in bytes.

    Attributes:
        initial: of its first round trip, as far as the sender is concerned.
        receive: the receiver's; infinity where slow start does not reach it in two rounds.
        window: the least of both; without slow start the limit.
    """

    def __init__(self, tcp: TcpSettings, route: Route) -> None:
        self.initial = min(tcp.initial_segments * route.segment, route.window_limit)
        first = RECEIVE_BYTES * route.streams
        self.receive = first if tcp.slow_start and 2 * self.initial > first else inf
        self.window = min(self.initial, self.receive) if tcp.slow_start else route.window_limit


class Window(CongestionControl):
    """Congestion window of one connection: slow start, and then congestion avoidance.

    Args:
        tcp: settings that all windows of a network share.
        route: of the connection; its latency and loss are read as they change.
        avoidance: growth after slow start.
    """

    def __init__(self, tcp: TcpSettings, route: Route, avoidance: Avoidance) -> None:
        super().__init__()
        self.tcp = tcp
        self.route = route
        self.avoidance = avoidance
        self.avoids = False  # slow start is over
        self.slow_start = SlowStart()
        self.drop = TailDrop()
        self.round = RoundTrip(route.round_trip)
        self.fresh = FreshWindow(tcp, route)
        self.receive = ReceiveWindow(self.fresh.receive, self.fresh.initial)
        self.window = self.fresh.window
        self.largest = self.window  # ever
        self.left = 0.0  # remaining bytes of the present message, when last reported
        self.loss = route.loss
        self.until_loss = self._loss_bytes

    # -- figures ---------------------------------------------------------------------------------------------

    @property
    def _loss_bytes(self) -> float:
        """Bytes from one loss to the next."""
        return self.route.segment / self.loss if self.loss else inf

    @property
    def _timeout(self) -> float:
        return self.tcp.minimum_timeout + self.route.round_trip

    def buffer_bytes(self, now: float) -> float:
        """Size of the sender's socket buffer: twice the largest window so far (Linux)."""
        largest = 0.0 if self._is_forgotten(now) else self.largest
        return min(2 * max(max(largest, self.fresh.initial), self.fresh.window), self.route.window_limit)

    def is_as_new(self, now: float) -> bool:
        """Return whether messages from `now` on take as long as on a new connection."""
        idle = now - self.last_used
        if self.last_used != inf and idle <= FORGOTTEN_SECONDS:
            has_lost = self.until_loss != self._loss_bytes or self.avoids
            has_opened = self.receive.coming > self.fresh.receive
            if idle <= self._timeout or has_lost or has_opened or self.slow_start.threshold < inf:
                return False
            largest = self.fresh.initial * 2.0 ** int(min(idle / self._timeout, 64))
            if not self.fresh.window <= self._acknowledged_window() <= largest:
                return False
        # A sender goes on when the socket's buffer holds its bytes: sooner once that has grown.
        is_small = self.buffer_bytes(now) == self.buffer_bytes(inf)
        return not self.tcp.buffers_sends or is_small

    # -- messages --------------------------------------------------------------------------------------------

    def start(self, now: float, num_bytes: float, queues: QueueState | None) -> None:
        """Begin to drain a message of `num_bytes`; `queues` if bursts may overrun one."""
        is_idle = self._is_idle(now)
        self._meet(now, queues)
        if is_idle or self.round.is_over(now):
            self._new_round(now)
            self.round.follows_full = False
            self.round.is_one = True
        self.left = num_bytes
        self._burst_after_pause(now, queues)
        self._grant(now)

    def go_on(self, now: float, left: float, queues: QueueState | None) -> None:
        """Use up the last grant, with `left` bytes of the message remaining, and take the next one."""
        self._use(now, left)
        self._read_queues(queues)
        round_ = self.round
        if self.until_loss <= self.route.segment * ROUNDING + self.left * BYTES_TOLERANCE:
            self.until_loss = self._loss_bytes
            # Of an overrun queue nothing is left to come: the window has fallen.
            self.drop.clear()
            # In slow start the window has grown by what was acknowledged of this round.
            window = self._avoided(now) if self.avoids else self.window + round_.used
            self._lose_packet(now, window)
        elif round_.is_blocked or round_.is_over(now):
            waited = round_.turn - self.route.round_trip if round_.is_blocked else 0.0
            self._new_round(now)
            round_.follows_full = round_.is_one = True
            self._burst_after_wait(now, left, waited, queues)
        self._grant(now)

    def end(self, now: float, left: float) -> None:
        """End the message: it has drained, or is given up with `left` bytes remaining."""
        self._use(now, left)

    def follow(self) -> None:
        """Note that the route's round trip or loss has changed; the caller then calls `again` if it is in use."""
        self.round.turn = self.route.round_trip
        if self.route.loss != self.loss:
            self.loss = self.route.loss
            self.until_loss = self._loss_bytes

    def again(self, now: float) -> None:
        """Grant a window to the message in flight on a changed route; `end` was called with its remaining bytes."""
        self._grant(now)

    def touch(self, now: float) -> None:
        """Record a message without bytes: it uses the connection, but fills no window."""
        self._is_idle(now)
        self.last_used = now

    # -- bursts: see netsim.network.bursts --------------------------------------------------------------------

    def _meet(self, now: float, queues: QueueState | None) -> None:
        """Read queues as a message starts."""
        self.round.is_one = False

    def _read_queues(self, queues: QueueState | None) -> None:
        """Read queues as a message goes on."""

    def _burst_after_pause(self, now: float, queues: QueueState | None) -> None:
        """Send at once what the window allows after a pause."""

    def _burst_after_wait(self, now: float, left: float, waited: float, queues: QueueState | None) -> None:
        """Send at once what acknowledgements release that have waited in a queue."""

    def _turn_seconds(self) -> float:
        """Time until a round's acknowledgements are back."""
        return self.route.round_trip

    def _ahead(self) -> float:
        """Bytes that the connection has still to send."""
        return self.left

    def _standing(self, wanted: float) -> float:
        """Bytes of a window that are in flight at once."""
        return wanted

    def _train(self, pipe: float) -> float:
        """Bytes after which a train of acknowledgements ends slow start; 0 if it does not."""
        return 0.0

    def _slow_start_limit(self) -> float:
        """Bytes to which slow start may grow after a round."""
        return inf

    def _hears_delay(self, used: float) -> bool:
        """HyStart: the first acknowledgements of a round of `used` bytes come late."""
        return False

    def _leaves_softly(self) -> bool:
        """Return whether slow start ends without a loss at its threshold."""
        return False

    def _at_least(self, wanted: float, used: float, rate: float) -> float:
        """The next window in congestion avoidance, after a round of `used` bytes that drained at `rate`."""
        return wanted

    def _threshold_after_pause(self) -> float:
        return self.window

    def _is_smooth(self) -> bool:
        """Return whether congestion avoidance goes by pieces, not by rounds."""
        return True

    def _note_use(self, now: float) -> None:
        self.last_used = now

    # -- windows ---------------------------------------------------------------------------------------------

    def _avoided(self, now: float) -> float:
        """The window of congestion avoidance at an instant."""
        return self.avoidance.window(now - self.avoidance.since)

    def _is_forgotten(self, now: float) -> bool:
        return now - self.last_used > FORGOTTEN_SECONDS

    def _is_idle(self, now: float) -> bool:
        """Return whether the connection was idle for long; if so, the window has shrunk, or is a new one's."""
        idle = now - self.last_used
        if idle <= self._timeout:
            return False
        if self._is_forgotten(now):
            self.window = self.largest = self.fresh.window
            self.avoids = self.avoidance.has_lost = False
            self.until_loss = self._loss_bytes
            self.slow_start.reset()
            self.receive = ReceiveWindow(self.fresh.receive, self.fresh.initial)
        else:
            acknowledged = self._acknowledged_window()
            if acknowledged > self.window:
                self._widen(acknowledged)
            slow = self.slow_start
            if self.avoids:
                # CUBIC's rounds have grown the receiver's buffer too, which does not shrink.
                self.receive.window = max(self.receive.window, self.window)
                self.receive.coming = max(self.receive.coming, self.window)
                slow.threshold = self._threshold_after_pause()
                self.avoids = False
            elif slow.ended < inf:
                self.avoidance.enter(slow.ended_at, slow.ended)
                self.window = min(self.window, self._avoided(self.last_used))
            slow.ended = inf
            halvings = int(min(idle / self._timeout, 64))
            self.window = max(self.window / 2.0**halvings, min(self.fresh.initial, self.window))
            slow.has_filled = False
        self.drop.clear()
        self.round.used = 0.0
        self.round.follows_full = False
        return True

    def _acknowledged_window(self) -> float:
        """The window when all that was sent has been acknowledged."""
        is_growing = self.round.follows_full and not self.avoids and not self.drop.is_active
        if not (self.tcp.rendezvous and is_growing):
            return self.window
        return min(min(self.window + self.round.used, self.route.window_limit), self.slow_start.threshold)

    def _use(self, now: float, left: float) -> None:
        drained = self.left - left
        if self.avoidance.periods.skips:
            self._end_skip(now, drained)
            self.left = left
        elif drained > 0:
            if self.avoids:
                self.avoidance.periods.drain(now, drained)
            self.left = left
            self.round.used += drained
            self.until_loss -= drained
            self._note_use(now)

    def _new_round(self, now: float) -> None:
        """Begin a round trip: double the window, or take it from congestion avoidance."""
        round_ = self.round
        used, rate = round_.used, round_.used / max(self.last_used - round_.began, 1e-12)
        round_.used = 0.0
        round_.began = now
        round_.turn = self._turn_seconds()
        round_.is_blocked = False
        if self.drop.is_active:
            following = self.drop.next_round()
            if following is None:
                self._lose(now, self.drop.window)
            else:
                self.window = following.window
                round_.began += following.later
        elif self.avoids:
            self._recover(now, used, rate)
        else:
            self._grow(now, used, rate)

    def _grow(self, now: float, used: float, rate: float) -> None:
        """Grow in slow start, or leave it."""
        slow, is_one = self.slow_start, self.round.is_one
        # Linux lets the window grow to twice what was in flight: after a full round, by all that is sent.
        wanted = self.window + used if self.round.follows_full else max(self.window, 2 * used)
        if self.window == self.fresh.initial and used >= self.window * ROUND_TOLERANCE:
            wanted -= self.tcp.owed * self.route.segment
        limit = min(self.route.window_limit, self._slow_start_limit())
        wanted = min(min(wanted, self.receive.after(used)), limit)
        pipe = rate * self.route.round_trip
        train = self._train(pipe)
        ends_by_train = is_one and used > train > 0
        if ends_by_train:
            wanted = min(wanted, self.window + train)
        hears_delay = not ends_by_train and self._hears_delay(used)
        if hears_delay:
            wanted = min(wanted, self.window + HYSTART_SEGMENTS * self.route.segment)
        # Of the queue: a round arrives at twice the rate at which it drains.
        peak = min(wanted, self._ahead()) / 2 if is_one else wanted / 2
        waits = not pipe > 0.98 * self.window > 1.02 * peak  # something, in the queue
        had_filled = slow.has_filled
        slow.has_filled = had_filled or 0 < pipe < 0.98 * self.window
        if not self.tcp.rendezvous and slow.ended == inf and is_one and 0 < pipe / 2 < used:
            slow.ended, slow.ended_at = min(wanted, self.window + pipe / 2), now
        if used and is_one and waits and not had_filled and self._overruns(wanted, peak, rate, pipe):
            self.window = wanted
        elif ends_by_train or hears_delay:
            self._leave_slow_start(now, wanted)
        elif wanted >= slow.threshold > self.window:
            if self._leaves_softly():
                self._leave_slow_start(now, slow.threshold)
            else:
                self._lose(now, slow.threshold / self.avoidance.kept)
        else:
            self._widen(wanted)

    def _overruns(self, wanted: float, peak: float, rate: float, pipe: float) -> bool:
        """Overrun the queue if a window of slow start does not find room in its share; returns whether it does."""
        share = self._share(rate)
        held = share * OVERRUN
        is_burst = peak > held
        if not is_burst and self._standing(wanted) - pipe <= held:
            return False
        limit = self.route.window_limit
        there = Bottleneck(
            rate, share, pipe, self.route.round_trip, self.route.segment, limit, self.avoidance.kept
        )
        if is_burst:
            there.overrun_by_burst(self.drop, wanted, self.left)
        else:
            there.overrun_by_standing_window(self.drop, wanted, self.left)
        return True

    def _leave_slow_start(self, now: float, window: float) -> None:
        """End slow start at this window; congestion avoidance continues as if it had just recovered to it."""
        self._widen(window)
        self.slow_start.has_exited = self.avoids = True
        self.slow_start.threshold = inf
        self.slow_start.last = window
        self.avoidance.enter(now, window)

    def _recover(self, now: float, used: float, rate: float) -> None:
        """Widen to the next window of congestion avoidance, or lose where the queue cannot hold it."""
        wanted = self._at_least(self._avoided(now), used, rate)
        pipe, share = rate * self.route.round_trip, self._share(rate)
        waits = pipe <= 0.98 * self.window  # something, in the queue
        if used and self.round.is_one and waits and self._standing(wanted) - pipe > share * OVERRUN:
            self._lose(now, min(wanted, pipe + share))
        else:
            self._widen(wanted)

    def _widen(self, wanted: float) -> None:
        self.window = wanted
        self.largest = max(self.largest, wanted)

    def _share(self, rate: float) -> float:
        """Bytes of the narrowest link's queue that are this connection's."""
        narrowest = self.route.narrowest
        return inf if narrowest.is_held else min(rate / narrowest.rate, 1.0) * narrowest.queue

    def _lose_packet(self, now: float, window: float) -> None:
        """Lose a packet on the way."""
        self._lose(now, window)

    def _lose(self, now: float, window: float) -> None:
        """Fall from a window at a loss."""
        self.avoidance.lose(now, window, self.avoids)
        self._fall(now)

    def _fall(self, now: float) -> None:
        """Begin a round with the window that a loss has left."""
        self.avoids = True
        self.slow_start.threshold = inf
        self.round.began = now
        self.round.turn = self._turn_seconds()
        self.round.used = 0.0
        self.window = self.slow_start.last = self._avoided(now)

    # -- grants ----------------------------------------------------------------------------------------------

    def _grant(self, now: float) -> None:
        left, round_trip = self.left, self.route.round_trip
        credit = min(self.window - self.round.used, max(left - self.drop.missing, 0.0))
        may = min(credit, self.until_loss)
        if left <= may:
            self._allow(0.0, inf, inf)
            return
        if self.avoids and round_trip and self._is_smooth():
            self._grant_piece(now)
            return
        self.round.is_blocked = credit <= self.window * ROUNDING + left * BYTES_TOLERANCE
        if self.round.is_blocked:
            self._allow(0.0, 0.0, self.round.began + self.round.turn)
            return
        steady = self.window == self.route.window_limit and not self.round.used and not self.loss
        if not steady or self.drop.is_active or not round_trip:
            self._allow(left - may, inf, inf)
            return
        # Full windows to come; a last burst drains as fast as the network lets it.
        full_windows = math.ceil(left / self.window) - 1
        self._allow(left - full_windows * self.window, self.window / round_trip, inf)

    def _grant_piece(self, now: float) -> None:
        """Grant a piece of growth at the rate of its middle, or skip equal periods at their mean rate."""
        avoidance, periods, round_trip = self.avoidance, self.avoidance.periods, self.route.round_trip
        num = periods.num_to_skip(self.left) if now == avoidance.since else 0
        if num > 1:
            periods.skips = True
            last = periods.last
            # Where the window never held the sender up, it does not now: others may leave a larger share.
            rate = last.num_bytes / last.seconds if last.was_held else avoidance.lost_at / round_trip
            self._allow(self.left - num * last.num_bytes, rate, inf)
            return
        elapsed = now - avoidance.since
        to_loss = self.until_loss * round_trip / self.window
        piece = max(min(avoidance.growth_seconds(), 2 * to_loss) / PIECES, round_trip)
        grown = avoidance.window(elapsed) >= self.route.window_limit
        rate = avoidance.window(elapsed + piece / 2) / round_trip
        periods.granted, periods.cap = now, rate
        self._allow(max(self.left - self.until_loss, 0.0), rate, inf if grown else now + piece)

    def _end_skip(self, now: float, drained: float) -> None:
        """Restore the window after a skip: at the beginning of a period, if all were granted."""
        periods = self.avoidance.periods
        part = periods.skip(drained)
        self._note_use(now)
        self.round.began = now
        self.avoidance.since = now - part * periods.last.seconds
        self.until_loss -= periods.num_bytes
        self.round.used = 0.0
        self.window = self._avoided(now)
