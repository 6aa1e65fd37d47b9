"""Strategies beside their authors' own code: parameters that it left behind, kept with their origin.

`mixing_authors.json` says which code at which commit, how it was called and on what.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import strategy_reference as reference
import torch

from exogym_core.strategy import NoLoCoCommunicator, NoLoCoStrategy, SlowMoStrategy

if TYPE_CHECKING:
    import pytest

NUMBERS: dict[str, Any] = json.loads((Path(__file__).parent / "mixing_authors.json").read_text())


def test_noloco_ends_where_its_authors_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their pairs, which they draw from the number of inner steps; to the last digits of fp64."""

    def group(module: NoLoCoCommunicator, rank: int, num_ranks: int, round_number: int) -> list[int]:
        inner_steps = module.options.H * (round_number + 1)
        order = [int(peer) for peer in np.random.default_rng(inner_steps + 1).permutation(num_ranks)]
        return next(
            sorted(order[k :: num_ranks // 2])
            for k in range(num_ranks // 2)
            if rank in order[k :: num_ranks // 2]
        )

    monkeypatch.setattr(NoLoCoCommunicator, "group", group)
    model, batches = reference.make_problem(4, 6, 2, 3, seed=21)
    run = reference.run_strategy(NoLoCoStrategy("adam", lr=0.01, H=2), model, batches)
    for got, numbers in zip(run.results, NUMBERS["NoLoCo"], strict=True):
        torch.testing.assert_close(got, torch.tensor(numbers, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_slowmo_ends_where_fairscales_does() -> None:
    """To rounding in fp32."""
    model, batches = reference.make_problem(2, 9, 2, 3, seed=22, dtype=torch.float32)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    run = reference.run_strategy(SlowMoStrategy(sgd, H=3, outer_lr=0.9, outer_momentum=0.5), model, batches)
    for got, numbers in zip(run.results, NUMBERS["SlowMo"], strict=True):
        torch.testing.assert_close(got, torch.tensor(numbers), rtol=1e-5, atol=1e-6)
