"""A little of each soak; `make test-all` runs them long."""

from __future__ import annotations

import random
from pathlib import Path

import broken_pairs
import pytest
from fault_scenarios import simulate
from forks import Fork, run_script
from fuzzed_readers import READERS, one_input
from hypothesis import given, settings
from hypothesis import strategies as st
from own_strategies import disagreements
from question_orders import depends_on_order, network


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_refused_in_a_line_that_names_them(reader: str) -> None:
    draw = random.Random(reader)
    taken = [one_input(reader, draw.randbytes(draw.choice((12, 40, 120)))) for _ in range(80)]
    assert not all(taken)  # or nothing is damaged


@pytest.mark.parametrize("reader", READERS)
@given(data=st.binary(max_size=80))
@settings(max_examples=30)
def test_whatever_is_drawn(reader: str, data: bytes) -> None:
    one_input(reader, data)


@pytest.mark.parametrize("number", range(1, 5))
def test_runs_on_networks_that_fail_end_rightly(number: int) -> None:
    assert simulate(number) in ("finished", "deadlock")


@pytest.mark.thorough
@pytest.mark.skipif(not broken_pairs.allowed(), reason="this machine allows no network namespaces")
def test_sites_that_lose_each_other_go_on_and_end_with_one_model(tmp_path: Path) -> None:
    options = ["--schedules", "1", "--events", "1", "--seed", "86", "--out", str(tmp_path)]
    done = Fork(run_script, broken_pairs.__file__, *options).end()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "'cut': 1" in done.stdout


@given(draw=st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_no_answer_about_collectives_depends_on_what_was_asked_before(draw: random.Random) -> None:
    assert not depends_on_order(network(draw), draw, 2)


@pytest.mark.parametrize("number", [2, 11, 12])
def test_plans_runs_checks_and_resumes_of_own_strategies_agree(number: int) -> None:
    assert disagreements(number) == []
