"""Compressing strategies: what each is equal to, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exogym_core.cost.coding import Coding
from exogym_core.strategy import (
    AllReduceStrategy,
    Chain,
    LowRankGradients,
    PowerSGDStrategy,
    Sites,
    build_strategy,
)
from netsim.files.errors import InputError

SEED = 11
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}

problems = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 4),
        "steps": st.integers(1, 6),
        "inputs": st.integers(1, 5),
        "hidden": st.integers(1, 8),
        "seed": st.integers(0, 1000),
    }
)


def assert_same(one: Any, other: Any, problem: dict[str, int], tolerance: float = 1e-9) -> None:
    """Both strategies lead to the same parameters on all ranks."""
    model, batches = reference.make_problem(**problem)
    first, second = (reference.run_strategy(strategy, model, batches, SEED) for strategy in (one, other))
    for ours, theirs in zip(first.results, second.results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@settings(max_examples=10)
@given(problem=problems)
def test_powersgd_at_full_rank_is_allreduce(problem: dict[str, int]) -> None:
    assert_same(PowerSGDStrategy(SGD, rank=99), AllReduceStrategy(SGD), problem)


@settings(max_examples=5)
@given(problem=problems)
def test_powersgd_before_it_starts_is_allreduce(problem: dict[str, int]) -> None:
    assert_same(PowerSGDStrategy(SGD, rank=1, start_powerSGD_iter=6), AllReduceStrategy(SGD), problem)


# --- arguments, costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: PowerSGDStrategy(rank=0),
            "PowerSGDStrategy: rank=0 must be a whole number of at least 1",
        ),
        (
            lambda: PowerSGDStrategy(start_step=-1),
            "PowerSGDStrategy: start_step=-1 must be a whole number of at least 0",
        ),
    ],
)
def test_wrong_arguments_are_told_in_one_line(make: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", [LowRankGradients])
def test_sites_are_refused(module: Any) -> None:
    model, batches = reference.make_problem(2, 1, 4, 6, seed=1)
    with pytest.raises(
        InputError, match=rf"{module.__name__} brings single ranks together, not sites; leave Sites out"
    ):
        reference.run_strategy(Chain([Sites(2), module()]), model, batches)


# Of each strategy: what a step codes, in values of the model, encoded and decoded.
CODED: dict[str, tuple[dict[str, Any], float]] = {
    "PowerSGD": ({}, 2 * (6 * 4 + 6 * 6)),
}


@pytest.mark.parametrize("name", CODED)
def test_the_work_of_coding_takes_time(name: str) -> None:
    """With one speed for all, a step costs what it codes over that speed, and nothing without one."""
    model, batches = reference.make_problem(2, 1, 4, 6, seed=1)
    options, num_values = CODED[name]
    coding = Coding.parse("4 kB/s")  # 1000 values a second
    seconds = []
    for speeds in (coding, None):
        strategy = build_strategy(name, **options)
        run = reference.run_strategy(strategy, model, batches, coding=speeds, topology="two-datacenters")
        assert run.virtual_seconds is not None
        seconds.append(run.virtual_seconds)
    assert seconds[0] - seconds[1] == pytest.approx(num_values / 1000, rel=1e-6)
