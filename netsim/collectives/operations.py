"""Operations of collectives: which members give and take each part; checks, early members and bounds follow from it.

A new operation is one row of `OPERATIONS`, and a row of its algorithms in `netsim.collectives.schedules.algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from netsim.collectives.schedules.schedule import Bytes, Schedule

__all__ = ["OPERATIONS", "Operation", "Side"]


class Side(Enum):
    """Members that hold a part before a collective, or need it afterwards."""

    ALL = auto()
    ROOT = auto()
    OWNER = auto()  # part i is member i's
    SENDER = auto()  # part (i, j) is for j, from i
    RECEIVER = auto()
    FIRST = auto()  # members 0 and 1 of a message
    SECOND = auto()


@dataclass(frozen=True)
class Operation:
    """Definition of a collective operation.

    Attributes:
        name: as torch.distributed calls it.
        gives: members that hold each part at the start; where all do, their parts are summed.
        takes: members that need each part, or its sum, at the end.
        has_size: its members pass elements.
        is_sent_empty: has messages without elements too: receivers learn that there are none.
        sends_first: gloo posts the send of a pair of messages before its receive.
    """

    name: str
    gives: Side
    takes: Side
    has_size: bool
    is_sent_empty: bool
    sends_first: bool

    @property
    def has_root(self) -> bool:
        """True if one member sends to all, or receives from all."""
        return Side.ROOT in (self.gives, self.takes)

    @cached_property
    def is_message(self) -> bool:
        """True for a message from the first of two members to the second."""
        return self.gives is Side.FIRST

    @cached_property
    def is_per_pair(self) -> bool:
        """True if every member has a part for every other."""
        return self.gives is Side.SENDER

    @property
    def is_whole(self) -> bool:
        """True if its only part is the whole tensor."""
        return not self.is_per_pair and Side.OWNER not in (self.gives, self.takes)

    def num_parts(self, num_ranks: int) -> int:
        """Number of parts of the layout: one, one a rank, or one a pair."""
        if self.is_whole:
            return 1
        return num_ranks**2 if self.is_per_pair else num_ranks

    def total_passes(self, num_parties: int) -> int:
        """Least number of times that each byte passes between parties; 1 if a part has one giver and one taker.

        A sum of g addends takes g - 1 messages, and t - 1 more bring it to t
        members (Patarasuk and Yuan 2009, theorem 1).
        """
        every = (self.gives is Side.ALL) + (self.takes is Side.ALL)
        return (every * (num_parties - 1) if every else 1) * self.has_size

    def parts_of(self, side: Side, schedule: Schedule, member: int) -> range:
        """Parts of the layout that a member has on a side."""
        num = schedule.num_ranks
        if side is Side.OWNER:
            return range(member, member + 1)
        if side is Side.SENDER:
            return range(member * num, (member + 1) * num)
        if side is Side.RECEIVER:
            return range(member, num * num, num)
        return range(len(schedule.parts) if self.member(side, schedule.root) in (None, member) else 0)

    def least_bytes(self, schedule: Schedule) -> tuple[Bytes, Bytes]:
        """Least bytes that each member sends, and receives, by any algorithm: what others take of it, and give it."""
        given, taken = self._bytes_of(self.gives, schedule), self._bytes_of(self.takes, schedule)
        diagonal = slice(None, None, schedule.num_ranks + 1)
        kept = schedule.parts[diagonal] if self.is_per_pair else np.minimum(given, taken)
        is_alone = schedule.num_ranks == 1
        sent = given - (kept if is_alone or self.takes is not Side.ALL else 0)
        received = taken - (kept if is_alone or self.gives is not Side.ALL else 0)
        return sent * self.has_size, received * self.has_size

    def _bytes_of(self, side: Side, schedule: Schedule) -> Bytes:
        """Bytes of each member on a side, shape (num_ranks,)."""
        parts, num = schedule.parts, schedule.num_ranks
        if side is Side.OWNER:
            return parts
        if side in (Side.SENDER, Side.RECEIVER):
            table: Bytes = parts.reshape(num, num).sum(axis=int(side is Side.SENDER))
            return table
        only = self.member(side, schedule.root)
        return np.array([int(parts.sum()) * (only in (None, member)) for member in range(num)])

    def crossing_bytes(self, schedule: Schedule, inside: npt.NDArray[np.bool_]) -> int:
        """Bytes that must leave the members `inside` by any algorithm: parts with a giver inside and a taker outside.

        Args:
            schedule: gives the parts and the root.
            inside: mask of the members.
        """
        if self.is_per_pair:
            table = schedule.parts.reshape(schedule.num_ranks, -1)
            return int(table[np.ix_(inside, ~inside)].sum())
        leaves = self._any(self.gives, inside, schedule.root) & self._any(self.takes, ~inside, schedule.root)
        return int((schedule.parts * leaves).sum())

    @staticmethod
    def member(side: Side, root: int) -> int | None:
        """The only member on this side, whatever the part; None if there are several."""
        return {Side.ROOT: root, Side.FIRST: 0, Side.SECOND: 1}.get(side)

    def _any(self, side: Side, members: npt.NDArray[np.bool_], root: int) -> Any:
        """By part: True if any of these members is on this side of it."""
        if side is Side.OWNER:
            return members
        only = self.member(side, root)
        return members.any() if only is None else members[only]


# gloo's allgather.cc, alltoall.cc and alltoallv.cc post a send before the receive of its pair; its others, after it.
OPERATIONS: Mapping[str, Operation] = {
    row.name: row
    for row in (
        Operation("all_reduce", Side.ALL, Side.ALL, has_size=True, is_sent_empty=False, sends_first=False),
        Operation("all_gather", Side.OWNER, Side.ALL, has_size=True, is_sent_empty=False, sends_first=True),
        Operation(
            "reduce_scatter", Side.ALL, Side.OWNER, has_size=True, is_sent_empty=False, sends_first=False
        ),
        Operation("broadcast", Side.ROOT, Side.ALL, has_size=True, is_sent_empty=False, sends_first=False),
        Operation("reduce", Side.ALL, Side.ROOT, has_size=True, is_sent_empty=False, sends_first=False),
        Operation("gather", Side.OWNER, Side.ROOT, has_size=True, is_sent_empty=False, sends_first=False),
        Operation("scatter", Side.ROOT, Side.OWNER, has_size=True, is_sent_empty=False, sends_first=False),
        Operation(
            "all_to_all", Side.SENDER, Side.RECEIVER, has_size=True, is_sent_empty=True, sends_first=True
        ),
        Operation("barrier", Side.ALL, Side.ALL, has_size=False, is_sent_empty=True, sends_first=False),
        Operation("sendrecv", Side.FIRST, Side.SECOND, has_size=True, is_sent_empty=True, sends_first=False),
    )
}
"""Operations by name."""
