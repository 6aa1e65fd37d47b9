"""Every strategy of the table against its algorithm, its byte formula, and the laws that hold for all."""

from __future__ import annotations

import copy

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from strategy_table import SEED, TABLE, Row

from netgym.strategy_check import Workload, find_faults

problems = reference.problems(5, 7, 5, 8)
rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


@rows
@settings(max_examples=8)
@given(problem=problems)
def test_equals_its_algorithm_and_sends_the_bytes_of_its_formula(row: Row, problem: dict[str, int]) -> None:
    model, batches = reference.make_problem(**problem)
    run = reference.run_strategy(row.make(), model, batches, SEED)
    expected = row.algorithm(copy.deepcopy(model), batches)
    for got, replica in zip(run.results, expected, strict=True):
        torch.testing.assert_close(got, reference.vector(replica), rtol=row.tolerance, atol=row.tolerance)
    n = problem["num_ranks"]
    payload = sum(row.payload(model, step, n) for step in range(1, len(batches) + 1))
    sent = sum(traffic.bytes_sent for traffic in run.traffic)
    if row.sent is None:
        assert sent == payload * row.sent_factor(n)
    else:
        assert sent == sum(row.sent(model, step, n) for step in range(1, len(batches) + 1))
    if n > 1:
        assert [traffic.payload_bytes for traffic in run.traffic] == [payload] * n


@rows
@pytest.mark.parametrize(
    ("num_steps", "laws"),
    [(7, ["judged", "state"]), (12, ["bytes", "round", "generator", "processes", "gloo"])],
)
def test_keeps_the_laws_that_netgym_check_asks_for(row: Row, num_steps: int, laws: list[str]) -> None:
    problem = Workload(*reference.make_problem(3, num_steps, 4, 6, seed=1), SEED)
    assert find_faults(row.make(), problem, laws) == []


@rows
@settings(max_examples=4)
@given(problem=problems)
def test_replicas_agree_where_all_is_exchanged(row: Row, problem: dict[str, int]) -> None:
    if row.apart:
        return
    model, batches = reference.make_problem(**{**problem, "steps": 6})
    results = reference.run_strategy(row.make(), model, batches, SEED).results
    for result in results[1:]:
        assert torch.equal(results[0], result)
