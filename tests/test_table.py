"""A table of a run's rows grows at its end, in the file and not in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from exogym_core.results.disk import RecordError
from exogym_core.results.record import TRAIN_COLUMNS, csv_text
from exogym_core.results.table import Table

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_are_appended_and_none_is_kept(tmp_path: Path) -> None:
    """The logger of a named run kept every row and wrote the whole file at each evaluation."""
    table, rows = Table(tmp_path / "train.csv", TRAIN_COLUMNS), []
    file = (tmp_path / "train.csv").stat().st_ino
    for step in range(1, 2501):
        rows.append({"step": step, "train_loss": 1 / step, "virtual_seconds": None})
        table.add(rows[-1])
        assert table.num_waiting < 1000
    table.flush()
    assert table.num_waiting == 0
    table.flush()
    assert (tmp_path / "train.csv").read_text() == csv_text(rows, TRAIN_COLUMNS)
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
