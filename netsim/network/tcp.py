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
runs full (below), and CUBIC takes over. Slow start ends without a loss one round after the pipe is
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

**Queues between sites** (under a rendezvous, where a queue with an end follows faster links). A sender that has
paused lets all that its window allows go at once; it arrives at the queue as fast as the links before carry it,
together with bursts of others. What does not fit is lost. A sender notices by what arrives after a loss. After the
last bytes of a message nothing does: a probe is sent two round trips after the last acknowledgement (RFC 8985, 7), and
after it all that is missing. Acknowledgements wait behind data on the way back: the next window follows that much
later, and what they release together is a burst again (Zhang, Shenker and Clark 1991, on two-way traffic). Windows then
go on by rounds after a loss as well, and grow only by those that were used up.

HyStart then ends slow start once a connection, at the window of the moment when acknowledgements have come in a row for
half a round trip; those of a burst come as fast as its host's share of what arrives lets it drain. Its other test, of
the delays of a round's first segments, is left out: it asks for a queue to within a few packets, and the model is as
right without it. After a pause slow start ends where it last did (after a loss: at 0.7 of the window), or at 3/4 of the
window before the pause if that is more. From there Reno's estimate grows as well as CUBIC's, and before its first loss
a window grows by at least 5 % a round trip.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

import math
from math import inf
from typing import Any, Final, NamedTuple, final

from netsim.network.route import Route

KEPT: Final = 0.7  # of the window, at a loss: beta of RFC 9438
GROWTH: Final = 0.4  # segments per second cubed: C of RFC 9438
RENO_GROWTH: Final = 3 * (1 - KEPT) / (1 + KEPT)  # segments per round trip
ALIKE: Final = 1.0 - 1e-5  # times a period's figure is less than that of one like it

# A round trip is over, and a window used up, when no more than rounding is missing.
ROUNDING: Final = 1e-9
SAME: Final = 1.0 - ROUNDING
# Remaining bytes are exact to this share of themselves: less than that is nothing, or it would never be used up.
OF_LEFT: Final = 2.0**-48
# By how much a queue must be overrun, relatively: rates carry rounding, and round figures often fit exactly.
OVERRUN: Final = 1.0 + 1e-6
QUEUE_SECONDS: Final = 0.1  # a full queue at a bottleneck: a round trip across a continent or an ocean
PIECES: Final = 8  # in which a period of growth is cut
# Periods in which no window was in the way: by then one that falls from loss to loss would have been.
SETTLED: Final = 16
# Idle for longer, a connection has forgotten all it learnt: as long as Linux keeps it (TCP_METRICS_TIMEOUT).
FORGOTTEN_SECONDS: Final = 3600.0
PAUSE_SECONDS: Final = 1e-6  # a sender that is silent for longer has paused


def share_weight(streams: int, rtt_bias: bool, round_trip_seconds: float) -> float:
    """Weight of a transfer relative to others, by the round trip of its route."""
    if not rtt_bias:
        return float(streams)
    return streams / (round_trip_seconds + QUEUE_SECONDS)


class QueueState(NamedTuple):
    """Queues on a connection's route and on the way back, as its next burst and its acknowledgements meet them.

    Attributes:
        num_bursts: bursts that arrive at the narrowest link together, this one included.
        feed: bytes per second at which they arrive, all together.
        standing: bytes of others in that link's queue.
        ack_wait: seconds that an acknowledgement sent now waits behind data on the way back.
        following: bytes of the connection's messages after the one under way.
    """

    num_bursts: int
    feed: float
    standing: float
    ack_wait: float
    following: float


class Bottleneck(NamedTuple):
    """Share of the narrowest link that one sender has.

    Attributes:
        rate: bytes per second that it gets.
        share: bytes of the queue that are its own.
        pipe: bytes that are under way without a queue: rate x round trip.
        round_trip: seconds.
    """

    rate: float
    share: float
    pipe: float
    round_trip: float


class WindowRound(NamedTuple):
    """A round of an overrun window.

    Attributes:
        window: bytes that may drain in it.
        missing: bytes of the message that are still to be sent again at its end.
        later: seconds by which it begins after the round before is over; negative: earlier.
    """

    window: float
    missing: float
    later: float = 0.0


class Overflow(NamedTuple):
    """Rounds after a queue was overrun, and the window in bytes that the sender falls from at their end."""

    rounds: tuple[WindowRound, ...]
    window: float


def of_a_burst(window: float, limit: float, left: float, segment: float, there: Bottleneck) -> Overflow:
    """Overflow by a window of slow start that arrives faster than it drains.

    Args:
        window: bytes of the round.
        limit: of the socket's buffer.
        left: bytes of the message before the round.
        segment: bytes of one.
        there: the bottleneck; `window` > 2 `there.share`.
    """
    heard = 2 * there.share  # acknowledged before the first loss is
    grown = window + heard
    missing = (min(window, left) - heard) / 2
    following = min(2 * heard + max(window - heard - (1 - KEPT) * grown, 0.0), limit)
    first = WindowRound(following, missing)
    if grown <= limit:
        return Overflow((first,), grown)
    waiting = stuck(missing, segment, there)
    burst = min(KEPT * grown, limit, left - window)
    if burst <= there.share:
        return Overflow((first, waiting), grown)
    again = (burst - there.share) / there.rate
    return Overflow((first, waiting, WindowRound(0.0, 0.0, waiting.later + again)), burst)


def of_a_standing_window(
    window: float, limit: float, left: float, segment: float, there: Bottleneck
) -> Overflow:
    """Overflow by a window that has filled the pipe, and the queue cannot hold the rest; arguments as above."""
    missing = min(window - there.pipe - there.share, left)
    first = WindowRound(there.pipe, missing)
    rounds = (first,) if window < limit else (first, stuck(missing, segment, there))
    return Overflow(rounds, there.pipe + there.share)


def stuck(missing: float, segment: float, there: Bottleneck) -> WindowRound:
    """Round in which only the missing bytes leave, and those that they release, while the full queue drains."""
    return WindowRound(missing + segment, 0.0, -min(there.share / there.rate, there.round_trip))


def cubic_segments(seconds: float, largest: float, round_trip_seconds: float) -> float:
    """CUBIC's window in segments, `seconds` after a loss at `largest` segments: RFC 9438, equations 1 and 4."""
    cubic = GROWTH * (seconds - inflection_seconds(largest)) ** 3 + largest
    reno = KEPT * largest + RENO_GROWTH * seconds / round_trip_seconds
    return max(cubic, reno)


def segments_after_slow_start(seconds: float, window: float, round_trip_seconds: float) -> float:
    """CUBIC's window in segments, `seconds` after HyStart ended slow start at `window`; Reno begins there."""
    return window + max(GROWTH * seconds**3, RENO_GROWTH * seconds / round_trip_seconds)


def inflection_seconds(largest: float) -> float:
    """K of RFC 9438: seconds until the window is back at `largest` segments."""
    return math.cbrt(largest * (1 - KEPT) / GROWTH)


class Period(NamedTuple):
    """Time from one loss to the next: seconds, bytes, the window at the second loss, and whether it held bytes up."""

    seconds: float
    num_bytes: float
    window: float
    was_held: bool

    def is_like(self, other: Period) -> bool:
        """Return whether the two differ by rounding only, or the window limited neither."""
        if not (self.was_held or other.was_held):
            return True
        return (
            min(self.seconds, other.seconds) > max(self.seconds, other.seconds) * ALIKE
            and min(self.num_bytes, other.num_bytes) > max(self.num_bytes, other.num_bytes) * ALIKE
            and min(self.window, other.window) > max(self.window, other.window) * ALIKE
        )


@final
class TcpSettings:
    """Settings of a protocol's windows.

    Args:
        protocol: a `netsim.Protocol`.

    Attributes:
        segment: bytes of a segment, one of each stream.
        initial_window: bytes, of all streams.
        owed: bytes that the acknowledgement of one segment would have let go, missing from the first doubling.
    """

    def __init__(self, protocol: Any) -> None:
        self.slow_start = bool(protocol.slow_start)
        self.rendezvous = bool(protocol.rendezvous)
        self.segment = float(protocol.segment_bytes * protocol.streams)
        self.initial_window = float(protocol.initial_window_bytes * protocol.streams)
        self.owed = 0.0 if protocol.quick_acks else 2 * self.segment
        self.minimum_timeout = float(protocol.minimum_timeout_seconds)


@final
class Window:
    """Congestion window of one connection (all its streams together).

    `start` and `go_on` set what a transfer may do until it asks again: `stop`, `cap` and `timer`.

    Args:
        tcp: settings that all windows of a network share.
        route: of the connection; its figures are read as they change.

    Attributes:
        stop: the transfer asks again when so many of its bytes remain; 0: when it is finished.
        cap: largest rate until then, bytes per second.
        timer: it asks again at this instant at the latest.
        last_used: instant of the last byte; infinity for never.
    """

    def __init__(self, tcp: TcpSettings, route: Route) -> None:
        self._tcp = tcp
        self._route = route
        self._limit = route.window_limit
        self._initial = min(tcp.initial_window, self._limit)
        self._fresh_window = self._initial if tcp.slow_start else self._limit
        self._loss = route.loss
        self._loss_bytes = tcp.segment / route.loss if route.loss else inf  # from one loss to the next
        self._window = self._fresh_window
        self._threshold = inf  # where slow start ends
        self._ssthresh = inf  # where it ended last, by HyStart or a loss
        self._has_exited = False  # slow start, by HyStart: once a connection
        self._has_lost = False
        self._began = -inf  # when the current round did
        self._used = 0.0  # bytes drained in it
        self._following = 0.0  # bytes of the connection's later messages
        self._ack_wait = 0.0  # of this round's acknowledgements, in the queue of the way back
        self._turn = route.round_trip  # until this round's acknowledgements are back
        self._burst = 0.0  # bytes that left at once, after a pause or a wait for acknowledgements
        self._burst_began = -inf
        self._clump_rate = 0.0  # at which its acknowledgements come: those of a burst stay together
        self._is_one = False  # whether all of it left without a pause
        self._follows_full = False  # whether it follows a full round of the same burst
        self._blocked = False  # until the round trip is over
        self._left = 0.0  # bytes of the message under way, when last reported
        self._drained_at = -inf  # its last byte of data
        self.last_used = inf
        self._largest = self._window  # ever
        self._until_loss = self._loss_bytes
        self._has_filled = False  # the pipe, before the current round
        self._overflow: Overflow | None = None  # what follows upon it
        self._missing = 0.0  # bytes of the message that the queue dropped, until they are sent again
        self._is_cubic = False  # since a loss, or HyStart
        self._has_fallen = True  # when that began
        self._lost_at = 0.0  # window at the last loss
        # From one loss to the next:
        self._lost = 0.0  # when the last one was
        self._period = Period(0.0, 0.0, 0.0, True)  # the last one that is over
        self._num_alike = 0  # of them in a row, but for rounding
        self._since_loss = 0.0  # bytes
        self._was_held = False  # by the window, not by the network alone
        self._granted = 0.0  # start of a piece of growth, and its rate
        self._cap = 0.0
        self._coasts = False  # over many periods at once
        self.stop = 0.0
        self.cap = inf
        self.timer = inf

    @property
    def _bursts(self) -> bool:
        """Whether bursts may overrun the queue of the narrowest link."""
        return self._route.narrowest.bursts_at >= 0

    @property
    def _timeout(self) -> float:
        return self._tcp.minimum_timeout + self._route.round_trip

    def standing_bytes(self, now: float, left: float, rate: float, full_rate: float) -> float:
        """Bytes in the narrowest link's queue that will be received after `now`, of `left` that then remain.

        Bytes drain at `rate` until then, and at `full_rate` where the window that is next has begun.
        """
        if rate == 0.0:
            since = now - self._began - self._turn
            standing = self._window - full_rate * since if since >= 0.0 else 0.0
        else:
            burst = self._burst - rate * max(now - self._burst_began, 0.0)
            standing = max(burst, self._window - rate * self._route.round_trip)
        return max(min(standing, left, self._route.narrowest.queue), 0.0)

    def is_bursting(self, now: float) -> bool:
        """Whether a burst is on its way into the queue."""
        return now - self._burst_began < self._burst / self._route.narrowest.feed

    def burst_seconds(self, num_bytes: float) -> float:
        """Time that a message's first burst takes to arrive at the queue."""
        return min(num_bytes, self._window) / self._route.narrowest.feed

    def buffer_bytes(self, now: float) -> float:
        """Size of the sender's socket buffer: twice the largest window so far (Linux)."""
        largest = self._fresh_window if self._is_forgotten(now) else self._largest
        return min(2 * largest, self._limit)

    def is_as_new(self, now: float) -> bool:
        """Return whether messages from `now` on take as long as on a new connection."""
        idle = now - self.last_used
        if self.last_used != inf and idle <= FORGOTTEN_SECONDS:
            has_lost = self._until_loss != self._loss_bytes or self._is_cubic
            if idle <= self._timeout or has_lost or self._threshold < inf:
                return False
            largest = self._initial * 2.0 ** int(min(idle / self._timeout, 64))
            if not self._initial <= self._acknowledged_window() <= largest:
                return False
        # Under a rendezvous a sender goes on when the socket's buffer holds its bytes: sooner once that has grown.
        return not self._tcp.rendezvous or self.buffer_bytes(now) == min(2 * self._fresh_window, self._limit)

    def start(self, now: float, num_bytes: float, queues: QueueState | None) -> None:
        """Begin to drain a message of `num_bytes`; `queues` where the window has one to overrun."""
        is_idle = self._is_idle(now)
        has_paused = now - self._drained_at > PAUSE_SECONDS
        self._meet(queues)
        if has_paused or not self._bursts:
            self._is_one = False
        if is_idle or now - self._began >= self._turn * SAME:
            self._new_round(now)
            self._follows_full = False
            self._is_one = True
        self._left = num_bytes
        if queues is not None and has_paused:
            self._send_burst(now, min(self._window - self._used, num_bytes), queues)
        self._grant(now)

    def go_on(self, now: float, left: float, queues: QueueState | None) -> None:
        """Use up the last grant, with `left` bytes of the message remaining, and take the next one."""
        self._use(now, left)
        self._meet(queues)
        if self._until_loss <= self._tcp.segment * ROUNDING + self._left * OF_LEFT:
            self._until_loss = self._loss_bytes
            # In slow start the window has grown by what was acknowledged of this round.
            slow = not self._is_cubic
            # Of an overrun queue nothing is left to come: the window has fallen.
            self._overflow, self._missing = None, 0.0
            self._lose(now, self._window + self._used if slow else self._cubic(now - self._lost))
        elif self._blocked or now - self._began >= self._turn * SAME:
            waited = self._turn - self._route.round_trip if self._blocked else 0.0
            self._new_round(now)
            self._follows_full = self._is_one = True
            if queues is not None and waited > 0.0:
                # Acknowledgements that waited in a queue leave it at once, and let as much go at once.
                self._send_burst(now, min(self._window, left, waited * self._route.narrowest.rate), queues)
        self._grant(now)

    def _meet(self, queues: QueueState | None) -> None:
        """Take the wait of acknowledgements, and the bytes that follow the message under way."""
        self._ack_wait = 0.0 if queues is None else queues.ack_wait
        self._following = 0.0 if queues is None else queues.following

    def _send_burst(self, now: float, burst: float, queues: QueueState) -> None:
        """Send `burst` bytes at once; they reach the narrowest link at `queues.feed`, and its queue may overflow."""
        self._burst, self._burst_began = burst, now
        through = self._route.narrowest.rate / queues.feed
        self._clump_rate = self._route.narrowest.feed * through
        waiting = 1.0 - through  # share that finds the link busy
        room = max(self._route.narrowest.queue - queues.standing, self._tcp.segment) / queues.num_bursts
        heard = room / waiting  # acknowledged before the first loss is
        if burst <= heard * OVERRUN or self._overflow is not None:
            return
        missing = self._missing = (burst - heard) * waiting
        later = heard * queues.num_bursts / self._route.narrowest.rate - self._route.round_trip
        # A loss is noticed by bytes that arrive after it: is there a whole segment of them?
        is_last = burst == self._left and not queues.following
        rounds: tuple[WindowRound, ...] = (WindowRound(heard, missing, later),)
        if (burst - heard) * through > self._tcp.segment * waiting:
            after = self._tcp.segment * waiting / through  # lost after the last segment that arrives
            if is_last and after < missing:
                rounds = (*rounds, WindowRound(KEPT * self._window, after))
        elif is_last:
            probe = (
                min(2 * self._route.round_trip, self._timeout) + self._route.round_trip
            )  # tail loss probe, RFC 8985
            rounds = (WindowRound(heard, missing, later + probe),)
        else:  # by those that the acknowledgements let go
            rounds = (WindowRound(heard, missing, max(later, 0.0)),)
        self._overflow = Overflow(rounds, self._window)

    def end(self, now: float, left: float = 0.0) -> None:
        """End the message: it has drained, or is given up with `left` bytes remaining."""
        self._use(now, left)

    def follow(self) -> None:
        """Note that the route's round trip or loss has changed; the caller then calls `again` if it is in use."""
        self._turn = self._route.round_trip
        if self._route.loss != self._loss:
            self._loss = self._route.loss
            self._until_loss = self._loss_bytes = self._tcp.segment / self._loss if self._loss else inf

    def again(self, now: float) -> None:
        """Grant a window to the message in flight on a changed path; `end` was called with its remaining bytes."""
        self._grant(now)

    def touch(self, now: float) -> None:
        """Record a message without bytes: it uses the connection, but fills no window."""
        self._is_idle(now)
        self.last_used = now

    def _is_idle(self, now: float) -> bool:
        """Return whether the connection was idle for long; if so, the window has shrunk, or is a new one's."""
        idle = now - self.last_used
        if idle <= self._timeout:
            return False
        if self._is_forgotten(now):
            self._window = self._largest = self._fresh_window
            self._threshold, self._is_cubic, self._until_loss = inf, False, self._loss_bytes
            self._ssthresh, self._has_exited, self._has_lost = inf, False, False
            self._has_filled = False
        else:
            if self._acknowledged_window() > self._window:
                self._widen(self._acknowledged_window())
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
            if self._is_cubic:
                self._since_loss += drained
                self._was_held |= drained >= self._cap * (now - self._granted) * ALIKE
            self._left = left
            self._used += drained
            self._until_loss -= drained
            self.last_used = self._drained_at = now

    def _leave_slow_start(self, now: float, window: float) -> None:
        """CUBIC goes on from this window, as from one that it has just come back to after a loss."""
        self._widen(window)
        self._has_exited = self._is_cubic = True
        self._has_fallen = False
        self._threshold, self._ssthresh = inf, window
        self._lost_at = window
        self._lost = now - inflection_seconds(window / self._tcp.segment)

    def _acknowledged_window(self) -> float:
        """The window when all that was sent has been acknowledged."""
        is_growing = self._follows_full and not self._is_cubic and self._overflow is None
        if not (self._tcp.rendezvous and is_growing):
            return self._window
        return min(self._window + self._used, self._limit, self._threshold)

    def _restart(self, halvings: int) -> None:
        if self._is_cubic:
            self._threshold = max(self._ssthresh, 0.75 * self._window) if self._bursts else self._window
            self._is_cubic = False
        self._window = max(self._window / 2.0**halvings, min(self._initial, self._window))
        self._has_filled = False

    def _new_round(self, now: float) -> None:
        """A round trip is over: the window doubles, or is what CUBIC makes it by now."""
        used, rate = self._used, self._used / max(self.last_used - self._began, 1e-12)
        if self._bursts and self._is_cubic and used < self._window * SAME:
            self._lost += now - self._began  # CUBIC's clock stands while the window is not used up
        self._used = 0.0
        self._began = now
        self._turn = self._route.round_trip + self._ack_wait
        self._blocked = False
        if self._overflow is not None:
            self._go_on_after(self._overflow, now)
        elif not self._is_cubic:
            self._grow(now, used, rate)
        else:
            self._recover(now, self._cubic(now - self._lost), used, rate)

    def _grow(self, now: float, used: float, rate: float) -> None:
        """Slow start, or what follows upon it without a loss."""
        # Linux lets the window grow to twice what was in flight: after a full round, by all that is sent.
        wanted = self._window + used if self._follows_full else max(self._window, 2 * used)
        if self._window == self._initial and used >= self._window * SAME:
            wanted -= self._tcp.owed
        wanted = min(wanted, self._limit)
        pipe = rate * self._route.round_trip
        # HyStart: acknowledgements came in a row for half a round trip.
        train = max(pipe, self._clump_rate * self._route.round_trip) / 2
        ends_by_train = self._bursts and not self._has_exited and self._is_one and used > train > 0
        if ends_by_train:
            wanted = min(wanted, self._window + train)
        # Of the queue: a round arrives at twice the rate at which it drains.
        peak = min(wanted, self._left + self._following) / 2 if self._is_one else wanted / 2
        waits = not pipe > 0.98 * self._window > 1.02 * peak  # something, in the queue
        had_filled, self._has_filled = self._has_filled, self._has_filled or 0 < pipe < 0.98 * self._window
        if used and self._is_one and waits and not had_filled:
            share = self._share(rate)
            there = Bottleneck(rate, share, pipe, self._route.round_trip)
            held = share * OVERRUN
            standing = min(wanted, self._left + self._following) if self._bursts else wanted
            happens = of_a_burst if peak > held else of_a_standing_window if standing - pipe > held else None
            if happens is not None:
                self._window = wanted
                self._overflow = happens(wanted, self._limit, self._left, self._tcp.segment, there)
                self._missing = self._overflow.rounds[0].missing
                return
        if ends_by_train:
            self._leave_slow_start(now, wanted)
        elif wanted >= self._threshold > self._window:
            if self._bursts and self._threshold >= self._lost_at:
                self._leave_slow_start(now, self._threshold)
            else:
                self._lose(now, self._threshold / KEPT)
        else:
            self._widen(wanted)

    def _recover(self, now: float, wanted: float, used: float, rate: float) -> None:
        """CUBIC's next window, as long as the queue holds what the pipe does not."""
        if self._bursts and not self._has_lost and used >= self._window * SAME:
            wanted = max(wanted, self._window + used / 20)  # Linux, before the first loss: 5 % a round trip
        pipe, share = rate * self._route.round_trip, self._share(rate)
        waits = pipe <= 0.98 * self._window  # something, in the queue
        standing = min(wanted, self._left + self._following) if self._bursts else wanted
        if used and self._is_one and waits and standing - pipe > share * OVERRUN:
            self._lose(now, min(wanted, pipe + share))
        else:
            self._widen(wanted)

    def _widen(self, wanted: float) -> None:
        self._window = wanted
        self._largest = max(self._largest, wanted)

    def _share(self, rate: float) -> float:
        """Bytes of the bottleneck's queue that are this connection's."""
        return min(rate / self._route.narrowest.rate, 1.0) * self._route.narrowest.queue

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
        is_alike = self._is_cubic and self._period.is_like(before)
        self._num_alike = self._num_alike + 1 if is_alike else 0
        self._since_loss, self._was_held = 0.0, False
        self._granted = now
        self._threshold = inf
        self._is_cubic = self._has_lost = self._has_fallen = True
        self._lost_at = min(window, self._limit)
        self._lost = self._began = now
        self._turn = self._route.round_trip + self._ack_wait
        self._used = 0.0
        self._window = self._ssthresh = self._cubic(0.0)

    def _cubic(self, seconds: float) -> float:
        if not self._route.round_trip:
            return self._limit
        largest = self._lost_at / self._tcp.segment
        if self._has_fallen:
            segments = cubic_segments(seconds, largest, self._route.round_trip)
        else:
            elapsed = seconds - inflection_seconds(largest)
            segments = segments_after_slow_start(elapsed, largest, self._route.round_trip)
        return min(segments * self._tcp.segment, self._limit)

    def _grant(self, now: float) -> None:
        left = self._left
        credit = min(self._window - self._used, max(left - self._missing, 0.0))
        may = min(credit, self._until_loss)
        if left <= may:
            self._allow(0.0, inf, inf)
            return
        if self._is_cubic and self._route.round_trip and not self._bursts:
            self._grant_piece(now)
            return
        self._blocked = credit <= self._window * ROUNDING + left * OF_LEFT
        if self._blocked:
            self._allow(0.0, 0.0, self._began + self._turn)
            return
        steady = self._window == self._limit and not self._used and self._loss_bytes == inf
        steady = steady and self._overflow is None
        if not steady or not self._route.round_trip:
            self._allow(left - may, inf, inf)
            return
        # Full windows to come; a last burst drains as fast as the network lets it.
        full_windows = math.ceil(left / self._window) - 1
        self._allow(left - full_windows * self._window, self._window / self._route.round_trip, inf)

    def _allow(self, stop: float, cap: float, timer: float) -> None:
        self.stop = stop
        self.cap = cap
        self.timer = timer

    def _grant_piece(self, now: float) -> None:
        """A while of growth by CUBIC, at the rate of its middle."""
        if now == self._lost and self._num_alike >= (2 if self._period.was_held else SETTLED):
            num = min(int(self._left / self._period.num_bytes), self._num_alike)
            if num > 1:
                self._grant_coast(num)
                return
        elapsed = now - self._lost
        whole = inflection_seconds(self._lost_at / self._tcp.segment)
        to_loss = self._until_loss * self._route.round_trip / self._window
        piece = max(min(whole, 2 * to_loss) / PIECES, self._route.round_trip)
        grown = self._cubic(elapsed) >= self._limit
        rate = self._cubic(elapsed + piece / 2) / self._route.round_trip
        self._granted, self._cap = now, rate
        self._allow(max(self._left - self._until_loss, 0.0), rate, inf if grown else now + piece)

    def _grant_coast(self, num: int) -> None:
        """So many periods like those before, as many as there were at most, at the rate of their mean.

        Where the window never held the sender up, it does not now: others may leave a larger share.
        """
        self._coasts = True
        period = self._period
        rate = (
            period.num_bytes / period.seconds if period.was_held else self._lost_at / self._route.round_trip
        )
        self._allow(self._left - num * period.num_bytes, rate, inf)

    def _end_coast(self, now: float, drained: float) -> None:
        """So many bytes later it is somewhere in a period again, at its beginning if all were granted."""
        self._coasts = False
        num, part = divmod(drained / self._period.num_bytes + ROUNDING, 1.0)
        part = max(part - ROUNDING, 0.0) if part > 2 * ROUNDING else 0.0
        self._num_alike += int(num)
        self.last_used = self._drained_at = self._began = now
        self._lost = now - part * self._period.seconds
        self._since_loss = part * self._period.num_bytes
        self._until_loss -= self._since_loss
        self._used = 0.0
        self._window = self._cubic(now - self._lost)

    def _is_forgotten(self, now: float) -> bool:
        return now - self.last_used > FORGOTTEN_SECONDS
