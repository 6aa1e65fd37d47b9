"""Rows kept as columns read like the dicts that they were given as, and cost a few bytes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.results.disk import RecordError
from exogym_core.results.fit_result import Rows
from exogym_core.results.loggers import Table
from exogym_core.results.run_folder import csv_text
from exogym_core.results.schema import TRAIN, header

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


def test_a_row_that_is_read_is_the_readers_own() -> None:
    rows = Rows([{"step": 1}])
    rows[0]["step"] = 7
    assert rows[0] == {"step": 1}
    with pytest.raises(IndexError, match="the table has 1 row"):
        rows[1]
    with pytest.raises(KeyError):
        rows.column("loss")


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


def test_a_column_that_comes_later_is_there_for_all_rows(tmp_path: Path) -> None:
    table = Table(tmp_path / "train.csv", ["step", "virtual_seconds"])
    rows = [{"step": 1, "wall_seconds": 0.1}, {"step": 2, "wall_seconds": 1 / 3, "num_peers": 3}]
    for row in rows:
        table.add(row)
        table.flush()
    assert (tmp_path / "train.csv").read_text() == csv_text(rows, ["step", "virtual_seconds"])


def test_a_file_that_cannot_be_appended_to_is_named(tmp_path: Path) -> None:
    table = Table(tmp_path / "train.csv", ["step"])
    (tmp_path / "train.csv").unlink()
    (tmp_path / "train.csv").mkdir()
    table.add({"step": 1})
    with pytest.raises(RecordError, match=r"train\.csv: cannot be written: "):
        table.flush()
