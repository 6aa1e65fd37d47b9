"""A little of each soak; `make test-all` runs them long."""

from __future__ import annotations

import random

import pytest
from fault_scenarios import simulate
from fuzzed_readers import READERS, one_input
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_refused_in_a_line_that_names_them(reader: str) -> None:
    draw = random.Random(reader)
    taken = [one_input(reader, draw.randbytes(draw.choice((12, 40, 120)))) for _ in range(150)]
    assert not all(taken)  # or nothing is damaged


@pytest.mark.parametrize("reader", READERS)
@given(data=st.binary(max_size=80))
@settings(max_examples=50)
def test_whatever_is_drawn(reader: str, data: bytes) -> None:
    one_input(reader, data)


@pytest.mark.parametrize("number", range(1, 12))
def test_runs_on_networks_that_fail_end_rightly(number: int) -> None:
    assert simulate(number) in ("finished", "deadlock")
