"""What ranks have sent, counted by the simulation as it serves what they request."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from netsim.ranks.requests import Post

if TYPE_CHECKING:
    from exogym_core.communicator.simulated.port import ScheduleBook
    from netsim.ranks.requests import Call, Request

__all__ = ["SentBytes"]


class SentBytes:
    """Counts the calls of ranks that do not count themselves."""

    def __init__(self) -> None:
        self._num: Counter[tuple[int, Call, int]] = Counter()

    def take(self, rank: int, request: Request) -> None:
        """Count what a rank has requested."""
        if isinstance(request, Post):
            self._num[rank, request.call, request.member] += 1

    def bytes_of(self, num_ranks: int, book: ScheduleBook) -> list[tuple[int, int]]:
        """(bytes sent, bytes sent to another region) of each rank."""
        sent, wan = [0] * num_ranks, [0] * num_ranks
        for (rank, call, member), num in self._num.items():
            once = book.traffic(call, member)
            sent[rank] += num * once[0]
            wan[rank] += num * once[1]
        return list(zip(sent, wan, strict=True))
