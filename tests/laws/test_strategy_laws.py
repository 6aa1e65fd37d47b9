"""Strategies' variants and parts against their algorithms; the strategies themselves are in conformance/."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_reference import SEED, adamw, named_codec, num_values, whole

from exogym_core.strategy import (
    AllReduceStrategy,
    FedAvgStrategy,
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SPARTAStrategy,
)
from exogym_core.strategy.parts.codecs import CODECS
from exogym_core.strategy.parts.selectors import slice_bounds

WIRE_CODECS = sorted(name for name, codec in CODECS.items() if codec is not None)


problems = reference.problems(5, 7, 5, 8)


@settings(max_examples=10)
@given(
    problem=problems,
    p=st.sampled_from([0.05, 0.3, 1.0]),
    selector=st.sampled_from([PartitionedIndexSelector, ShuffledSequentialIndexSelector]),
)
def test_sparta_with_selectors_that_visit_everything(
    problem: dict[str, int], p: float, selector: Any
) -> None:
    model, batches = reference.make_problem(**problem)
    run = reference.run_strategy(
        SPARTAStrategy(adamw, p_sparta=p, index_selector=selector), model, batches, SEED
    )
    after_step = reference.sparse(selector(p), 1, SEED)
    expected = reference.reference_local(copy.deepcopy(model), batches, adamw, after_step)
    for got, replica in zip(run.results, expected, strict=True):
        torch.testing.assert_close(got, reference.vector(replica), rtol=1e-9, atol=1e-9)


@settings(max_examples=10)
@given(problem=problems, island_size=st.integers(1, 6))
def test_fedavg_exchanges_within_islands_only(problem: dict[str, int], island_size: int) -> None:
    model, batches = reference.make_problem(**problem)
    n = problem["num_ranks"]
    run = reference.run_strategy(FedAvgStrategy(adamw, island_size=island_size, H=2), model, batches, SEED)
    after_step = reference.averaging(2, island_size, SEED)
    expected = reference.reference_local(copy.deepcopy(model), batches, adamw, after_step)
    for got, replica in zip(run.results, expected, strict=True):
        torch.testing.assert_close(got, reference.vector(replica), rtol=1e-9, atol=1e-9)
    sizes = [island_size] * (n // island_size) + [n % island_size] if island_size < n else [n]
    ring = sum(2 * (size - 1) for size in sizes if size)
    assert sum(t.bytes_sent for t in run.traffic) == ring * whole(model) * (len(batches) // 2)


@settings(max_examples=10)
@given(problem=problems, codec=st.sampled_from(WIRE_CODECS))
def test_codecs_send_what_they_are_charged_for(problem: dict[str, int], codec: str) -> None:
    model, batches = reference.make_problem(**problem)
    n, size = problem["num_ranks"], num_values(model)
    run = reference.run_strategy(AllReduceStrategy(adamw, codec=codec), model, batches, SEED)
    parts = [len(part) for part in torch.zeros(size).tensor_split(n)]
    payload = len(batches) * sum(named_codec(codec).encoded_bytes(part) for part in parts)
    assert sum(t.bytes_sent for t in run.traffic) == (2 * (n - 1) * payload if n > 1 else 0)
    if n > 1:
        assert {t.payload_bytes for t in run.traffic} == {payload}
    for result in run.results[1:]:
        assert torch.equal(run.results[0], result)


@settings(max_examples=20)
@given(size=st.integers(1, 500), p=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_selectors_choose_what_they_promise(size: int, p: float, seed: int) -> None:
    flat = torch.zeros(size)
    random_choice = RandomIndexSelector(p)
    random_choice.seed = seed
    chosen = random_choice.get_indices(flat, 3)
    assert len(chosen.unique()) == len(chosen) == max(1, round(p * size))
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < size
    for selector in (PartitionedIndexSelector(p), ShuffledSequentialIndexSelector(p)):
        selector.seed = seed
        a_pass = -(-size // selector.count(size))  # in so many iterations
        for visit in range(2):
            pieces = [selector.get_indices(flat, visit * a_pass + i) for i in range(a_pass)]
            assert {len(piece.unique()) for piece in pieces} == {selector.count(size)}
            if visit == 0 or isinstance(selector, PartitionedIndexSelector):
                assert set(torch.cat(pieces).tolist()) == set(range(size))


@pytest.mark.parametrize(
    "kind", [RandomIndexSelector, PartitionedIndexSelector, ShuffledSequentialIndexSelector]
)
@pytest.mark.parametrize(("size", "p"), [(4, 0.75), (100, 0.3), (10, 0.9), (7, 0.01)])
def test_every_value_has_the_same_chance(kind: type[IndexSelector], size: int, p: float) -> None:
    """Of slices of unequal lengths, values in the short ones would come more often; of 1/p pieces, too few."""
    selector, flat, draws = kind(p), torch.zeros(size), 4000
    counts = torch.zeros(size)
    for iteration in range(draws):
        counts[selector.get_indices(flat, iteration)] += 1
    share = max(1, round(p * size)) / size
    deviation = (share * (1 - share) / draws) ** 0.5
    assert bool(((counts / draws - share).abs() <= 5 * deviation + 1e-9).all()), (counts / draws).tolist()


def test_billions_of_values_are_cut_into_slices_without_overflow() -> None:
    size, count = 30_000_000_000, 600_000_000
    bounds = slice_bounds(torch.tensor([0, 1, count - 1, count]), size, count)
    assert bounds.tolist() == [0, 50, size - 50, size]


def test_selectors_differ_in_their_draws() -> None:
    flat = torch.zeros(1000)

    def drawn(selector: IndexSelector, iteration: int, seed: int = 0) -> list[int]:
        selector.seed = seed
        indices: list[int] = selector.get_indices(flat, iteration).tolist()
        return indices

    one_pass = 10  # iterations
    for kind in (RandomIndexSelector, PartitionedIndexSelector, ShuffledSequentialIndexSelector):
        assert drawn(kind(0.1), 0) == drawn(kind(0.1), 0)
        assert drawn(kind(0.1), 0) != drawn(kind(0.1), 1)
        assert drawn(kind(0.1), 0) != drawn(kind(0.1), 0, seed=1)
        again = drawn(kind(0.1), 0) == drawn(kind(0.1), one_pass)
        assert again == (kind is ShuffledSequentialIndexSelector)
