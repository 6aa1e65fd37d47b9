"""What codecs lose and weigh, error feedback, robust averages; what compressing strategies are equal to."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import pytest
import strategy_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.cost.compute import Coding
from exogym_core.strategy import (
    MODULES,
    Chain,
    MuLoCoStrategy,
    SignSGDStrategy,
    Sites,
    build_strategy,
)
from exogym_core.strategy.parts.average import Averaging, Flight
from exogym_core.strategy.parts.codecs import (
    CODECS,
    CastCodec,
    Codec,
    codec_named,
    pack,
    packed_bytes,
    unpack,
)
from exogym_core.strategy.parts.muon import hidden_matrices
from exogym_core.strategy.parts.tensor_codecs import (
    EachTensorCodec,
    LargestCodec,
    LinearCodec,
    QSGDCodec,
    SignCodec,
    StatisticalCodec,
    block_shape,
)
from netsim.errors import InputError

NAMES = sorted(name for name, codec in CODECS.items() if codec is not None)
PIECE, BLOCK = 2**17, 4096
SGD = functools.partial(torch.optim.SGD, lr=0.1)

# Bytes for so many values: of the values themselves, and of the heads or scales beside them.
BYTES = {
    "bf16": lambda n: 2 * n,
    "blockwise8bit": lambda n: n + 4 * math.ceil(n / BLOCK),
    "e3m0": lambda n: math.ceil(n / 2) + 4 * math.ceil(n / 256),
    "fp16": lambda n: 2 * n,
    "int8": lambda n: n + 4 * math.ceil(n / 1024),
    "quantile8bit": lambda n: n + 1024 * math.ceil(n / PIECE),
    "scaled-fp16": lambda n: 2 * n + 8 * math.ceil(n / PIECE),
    "uniform8bit": lambda n: n + 1024 * math.ceil(n / PIECE),
}


def named(name: str) -> Codec:
    codec = codec_named(name)
    assert codec is not None
    return codec


def through(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), len(values))


def normal(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num", [0, 1, 2, 255, BLOCK + 1, PIECE, PIECE + 3])
def test_messages_have_the_size_that_is_charged(name: str, num: int) -> None:
    codec = named(name)
    message = codec.encode(normal(num).double())
    assert message.dtype == torch.uint8
    assert len(message) == codec.encoded_bytes(num) == BYTES[name](num)
    got = codec.decode(message, num)
    assert got.dtype == torch.float32
    assert len(got) == num


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("travels_in", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_half_precision_travels_in_either_half(travels_in: torch.dtype, dtype: torch.dtype) -> None:
    values = torch.tensor([-1.5, 0.0, 96.0, math.inf], dtype=dtype)
    assert torch.equal(through(CastCodec(travels_in), values), values.float())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(num=st.integers(1, 2000), scale=st.sampled_from([1e-4, 1.0, 1e4]), offset=st.sampled_from([0.0, 3.0]))
def test_values_come_back_within_the_codecs_resolution(
    name: str, num: int, scale: float, offset: float
) -> None:
    values = (normal(num, num) + offset) * scale
    got = through(named(name), values)
    error, spread = (got - values).abs(), float(values.std(correction=0))
    largest = float(values.abs().max())
    tiny = 1e-5 * largest + 1e-7
    if name in ("fp16", "bf16"):  # half a unit in the last place, within the range
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
        error = (got - values.clamp(torch.finfo(kind).min, torch.finfo(kind).max)).abs()
        assert bool((error <= torch.finfo(kind).eps / 2 * values.abs() + tiny).all())
    elif name == "int8":
        assert bool((error <= 0.501 * largest / 127 + tiny).all())
    elif name == "e3m0":  # powers of two, down to the 64th part of a block's largest
        levels = values.abs() > largest / 32
        assert bool((error[levels] <= 0.5 * values.abs()[levels]).all())
    elif name == "scaled-fp16":
        assert bool((error <= 2.0**-11 * (values - values.mean()).abs() + tiny).all())
    elif name == "uniform8bit":
        inner = (values - values.mean()).abs() < 2.9 * spread
        assert bool((error[inner] <= 6 / 256 * spread + tiny).all())
    elif name == "quantile8bit":
        # Nothing leaves its bin: what was sorted still is, and means of bins are means of all.
        assert bool((got[values.argsort()].diff() >= -tiny).all())
        assert float(got.mean()) == pytest.approx(float(values.mean()), abs=tiny)
        assert num > 256 or bool((error <= tiny).all())
    else:
        assert name == "blockwise8bit"
        # Steps are finest, in proportion, near the largest value and never wider than a tenth of the decade.
        levels = values.abs() / largest
        assert bool((error[levels > 0.1] <= 0.9 / 64 * largest).all())
        assert bool((error[levels > 0.01] <= 0.5 * values.abs()[levels > 0.01] + tiny).all())


@pytest.mark.parametrize("name", NAMES)
def test_constants_zeros_and_what_is_not_finite(name: str) -> None:
    codec = named(name)
    for constant in (0.0, 2.5):
        torch.testing.assert_close(through(codec, torch.full((300,), constant)), torch.full((300,), constant))
    if name in ("bf16", "fp16"):
        return  # clamps
    broken = normal(200)  # no more than the smallest block
    broken[7] = float("inf")
    assert bool(through(codec, broken).isnan().all())


def test_e3m0_takes_the_power_of_two_that_is_nearest_in_logarithm() -> None:
    values = torch.tensor([8.0, -4.0, 2.9, 2.8, 0.125, 0.09, 0.08, 0.0, -8.0])
    assert through(named("e3m0"), values).tolist() == [8.0, -4.0, 4.0, 2.0, 0.125, 0.125, 0.0, 0.0, -8.0]


# --- error feedback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "uniform8bit", "blockwise8bit"])
def test_error_feedback_gives_back_what_was_rounded_off(name: str) -> None:
    """Sums of many rounds are right to what is still owed, however coarse a single round is."""
    num_rounds, num_ranks = 20, 3
    generator = torch.Generator().manual_seed(1)
    sent = torch.randn(num_ranks, 50, generator=generator) * torch.logspace(-3, 0, 50)
    true = sent.mean(dim=0) * num_rounds

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        plain, fed, residual = torch.zeros(50), torch.zeros(50), torch.zeros(50)
        for _ in range(num_rounds):
            plain += Flight(Averaging(named(name)).steps(comm, sent[comm.rank].clone())).wait()
            fed += Flight(Averaging(named(name)).steps(comm, sent[comm.rank].clone(), residual)).wait()
        owed = comm.all_reduce(residual.clone(), "avg")
        torch.testing.assert_close(fed + owed, true, rtol=1e-4, atol=1e-4)
        return plain, fed

    for plain, fed in run_ranks(body, num_ranks).results:
        assert float((fed - true).norm()) < float((plain - true).norm()) / 4


# --- robust averages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_robust_averages_equal_their_definition(aggregate: str, num_ranks: int) -> None:
    values = torch.randn(num_ranks, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run = run_ranks(
        lambda comm: Flight(Averaging(aggregate=aggregate).steps(comm, values[comm.rank].clone())).wait(),
        num_ranks,
    )
    for column in range(6):
        there = sorted(values[:, column].tolist())
        if aggregate == "trimmed-mean":
            drop = {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 8: 2}[num_ranks]
            want = statistics.fmean(there[drop : num_ranks - drop])
        else:
            want = statistics.median(there)
        for result in run.results:
            assert float(result[column]) == pytest.approx(want, abs=1e-12)
    assert sum(t.bytes_sent for t in run.traffic) == num_ranks * (num_ranks - 1) * 6 * 8


@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
@pytest.mark.parametrize("lie", [1e9, -1e9, float("inf"), float("nan")])
def test_one_rank_that_lies_pulls_nothing_beyond_the_honest_ones(aggregate: str, lie: float) -> None:
    honest = normal(4 * 10).view(4, 10)

    def body(comm: Communicator) -> Tensor:
        own = torch.full((10,), lie) if comm.rank == 2 else honest[comm.rank - (comm.rank > 2)].clone()
        return Flight(Averaging(aggregate=aggregate).steps(comm, own)).wait()

    for result in run_ranks(body, 5).results:
        assert bool((result >= honest.amin(dim=0)).all() and (result <= honest.amax(dim=0)).all())


# --- compressing strategies ---------------------------------------------------------------------------------

SEED = 11

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


@settings(max_examples=5)
@given(problem=problems)
def test_both_ways_of_counting_votes_give_the_same_bits(problem: dict[str, int]) -> None:
    assert_same(SignSGDStrategy(vote="servers"), SignSGDStrategy(vote="all"), problem, tolerance=0.0)


@settings(max_examples=5)
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
OF_PAPERS = {
    "sign": SignCodec(),
    "scaled sign": SignCodec("l2"),
    "qsgd": QSGDCodec(4, 100, "l2", torch.Generator().manual_seed(0)),
    "statistical": StatisticalCodec(2),
    "linear": LinearCodec(4),
    "largest": LargestCodec(SHAPES, [block_shape(s, 64) for s in SHAPES], [64] * 5, 12, StatisticalCodec(2)),
    "each": EachTensorCodec([shape.numel() for shape in SHAPES], LinearCodec(2)),
}


@pytest.mark.parametrize("name", OF_PAPERS)
def test_messages_have_the_size_they_say_and_come_back(name: str) -> None:
    codec = OF_PAPERS[name]
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
