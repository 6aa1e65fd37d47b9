"""What a run tells of absences is the same at every site, though each hears of them in an order of its own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exogym_core.results.rounds import Rounds
from exogym_core.training.in_rounds import RoundsInOrder
from netsim.ranks.kernel import StampedRow

PRESENT = {1: [0, 1, 2], 2: [0, 1], 3: [0, 1], 4: [0, 1], 5: [0, 1, 2], 6: [0, 2], 7: [0, 1, 2]}
ABSENCES = [
    {"rank": 2, "step": 4, "wall_seconds": 2.0, "back_step": 6, "back_wall_seconds": 3.5},
    {"rank": 2, "step": 8, "wall_seconds": 4.0, "back_step": 8, "back_wall_seconds": 4.5},
    {"rank": 1, "step": 12, "wall_seconds": 6.0, "back_step": 12, "back_wall_seconds": 6.5},
]
RETURNS = {
    (2, 4): (2, 4, 3.5),
    (2, 5): (4, 5, 4.5),
    (1, 7): (6, 7, 6.5),
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


TWO_ROUNDS = st.permutations([0, 1, 2] * 4)


@given(st.tuples(TWO_ROUNDS, TWO_ROUNDS, TWO_ROUNDS, st.permutations([0, 1, 2] * 2)))
def test_absences_do_not_depend_on_the_order_in_which_ranks_are_heard(orders: tuple[list[int], ...]) -> None:
    rounds, in_order = Rounds(3), RoundsInOrder()
    said = {rank: iter(rows_of(rank)) for rank in range(3)}
    for rank in (rank for order in orders for rank in order):
        marked = next(said[rank])
        for whose, row in in_order.add(rank, {**marked.row, "wall_seconds": marked.virtual_seconds}):
            list(rounds.add(StampedRow(whose, row["wall_seconds"], 0.0, 0.0, row)))
    assert rounds.dropped_peers("wall_seconds") == ABSENCES
