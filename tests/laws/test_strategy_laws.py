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
from worlds import chain

from exogym_core.communicator.base import Communicator
from exogym_core.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    Chain,
    CoCoDCStrategy,
    DelayedDiLoCoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    IndexSelector,
    MomentCommunicator,
    MuLoCoStrategy,
    PartitionedIndexSelector,
    QsparseLocalSGDStrategy,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SlowMoStrategy,
    SparseLoCoStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from exogym_core.strategy.parts.codecs import CODECS
from exogym_core.strategy.parts.selectors import slice_bounds
from exogym_core.workers.run import run_ranks

WIRE_CODECS = sorted(name for name, codec in CODECS.items() if codec is not None)


problems = reference.problems(5, 7, 5, 8)


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


FRAGMENTS = {"H": 4, "num_fragments": 2, "tau": 2}

# Strategies with rounds whose reductions treat each value, or each tensor, by itself.
WITH_ROUNDS: list[Any] = [
    lambda **how: DiLoCoStrategy(adamw, H=2, **how),
    lambda **how: DiLoCoStrategy(adamw, H=2, **how, codec="fp16"),
    lambda **how: DiLoCoStrategy(adamw, H=2, **how, codec="bf16"),
    lambda **how: DiLoCoStrategy(adamw, H=2, **how, aggregate="median"),
    lambda **how: DiLoCoStrategy(adamw, H=2, **how, averaging_timeout=9),
    lambda **how: FedAvgStrategy(adamw, H=2, island_size=3, **how),
    lambda **how: SlowMoStrategy(adamw, H=2, buffers="average", **how),
    lambda **how: DESLOCStrategy(adamw, H=1, Ku=2, Kv=3, **how),
    lambda **how: Chain(
        [AveragingCommunicator(H=2, **how), MomentCommunicator(moment="first", **how)], adamw
    ),
    lambda **how: DelayedDiLoCoStrategy(adamw, H=2, **how),
    lambda **how: EagerDiLoCoStrategy(adamw, H=2, **how),
    lambda **how: StreamingDiLoCoStrategy(adamw, **FRAGMENTS, **how),
    lambda **how: CoCoDCStrategy(adamw, **FRAGMENTS, **how),
    lambda **how: MuLoCoStrategy(adamw, H=2, **how),
    lambda **how: MuLoCoStrategy(adamw, H=2, bits=2, **how),
    lambda **how: SparseLoCoStrategy(adamw, H=2, k=3, chunk=4, **how),
    lambda **how: QsparseLocalSGDStrategy(adamw, H=2, density=0.5, **how),
]


def every_second_is_thorough(rows: list[Any]) -> list[Any]:
    return [pytest.param(row, marks=[pytest.mark.thorough] * (place % 2)) for place, row in enumerate(rows)]


@pytest.mark.parametrize("make", every_second_is_thorough(WITH_ROUNDS))
@settings(max_examples=1)
@given(problem=problems, buckets=st.one_of(st.just("parameter"), st.integers(1, 300)))
def test_buckets_change_neither_values_nor_bytes(make: Any, problem: dict[str, int], buckets: Any) -> None:
    model, batches = reference.make_problem(**problem)
    one, several = (
        reference.run_strategy(make(buckets=each), model, batches, SEED) for each in ("one", buckets)
    )
    for got, expected in zip(several.results, one.results, strict=True):
        assert torch.equal(got, expected)
    assert [t.payload_bytes for t in several.traffic] == [t.payload_bytes for t in one.traffic]
    assert sum(t.bytes_sent for t in several.traffic) == sum(t.bytes_sent for t in one.traffic)


@pytest.mark.parametrize("make", every_second_is_thorough(WITH_ROUNDS))
@settings(max_examples=1)
@given(problem=problems)
def test_rounds_through_a_store_have_equal_values_and_each_rank_sends_its_own_once(
    make: Any, problem: dict[str, int]
) -> None:
    model, batches = reference.make_problem(**problem)
    direct, stored = (
        reference.run_strategy(make(exchange=each), model, batches, SEED) for each in ("direct", "store")
    )
    assert [t.bytes_sent for t in stored.traffic] == [t.payload_bytes for t in stored.traffic]
    # Through a store encoded values are decoded by all, and their mean is not encoded again.
    is_rounded = getattr(getattr(make(), "averaging", None), "codec", None) is not None
    for got, expected in zip(stored.results, direct.results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.05 * is_rounded, atol=0.05 * is_rounded)


def a_round(strategy: Strategy, protocol: str, **options: Any) -> Any:
    """A round of two ranks on a link of 8 Mbit/s and 10 ms."""
    model, batches = reference.make_problem(2, 1, 60, 50, seed=0)
    assert [each.numel() for each in model.parameters()] == [3000, 50, 300, 1]
    return reference.run_strategy(strategy, model, batches, topology=chain(protocol=protocol), **options)


@pytest.mark.parametrize(
    ("buckets", "num_calls"), [("one", 1), ("parameter", 4), ("24 kB", 2), ("2.4 kB", 3), ("1 GB", 1)]
)
def test_each_bucket_is_a_call(buckets: str, num_calls: int) -> None:
    run = a_round(DiLoCoStrategy(adamw, H=1, buckets=buckets), "ideal", collectives="ring")
    assert [t.bytes_sent for t in run.traffic] == [pytest.approx(8 * 3351, abs=8)] * 2
    # A ring of two sends half of the values twice, each time behind 10 ms of latency; one call after the other.
    assert run.virtual_seconds == pytest.approx(num_calls * 0.02 + 8 * 3351 / 1e6, abs=2e-5)


def test_buckets_overlap_like_calls_that_are_posted_at_once_and_waited_for_in_order() -> None:
    def by_hand(comm: Communicator) -> None:
        tensors = [torch.zeros(size, dtype=torch.float64) for size in (3000, 50, 300, 1)]
        for handle in [comm.all_reduce(tensor, "avg", async_op=True) for tensor in tensors]:
            handle.wait()

    run = a_round(DiLoCoStrategy(adamw, H=1, buckets="parameter"), "gloo")
    assert run.virtual_seconds == run_ranks(by_hand, 2, chain(protocol="gloo")).virtual_seconds
    in_turn = a_round(DiLoCoStrategy(adamw, H=1, buckets="parameter", averaging_timeout=9), "gloo")
    assert run.virtual_seconds == in_turn.virtual_seconds


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
    selector, flat, draws = kind(p), torch.zeros(size), 1000
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
