"""Rows kept as columns read like the dicts that they were given as, and cost a few bytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.results.rows import Rows

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
    with pytest.raises(IndexError, match="there are 1 rows"):
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
