"""What codecs lose and weigh, what error feedback gives back, and averages that no single rank can spoil."""

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
from torch import Tensor

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import DiLoCoStrategy, FedAvgStrategy
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.codecs import CODECS, Codec, codec_named

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


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_travels_in_either_half(name: str, dtype: torch.dtype) -> None:
    values = torch.tensor([-1.5, 0.0, 96.0, math.inf], dtype=dtype)
    assert torch.equal(through(named(name), values), values.float())


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
    if name == "scaled-fp16":
        assert bool((error <= 2.0**-11 * (values - values.mean()).abs() + tiny).all())
    elif name == "uniform8bit":
        inner = (values - values.mean()).abs() < 2.9 * spread
        assert bool((error[inner] <= 6 / 256 * spread + tiny).all())
    elif name == "quantile8bit":
        # Nothing leaves its bin: what was sorted still is, and means of bins are means of all.
        assert bool((got[values.argsort()].diff() >= -tiny).all())
        assert float(got.mean()) == pytest.approx(float(values.mean()), abs=tiny)
        assert num > 256 or bool((error <= tiny).all())
    elif name == "blockwise8bit":
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


def test_eight_bits_are_used_where_the_values_are() -> None:
    """For values that are normally distributed, by root mean square error."""
    values = normal(PIECE)
    loss = {name: float((through(named(name), values) - values).square().mean().sqrt()) for name in NAMES}
    assert loss["scaled-fp16"] < loss["fp16"] * 1.01 < loss["bf16"]
    assert loss["bf16"] < min(loss["int8"], loss["uniform8bit"], loss["quantile8bit"], loss["blockwise8bit"])
    heavy = values**5
    worse = float((through(named("uniform8bit"), heavy) - heavy).abs().median())
    for name in ("quantile8bit", "blockwise8bit"):
        assert float((through(named(name), heavy) - heavy).abs().median()) < worse / 5


def test_e3m0_takes_the_power_of_two_that_is_nearest_in_logarithm() -> None:
    values = torch.tensor([8.0, -4.0, 2.9, 2.8, 0.125, 0.09, 0.08, 0.0, -8.0])
    assert through(named("e3m0"), values).tolist() == [8.0, -4.0, 4.0, 2.0, 0.125, 0.125, 0.0, 0.0, -8.0]


def test_none_is_no_codec() -> None:
    assert codec_named("none") is codec_named("fp32") is codec_named(None) is None


# --- error feedback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "uniform8bit", "blockwise8bit"])
def test_error_feedback_gives_back_what_was_rounded_off(name: str) -> None:
    """Sums of many rounds are right to what is still owed, however coarse a single round is."""
    num_rounds, num_ranks = 40, 3
    generator = torch.Generator().manual_seed(1)
    sent = torch.randn(num_ranks, 50, generator=generator) * torch.logspace(-3, 0, 50)
    true = sent.mean(dim=0) * num_rounds

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        plain, fed, residual = torch.zeros(50), torch.zeros(50), torch.zeros(50)
        for _ in range(num_rounds):
            plain += Averaging(named(name)).flat(comm, sent[comm.rank].clone())
            fed += Averaging(named(name)).flat(comm, sent[comm.rank].clone(), residual)
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
        lambda comm: Averaging(aggregate=aggregate).flat(comm, values[comm.rank].clone()), num_ranks
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
        return Averaging(aggregate=aggregate).flat(comm, own)

    for result in run_ranks(body, 5).results:
        assert bool((result >= honest.amin(dim=0)).all() and (result <= honest.amax(dim=0)).all())


@pytest.mark.parametrize("make", [DiLoCoStrategy, FedAvgStrategy])
def test_strategies_survive_a_rank_that_lies(make: Any) -> None:
    model, batches = reference.make_problem(4, 6, 4, 6, seed=2)
    for step in batches:
        step[1] = (step[1][0] * 1e4, step[1][1] * 1e8)
    moved = {}
    for aggregate in ("mean", "median", "trimmed-mean"):
        results = reference.run_strategy(make(SGD, H=2, aggregate=aggregate), model, batches).results
        moved[aggregate] = float((results[0] - reference.vector(model)).abs().max())
        assert all(torch.equal(results[0], result) for result in results) or aggregate == "mean"
    assert moved["median"] < 2
    assert moved["trimmed-mean"] < 2
    assert not moved["mean"] < 1000


@pytest.mark.parametrize("name", sorted(name for name, codec in CODECS.items() if codec is not None))
def test_without_values_a_codec_knows_its_sizes(name: str) -> None:
    """On the meta device messages have the sizes that they have elsewhere, and decode to as many values."""
    codec = codec_named(name)
    sizes = codec.on(torch.device("meta"))
    message = sizes.encode(torch.empty(5000, device="meta"))
    assert message.is_meta
    assert len(message) == len(codec.encode(torch.zeros(5000)))
    assert sizes.decode(message, 5000).shape == (5000,)
    assert codec.on(torch.device("cpu")) is codec
