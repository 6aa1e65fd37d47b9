"""What a TCP sender goes through after the queue of its bottleneck has run full in slow start.

A window arrives at twice the rate at which the bottleneck drains (each acknowledgement of two segments lets four
go), so a queue of Q bytes is full after 2 Q of it, and loses half of what follows. The sender hears of that in the
next round, in which it goes on growing by all that was acknowledged before, and then falls to 0.7 of what the
window has become (RFC 9438), while what was lost is sent again (RFC 6675).

If by then the window exceeds the socket's buffer, nothing new leaves until the first hole is filled: for a round
trip the queue only drains. Then all that the window allows leaves at once, since nothing paces it (as in ns-3, and
in Linux without `fq`); a queue that cannot take that loses the rest, and another round trip goes by, with the time
that the retransmissions take at the bottleneck's rate.

A queue that runs full while a window stands in it, more than the pipe holds, loses what does not fit, in the same
way.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KEPT", "Bottleneck", "Overflow", "WindowRound", "of_a_burst", "of_a_standing_window"]

KEPT = 0.7  # of the window, at a loss: beta of RFC 9438


class Bottleneck(NamedTuple):
    """What a sender finds there.

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
    """One of the rounds to come.

    Attributes:
        window: bytes that may drain in it.
        missing: bytes of the message that are still to be sent again at its end.
        later: seconds by which it begins after the round before is over; negative: earlier.
    """

    window: float
    missing: float
    later: float = 0.0


class Overflow(NamedTuple):
    """The rounds that follow, and the window in bytes that the sender falls from when they are over."""

    rounds: tuple[WindowRound, ...]
    window: float


def of_a_burst(window: float, limit: float, left: float, segment: float, there: Bottleneck) -> Overflow:
    """A window of slow start arrives faster than it drains and does not fit.

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
    stuck = _stuck(missing, segment, there)
    burst = min(KEPT * grown, limit, left - window)
    if burst <= there.share:
        return Overflow((first, stuck), grown)
    again = (burst - there.share) / there.rate
    return Overflow((first, stuck, WindowRound(0.0, 0.0, stuck.later + again)), burst)


def of_a_standing_window(
    window: float, limit: float, left: float, segment: float, there: Bottleneck
) -> Overflow:
    """A window of slow start has filled the pipe, and the queue cannot hold the rest; arguments as above."""
    missing = min(window - there.pipe - there.share, left)
    first = WindowRound(there.pipe, missing)
    rounds = (first,) if window < limit else (first, _stuck(missing, segment, there))
    return Overflow(rounds, there.pipe + there.share)


def _stuck(missing: float, segment: float, there: Bottleneck) -> WindowRound:
    """Only what is missing leaves, and what that lets go; meanwhile the full queue goes on draining."""
    return WindowRound(missing + segment, 0.0, -min(there.share / there.rate, there.round_trip))
