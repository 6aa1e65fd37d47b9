"""Deadlines of meetings, fixed or learned from earlier arrivals; quorums and grace; members awaited while they return.

Simulated meetings and those at a rendezvous apply the same rules; instants are of their own clocks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["SLOW_TIMES", "ArrivalDelays", "Deadline", "Returns"]

#: Downloads of a member that was too slow for two averages are not awaited, for this many times an average's time-out.
SLOW_TIMES = 10

_MEETINGS = 16  # whose arrivals are remembered


class Deadline(NamedTuple):
    """Rule by which a meeting closes while members that it waits for are missing.

    It closes `grace_seconds` after the deadline, or after the arrival of the `quorum`-th member if that is later. The
    deadline is a time after the first arrival: the meeting's own fixed one, which is the limit of a learned one.

    Attributes:
        median, mad: multiples of the median of earlier delays and of their median absolute deviation from it.
        quantile: instead, this quantile of the delays (0 to 1); 0: none.
        grace_seconds: see above.
        quorum: fewest members.
    """

    median: float = 0.0
    mad: float = 0.0
    quantile: float = 0.0
    grace_seconds: float = 0.0
    quorum: int = 1

    @property
    def is_learned(self) -> bool:
        """True if earlier arrivals decide."""
        return bool(self.median or self.mad or self.quantile)


class ArrivalDelays:
    """Delays of arrivals at the last meetings of a group, each from its meeting's first arrival (which counts as 0).

    >>> arrivals = ArrivalDelays()
    >>> for now in (5.0, 6.0, 7.0, 35.0):
    ...     arrivals.add(7, now)
    >>> arrivals.seconds(Deadline(median=1, mad=3), 60.0)  # 1.5 + 3 * 1
    4.5
    >>> arrivals.seconds(Deadline(quantile=0.75), 60.0), arrivals.seconds(Deadline(), 60.0)
    (2.0, 60.0)
    """

    def __init__(self) -> None:
        # Number, first, delays.
        self._meetings: deque[tuple[int, float, list[float]]] = deque(maxlen=_MEETINGS)

    def add(self, number: int, now: float, since: float | None = None) -> None:
        """Add an arrival at the meeting `number`, also one after it has closed.

        Args:
            number: of the meeting.
            now: instant of the arrival.
            since: instant from which its delay counts; None: the first arrival.
        """
        if not self._meetings or number > self._meetings[-1][0]:
            self._meetings.append((number, now, []))
        for known, first, delays in self._meetings:
            if known == number:
                delays.append(now - (first if since is None else since))

    def seconds(self, deadline: Deadline, limit: float, before: int | None = None) -> float:
        """Deadline in seconds after the first arrival: `limit` at most, and where nothing has been learned yet.

        Args:
            deadline: the rule.
            limit: fixed deadline.
            before: number of the meeting, whose own arrivals do not count; None: all count.
        """
        if not deadline.is_learned:
            return limit
        delays = sorted(
            delay for number, _, own in self._meetings if before is None or number < before for delay in own
        )
        if not delays:
            return limit
        if deadline.quantile:
            return min(limit, delays[math.ceil(deadline.quantile * len(delays)) - 1])
        middle = median(delays)
        deviation = median(abs(delay - middle) for delay in delays)
        return min(limit, deadline.median * middle + deadline.mad * deviation)


@dataclass(slots=True, eq=False)
class Returns:
    """Members that return to a group's meetings by downloading its state, and those too slow for its averages.

    Attributes:
        downloaded: by member, number of the last state that it downloaded, and age of that state then.
        slow: by member, averages without it in a row, and until when its downloads are not awaited.
    """

    downloaded: dict[int, tuple[int, float]] = field(default_factory=dict)
    slow: dict[int, tuple[int, float]] = field(default_factory=dict)

    def ages(self, number: int) -> dict[int, float]:
        """Members whose last download was the state of this number, and its age then."""
        return {member: age for member, (last, age) in self.downloaded.items() if last == number}

    def awaited(self, number: int, due: float, downloading: Collection[int], now: float) -> set[int]:
        """Members that download the state of this number, or have just done so.

        They are awaited beyond the time that is `due`, by as much as they got the state later.
        """
        found = {member for member, age in self.ages(number).items() if now < due + age}
        return {member for member in found.union(downloading) if now >= self.slow.get(member, (0, now))[1]}

    def forget(self, member: int) -> None:
        """Forget a member, which another takes the place of."""
        self.downloaded.pop(member, None)
        self.slow.pop(member, None)

    def are_slow(self, members: Collection[int], averaging_seconds: float, now: float) -> None:
        """Stop waiting for downloads of members that were too slow twice, for a while: they would delay all others."""
        for member in members:
            num_slow, _ = self.slow.get(member, (0, now))
            _, age = self.downloaded.get(member, (0, 0.0))
            self.slow[member] = (
                num_slow + 1,
                now + (SLOW_TIMES * (averaging_seconds + age) if num_slow else 0.0),
            )
