"""Who waits for whom among real ranks: what each says when it has waited a while, and who can never go on.

A rank counts what it has posted, lane by lane: calls of a group, messages of a tag from one rank to another. What it
waits for is that others have posted so many. Counts only grow, and those of a rank that waits stand still. So what
ranks have said may be old and still shows a deadlock truly: the first of them to go on would have needed a post that
another one had not made when it said what it waits for.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from netsim.files.errors import DeadlockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Pending", "Posted", "Want", "deadlock_among"]

_MOST_LANES = 500  # of which a rank tells, those it has used last


class Want(NamedTuple):
    """What a rank waits for.

    Attributes:
        text: the call and its place.
        needs: (rank, lane, how many posts of that rank in that lane), all of them.
        any_one: one of them is enough.
    """

    text: str
    needs: tuple[tuple[int, str, int], ...]
    any_one: bool = False


class Pending(NamedTuple):
    """What a rank says while it waits: what for, and what it has posted itself."""

    want: Want
    posted: dict[str, int]
    is_all: bool

    def to_text(self) -> str:
        """As it lies in the store."""
        return json.dumps([self.want, self.posted, self.is_all])

    @classmethod
    def of_text(cls, text: bytes) -> Pending:
        """What `to_text` has written."""
        (told, needs, any_one), posted, is_all = json.loads(text)
        return cls(
            Want(told, tuple((rank, lane, number) for rank, lane, number in needs), any_one), posted, is_all
        )

    def has_posted(self, lane: str, number: int) -> bool:
        """Whether so many posts in a lane may have been made."""
        found = self.posted.get(lane)
        return not self.is_all if found is None else found >= number


class Posted:
    """Counts a rank's posts by lane."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, lane: str) -> int:
        """One more; returns how many there are now."""
        number = self._counts.pop(lane, 0) + 1
        self._counts[lane] = number  # the last used stand last
        return number

    def count(self, lane: str) -> int:
        """How many posts in a lane there are."""
        return self._counts.get(lane, 0)

    def pending(self, want: Want) -> Pending:
        """What this rank says while it waits for `want`."""
        lanes = list(self._counts.items())
        return Pending(want, dict(lanes[-_MOST_LANES:]), len(lanes) <= _MOST_LANES)


def deadlock_among(pending: Mapping[int, Pending], others: Mapping[int, str]) -> DeadlockError | None:
    """The error if some of the ranks can never go on, by what they said last.

    Args:
        pending: of ranks that have said that they wait; those that have not may do anything.
        others: what else is to be told in the table, by rank.
    """
    missing = {rank: _missing(said, pending) for rank, said in pending.items()}
    hopeful: set[int] = set()
    grew = True
    while grew:
        grew = False
        for rank, said in pending.items():
            awaited = missing[rank]
            free = [each for each in awaited if each in hopeful or each not in pending]
            some = any if said.want.any_one else all
            if rank not in hopeful and (not awaited or some(each in free for each in awaited)):
                hopeful.add(rank)
                grew = True
    hopeless = {rank: missing[rank] for rank in sorted(pending) if rank not in hopeful}
    return DeadlockError(_told(hopeless, pending, others)) if hopeless else None


def _missing(said: Pending, pending: Mapping[int, Pending]) -> list[int]:
    """The ranks whose posts are not known to be there; none if what it waits for is under way."""
    needs = [
        (rank, rank in pending and pending[rank].has_posted(lane, number))
        for rank, lane, number in said.want.needs
    ]
    if said.want.any_one and any(is_there for _, is_there in needs):
        return []
    return sorted({rank for rank, is_there in needs if not is_there})


def _told(
    hopeless: Mapping[int, Sequence[int]], pending: Mapping[int, Pending], others: Mapping[int, str]
) -> str:
    waits = {
        rank: f"{'any of ' if pending[rank].want.any_one else ''}{_names(awaited)} in {pending[rank].want.text}"
        for rank, awaited in hopeless.items()
    }
    shown = "; ".join(f"rank {rank} waits for {text}" for rank, text in list(waits.items())[:4])
    more = f"; and {len(waits) - 4} more ranks" if len(waits) > 4 else ""
    rest = {rank: f"waits in {said.want.text}" for rank, said in pending.items()} | dict(others)
    table = [
        f"  rank {rank}: {f'waits for {waits[rank]}' if rank in waits else rest[rank]}"
        for rank in sorted({*waits, *rest})
    ]
    return "\n".join([f"deadlock: {shown}{more}", *table])


def _names(ranks: Sequence[int]) -> str:
    counted = Counter(ranks)
    return f"rank{'s' if len(counted) > 1 else ''} {', '.join(map(str, ranks))}"
