"""Requests of ranks that may be absent: meetings, joint work under a time-out, published states; and their answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from exogym_core.communicator.deadlines import Deadline

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from netsim.ranks import Key

__all__ = [
    "Arrival",
    "Confirm",
    "Fetch",
    "Fetched",
    "Join",
    "Keep",
    "Met",
    "Publish",
]


class Arrival(NamedTuple):
    """A member that joined in time, and its weight."""

    member: int
    weight: float


class Join(NamedTuple):
    """Join a meeting; ask which ranks are present, once that is settled. The answer is a `Met`.

    A meeting with a number is settled when all awaited ranks have joined and reach each other, else `seconds` after the
    first has joined. Ranks that join at that very instant are included; ranks out of reach of the others are not. Later
    ones are answered at once.

    Without a number it is the next meeting of the group with this rank, formed as torchft's lighthouse forms quorums:
    as soon as all members of the one before are there; else when more than half of the members that answer are, and
    all of these or `seconds` have passed since the first came. A member answers until it has been down, paused or cut
    off for `HEARTBEAT_SECONDS`. Who comes later is in the next one. A crash takes back what the rank has asked; once
    it is up, and has computed again what it has lost, it asks again. None is the answer to a rank without which the
    others have ended.

    Attributes:
        key: the group of the meeting, and its number or None.
        member: the arriving rank, by its position among `ranks`.
        ranks: all that may join.
        seconds: time that the others have from the first arrival, whose value counts.
        averaging_seconds: time-out of their joint work, until all have sent `Confirm`.
        weight: reported to all that are present, with the member; without a number it is that of the rank's state, and
            grows from meeting to meeting.
        awaited: ranks to wait for; None: all. Ranks that fetched the group's state of this number are, too.
        is_past: it was answered in an earlier part of the run, and is not asked again.
        deadline: learned deadline, quorum and grace; its first member's counts.
        num_positions: member m is at position m modulo this; neither the meeting nor its work goes on while a position
            has no member.
    """

    key: Key
    member: int
    ranks: tuple[int, ...]
    seconds: float
    averaging_seconds: float = math.inf
    weight: float = 1.0
    awaited: tuple[int, ...] | None = None
    is_past: bool = False
    deadline: Deadline = Deadline()
    num_positions: int = 1

    def has_all_positions(self, ranks: Collection[int]) -> bool:
        """True if each position has one of these ranks."""
        return len({self.ranks.index(rank) % self.num_positions for rank in ranks}) == self.num_positions


class Met(NamedTuple):
    """A meeting that is settled.

    Attributes:
        present: its members, in order.
        num_alive: members that were alive then: they have been awaited or have come before, and their hosts are up and
            have a link that is up.
        number: of the meeting; counted from 0 where ranks have joined the next one, for which the others are:
        sources: members with the newest state, of the greatest weight; of equal weights the last to have met.
        is_newest: no meeting before had this weight; else these members repeat what others have done without them.
        since_last: seconds since the last meeting was formed, or since the start.
    """

    present: tuple[Arrival, ...]
    num_alive: int
    number: int
    sources: tuple[int, ...] = ()
    is_newest: bool = True
    since_last: float = 0.0


class Keep(NamedTuple):
    """Take part in the meetings of `group` from now on, and keep the state: a crash loses what is computed later.

    That is computed again when the rank's host is up, before anything else.
    """

    group: Hashable


class Confirm(NamedTuple):
    """Finish the joint work of the ranks that joined `key`; ask whether all have finished.

    The answer is the ranks left: all of them, or at the time-out those that still reach each other
    (without the slowest, where all do), which may begin again. Then calls among them are cancelled at once.

    Attributes:
        key: the name of the meeting.
        attempt: number of times that the ranks left have begun again.
        is_past: as for `Join`.
    """

    key: Key
    attempt: int
    is_past: bool = False


class Publish(NamedTuple):
    """Publish this rank's state of `num_bytes` as `key` (group, number), for others to fetch.

    All that publish under one key have the same state, and older numbers are obsolete.
    """

    key: Key
    num_bytes: int


class Fetch(NamedTuple):
    """Download the newest state of `group` from the nearest rank that has it; ask which, on arrival.

    Attributes:
        group: whose state.
        at_least: the oldest number of use; waits until a rank publishes it or a newer one.
        is_past: as for `Join`.
        source: the rank to download from, which is waited for; None: the nearest.
        is_open: a state is of no use once its meeting, of the same number, is settled: waits for the next one.
    """

    group: Hashable
    at_least: int
    is_past: bool = False
    source: int | None = None
    is_open: bool = False


class Fetched(NamedTuple):
    """Result of a `Fetch`: number of the state, rank that sent it, bytes."""

    number: int
    source: int
    num_bytes: int
