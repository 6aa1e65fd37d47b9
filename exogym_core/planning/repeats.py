"""Steps of a round that do what the one before did: a few are simulated, and stand for the others.

In a round between sites every step but the last exchanges gradients inside them. Where a step takes as long as the one
before, the rest of them do too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.planning.round_figures import RoundFigures
    from netsim.ranks.kernel import StampedRow

__all__ = ["FEWEST_STEPS", "NUM_SIMULATED", "add_left_out", "is_left_out", "is_pace_step"]

#: Steps at a round's beginning that are simulated; the last of them stands for what is left out.
NUM_SIMULATED = 3
#: Rounds that are shorter are simulated as they are.
FEWEST_STEPS = NUM_SIMULATED + 2


def is_left_out(place: int, period: int) -> bool:
    """Whether the step at this place of a round is left to what the others show."""
    return NUM_SIMULATED <= place < period - 1


def is_pace_step(place: int) -> bool:
    """Whether the end of the step at this place tells how long one takes."""
    return place in (NUM_SIMULATED - 2, NUM_SIMULATED - 1)


def add_left_out(
    figures: RoundFigures,
    marked: Sequence[StampedRow],
    period: int,
    seconds: Sequence[Callable[[int], float]],
) -> None:
    """Put into figures of rounds what the steps that were left out take and send.

    Args:
        figures: as they were simulated; changed.
        marked: rows of the pace steps, with `round` and `place`.
        period: steps a round.
        seconds: of computing by step, one function a rank, the same for every step.
    """
    num_left = period - FEWEST_STEPS + 1
    rows: dict[tuple[int, int, int], tuple[float, Mapping[str, Any]]] = {
        (row.rank, row.row["round"], row.row["place"]): (row.virtual_seconds, row.row) for row in marked
    }
    first, second = NUM_SIMULATED - 2, NUM_SIMULATED - 1
    later = 0.0
    for number in range(len(figures.round_seconds)):
        ranks = range(len(figures.rank_ends))
        took = max(rows[rank, number, second][0] - rows[rank, number, first][0] for rank in ranks)
        later += num_left * took
        figures.round_seconds[number] += later
        for rank in ranks:
            figures.rank_ends[rank][number] += later
            computing = seconds[rank](0)
            figures.compute_seconds[rank] += num_left * computing
            figures.exposed_seconds[rank] += num_left * max(took - computing, 0.0)
            before, after = rows[rank, number, first][1], rows[rank, number, second][1]
            for name in ("bytes_sent", "wan_bytes", "payload_bytes"):
                counts = getattr(figures, name)[rank]
                for place in range(number, len(counts)):
                    counts[place] += num_left * (after[name] - before[name])
