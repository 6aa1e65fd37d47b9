"""Equalities between strategies of 2024 to 2026 and older ones, and what each of them refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import strategy_reference as reference
import torch
from strategy_reference import adamw
from torch import Tensor

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    ACCOStrategy,
    AllReduceStrategy,
    DiLoCoStrategy,
    EDiTStrategy,
    GPAStrategy,
    SNOOStrategy,
    StepContext,
    Strategy,
    StreamingDiLoCoStrategy,
)


def diloco(n: int) -> DiLoCoStrategy:
    return DiLoCoStrategy(adamw, H=2, outer_lr=0.68, outer_momentum=0.37, ranks_per_worker=n)


EQUAL: dict[str, tuple[Callable[[], Strategy], Callable[[int], Strategy], float]] = {
    "SNOO is DiLoCo with one worker": (lambda: SNOOStrategy(adamw, H=2), diloco, 0.0),
    "GPA without an average is AllReduce": (
        lambda: GPAStrategy(adamw, mu_x=0),
        lambda n: AllReduceStrategy(adamw),
        1e-12,
    ),
    "SNOO in shards": (
        lambda: SNOOStrategy(adamw, H=2, sharding="FULL_SHARD"),
        lambda n: SNOOStrategy(adamw, H=2),
        1e-12,
    ),
    "GPA in shards": (
        lambda: GPAStrategy(adamw, mu_x=0.5, sharding="SHARD_GRAD_OP"),
        lambda n: GPAStrategy(adamw, mu_x=0.5),
        1e-12,
    ),
    "EDiT of one worker without a penalty is DiLoCo": (
        lambda: EDiTStrategy(adamw, H=2, ranks_per_worker=2, outlier_score=0, clip_outer=0),
        lambda n: DiLoCoStrategy(adamw, H=2, ranks_per_worker=n),
        0.0,
    ),
    "isotropic fragments": (
        lambda: StreamingDiLoCoStrategy(
            adamw, H=2, num_fragments=1, tau=0, alpha=0, outer_lr=0.7, aggregate="isotropic"
        ),
        lambda n: DiLoCoStrategy(adamw, H=2, aggregate="isotropic"),
        0.0,
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name: str) -> None:
    one, other, tolerance = EQUAL[name]
    model, batches = reference.make_problem(2, 5, 3, 4, seed=5)
    for got, expected in zip(
        reference.run_strategy(one(), model, batches).results,
        reference.run_strategy(other(2), model, batches).results,
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [ACCOStrategy, GPAStrategy, SNOOStrategy, EDiTStrategy])
def test_a_scaler_by_a_power_of_two_changes_no_bit(make: Callable[..., Strategy]) -> None:
    """Also in the update that ends a run."""
    model, batches = reference.make_problem(2, 6, 3, 4, seed=9, dtype=torch.float32)

    def body(comm: Communicator, scaler: torch.amp.GradScaler | None) -> Tensor:
        strategy, replica = make(adamw, max_norm=0.3), copy.deepcopy(model)
        strategy.setup(replica, comm, 6, seed=0)
        for number, step in enumerate(batches):
            strategy.begin_step(StepContext(number, scaler=scaler))
            strategy.zero_grad()
            strategy.before_backward(last_micro_batch=True)
            loss = replica(step[comm.rank])
            (loss if scaler is None else scaler.scale(loss)).backward()
            strategy.step()
        strategy.finish()
        return reference.vector(replica)

    plain = run_ranks(lambda comm: body(comm, None), 2).results
    scaled = run_ranks(lambda comm: body(comm, torch.amp.GradScaler("cpu", init_scale=1024.0)), 2).results
    assert all(map(torch.equal, plain, scaled))
