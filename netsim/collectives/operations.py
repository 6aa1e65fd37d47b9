"""Operations of collectives: which members give and take each part; checks, early members and bounds follow from it.

A new operation is one row of `OPERATIONS`, and a row of its algorithms in `netsim.collectives.schedules.algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from netsim.collectives.schedules.schedule import Schedule

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
        is_sent_empty: without elements it has messages all the same, by which receivers learn that there is nothing.
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
        """One member sends to all, or receives from all."""
        return Side.ROOT in (self.gives, self.takes)

    @property
    def is_message(self) -> bool:
        """Two members, of which the first sends to the second."""
        return self.gives is Side.FIRST

    @property
    def is_per_pair(self) -> bool:
        """Every member has a part for every other."""
        return self.gives is Side.SENDER

    @property
    def is_whole(self) -> bool:
        """One part, the whole tensor."""
        return not self.is_per_pair and Side.OWNER not in (self.gives, self.takes)

    def num_parts(self, num_ranks: int) -> int:
        """Parts of the layout among so many members: one, one a rank, or one a pair."""
        if self.is_whole:
            return 1
        return num_ranks**2 if self.is_per_pair else num_ranks

    def needs_nobody(self, *, is_root: bool, is_empty: bool) -> bool:
        """True if a member has its result as soon as it has entered, without any other member's data."""
        if is_empty and not self.is_sent_empty:
            return True
        return (self.gives is Side.ROOT and is_root) or (self.takes is Side.ROOT and not is_root)

    def total_passes(self, num_parties: int) -> int:
        """Times that each byte passes between so many parties at least; 1 where a part has one giver and one taker.

        A sum of g addends takes g - 1 messages, and t - 1 more bring it to t
        members (Patarasuk and Yuan 2009, theorem 1).
        """
        every = (self.gives is Side.ALL) + (self.takes is Side.ALL)
        return (every * (num_parties - 1) if every else 1) * self.has_size

    def kept_bytes(self, schedule: Schedule) -> int:
        """Bytes of parts that the one who gives them needs itself."""
        if Side.ALL in (self.gives, self.takes) or self.is_message:
            return 0
        if self.is_per_pair:
            return int(schedule.parts[:: schedule.num_ranks + 1].sum())
        return int(schedule.parts[schedule.root])

    def crossing_bytes(self, schedule: Schedule, inside: npt.NDArray[np.bool_]) -> int:
        """Bytes that must leave some members, whatever the algorithm: a giver is among them, and a taker is not.

        Args:
            schedule: its parts and root count.
            inside: by member, whether it is one of them.
        """
        if self.is_per_pair:
            table = schedule.parts.reshape(schedule.num_ranks, -1)
            return int(table[np.ix_(inside, ~inside)].sum())
        leaves = _any(self.gives, inside, schedule.root) & _any(self.takes, ~inside, schedule.root)
        return int((schedule.parts * leaves).sum())


def _any(side: Side, members: npt.NDArray[np.bool_], root: int) -> Any:
    """Whether any of these members is on this side of each part, by part."""
    if side is Side.ALL:
        return members.any()
    if side is Side.OWNER:
        return members
    return members[{Side.ROOT: root, Side.FIRST: 0, Side.SECOND: 1}[side]]


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
