"""Bursts at queues between sites, as gloo's collectives meet them; and the choice of a connection's window.

**Queues between sites** (under a rendezvous, where a queue with an end follows faster links). A sender that has
paused lets all that its window allows go at once, of all messages that wait; it arrives at the queue as fast as the
links before carry it, together with bursts of others. What does not fit is lost: bursts that are short, or early, find
room, and others do not. A sender notices by what arrives after a loss, and sends no more again than has arrived
since; by each of these it sends two (proportional rate reduction, RFC 6937). So a burst that loses its end takes as
many round trips to repair as doublings lead from the segments that arrived after the first loss to the lost ones. If
none did, a probe is sent two round trips after the last acknowledgement (RFC 8985, 7).

Acknowledgements wait behind data on the way back: the next window follows that much later, and what they release
together is a burst again. Where windows of both directions are more than half the pipe they keep in step, so that a
round takes the time of the window at the link's rate and one latency, and the links idle for as long (Zhang, Shenker
and Clark 1991, on two-way traffic). Windows then go on by rounds after a loss as well, and grow only by those that were
used up.

HyStart then ends slow start once a connection, at the window of the moment when acknowledgements have come in a row for
half a round trip; those of a burst come as fast as its host's share of what arrives lets it drain. Its other test is
whether a round's first segments are late by an eighth of the round trip (4 to 16 ms): a new connection to a host whose
line others fill, or beside others that fill the sender's, so stays at some 36 segments, and then grows by CUBIC.
The test is made for hosts' lines; in queues between sites it depends on a few packets, and the model is as right
without it.

**A host's own line** (under a rendezvous) carries what TCP's small queues let each socket put there: two bursts, each
as long as a millisecond at 1.2 windows a round trip, 2 in slow start (Linux: `tcp_small_queue_check`,
`tcp_tso_autosize`, `tcp_pacing_ca_ratio`, `tcp_pacing_ss_ratio`), of two segments at least and 64 KiB at most. A round
trip is at least half the time of all windows at the line: they are up to twice what was in flight. Notes, first bytes
and acknowledgements of the host's other connections wait behind them. The line serves sockets in turn, so a window
lasts at least as long as it takes there between the others' bursts, while others have data. A round of slow start that
outlasts the round trip grows to twice what was in flight: in the pipe, and in the line.

After a pause slow start ends where it last did (after a loss: at 0.7 of the window), or at 3/4 of the window before the
pause if that is more. From there Reno's estimate grows as well as CUBIC's. Before its first loss a window never shrinks
but by a pause, and grows by at least 5 % a round trip while it holds the sender up (Linux: `tcp_cwnd_validate`): while
its bytes, or those before them, are used up before acknowledgements are back, and not held back by the line's turns.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, final

from netsim.network.congestion import Avoidance, QueueState, TcpSettings
from netsim.network.route import Route
from netsim.network.sockets import SocketsWindow
from netsim.network.tail_drop import WindowRound
from netsim.network.tcp import HYSTART_SEGMENTS, ROUND_TOLERANCE, Window
from netsim.network.tcp_cubic import Cubic

AVOIDANCE: Final[dict[str, Callable[[TcpSettings, Route], Avoidance]]] = {"cubic": Cubic}
PACING: Final = 1.2  # windows a round trip, by which Linux sizes bursts (tcp_pacing_ca_ratio)
DOUBLING_PACING: Final = 2.0  # the same in slow start (tcp_pacing_ss_ratio)
BURST_BYTES: Final = 65536.0  # largest burst (GSO_LEGACY_MAX_SIZE)
PAUSE_SECONDS: Final = 1e-6  # a sender that is silent for longer has paused


def open_window(tcp: TcpSettings, route: Route, lane: int, number: int) -> Window:
    """The window of a new connection on a route; of a channel of NCCL, in a lane below zero, each socket's."""
    avoidance = AVOIDANCE[tcp.congestion](tcp, route)
    if tcp.num_channels and lane < 0:
        seed = 1 + (route.source * 40692 + route.target * 40014 + number * 69621 - lane) * 16807 % 2147483646
        return SocketsWindow(tcp, route, avoidance, seed)
    return BurstyWindow(tcp, route, avoidance) if tcp.rendezvous else Window(tcp, route, avoidance)


@final
class BurstyWindow(Window):
    """A window whose bursts may overrun the queue of its route's narrowest link, if that has an end."""

    def __init__(self, tcp: TcpSettings, route: Route, avoidance: Avoidance) -> None:
        super().__init__(tcp, route, avoidance)
        self._following = 0.0  # bytes of the connection's later messages
        self._ack_wait = 0.0  # of this round's acknowledgements, in the queue of the way back
        self.burst = 0.0  # bytes that left at once, after a pause or a wait for acknowledgements
        self.burst_began = -inf
        self.crowd_seconds = 0.0  # wait at the receiver's line, now
        self.line_seconds = 0.0  # the same at senders' own lines, of data and of their acknowledgements
        self.share_seconds = 0.0  # of the sender's own line for a window, between others' bursts
        self._ack_delay = 0.0  # of the round's first segments there
        self._clump_rate = 0.0  # at which its acknowledgements come: those of a burst stay together
        self._drained_at = -inf  # its last byte of data
        self._most_grown = inf  # bytes to which slow start may grow: twice what was in flight

    @property
    def _has_queue(self) -> bool:
        return self.route.narrowest.bursts_at >= 0

    def standing_bytes(self, now: float, span: float, left: float, rate: float, full_rate: float) -> float:
        """Most bytes in the narrowest link's queue from `now` on, within `span` seconds.

        `left` bytes remain at `now`. They drain at `rate` until then, at `full_rate` where the next window has begun.
        """
        if rate == 0.0:
            return self.coming_bytes(now, span, left, full_rate, self.round.began + self.round.turn)
        narrowest = self.route.narrowest
        since = now - self.burst_began
        since = max(since, min(self.burst / narrowest.feed, since + span))
        burst = min(self.burst, narrowest.feed * since)
        standing = min(burst - burst / narrowest.feed * rate, self.window - rate * since)
        standing = max(standing, self.window - rate * self.route.round_trip)
        return max(min(min(standing, left), narrowest.queue), 0.0)

    def small_queue_bytes(self, payload: float, windows: float) -> float:
        """Bytes that wait at the sender's own line, which carries `payload` for sockets of `windows` together."""
        # Linux's windows are up to twice what was in flight, and its round trip includes queues.
        round_trip = max(self.route.round_trip, windows / (2 * payload))
        doubles = not self.avoids and self.window < self.slow_start.threshold / 2
        pace = (DOUBLING_PACING if doubles else PACING) * self.window / round_trip
        burst = min(pace / 1024, BURST_BYTES) // self.route.segment
        return 2.0 * max(burst, 2.0) * self.route.segment

    def coming_bytes(self, now: float, span: float, left: float, full_rate: float, begins: float) -> float:
        """The same, of a window whose first byte is received at `begins`."""
        narrowest = self.route.narrowest
        most = min(min(self.window, left), narrowest.queue)
        since = min(max(now - begins, most / narrowest.feed), now + span - begins)
        return max(min(most, narrowest.feed * since) - full_rate * since, 0.0)

    def is_bursting(self, now: float) -> bool:
        """Whether a burst is on its way into the queue."""
        return now - self.burst_began < self.burst / self.route.narrowest.feed

    def burst_seconds(self, num_bytes: float) -> float:
        """Time that a message's first burst takes to arrive at the queue."""
        return min(num_bytes, self.window) / self.route.narrowest.feed

    def _meet(self, now: float, queues: QueueState | None) -> None:
        self._read_queues(queues)
        if now - self._drained_at > PAUSE_SECONDS or not self._has_queue:
            self.round.is_one = False

    def _read_queues(self, queues: QueueState | None) -> None:
        self._ack_wait = 0.0 if queues is None else queues.ack_wait
        self._following = 0.0 if queues is None else queues.following

    def _burst_after_pause(self, now: float, queues: QueueState | None) -> None:
        if queues is not None and now - self._drained_at > PAUSE_SECONDS:
            self._send_burst(now, min(self.window - self.round.used, self.left + queues.following), queues)

    def _burst_after_wait(self, now: float, left: float, waited: float, queues: QueueState | None) -> None:
        if queues is not None and waited > 0.0:
            self._send_burst(
                now, min(self.window, left + queues.following, waited * self.route.narrowest.rate), queues
            )

    def _send_burst(self, now: float, burst: float, queues: QueueState) -> None:
        """Send `burst` bytes at once; they reach the narrowest link at `queues.feed`, and its queue may overflow."""
        narrowest, segment, round_trip = self.route.narrowest, self.route.segment, self.route.round_trip
        self.burst, self.burst_began = burst, now
        through = narrowest.rate / queues.feed
        self._clump_rate = narrowest.feed * through
        waiting = 1.0 - through  # share that finds the link busy
        heard = queues.heard  # acknowledged before the first loss is
        missing = (burst - heard) * waiting
        if missing < segment or self.drop.is_active:
            return
        missing = min(missing, self.left)
        later = queues.full_at - now + narrowest.queue / narrowest.rate - round_trip
        # A loss is noticed by bytes that arrive after it, and as many are sent again (RFC 6937), then twice as many.
        sent = (burst - heard) * through + min(heard, self.left + queues.following - burst)
        if sent < segment:
            later += min(2 * round_trip, self._timeout) + round_trip  # tail loss probe, RFC 8985
            sent = segment
        rounds = [WindowRound(heard, missing, later)]
        while missing > sent:
            missing -= sent
            rounds.append(WindowRound(sent, missing))
            sent *= 2
        self.drop.begin(rounds, self.window)

    def _turn_seconds(self) -> float:
        turn = self.route.round_trip + self._ack_wait
        return max(turn + self.line_seconds, self.share_seconds) if self.avoids else turn

    def _ahead(self) -> float:
        return self.left + self._following

    def _standing(self, wanted: float) -> float:
        return min(wanted, self._ahead()) if self._has_queue else wanted

    def _train(self, pipe: float) -> float:
        """HyStart: acknowledgements came in a row for half a round trip."""
        if not self._has_queue or self.slow_start.has_exited:
            return 0.0
        return max(pipe, self._clump_rate * self.route.round_trip) / 2

    def is_growing(self) -> bool:
        """Return whether HyStart may still end slow start."""
        return not (self.avoids or self.slow_start.has_exited)

    def _hears_delay(self, used: float) -> bool:
        late = min(max(self.route.round_trip / 8, 0.004), 0.016)
        enough = used >= HYSTART_SEGMENTS * self.route.segment
        return enough and not self.slow_start.has_exited and self._ack_delay > late

    def _leaves_softly(self) -> bool:
        return self._has_queue and self.slow_start.threshold >= self.avoidance.lost_at

    def _at_least(self, wanted: float, used: float, rate: float) -> float:
        """Before its first loss a window grows by 5 % a round trip while it limits the sender, and does not shrink."""
        if self.avoidance.has_lost:
            return wanted
        limits = used >= self.window * ROUND_TOLERANCE
        if not self._has_queue:  # between sites losses soon come, and the model is as right without it
            turn = self.round.turn
            limits = (limits or self.round.follows_full) and self.share_seconds < turn and used < rate * turn
            wanted = max(wanted, self.window)
        return max(wanted, self.window + used / 20) if limits else wanted

    def _threshold_after_pause(self) -> float:
        return max(self.slow_start.last, 0.75 * self.window) if self._has_queue else self.window

    def _is_smooth(self) -> bool:
        return self.avoidance.has_lost and not self._has_queue

    def _note_use(self, now: float) -> None:
        self.last_used = self._drained_at = now

    def _slow_start_limit(self) -> float:
        return max(self.window, self._most_grown)

    def _new_round(self, now: float) -> None:
        span, round_trip = self._drained_at - self.round.began, self.route.round_trip
        self._most_grown = inf
        if span > round_trip > 0.0 and self.round.used and not self._has_queue:  # the line held the round up
            in_line = self.small_queue_bytes(self.route.narrowest.rate, self.window)
            self._most_grown = 2 * (self.round.used / span * round_trip + in_line)
        if self.avoids and self.round.used < self.window * ROUND_TOLERANCE:
            self.avoidance.since += (
                now - self.round.began
            )  # CUBIC's clock stands while the window is not used up
        super()._new_round(now)
        self._ack_delay = self.crowd_seconds + self.line_seconds
