"""Letters that cross the cut of a checkpoint: put before their sender's state was kept, taken after the receiver's.

Ranks keep their states each at its own virtual time, and nobody waits for it. A run that goes on repeats what each rank
has requested up to there. Then of a letter one of four things holds:

    put before, taken before    the receiver's state has it
    put before, taken after     nobody sends it again: it lies in the checkpoint
    put after, taken before     its sender sends it again, to the same bits; the receiver's state has it: it is dropped
    put after, taken after      like any

So any moments of the ranks make a consistent checkpoint (Lai and Yang, On distributed snapshots, 1987, whose coloured
messages these are; here a message from the future does no harm, since ranks repeat themselves exactly).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from netsim.ranks.requests import Mark, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from torch import Tensor

    from netsim.ranks.requests import Letter, Request, Take

__all__ = ["CrossingLetters", "LetterName", "letter_name"]

LetterName = tuple[tuple["Hashable", int], int]
"""((the box, who has put it there), its number among that rank's letters to the box)."""


def letter_name(take: Take, letter: Letter) -> LetterName:
    """What a letter that came of a `Take` is known by."""
    return (take.box, letter.source), letter.number


class CrossingLetters:
    """Follows letters through a run, and knows those that a checkpoint needs.

    Args:
        step: of the checkpoint that the run goes on from; 0 for one from the start.
        kept: the letters that lie in it.

    Attributes:
        kept: as given.
        look: what a letter holds that has not been taken; set by whoever has the values.
    """

    def __init__(self, step: int = 0, kept: Mapping[LetterName, tuple[Tensor, ...]] | None = None) -> None:
        self.kept = dict(kept or {})
        self.look: Callable[[LetterName], tuple[Tensor, ...]] = self.kept.__getitem__
        self._last_complete = step
        self._passed: Counter[int] = Counter()  # rank -> the step of the last checkpoint that has its state
        self._under_way: dict[LetterName, int] = {}  # not taken -> what its sender had passed
        self._open: dict[int, dict[LetterName, tuple[Tensor, ...]]] = {}  # step -> letters taken meanwhile

    def requested(self, rank: int, request: Request) -> None:
        """Told of every request as the clock serves it."""
        if isinstance(request, Put):
            self._under_way[(request.box, rank), request.number] = self._passed[rank]
        elif isinstance(request, Mark) and "checkpoint" in request.row:
            step = request.row["step"]
            self._passed[rank] = step
            if step > self._last_complete:
                self._open.setdefault(step, {})

    def taken(self, rank: int, names: Iterable[LetterName]) -> None:
        """A rank is about to have these letters."""
        for name in names:
            sent = self._under_way.pop(name)
            crossed = [step for step in self._open if sent < step <= self._passed[rank]]
            for step in crossed:
                self._open[step][name] = self.look(name)

    def complete(self, step: int) -> dict[LetterName, tuple[Tensor, ...]]:
        """Every rank has passed this step's checkpoint: the letters that belong to it."""
        taken = self._open.pop(step, {})
        waiting = {name: self.look(name) for name, sent in self._under_way.items() if sent < step}
        self._open = {other: letters for other, letters in self._open.items() if other > step}
        self._last_complete = max(step, self._last_complete)
        return taken | waiting
