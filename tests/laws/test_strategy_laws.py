"""Every strategy against its algorithm and its byte formula. A new strategy adds one row to TABLE."""

from __future__ import annotations

import copy
import io
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    AllReduceStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    IndexSelector,
    LocalSGDStrategy,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym_core.strategy.parts.codecs import CODECS, Codec, codec_named
from exogym_core.strategy.parts.selectors import slice_bounds

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 11
DTYPE_BYTES = 8  # the table trains in fp64, so that rounding hides nothing

adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Row:
    """One strategy: how to make it, its algorithm, and the payload of a 1-based step.

    `payload(model, step, num_ranks)` is in bytes per rank; `sent_factor(n)` turns it into bytes sent by all
    `n` ranks together. `islands` marks exchanges that not all ranks take part in.
    """

    name: str
    make: Callable[[], Strategy]
    algorithm: Callable[[nn.Module, reference.Batches], list[nn.Module]]
    payload: Callable[[nn.Module, int, int], int]
    sent_factor: Callable[[int], int] = lambda n: 2 * (n - 1)
    tolerance: float = 1e-9
    unequal: bool = field(default=False)


def num_values(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def every(period: int, num_bytes: Callable[[nn.Module], int]) -> Callable[[nn.Module, int, int], int]:
    return lambda model, step, _: num_bytes(model) if step % period == 0 else 0


def whole(model: nn.Module) -> int:
    return DTYPE_BYTES * num_values(model)


def share(p: float) -> Callable[[nn.Module], int]:
    return lambda model: DTYPE_BYTES * max(1, round(p * num_values(model)))


def local(after: Callable[[nn.Module], Any], make_optim: Any = adamw, max_norm: float | None = None) -> Any:
    return lambda model, batches: reference.reference_local(
        model, batches, make_optim, after(model), max_norm
    )


def through(codec: Codec) -> Callable[[Tensor], Tensor]:
    """What `codec` leaves of values; exact enough as a whole for codecs without chunks."""
    return lambda values: codec.decode(codec.encode(values), len(values)).double()


def demo_payload(topk: int, chunk: int, entry_bytes: int) -> Callable[[nn.Module, int, int], int]:
    def payload(model: nn.Module, step: int, num_ranks: int) -> int:
        blocks = [b for p in model.parameters() for b in reference.matrix_blocks(p.detach(), chunk)]
        return sum(min(topk, block.numel()) for block in blocks) * entry_bytes

    return payload


TABLE = [
    Row(
        "AllReduce",
        lambda: AllReduceStrategy("adamw", lr=0.01, max_norm=0.5, bucket_bytes=64),
        lambda model, batches: reference.reference_all_reduce(model, batches, adamw, max_norm=0.5),
        every(1, whole),
    ),
    Row(
        "FedAvg",
        lambda: FedAvgStrategy(torch.optim.SGD, H=2, island_size=99, lr=0.05),
        local(lambda _: reference.averaging(2, 99, SEED), partial(torch.optim.SGD, lr=0.05)),
        every(2, whole),
    ),
    Row(
        "LocalSGD",
        lambda: LocalSGDStrategy(H=3, optim_spec=sgd, max_norm=0.3),
        local(lambda _: reference.averaging(3, None, SEED), sgd, max_norm=0.3),
        every(3, whole),
    ),
    Row(
        "DiLoCo",
        lambda: DiLoCoStrategy(adamw, H=3),
        local(lambda model: reference.outer(model, 3)),
        every(3, whole),
    ),
    Row(
        "DiLoCo fp16",
        lambda: DiLoCoStrategy(adamw, H=2, codec="fp16", outer_lr=0.5, outer_momentum=0.8),
        local(lambda model: reference.outer(model, 2, 0.5, 0.8, through(_codec("fp16")))),
        every(2, lambda model: 2 * num_values(model)),
        tolerance=1e-3,  # a value on the border between two codes may round either way
    ),
    Row(
        "SPARTA",
        lambda: SPARTAStrategy(adamw, p_sparta=0.1, interval=2),
        local(lambda _: reference.sparse(RandomIndexSelector(0.1), 2, SEED)),
        every(2, share(0.1)),
    ),
    Row(
        "SPARTA+DiLoCo",
        lambda: SPARTADiLoCoStrategy(adamw, p_sparta=0.2, sparta_interval=2, H=3),
        local(
            lambda model: reference.both(
                reference.sparse(RandomIndexSelector(0.2), 2, SEED), reference.outer(model, 3)
            )
        ),
        lambda model, step, n: every(2, share(0.2))(model, step, n) + every(3, whole)(model, step, n),
    ),
    Row(
        "DeMo",
        lambda: DeMoStrategy(lr=0.01, compression_topk=3, compression_chunk=4, weight_decay=0.1),
        lambda model, batches: reference.reference_demo(
            model, batches, lr=0.01, decay=0.999, topk=3, chunk=4, weight_decay=0.1
        ),
        demo_payload(3, 4, 12),
        sent_factor=lambda n: n * (n - 1),
    ),
]


WIRE_CODECS = sorted(name for name, codec in CODECS.items() if codec is not None)


def _codec(name: str) -> Codec:
    codec = codec_named(name)
    assert codec is not None
    return codec


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
    assert sent == payload * row.sent_factor(n)
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
    if row.name.startswith("SPARTA") and "DiLoCo" not in row.name:
        return  # replicas stay apart in what was not chosen
    for result in results[1:]:
        assert torch.equal(results[0], result)


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
    payload = len(batches) * sum(_codec(codec).encoded_bytes(part) for part in parts)
    assert sum(t.bytes_sent for t in run.traffic) == (2 * (n - 1) * payload if n > 1 else 0)
    if n > 1:
        assert {t.payload_bytes for t in run.traffic} == {payload}
    for result in run.results[1:]:
        assert torch.equal(run.results[0], result)


@settings(max_examples=15)
@given(
    num=st.integers(0, 3000),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    name=st.sampled_from(["fp16", "bf16", "int8"]),
)
def test_codecs_round_within_their_resolution(num: int, scale: float, name: str) -> None:
    codec = _codec(name)
    values = torch.randn(num, generator=torch.Generator().manual_seed(num)) * scale
    message = codec.encode(values)
    assert message.dtype == torch.uint8
    assert message.numel() == codec.encoded_bytes(num)
    error = (codec.decode(message, num) - values).abs()
    if name == "int8":
        for chunk, chunk_error in zip(values.split(1024), error.split(1024), strict=True):
            if len(chunk):
                assert float(chunk_error.max()) <= float(chunk.abs().max()) / 127 * 0.501
    else:
        resolution = 2.0**-10 if name == "fp16" else 2.0**-7
        assert bool((error <= resolution * values.abs() + 1e-7).all())


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


def test_selectors_differ_in_what_they_draw_anew() -> None:
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
