"""Strategies of 2024 to 2026 beside their authors' own code: parameters that it left behind, kept with their origin.

`recent_authors.json` says which code at which commit, how it was called and on what. Nothing of that code is here.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import strategy_reference as reference
import torch
from torch import Tensor

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    ACCOStrategy,
    DiLoCoStrategy,
    EDiTStrategy,
    GPAStrategy,
    SNOOStrategy,
    Strategy,
)

NUMBERS: dict[str, Any] = json.loads((Path(__file__).parent / "recent_authors.json").read_text())
adamw = partial(torch.optim.AdamW, lr=0.01)

CASES: dict[str, tuple[Strategy, tuple[int, int, int], float]] = {
    "SNOO": (SNOOStrategy(adamw, H=3), (1, 9, 81), 1e-12),
    "IsoLoCo": (
        DiLoCoStrategy(adamw, H=2, outer_lr=0.9, outer_momentum=0.8, aggregate="isotropic"),
        (3, 6, 83),
        1e-9,
    ),
    "EDiT": (
        EDiTStrategy(
            partial(torch.optim.SGD, lr=0.1),
            H=1,
            clip_outer=0.02,
            outlier_score=1,
            outlier_warmup=3,
            outlier_rate=0.3,
        ),
        (3, 24, 84),
        1e-6,  # weights are in fp32
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_where_its_authors_code_does(name: str) -> None:
    """EDiT's run has eight outliers on the first rank, among them a tensor that no rank's step moves."""
    strategy, (n, steps, seed), tolerance = CASES[name]
    model, batches = reference.make_problem(n, steps, 3, 4, seed)
    for got in reference.run_strategy(strategy, model, batches).results:
        numbers = torch.tensor(NUMBERS[name], dtype=torch.float64)
        torch.testing.assert_close(got, numbers, rtol=tolerance, atol=tolerance)


def test_gpa_has_its_authors_points_of_training_and_evaluation() -> None:
    model, batches = reference.make_problem(1, 6, 3, 4, seed=82)
    spec = partial(torch.optim.AdamW, lr=0.01, weight_decay=0, betas=(0.9, 0.95))

    def body(comm: Communicator) -> dict[str, Tensor]:
        strategy, replica = GPAStrategy(spec, mu_x=0.9, mu_y=0.6), copy.deepcopy(model)
        strategy.setup(replica, comm, 6, seed=0)
        reference.train(strategy, replica, comm, batches)
        judged = strategy.judged_state()
        assert judged is not None
        return {
            "y": reference.vector(replica),
            "x": torch.cat([each.reshape(-1) for each in judged.values()]),
        }

    (points,) = run_ranks(body, 1).results
    for name, numbers in NUMBERS["GPA"].items():
        torch.testing.assert_close(
            points[name], torch.tensor(numbers, dtype=torch.float64), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_acco_updates_as_its_authors_code_does(updates: int) -> None:
    """A half without its second one changes nothing."""
    model, batches = reference.make_problem(3, 7, 3, 4, seed=85)
    for steps in (2 * updates, 2 * updates + 1):
        for got in reference.run_strategy(ACCOStrategy(adamw), model, batches[:steps]).results:
            numbers = torch.tensor(NUMBERS["ACCO"][updates - 1], dtype=torch.float64)
            torch.testing.assert_close(got, numbers, rtol=1e-12, atol=1e-14)
