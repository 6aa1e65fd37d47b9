"""What a run tells of absences is the same at every site, though each hears of them in an order of its own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exogym_core.results.rounds import Rounds
from exogym_core.training.in_rounds import RoundsInOrder
from netsim.ranks.kernel import StampedRow

PRESENT = {1: [0, 1, 2], 2: [0, 1], 3: [0, 1], 4: [0, 1], 5: [0], 6: [0, 1, 2], 7: [0, 1, 2]}
ABSENCES = [
    {"rank": 2, "step": 4, "wall_seconds": 2.0, "back_step": 6, "back_wall_seconds": 3.5},
    {"rank": 2, "step": 8, "wall_seconds": 4.0, "back_step": 10, "back_wall_seconds": 5.5},
    {"rank": 1, "step": 10, "wall_seconds": 5.0, "back_step": 10, "back_wall_seconds": 5.2},
]
RETURNS = {
    (2, 4): (2, 4, 3.5),
    (2, 6): (4, 6, 5.5),
    (1, 6): (5, 6, 5.2),
}  # (rank, round) -> missed, back, when


def rows_of(rank: int) -> list[StampedRow]:
    """What one rank says, in order: it steps in rounds that go on without it, too."""
    rows = []
    for number, present in PRESENT.items():
        for step in (2 * number - 1, 2 * number):
            row: dict[str, Any] = {"round": number, "step": step, "loss": 1.0}
            seconds = float(number)
            if (rank, number) in RETURNS and step % 2:
                missed, back, seconds = RETURNS[rank, number]
                row |= {"missed_round": missed, "back_in_round": back}
            if step % 2 == 0 and rank in present:
                row["averaged_ranks"] = present
            rows.append(StampedRow(rank, seconds, 0.0, 0.0, row))
    return rows


@given(st.lists(st.integers(0, 16), min_size=8, max_size=8))
def test_absences_do_not_depend_on_the_order_in_which_ranks_are_heard(late: list[int]) -> None:
    """The rows of rank 2 of the rounds without it come at any time."""
    others = [0, 0, 1, 1] * 4
    for place in sorted(late, reverse=True):
        others.insert(place, 2)
    rounds, in_order = Rounds(3), RoundsInOrder()
    said = {rank: iter(rows_of(rank)) for rank in range(3)}
    for rank in (*[0, 1, 2] * 2, *others, *[0, 1, 2] * 4):
        marked = next(said[rank])
        for whose, row in in_order.add(rank, {**marked.row, "wall_seconds": marked.virtual_seconds}):
            list(rounds.add(StampedRow(whose, row["wall_seconds"], 0.0, 0.0, row)))
    assert rounds.dropped_peers("wall_seconds") == ABSENCES
