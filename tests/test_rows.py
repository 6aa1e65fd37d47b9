"""Rows kept as columns, and rows of sites that join and leave: whole rounds in order."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exogym_core.events import Absent, RoundPlace, StepDone
from exogym_core.results.fit_result import Rows
from exogym_core.results.loggers import Table
from exogym_core.results.recorder import Rounds
from exogym_core.results.schema import TRAIN, csv_text, header
from netgym.sites.elastic_runs import RowOrder
from netsim.ranks import StampedRow

values = st.one_of(st.integers(), st.floats(allow_nan=False), st.none(), st.booleans(), st.text(max_size=2))
tables = st.lists(st.dictionaries(st.sampled_from("abcd"), values), max_size=8)


@given(tables)
def test_rows_come_back_as_they_were_given_types_included(table: list[dict[str, Any]]) -> None:
    rows = Rows(table)
    assert list(rows) == rows[:] == table
    assert rows == table
    assert [{name: type(value) for name, value in row.items()} for row in rows] == [
        {name: type(value) for name, value in row.items()} for row in table
    ]
    assert rows == Rows(table)
    assert len(rows) == len(table)
    assert table[::-2] == rows[::-2]
    if table:
        assert rows[-1] == table[-1]
        assert rows != [*table[:-1], {**table[-1], "e": 1}]


def test_a_long_run_costs_eight_bytes_a_column() -> None:
    """A dict a row took 500 bytes and more."""
    tracemalloc.start()
    try:
        rows = Rows({"step": step, "loss": step / 7, "seconds": None} for step in range(10_000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(rows) == 10_000
    assert held < 10_000 * 3 * 8 * 1.3


def test_rows_are_appended_and_none_is_kept(tmp_path: Path) -> None:
    """The logger of a named run kept every row and wrote the whole file at each evaluation."""
    table, rows = Table(tmp_path / "train.csv", header(TRAIN)), []
    file = (tmp_path / "train.csv").stat().st_ino
    for step in range(1, 2501):
        rows.append({"step": step, "train_loss": 1 / step, "virtual_seconds": None})
        table.add(rows[-1])
    written = (tmp_path / "train.csv").read_text().splitlines()
    assert len(written) - 1 > len(rows) - 1000, "at most a thousand wait"
    table.flush()
    table.flush()
    assert (tmp_path / "train.csv").read_text() == csv_text(rows, header(TRAIN))
    assert (tmp_path / "train.csv").stat().st_ino == file, "appended, never written anew"


# --- rows of sites that join and leave ----------------------------------------------------------------------


def row(step: int, present: list[int] | None = None) -> StepDone:
    return StepDone(step, float(step), 1, 0.1, 7, 7, 0, place=RoundPlace((step + 1) // 2, present))


def rows_in_order(rounds: RowOrder, *rows: tuple[int, StepDone]) -> list[tuple[int, int, Any]]:
    found: list[Any] = [each for rank, what in rows for each in rounds.add(rank, what)]
    return [(rank, each.step, each.place.averaged_ranks) for rank, each in found]


def test_a_site_that_dies_between_a_round_and_its_row_has_announced_it() -> None:
    """Its last step counts like those before; it was lost, and the round was told as if without that rank."""
    rounds, both = RowOrder(), [0, 1]
    assert rows_in_order(rounds, (0, row(1)), (1, row(1))) == []
    rounds.announce(0, row(2))
    rounds.announce(1, row(2))
    assert rows_in_order(rounds, (0, row(2, both))) == []  # the other one's may be on its way
    assert rows_in_order(rounds, (0, row(3)), (0, row(4, [0])), (0, row(5))) == []
    assert rows_in_order(rounds, (0, row(6, [0]))) == [
        (0, 1, None), (1, 1, None), (0, 2, both), (1, 2, both),
        (0, 3, None), (0, 4, [0]), (0, 5, None), (0, 6, [0]),
    ]  # fmt: skip


def test_steps_that_a_rank_takes_again_count_as_it_took_them_last() -> None:
    """All were stopped: one site knows the rows that another has lost, and trains anew."""
    knows, lost = RowOrder(), RowOrder()
    assert (
        rows_in_order(knows, (1, row(1)._replace(loss=-1.0)), (1, row(2, [0, 1])._replace(loss=-2.0))) == []
    )
    knows.forget(1, 1)
    again = [(1, row(1)), (0, row(1)), (0, row(2, [0, 1])), (1, row(2, [0, 1]))]
    found: list[Any] = [
        [each for rank, what in again for each in rounds.add(rank, what)] for rounds in (knows, lost)
    ]
    assert found[0] == found[1]
    assert [(rank, each.loss) for rank, each in found[0]] == [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0)]
    assert not knows.is_pending(row(2))


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=6), st.randoms(), st.randoms())
def test_every_site_reports_the_same_however_late_rows_of_absent_sites_come(
    members: list[set[int]], one: random.Random, other: random.Random
) -> None:
    """A rank that was left out has trained until it heard so; its rows are in time at one site, and late at another."""
    reports = [_reported(members, luck) for luck in (one, other)]
    assert reports[0] == reports[1]
    assert [
        {rank for rank, each in reports[0] if each.place and each.place.round == number}
        for number in range(1, len(members) + 1)
    ] == [set(each) for each in members]


def _reported(members: list[set[int]], luck: random.Random) -> list[tuple[int, StepDone]]:
    """What a site tells of steps, where those who were left out come at any time after their last row."""
    order: list[tuple[int, StepDone]] = []
    last = dict.fromkeys(range(4), 0)  # before which place no further row of a rank can be
    for number, there in enumerate(members):
        first, end = row(2 * number + 1), row(2 * number + 2, sorted(there))
        begun = max(last[rank] for rank in there)
        for rank in sorted(there, key=lambda _: luck.random()):
            order += [(rank, first), (rank, end)]
        for rank in set(range(4)) - there:
            place = luck.randint(max(last[rank], begun), len(order))
            order.insert(place, (rank, first))
        last = {
            rank: max(place for place, each in enumerate([(rank, first), *order]) if each[0] == rank)
            for rank in last
        }
    rounds = RowOrder()
    found = [each for rank, what in order for each in rounds.add(rank, what)]
    return [(rank, each) for rank, each in [*found, *rounds.rest()] if isinstance(each, StepDone)]


def test_a_rank_that_was_left_out_still_tells_when_it_was_away() -> None:
    """Also where the round is long over; what it has sent is told with its next row that counts."""
    rounds = RowOrder()
    rows_in_order(rounds, (0, row(1)), (0, row(2, [0])))
    back = RoundPlace(1, missed_round=1, back_in_round=3)
    assert list(rounds.add(1, row(2)._replace(place=back, wall_seconds=2.0))) == [(1, Absent(2, back, 2.0))]


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
            place, seconds = RoundPlace(number), float(number)
            if (rank, number) in RETURNS and step % 2:
                missed, back, seconds = RETURNS[rank, number]
                place = RoundPlace(number, missed_round=missed, back_in_round=back)
            if step % 2 == 0 and rank in present:
                place = RoundPlace(number, present)
            rows.append(StampedRow(rank, seconds, 0.0, 0.0, row(step)._replace(place=place)))
    return rows


@given(st.lists(st.integers(0, 16), min_size=8, max_size=8))
def test_absences_do_not_depend_on_the_order_in_which_ranks_are_heard(late: list[int]) -> None:
    """The rows of rank 2 of the rounds without it come at any time."""
    others = [0, 0, 1, 1] * 4
    for place in sorted(late, reverse=True):
        others.insert(place, 2)
    rounds, in_order = Rounds(3), RowOrder()
    streams = {rank: iter(rows_of(rank)) for rank in range(3)}
    for rank in (*[0, 1, 2] * 2, *others, *[0, 1, 2] * 4):
        marked = next(streams[rank])
        timed = marked.row._replace(wall_seconds=marked.virtual_seconds)
        for whose, each in in_order.add(rank, timed):
            list(rounds.add(StampedRow(whose, each.wall_seconds or 0.0, 0.0, 0.0, each)))
    assert rounds.dropped_peers("wall_seconds") == ABSENCES
