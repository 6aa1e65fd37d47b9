"""Compute time: parsing, the device table, FLOPs against their formulas, repeatable draws."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.cost.compute import (
    Compute,
    Flops,
    MeasuredStep,
    StepDurations,
    Stragglers,
)
from exogym_core.cost.devices import DEVICES, find_device
from exogym_core.cost.flops import FlopCount, count_flops
from exogym_core.cost.speeds import measure_seconds
from netgym.tasks import GPT, MLP
from netsim.errors import InputError


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, Compute()),
        ("flops", Compute()),
        (0.5, Compute(fixed=0.5)),
        (0, Compute(fixed=0.0)),
        ("50 ms", Compute(fixed=0.05)),
        ({"fixed": "50 ms"}, Compute(fixed=0.05)),
        ({"flops": None, "jitter": 0.2}, Compute(jitter=0.2)),
        ({"jitter": {"sigma": 0.2}}, Compute(jitter=0.2)),
        (
            {"flops": {"utilisation": "40 %", "device": "RTX 4090", "dtype": "bf16"}},
            Compute(flops=Flops(utilisation=0.4, device="RTX 4090", dtype="bf16")),
        ),
        ({"measured": {"factor": 2}}, Compute(measured=MeasuredStep(factor=2.0))),
        ("measured", Compute(measured=MeasuredStep())),
        (
            {"fixed": "1 s", "stragglers": {"fraction": "1 %", "slowdown": 5}},
            Compute(fixed=1.0, stragglers=Stragglers(fraction=0.01, slowdown=5.0)),
        ),
    ],
)
def test_specs_parse_and_come_back(spec, expected):
    parsed = Compute.parse(spec)
    assert parsed == expected
    assert Compute.parse(parsed) is parsed
    assert Compute.parse(parsed.to_mapping()) == parsed
    assert parsed.describe()


def test_device_table_is_complete_and_plausible():
    assert len(DEVICES) >= 12
    for name, device in DEVICES.items():
        assert find_device(name.upper().replace("-", " ")) is device
        assert device.source
        assert 1e10 < device.flops["fp32"] <= max(device.flops.values()) < 1e16
    assert DEVICES["a100"].flops_for("bf16", "a100") == 312e12
    assert DEVICES["v100"].flops_for("bf16", "v100") == 15.7e12  # has no bf16 units


def test_step_seconds_follow_the_device():
    compute = Compute.parse({"flops": {"utilisation": 0.5}})
    assert compute.step_seconds(1e12, "h100") == 1e12 / (67e12 * 0.5)
    assert compute.step_seconds(1e12, "h100", half=True) == 1e12 / (989.5e12 * 0.5)
    assert Compute.parse({"flops": {"device": "t4", "dtype": "fp16"}}).step_seconds(26e12, "h100") == 1.0
    assert Compute.parse("3 s").step_seconds(1e12, "h100") == 3.0


def test_flops_of_an_mlp_are_counted_by_hand():
    sizes = (64, 128, 64, 10)
    products = [16 * a * b for a, b in itertools.pairwise(sizes)]
    # forward, gradient of the weights, and gradient of the inputs of all but the first layer
    expected = 2 * (2 * sum(products) + sum(products[1:]))
    batch = (torch.zeros(16, 64), torch.zeros(16, dtype=torch.long))
    assert count_flops(MLP(), batch).total == expected


def test_flops_of_a_gpt_include_attention():
    layers, width, length, samples, vocabulary = 2, 32, 16, 3, 20
    model = GPT(num_layers=layers, width=width, num_heads=2, vocab_size=vocabulary, block_size=length)
    tokens = torch.zeros(samples, length, dtype=torch.long)
    weights = layers * 12 * width**2 + vocabulary * width
    attention = layers * 4 * samples * length**2 * width
    assert count_flops(model, (tokens, tokens)).total == pytest.approx(
        6 * samples * length * weights + 3.5 * attention, rel=1e-9
    )


class LossOf(torch.nn.Module):
    def __init__(self, body, head=None):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, batch):
        output = self.body(*batch) if isinstance(batch, tuple) else self.body(batch)
        output = output[0] if isinstance(output, tuple) else output
        return (output if self.head is None else self.head(output[:, -1])).square().mean()


@pytest.mark.parametrize("directions", [1, 2])
def test_flops_of_a_recurrent_network_are_counted(directions):
    """torch's counter does not know the kernel that runs an LSTM; the linear layer alone was counted."""
    lstm = torch.nn.LSTM(16, 32, batch_first=True, bidirectional=directions == 2)
    model = LossOf(lstm, torch.nn.Linear(32 * directions, 1))
    recurrent = 2 * 4 * 8 * 4 * 32 * (16 + 32) * directions
    linear = 2 * 4 * 32 * directions
    assert count_flops(model, torch.zeros(4, 8, 16)) == FlopCount(3 * recurrent + 3 * linear)
    # The other recurrent layers are made of matrix products; data and the first of 4 states need no gradient.
    gru = count_flops(LossOf(torch.nn.GRU(16, 32)), torch.zeros(4, 8, 16)).total
    products = 2 * 4 * 8 * 3 * 32
    assert gru == products * (2 * 16 + 2 * 32) + products * 32 * 3 // 4


@pytest.mark.parametrize(
    ("body", "batch", "expected"),
    [
        (torch.nn.Bilinear(3, 5, 7), (torch.zeros(2, 3), torch.zeros(2, 5)), 2 * (3 * 2 * 3 * 5 * 7)),
        (LossOf(torch.nn.Linear(4, 4)), torch.zeros(2, 4), 2 * (2 * 2 * 4 * 4)),
    ],
)
def test_flops_of_other_products(body, batch, expected):
    assert count_flops(LossOf(body), batch).total == expected


class Elementwise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 6)
        self.scale = torch.nn.Parameter(torch.ones(2, 6))

    def forward(self, batch):
        return self.table(batch) * self.scale


def test_what_cannot_be_counted_is_named_and_nothing_at_all_is_refused():
    """A model without matrix products took no virtual time, without a word."""
    scan = Elementwise()
    count = count_flops(LossOf(scan), torch.zeros(2, dtype=torch.long))
    assert count == FlopCount(0, ("body (Elementwise)",))
    with pytest.raises(
        InputError, match=r"no operations in this model: body \(Elementwise\) cannot be counted; give"
    ):
        count.warn_or_refuse()
    with pytest.raises(InputError, match="it multiplies no matrices"):
        FlopCount(0).warn_or_refuse()
    partly = count_flops(
        LossOf(torch.nn.Sequential(scan, torch.nn.Linear(6, 6))), torch.zeros(2, dtype=torch.long)
    )
    with pytest.warns(UserWarning, match=r"cannot count body\.0 \(Elementwise\), which will take no time"):
        partly.warn_or_refuse()
    FlopCount(3).warn_or_refuse()


def test_counting_and_measuring_change_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, batch):
            return self.body(batch).square().mean()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    count_flops(Loss(), torch.ones(8, 4))
    assert measure_seconds(Loss(), torch.ones(8, 4)) > 0
    assert measure_seconds(Loss(), torch.ones(8, 4), shared_cores=2) > 0
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measured_seconds_are_those_of_half_precision():
    dtypes = set()

    class Seen(torch.nn.Linear):
        def forward(self, batch):
            output = super().forward(batch)
            dtypes.add(output.dtype)
            return output.float().mean()

    assert measure_seconds(Seen(4, 4), torch.ones(8, 4), precision="bf16") > 0
    assert dtypes == {torch.bfloat16}


def test_draws_have_the_spread_that_was_asked_for():
    compute = Compute.parse({"fixed": "2 s", "jitter": 0.3, "stragglers": {"fraction": 0.1, "slowdown": 4}})
    jitter_only = Compute.parse({"fixed": "2 s", "jitter": 0.3})
    durations = StepDurations(jitter_only, 2.0, seed=1, host=0)
    seconds = [durations.seconds(step) for step in range(4000)]
    assert statistics.mean(seconds) == pytest.approx(2.0, rel=0.02)
    assert statistics.stdev(map(math.log, seconds)) == pytest.approx(0.3, rel=0.05)
    both = StepDurations(compute, 2.0, seed=1, host=0)
    slow = [both.seconds(step) / alone for step, alone in enumerate(seconds)]
    assert set(map(round, slow)) == {1, 4}
    assert sum(map(round, slow)) / 4000 == pytest.approx(1.3, rel=0.05)


@given(seed=st.integers(0, 2**40), host=st.integers(0, 2000), step=st.integers(0, 10**9))
def test_draws_depend_on_seed_host_and_step_alone(seed, host, step):
    compute = Compute(jitter=0.5, stragglers=Stragglers(fraction=0.5, slowdown=3.0))
    drawn = StepDurations(compute, 1.0, seed, host).seconds(step)
    again = StepDurations(compute, 1.0, seed, host)
    again.seconds(step + 1)
    assert again.seconds(step) == drawn
    assert 0 < drawn < math.inf
    assert (
        len({drawn, StepDurations(compute, 1.0, seed, host + 1).seconds(step), again.seconds(step + 1)}) == 3
    )


def test_without_spread_every_step_is_equal():
    assert StepDurations(Compute(fixed=0.25), 0.25, seed=0, host=0).seconds(7) == 0.25
