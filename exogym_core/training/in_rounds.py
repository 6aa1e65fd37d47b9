"""Rows of sites that come and go, in the order in which rounds ended: the same at every site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["RoundsInOrder"]

_LOST_ROUNDS = (
    2  # rows of a round that are not here when one so much later is whole were lost with their site
)


class RoundsInOrder:
    """Rows of sites come one round after the other, whole: they may be late on their way, or lost with their site.

    Of a rank that was left out of a round's average there are no rows of that round, whether they were here in time or
    not, as they are in time at one site and late at another; only what it tells of its absence counts.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}  # by round
        self._ends: dict[int, dict[int, Mapping[str, Any]]] = {}  # rows of a round's end, by round and rank
        self._announced: dict[int, dict[int, Mapping[str, Any]]] = {}  # the same, before the round
        self._num_over = 0

    def announce(self, rank: int, row: Mapping[str, Any]) -> None:
        """A rank is about to end a round; this is its row, should it be lost before it marks one."""
        if row["round"] > self._num_over:
            self._announced.setdefault(row["round"], {})[rank] = row

    def add(self, rank: int, row: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Take in a row; gives those whose turn it is."""
        number = row.get("round")
        if number is None:
            yield rank, row
            return
        if number <= self._num_over:
            yield from _told_of_absence(rank, row)
            return
        self._waiting.setdefault(number, []).append((rank, row))
        if "averaged_ranks" in row:
            self._ends.setdefault(number, {})[rank] = row
        while (turn := self._next()) is not None:
            yield from self._given(turn)

    def _next(self) -> int | None:
        """The first round that waits, if all of it is here, or if it will never be."""
        first = min(self._waiting, default=0)
        if not first:
            return None
        is_lost = any(self._is_whole(number) for number in self._ends if number >= first + _LOST_ROUNDS)
        return first if self._is_whole(first) or is_lost else None

    def _is_whole(self, number: int) -> bool:
        ends = self._ends.get(number, {})
        return any(all(rank in ends for rank in row["averaged_ranks"]) for row in ends.values())

    def _given(self, number: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows, ends = self._waiting.pop(number), self._ends.pop(number, {})
        self._num_over = number
        announced = self._announced.pop(number, {})
        there = {rank for row in ends.values() for rank in row["averaged_ranks"]}
        for rank in sorted(there - set(ends)):  # it took part, and died then
            if rank in announced:
                ends[rank] = {**announced[rank], "averaged_ranks": sorted(there)}
                rows.append((rank, ends[rank]))
        known = sorted(ends)
        for rank, row in sorted(rows, key=lambda each: (each[1]["step"], each[0])):
            if there and rank not in there:
                yield from _told_of_absence(rank, row)
                continue
            is_cut = "averaged_ranks" in row and any(other not in ends for other in row["averaged_ranks"])
            yield rank, {**row, "averaged_ranks": known} if is_cut else row

    def rest(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """No more rows will come: gives what is here."""
        for number in sorted(self._waiting):
            yield from self._given(number)


def _told_of_absence(rank: int, row: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """What is left of the row of a rank that was left out: when it was away; nothing of what it has done and sent."""
    if "missed_round" in row:
        kept = ("step", "round", "missed_round", "back_in_round", "wall_seconds")
        yield rank, {name: row[name] for name in kept if name in row}
