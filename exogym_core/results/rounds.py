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
        dropped_peers: absences in order: `rank`; `step` and `virtual_seconds`, the end of the first round without
            it; `back_step` and `back_virtual_seconds`, the step after which it goes on, and when it has what it
            needs for that; None if never.
    """

    def __init__(self, num_ranks: int) -> None:
        self.has_any = False
        self.dropped_peers: list[dict[str, Any]] = []
        self._num_ranks = num_ranks
        self._held: dict[int, dict[int, dict[int, StampedRow]]] = {}  # round -> step -> rank -> row
        self._num_over = 0
        self._present: Sequence[int] = ()
        self._steps_a_round = 1
        self._ends = array("d", [0.0])  # when each round was over, the start being round 0
        self._absent: dict[int, dict[str, Any]] = {}
        self._first_missed: dict[int, int] = {}  # of those absent: the round that their absence began with
        self._returns: dict[int, _Return] = {}  # each rank's latest

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
            self._returns[marked.rank] = returned
            self._note_return(marked.rank)
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
        """A round is over: note who was missing for the first time, or again."""
        self._steps_a_round = step // number
        self._ends.extend([seconds] * (number + 1 - len(self._ends)))
        for rank in range(self._num_ranks):
            absence = self._absent.get(rank)
            if rank in self._present:
                self._absent.pop(rank, None)
            elif absence is None or (absence["back_step"] is not None and absence["back_step"] < step):
                self._begin(rank, number)

    def _begin(self, rank: int, number: int) -> None:
        """This is the first round without a rank that was there, or ready to be."""
        self._first_missed[rank] = number
        self._absent[rank] = {
            "rank": rank,
            "step": number * self._steps_a_round,
            "virtual_seconds": self._ends[number],
            "back_step": None,
            "back_virtual_seconds": None,
        }
        self.dropped_peers.append(self._absent[rank])
        self._note_return(rank)

    def _note_return(self, rank: int) -> None:
        """Complete the absence that a rank has come back from; it may have missed the next round by then."""
        returned = self._returns.get(rank)
        if rank not in self._absent or returned is None:
            return
        if returned.missed <= self._first_missed[rank] < returned.back < math.inf:
            back = int(returned.back)
            self._absent[rank]["back_step"] = (back - 1) * self._steps_a_round
            self._absent[rank]["back_virtual_seconds"] = returned.seconds
            if back <= self._num_over:
                self._begin(rank, back)
