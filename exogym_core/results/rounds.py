"""Rows of steps that belong to rounds some ranks may be left out of: who was, when, and until when."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from netsim.ranks.kernel import StampedRow

__all__ = ["Rounds"]


class _Return(NamedTuple):
    """A rank missed rounds from one on and goes on in another (infinity: never), since an instant."""

    missed: int
    back: float
    seconds: float


class Rounds:
    """Keeps rows back until it is known who took part in their round: only those have done its steps.

    A row's `round` counts from 1. At a round's end the rows of those who took part hold `averaged_ranks`. The
    first row of a rank after it has caught up tells the first round it missed, `missed_round`, and in which it
    goes on, `back_in_round` (None: never).

    Args:
        num_ranks: all ranks of the run.

    Attributes:
        has_any: whether there were such rows.
    """

    def __init__(self, num_ranks: int) -> None:
        self.has_any = False
        self._num_ranks = num_ranks
        self._held: dict[int, dict[int, dict[int, StampedRow]]] = {}  # round -> step -> rank -> row
        self._num_over = 0
        self._present: Sequence[int] = ()
        self._steps_a_round = 1
        self._ends = array("d", [0.0])  # when each round was over, the start being round 0
        self._missed: dict[
            int, list[tuple[int, int]]
        ] = {}  # rank -> first and last of rounds missed in a row
        self._away: set[int] = set()  # those who missed the last round
        self._returns: dict[int, list[_Return]] = {}

    def add(self, marked: StampedRow) -> Iterator[list[StampedRow]]:
        """Take in a row; gives the steps that are complete with it, in order, as rows of those who did them."""
        self.has_any = True
        row = marked.row
        number, step = row["round"], row["step"]
        if "missed_round" in row:
            back = row["back_in_round"]
            returned = _Return(
                row["missed_round"], math.inf if back is None else back, marked.virtual_seconds
            )
            self._returns.setdefault(marked.rank, []).append(returned)
        if number <= self._num_over:
            return  # of a round that went on without this rank
        ranks = self._held.setdefault(number, {}).setdefault(step, {})
        ranks[marked.rank] = marked
        present = row.get("averaged_ranks")
        if present is not None and all(rank in ranks for rank in present):
            self._num_over, self._present = number, present
            self._end(number, step, max(ranks[rank].virtual_seconds for rank in present))
            yield from self._complete(number)

    def finish(self) -> Iterator[list[StampedRow]]:
        """No more rows will come: gives what was done after the last round by all who took part in that."""
        for number in sorted(self._held):
            yield from self._complete(number)

    def _complete(self, number: int) -> Iterator[list[StampedRow]]:
        steps = self._held.pop(number)
        for step in sorted(steps):
            ranks = steps[step]
            present = self._present or sorted(ranks)
            if any(rank not in ranks for rank in present):
                return
            yield [ranks[rank] for rank in present]

    # --- absences -------------------------------------------------------------------------------------------

    def _end(self, number: int, step: int, seconds: float) -> None:
        """A round is over: note who was missing."""
        self._steps_a_round = step // number
        self._ends.extend([seconds] * (number + 1 - len(self._ends)))
        for rank in range(self._num_ranks):
            missed = self._missed.setdefault(rank, [])
            if rank in self._present:
                self._away.discard(rank)
            elif rank in self._away:
                missed[-1] = (missed[-1][0], number)
            else:
                missed.append((number, number))
                self._away.add(rank)

    def dropped_peers(self, clock: str = "virtual_seconds") -> list[dict[str, Any]]:
        """Absences in order of their first steps, whatever order rows have come in.

        Args:
            clock: what the times are called.

        Returns:
            Of each `rank`; `step` and the `clock`'s time, the end of the first round without it; `back_step` and
            `back_` of the time, the step after which it goes on, and when it has what it needs for that; None if never.
        """
        absences = [
            {
                "rank": rank,
                "step": first * self._steps_a_round,
                clock: self._ends[first],
                "back_step": None if back is None else (int(back.back) - 1) * self._steps_a_round,
                f"back_{clock}": None if back is None else back.seconds,
            }
            for rank, spans in self._missed.items()
            for span in spans
            for first, back in self._parts(rank, *span)
        ]
        return sorted(absences, key=lambda absence: (absence["step"], absence["rank"]))

    def _parts(self, rank: int, first: int, last: int) -> Iterator[tuple[int, _Return | None]]:
        """Absences within rounds that a rank missed in a row: it may have been back, and late for the next round."""
        while first <= last:
            returns = [
                each for each in self._returns.get(rank, ()) if each.missed <= first < each.back < math.inf
            ]
            back = min(returns, key=lambda each: each.back, default=None)
            yield first, back
            first = last + 1 if back is None else int(back.back)
