"""Every strategy of the table against its algorithm, its byte formula, and the laws that hold for all."""

from __future__ import annotations

import copy
import io
import random
from typing import TYPE_CHECKING

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_table import SEED, TABLE, Row

from exogym_core.communicator import Communicator, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

problems = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 5),
        "steps": st.integers(1, 7),
        "inputs": st.integers(1, 5),
        "hidden": st.integers(1, 8),
        "seed": st.integers(0, 1000),
    }
)
rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


@rows
@settings(max_examples=12)
@given(problem=problems)
def test_equals_its_algorithm_in_one_process(row: Row, problem: dict[str, int]) -> None:
    model, batches = reference.make_problem(**problem)
    run = reference.run_strategy(row.make(), model, batches, SEED)
    expected = row.algorithm(copy.deepcopy(model), batches)
    for got, replica in zip(run.results, expected, strict=True):
        torch.testing.assert_close(got, reference.vector(replica), rtol=row.tolerance, atol=row.tolerance)


@rows
@settings(max_examples=12)
@given(problem=problems)
def test_bytes_equal_their_formula(row: Row, problem: dict[str, int]) -> None:
    model, batches = reference.make_problem(**problem)
    n = problem["num_ranks"]
    run = reference.run_strategy(row.make(), model, batches, SEED)
    payload = sum(row.payload(model, step, n) for step in range(1, len(batches) + 1))
    sent = sum(traffic.bytes_sent for traffic in run.traffic)
    if row.sent is None:
        assert sent == payload * row.sent_factor(n)
    else:
        assert sent == sum(row.sent(model, step, n) for step in range(1, len(batches) + 1))
    if n > 1:
        assert [traffic.payload_bytes for traffic in run.traffic] == [payload] * n


@rows
def test_same_seed_gives_the_same_bits_and_touches_no_global_generator(row: Row) -> None:
    model, batches = reference.make_problem(3, 6, 4, 6, seed=1)
    torch.manual_seed(5)
    random.seed(5)
    first = reference.run_strategy(row.make(), model, batches, SEED)
    torch.manual_seed(6)
    random.seed(6)
    second = reference.run_strategy(row.make(), model, batches, SEED)
    for one, other in zip(first.results, second.results, strict=True):
        assert torch.equal(one, other)


@rows
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_state_saved_and_loaded_goes_on_with_the_same_bits(row: Row, stop: int) -> None:
    model, batches = reference.make_problem(3, 7, 4, 6, seed=2)

    def interrupted(comm: Communicator) -> Tensor:
        strategy, replica = row.make(), copy.deepcopy(model)
        strategy.setup(replica, comm, len(batches), SEED)
        reference.train(strategy, replica, comm, batches[:stop])
        stored = io.BytesIO()
        torch.save((strategy.state_dict(), replica.state_dict()), stored)
        stored.seek(0)
        state, weights = torch.load(stored)
        strategy, replica = row.make(), copy.deepcopy(model)
        strategy.setup(replica, comm, len(batches), SEED)
        replica.load_state_dict(weights)
        strategy.load_state_dict(state)
        assert strategy.local_step == stop
        reference.train(strategy, replica, comm, batches, start=stop)
        strategy.finish()
        return reference.vector(replica)

    straight = reference.run_strategy(row.make(), model, batches, SEED).results
    for one, other in zip(straight, run_ranks(interrupted, 3).results, strict=True):
        assert torch.equal(one, other)


@rows
def test_real_sockets_and_other_processes_change_neither_result_nor_bytes(row: Row) -> None:
    model, batches = reference.make_problem(3, 20, 4, 6, seed=1)
    simulated = reference.run_strategy(row.make(), model, batches, SEED)
    apart = reference.run_strategy(
        row.make(), model, batches, SEED, workers={"kind": "processes", "processes": 2}
    )
    real = reference.run_strategy(row.make(), model, batches, SEED, transport="gloo")
    for ours, same, theirs in zip(simulated.results, apart.results, real.results, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert simulated.traffic == apart.traffic
    for ours, theirs in zip(simulated.traffic, real.traffic, strict=True):
        assert (ours.bytes_sent, ours.payload_bytes) == (theirs.bytes_sent, theirs.payload_bytes)


@rows
@settings(max_examples=4)
@given(problem=problems)
def test_replicas_agree_where_all_is_exchanged(row: Row, problem: dict[str, int]) -> None:
    model, batches = reference.make_problem(**{**problem, "steps": 6})
    results = reference.run_strategy(row.make(), model, batches, SEED).results
    if row.apart:
        return
    for result in results[1:]:
        assert torch.equal(results[0], result)
