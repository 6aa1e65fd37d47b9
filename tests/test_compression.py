"""Compressing strategies: what each is equal to, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exogym_core.cost.compute import Coding
from exogym_core.strategy import (
    MODULES,
    AllReduceStrategy,
    Chain,
    DGCStrategy,
    DiLoCoStrategy,
    DionStrategy,
    LocalSGDStrategy,
    MuLoCoStrategy,
    PowerSGDStrategy,
    QsparseLocalSGDStrategy,
    SignSGDStrategy,
    Sites,
    SparseLoCoStrategy,
    build_strategy,
)
from exogym_core.strategy.parts.codecs import pack, packed_bytes, unpack
from exogym_core.strategy.parts.few_bits import (
    LinearCodec,
    QSGDCodec,
    SignCodec,
    StatisticalCodec,
)
from exogym_core.strategy.parts.muon import hidden_matrices, orthogonalized
from exogym_core.strategy.parts.tensor_codecs import EachTensorCodec, LargestCodec, block_shape
from netsim.errors import InputError

SEED = 11
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}

# Of each strategy: what a step codes, in values of the model's 67, encoded and decoded; 33 are a half of them.
CODED: dict[str, tuple[dict[str, Any], float]] = {
    "DGC": ({}, 60 * 3),
    "Dion": ({}, 24 * 2),
    "MuLoCo": ({"bits": 4, "H": 1}, 67 * 5),
    "OneBitAdam": ({"freeze_step": 1}, 67 * 2 + 34 * 4 + 67),
    "PowerSGD": ({}, 60 * 2),
    "QSGD": ({}, 67 * 3),
    "QsparseLocalSGD": ({"H": 1}, 67 * 3),
    "SignSGD": ({}, 67 + 34 * 3 + 67),
    "SparseLoCo": ({"H": 1}, 67 * 3),
}


problems = reference.problems(4, 6, 5, 8)


def assert_same(one: Any, other: Any, problem: dict[str, int], tolerance: float = 1e-9) -> None:
    """Both strategies lead to the same parameters on all ranks."""
    model, batches = reference.make_problem(**problem)
    first, second = (reference.run_strategy(strategy, model, batches, SEED) for strategy in (one, other))
    for ours, theirs in zip(first.results, second.results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@settings(max_examples=10)
@given(problem=problems)
def test_powersgd_at_full_rank_is_allreduce(problem: dict[str, int]) -> None:
    assert_same(PowerSGDStrategy(SGD, approximation_rank=99), AllReduceStrategy(SGD), problem)


@settings(max_examples=5)
@given(problem=problems)
def test_powersgd_before_it_starts_is_allreduce(problem: dict[str, int]) -> None:
    assert_same(
        PowerSGDStrategy(SGD, approximation_rank=1, start_powerSGD_iter=6), AllReduceStrategy(SGD), problem
    )


@settings(max_examples=8)
@given(problem=problems, H=st.integers(1, 3))
def test_sparseloco_that_sends_everything_is_diloco_without_momentum(
    problem: dict[str, int],
    H: int,  # noqa: N803
) -> None:
    sparse = SparseLoCoStrategy(SGD, H=H, k=4096, bits=0, error_decay=0.0, outer_lr=0.8, mean_over="all")
    assert_same(sparse, DiLoCoStrategy(SGD, H=H, outer_lr=0.8, outer_optim_spec="sgd"), problem)


@settings(max_examples=8)
@given(problem=problems)
def test_muloco_with_adamw_is_diloco(problem: dict[str, int]) -> None:
    adamw = {"name": "adamw", "lr": 0.01}
    diloco = DiLoCoStrategy(adamw, H=2, outer_lr=0.7, outer_momentum=0.6)
    assert_same(MuLoCoStrategy(adamw, H=2), diloco, problem)


@settings(max_examples=8)
@given(problem=problems)
def test_qsparse_that_sends_everything_is_local_sgd(problem: dict[str, int]) -> None:
    qsparse = QsparseLocalSGDStrategy(SGD, H=2, density=1.0, values="exact")
    assert_same(qsparse, LocalSGDStrategy(SGD, H=2), problem, tolerance=1e-5)  # fp32 on the wire


@settings(max_examples=8)
@given(problem=problems)
def test_dgc_that_sends_everything_without_momentum_is_allreduce(problem: dict[str, int]) -> None:
    dgc = DGCStrategy(lr=0.05, density=1.0, momentum=0.0)
    assert_same(dgc, AllReduceStrategy("sgd", lr=0.05), problem, tolerance=1e-5)


@settings(max_examples=8)
@given(problem=problems)
def test_both_ways_of_counting_votes_give_the_same_bits(problem: dict[str, int]) -> None:
    assert_same(SignSGDStrategy(vote="servers"), SignSGDStrategy(vote="all"), problem, tolerance=0.0)


@settings(max_examples=8)
@given(problem=problems)
def test_dion_on_many_ranks_is_dion_on_one_with_the_mean_gradient(problem: dict[str, int]) -> None:
    """Ranks that all have the same batches do what one of them does alone."""
    model, batches = reference.make_problem(**problem)
    alike = [[step[0]] * len(step) for step in batches]
    alone = [[step[0]] for step in batches]
    many, one = (
        reference.run_strategy(DionStrategy(), model, each, SEED).results[0] for each in (alike, alone)
    )
    torch.testing.assert_close(many, one, rtol=1e-7, atol=1e-7)


@settings(max_examples=8)
@given(problem=problems)
def test_torchs_muon_inside_is_torchs(problem: dict[str, int]) -> None:
    """Of one rank with an outer step that takes all of the displacement: torch's own loop, bit for bit."""
    model, batches = reference.make_problem(**{**problem, "num_ranks": 1}, dtype=torch.float32)
    strategy = MuLoCoStrategy(muon="torch", H=1, outer_lr=1.0, outer_momentum=0.0)
    got = reference.run_strategy(strategy, model, batches, SEED).results[0]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optims = [
        torch.optim.Muon(matrices, 0.02, 0.01, 0.95),
        torch.optim.AdamW(others, 0.02, (0.9, 0.95), weight_decay=0.01),
    ]
    for step in batches:
        model.zero_grad()
        model(step[0]).backward()
        for optim in optims:
            optim.step()
    torch.testing.assert_close(got, reference.vector(model), rtol=1e-4, atol=1e-5)


def test_newton_schulz_moves_singular_values_to_one() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for each in (matrix, matrix.T):
        sizes = torch.linalg.svdvals(orthogonalized(each))
        assert bool(((sizes - 1).abs() < 0.02).all())


def test_hidden_matrices_are_neither_embeddings_nor_heads() -> None:
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(5, 4), "blocks": nn.Linear(4, 6), "lm_head": nn.Linear(6, 5)}
    )
    assert [tuple(p.shape) for p in hidden_matrices(model)] == [(6, 4)]


# --- on the wire -------------------------------------------------------------------------------------------


@given(bits=st.sampled_from([1, 2, 3, 4, 8, 12, 32]), num=st.integers(0, 40), seed=st.integers(0, 99))
def test_packed_codes_come_back_and_leave_no_gaps(bits: int, num: int, seed: int) -> None:
    codes = torch.randint(2**bits, (num,), generator=torch.Generator().manual_seed(seed))
    message = pack(codes, bits)
    assert message.numel() == packed_bytes(num, bits) == -(-num * bits // 8)
    assert torch.equal(unpack(message, bits, num).long(), codes)


SHAPES = [torch.Size(shape) for shape in ((64, 128), (3, 5), (7,), (), (0, 3))]
NUM_VALUES = sum(shape.numel() for shape in SHAPES)
CODECS = {
    "sign": SignCodec(),
    "scaled sign": SignCodec("l2"),
    "qsgd": QSGDCodec(4, 100, "l2", torch.Generator().manual_seed(0)),
    "statistical": StatisticalCodec(2),
    "linear": LinearCodec(4),
    "largest": LargestCodec(SHAPES, [block_shape(s, 64) for s in SHAPES], [64] * 5, 12, StatisticalCodec(2)),
    "each": EachTensorCodec([shape.numel() for shape in SHAPES], LinearCodec(2)),
}


@pytest.mark.parametrize("name", CODECS)
def test_messages_have_the_size_they_say_and_come_back(name: str) -> None:
    codec = CODECS[name]
    values = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1))
    message = codec.encode(values)
    assert message.dtype == torch.uint8
    assert message.numel() == codec.encoded_bytes(NUM_VALUES)
    back = codec.decode(message, NUM_VALUES)
    assert back.shape == values.shape
    assert float((back * values).sum()) > 0


def test_sparseloco_sends_what_its_paper_counts() -> None:
    """Of 4096 values 64 times 14 bits, 146.3 times below fp32, where sides are multiples of 64; 20 bytes a tensor."""
    shape = torch.Size((512, 1024))
    codec = LargestCodec([shape], [block_shape(shape, 64)], [64], 12, StatisticalCodec(2))
    assert codec.encoded_bytes(shape.numel()) == shape.numel() * 64 * 14 // 4096 // 8 + 20
    assert 4 * shape.numel() / (codec.encoded_bytes(shape.numel()) - 20) == pytest.approx(146.3, abs=0.05)


def test_qsgd_has_no_bias() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    codec = QSGDCodec(3, 32, "l2", torch.Generator().manual_seed(1))
    mean = codec.decode(codec.encode(values.repeat(4000)), 64 * 4000).view(4000, 64).mean(0)
    torch.testing.assert_close(mean, values, rtol=0, atol=0.1)


# --- arguments, costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [module for name, module in MODULES.items() if name in CODED])
def test_sites_are_refused(module: Any) -> None:
    model, batches = reference.make_problem(2, 1, 4, 6, seed=1)
    with pytest.raises(
        InputError, match=rf"{module.__name__} mixes single ranks, not sites; leave Sites out"
    ):
        reference.run_strategy(Chain([Sites(2), module()]), model, batches)


@pytest.mark.parametrize("name", CODED)
def test_the_work_of_coding_takes_time(name: str) -> None:
    """With one speed for all, a step costs what it codes over that speed, and nothing without one."""
    options, num_values = CODED[name]
    steps = 1 + int(name == "OneBitAdam")  # whose first step is Adam's
    model, batches = reference.make_problem(2, steps, 4, 6, seed=1)
    coding = Coding.model_validate("4 kB/s")  # 1000 values a second
    seconds = []
    for speeds in (coding, None):
        strategy = build_strategy(name, **options)
        run = reference.run_strategy(strategy, model, batches, coding=speeds, topology="two-datacenters")
        assert run.virtual_seconds is not None
        seconds.append(run.virtual_seconds)
    assert seconds[0] - seconds[1] == pytest.approx(num_values / 1000, rel=1e-6)
