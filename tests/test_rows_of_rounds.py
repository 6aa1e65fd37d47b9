"""Rows of sites that come and go: whole rounds, one after the other, also of who died at a round's end."""

from __future__ import annotations

from typing import Any

from exogym_core.training.in_rounds import RoundsInOrder


def row(step: int, present: list[int] | None = None) -> dict[str, Any]:
    ends = {} if present is None else {"averaged_ranks": present}
    return {"step": step, "round": (step + 1) // 2, "loss": float(step), **ends}


def given(rounds: RoundsInOrder, *rows: tuple[int, dict[str, Any]]) -> list[tuple[int, int, Any]]:
    found = [each for rank, what in rows for each in rounds.add(rank, what)]
    return [(rank, each["step"], each.get("averaged_ranks")) for rank, each in found]


def test_who_dies_between_a_round_and_its_row_has_announced_it() -> None:
    """Its last step counts like those before; it was lost, and the round was told as if without that rank."""
    rounds, both = RoundsInOrder(), [0, 1]
    assert given(rounds, (0, row(1)), (1, row(1))) == []
    rounds.announce(0, row(2))
    rounds.announce(1, row(2))
    assert given(rounds, (0, row(2, both))) == []  # the other one's may be on its way
    assert given(rounds, (0, row(3)), (0, row(4, [0])), (0, row(5))) == []
    assert given(rounds, (0, row(6, [0]))) == [
        (0, 1, None), (1, 1, None), (0, 2, both), (1, 2, both),
        (0, 3, None), (0, 4, [0]), (0, 5, None), (0, 6, [0]),
    ]  # fmt: skip


def test_what_was_announced_and_left_out_of_the_round_is_no_row() -> None:
    rounds = RoundsInOrder()
    assert given(rounds, (0, row(1)), (1, row(1))) == []
    rounds.announce(1, row(2))
    assert given(rounds, (0, row(2, [0]))) == [(0, 1, None), (1, 1, None), (0, 2, [0])]


def test_a_run_that_ends_so_tells_it_at_its_end() -> None:
    rounds = RoundsInOrder()
    given(rounds, (0, row(1)), (1, row(1)))
    rounds.announce(1, row(2))
    assert given(rounds, (0, row(2, [0, 1]))) == []
    assert [(rank, each["step"]) for rank, each in rounds.rest()] == [(0, 1), (1, 1), (0, 2), (1, 2)]
