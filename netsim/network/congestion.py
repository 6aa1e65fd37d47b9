"""Congestion control: what a connection allows its transfer, and growth of windows after slow start.

A variant of TCP is a class in a file `tcp_NAME.py`: an `Avoidance` where it differs by how windows grow and fall
(CUBIC, Reno), a `CongestionControl` where it has no such windows. The protocol's `congestion` names it, and
`netsim.network.bursts.open_window` opens it.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import Any, Final, NamedTuple, final

from netsim.network.route import Route

# Relative rounding: of round trips, of windows that are used up, and of bytes drained in periods of a loss.
ROUNDING: Final = 1e-9
ALIKE: Final = 1.0 - 1e-5  # times a period's figure is less than that of one like it
PIECES: Final = 8  # in which a period of growth is cut
# Equal periods without a limiting window before they are skipped: one that falls from loss to loss would limit by then.
SETTLED: Final = 16


@final
class TcpSettings:
    """Settings of a protocol's windows.

    Args:
        protocol: a `netsim.Protocol`.

    Attributes:
        num_channels: NCCL's connections between two hosts; 0: the protocol has none.
        initial_segments: segments of a stream's first round trip.
        owed: segments that the acknowledgement of one would have let go, missing from the first doubling.
    """

    def __init__(self, protocol: Any) -> None:
        self.slow_start = bool(protocol.slow_start)
        self.rendezvous = bool(protocol.rendezvous)
        self.buffers_sends = bool(protocol.buffers_sends)
        self.congestion = str(protocol.congestion)
        self.initial_segments = float(protocol.initial_segments)
        self.owed = 0.0 if protocol.quick_acks else 2.0
        self.num_channels = int(protocol.channels)
        self.minimum_timeout = float(protocol.minimum_timeout_seconds)


class QueueState(NamedTuple):
    """Queues on a connection's route and on the way back, as its next burst and its acknowledgements meet them.

    Attributes:
        feed: bytes per second at which bursts arrive at the narrowest link together, this one included.
        heard: bytes of the burst that arrive before the queue is full.
        full_at: instant at which it is.
        ack_wait: seconds that an acknowledgement sent now waits behind data on the way back.
        following: bytes of the connection's messages after the one under way.
    """

    feed: float
    heard: float
    full_at: float
    ack_wait: float
    following: float


class CongestionControl:
    """Limit of one connection, all its streams together; `start` and `go_on` set it until the transfer asks again.

    Attributes:
        stop: remaining bytes at which the transfer asks again; 0: when it is finished.
        cap: largest rate until then, bytes per second.
        timer: it asks again at this instant at the latest.
        last_used: instant of the last byte; infinity for never.
        repaired_at: until then messages that have drained wait for a lost packet.
        following: bytes of the connection's later messages, given before `start` and `go_on`.
    """

    def __init__(self) -> None:
        self.stop = 0.0
        self.cap = inf
        self.timer = inf
        self.last_used = inf
        self.repaired_at = -inf
        self.following = 0.0

    def start(self, now: float, num_bytes: float, queues: QueueState | None) -> None:
        """Begin to drain a message of `num_bytes`; `queues` if bursts may overrun one."""
        raise NotImplementedError

    def go_on(self, now: float, left: float, queues: QueueState | None) -> None:
        """Use up the last grant, with `left` bytes of the message remaining, and take the next one."""
        raise NotImplementedError

    def end(self, now: float, left: float) -> None:
        """End the message: it has drained, or is given up with `left` bytes remaining."""
        raise NotImplementedError

    def touch(self, now: float) -> None:
        """Record a message without bytes: it uses the connection, but fills no window."""
        raise NotImplementedError

    def follow(self) -> None:
        """Note that the route's round trip or loss has changed; the caller then calls `again` if it is in use."""
        raise NotImplementedError

    def again(self, now: float) -> None:
        """Grant a window to the message in flight on a changed route; `end` was called with its remaining bytes."""
        raise NotImplementedError

    def buffer_bytes(self, now: float) -> float:
        """Size of the sender's socket buffer."""
        raise NotImplementedError

    def is_as_new(self, now: float) -> bool:
        """Return whether messages from `now` on take as long as on a new connection."""
        raise NotImplementedError

    def _allow(self, stop: float, cap: float, timer: float) -> None:
        self.stop = stop
        self.cap = cap
        self.timer = timer


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
class Periods:
    """Periods from loss to loss, of which equal ones are skipped together.

    Attributes:
        last: the last one that is over.
        num_alike: number of equal periods in a row before it.
        num_bytes: drained in the present one.
        was_held: the window, not the network alone, has limited the present one.
        granted: start of the present piece of growth.
        cap: its rate.
        skips: the present grant skips periods.
    """

    def __init__(self) -> None:
        self.last = Period(0.0, 0.0, 0.0, True)
        self.num_alike = 0
        self.num_bytes = 0.0
        self.was_held = False
        self.granted = 0.0
        self.cap = 0.0
        self.skips = False

    def drain(self, now: float, num_bytes: float) -> None:
        self.num_bytes += num_bytes
        self.was_held |= num_bytes >= self.cap * (now - self.granted) * ALIKE

    def end(self, now: float, seconds: float, window: float, avoids: bool) -> None:
        """End the present period with a loss at `window` bytes; `avoids`: it began with a loss, too."""
        before = self.last
        self.last = Period(seconds, self.num_bytes, window, self.was_held)
        self.num_alike = self.num_alike + 1 if avoids and self.last.is_like(before) else 0
        self.num_bytes = 0.0
        self.was_held = False
        self.granted = now

    def num_to_skip(self, left: float) -> int:
        """Number of periods to skip: at most as many as were equal before."""
        if self.num_alike < (2 if self.last.was_held else SETTLED):
            return 0
        return min(int(left / self.last.num_bytes), self.num_alike)

    def skip(self, num_bytes: float) -> float:
        """End a skip after `num_bytes`; returns the share of the present period that has passed."""
        self.skips = False
        num, part = divmod(num_bytes / self.last.num_bytes + ROUNDING, 1.0)
        part = max(part - ROUNDING, 0.0) if part > 2 * ROUNDING else 0.0
        self.num_alike += int(num)
        self.num_bytes = part * self.last.num_bytes
        return part


class Avoidance:
    """Window of a connection from a loss, or the end of slow start, to the next loss.

    Attributes:
        kept: share of the window that is left after a loss.
        lost_at: bytes of the window at the last loss, or where slow start ended.
        since: instant of the last loss, from which growth counts.
        has_fallen: it began with a loss.
        has_lost: there was a loss.
    """

    def __init__(self, tcp: TcpSettings, route: Route, kept: float) -> None:
        self.tcp = tcp
        self.route = route
        self.kept = kept
        self.periods = Periods()
        self.reset()

    def reset(self) -> None:
        """Return to the state of a new connection, which has had no loss."""
        self.lost_at = 0.0
        self.since = 0.0
        self.has_fallen = True
        self.has_lost = False

    def segments(self, seconds: float) -> float:
        """The window in segments, `seconds` after `since`."""
        raise NotImplementedError

    def growth_seconds(self) -> float:
        """Seconds after a loss in which the window is back at `lost_at`, about."""
        raise NotImplementedError

    def window(self, seconds: float) -> float:
        """The window in bytes, `seconds` after `since`."""
        limit = self.route.window_limit
        return min(self.segments(seconds) * self.route.segment, limit) if self.route.round_trip else limit

    def enter(self, now: float, window: float) -> None:
        """Go on from a window at which slow start ended without a loss."""
        self.has_fallen = False
        self.lost_at = window
        self.since = now - self.growth_seconds()

    def lose(self, now: float, window: float, avoids: bool) -> None:
        """Begin a period, after a loss at `window` bytes; `avoids`: slow start was over before."""
        lost_at = min(window, self.route.window_limit)
        self.periods.end(now, now - self.since, lost_at, avoids)
        self.has_fallen = self.has_lost = True
        self.lost_at = lost_at
        self.since = now
