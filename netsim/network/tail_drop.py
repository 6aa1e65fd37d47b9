"""Tail drop: when bursts fill a queue, and what a window may send after that, until the loss is repaired.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple, final

# By how much a queue must be overrun, relatively: rates carry rounding, and round figures often fit exactly.
OVERRUN: Final = 1.0 + 1e-6


class Burst(NamedTuple):
    """A burst on its way into a queue.

    Attributes:
        began: instant of its first byte.
        num_bytes: its size.
        source: host whose line it shares with the host's other bursts.
        feed: bytes per second that the line carries.
    """

    began: float
    num_bytes: float
    source: int
    feed: float


def meet(bursts: list[Burst], room: float, rate: float) -> tuple[float, float, float]:
    """Let bursts fill the `room` in a queue that drains at `rate`.

    Returns:
        The rate at which they arrive together, the bytes of the first of them that find room, and the instant at which
        the queue is full; infinity where it never is.
    """
    num_by_source: dict[int, int] = {}
    for each in bursts:
        num_by_source[each.source] = num_by_source.get(each.source, 0) + 1
    lines = [each.feed / num_by_source[each.source] for each in bursts]
    began = min([each.began for each in bursts])
    are_over = [False for _ in bursts]
    while True:  # bursts that end before the queue is full leave its room to others
        arriving = -rate
        arrived = rate * began  # at instant 0, were they under way then
        for each, line, is_over in zip(bursts, lines, are_over, strict=True):
            arriving += 0.0 if is_over else line
            arrived += each.num_bytes if is_over else -line * each.began
        if arriving <= 0.0:
            return sum(lines), inf, inf
        full_at = (room - arrived) / arriving
        # One that is over stays so: rounding may place the end of a burst on either side of the instant, for ever.
        over = [
            is_over or line * (full_at - each.began) > each.num_bytes
            for each, line, is_over in zip(bursts, lines, are_over, strict=True)
        ]
        if over == are_over:
            return sum(lines), max(lines[0] * (full_at - bursts[0].began), 0.0), full_at
        are_over = over


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


@final
class TailDrop:
    """Rounds after a queue was overrun.

    Attributes:
        is_active: the queue was overrun, and the sender has not fallen yet.
        missing: bytes of the message that the queue dropped, until they are sent again.
        window: bytes of the window at the loss, when no round is left.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.missing = 0.0
        self.window = 0.0
        self._rounds: list[WindowRound] = []

    def clear(self) -> None:
        self.is_active = False
        self.missing = 0.0

    def begin(self, rounds: list[WindowRound], window: float) -> None:
        """Begin with the first of `rounds`, whose missing bytes are lost."""
        self.is_active = True
        self.missing = rounds[0].missing
        self.window = window
        self._rounds = rounds

    def next_round(self) -> WindowRound | None:
        """The next round; None after the last one."""
        if not self._rounds:
            self.clear()
            return None
        first = self._rounds[0]
        self._rounds = self._rounds[1:]
        self.missing = first.missing
        return first


@final
class Bottleneck:
    """Share of the narrowest link that one sender has.

    Attributes:
        rate: bytes per second that it gets.
        share: bytes of the queue that are its own.
        pipe: bytes in flight without a queue: rate x round trip.
        round_trip: seconds.
        segment: bytes of one.
        limit: bytes of the socket's buffer.
        kept: share of the window that a loss leaves.
    """

    def __init__(
        self,
        rate: float,
        share: float,
        pipe: float,
        round_trip: float,
        segment: float,
        limit: float,
        kept: float,
    ) -> None:
        self.rate = rate
        self.share = share
        self.pipe = pipe
        self.round_trip = round_trip
        self.segment = segment
        self.limit = limit
        self.kept = kept

    def overrun_by_burst(self, drop: TailDrop, window: float, left: float) -> None:
        """Overflow by a window of slow start that arrives faster than it drains; `window` > 2 `share`.

        Args:
            drop: is to begin.
            window: bytes of the round.
            left: bytes of the message before the round.
        """
        heard = 2 * self.share  # acknowledged before the first loss is
        grown = window + heard
        missing = (min(window, left) - heard) / 2
        following = min(2 * heard + max(window - heard - (1 - self.kept) * grown, 0.0), self.limit)
        first = WindowRound(following, missing)
        if grown <= self.limit:
            drop.begin([first], grown)
            return
        waiting = self._stuck(missing)
        burst = min(self.kept * grown, self.limit, left - window)
        if burst <= self.share:
            drop.begin([first, waiting], grown)
            return
        again = (burst - self.share) / self.rate
        drop.begin([first, waiting, WindowRound(0.0, 0.0, waiting.later + again)], burst)

    def overrun_by_standing_window(self, drop: TailDrop, window: float, left: float) -> None:
        """Overflow by a window that has filled the pipe, and the queue cannot hold the rest; arguments as above."""
        missing = min(window - self.pipe - self.share, left)
        first = WindowRound(self.pipe, missing)
        rounds = [first] if window < self.limit else [first, self._stuck(missing)]
        drop.begin(rounds, self.pipe + self.share)

    def _stuck(self, missing: float) -> WindowRound:
        """Round in which only the missing bytes leave, and those that they release, while the full queue drains."""
        return WindowRound(missing + self.segment, 0.0, -min(self.share / self.rate, self.round_trip))
