"""Compute time: steps, codecs, optimizers' updates, shared cores and devices; parsing, formulas, draws."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import strategy_reference as reference
import torch
from experiments import Squares, fitted, three_steps
from hypothesis import given
from hypothesis import strategies as st
from test_crashed_hosts import crash, star
from torch import nn
from torch.utils.data import TensorDataset
from worlds import chain_form, finished

from exogym_core.communicator import run_ranks
from exogym_core.cost.compute import (
    BothWays,
    Coding,
    Compute,
    Flops,
    MeasuredStep,
    StepDurations,
    Stragglers,
    Updates,
)
from exogym_core.cost.devices import DEVICES, find_device
from exogym_core.cost.flops import FlopCount, count_flops
from exogym_core.cost.operations import OperationWatch, TorchOperation
from exogym_core.cost.roofline import PRODUCT_SHARE, Roofline
from exogym_core.cost.speeds import measure_seconds, seconds_of
from exogym_core.strategy import (
    STRATEGIES,
    AllReduceStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    Strategy,
    build_strategy,
)
from exogym_core.strategy.options import accepted_arguments
from exogym_core.strategy.parts.codecs import CastCodec
from exogym_core.strategy.trials import CODEC_NAMES
from netgym.tasks import GPT, MLP
from netsim import Topology
from netsim.errors import InputError
from netsim.ranks import Advance, Mark

ENCODED, DECODED = 1000, 4000  # bytes a second: slow enough to see


def both(encode: int, decode: int) -> BothWays:
    return BothWays.model_construct(encode=encode, decode=decode)


SPEEDS = Coding({"": both(ENCODED, DECODED)})
CODING: list[tuple[Any, Coding]] = [
    (None, Coding({})),
    ("free", Coding({})),
    ("measured", Coding.model_construct(None)),
    ("2 GB/s", Coding({"": both(2 * 10**9, 2 * 10**9)})),
    ({"encode": "1 kB/s", "decode": "4 kB/s"}, SPEEDS),
    (
        {"int8": "1 MB/s", "fp16": {"encode": "2 MiB/s", "decode": "1 B/s"}},
        Coding({"fp16": both(2**21, 1), "int8": both(10**6, 10**6)}),
    ),
]
UPDATES: list[tuple[Any, Updates]] = [
    (None, Updates({})),
    ("free", Updates({})),
    ("measured", Updates.model_construct(None)),
    ("2 GB/s", Updates.model_validate({"other": "2 GB/s"})),
    (
        {"SGD with momentum": "1 kB/s", "AdamW": "3 B/s"},
        Updates.model_validate({"AdamW": "3 B/s", "SGD with momentum": "1000 B/s"}),
    ),
]


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
        *(({"fixed": "1 s", "coding": spec}, Compute(fixed=1.0, coding=made)) for spec, made in CODING),
        *(({"fixed": "1 s", "updates": spec}, Compute(fixed=1.0, updates=made)) for spec, made in UPDATES),
    ],
)
def test_specs_parse_and_come_back(spec, expected):
    parsed = Compute.parse(spec)
    assert parsed == expected
    assert Compute.parse(parsed) is parsed
    assert Compute.parse(parsed.model_dump()) == parsed
    assert parsed.describe()


def test_device_table_is_complete_and_plausible():
    assert len(DEVICES) >= 12
    for name, device in DEVICES.items():
        assert find_device(name.upper().replace("-", " ")) is device
        assert device.source
        assert 1e10 < device.flops["fp32"] <= max(device.flops.values()) < 1e16
        assert device.flops.get("fp64", 0.0) <= device.flops["fp32"]
        assert 5e9 < device.memory_bytes_per_second < 1e13
        assert 0.0 <= device.launch_seconds < 1e-4
        assert device.best_product is None or 0.5 < device.best_product < 1.0
    assert DEVICES["a100"].flops_for("bf16", "a100") == 312e12
    assert DEVICES["v100"].flops_for("bf16", "v100") == 15.7e12  # has no bf16 units
    assert {each: DEVICES[each].unit_for("fp8", each) for each in ("h100", "a100", "t4", "m1")} == {
        "h100": "fp8",
        "a100": "bf16",
        "t4": "fp16",
        "m1": "fp32",
    }
    assert DEVICES["tpu-v5e"].flops_for("bf16", "tpu-v5e") == 197e12
    assert DEVICES["b200"].memory_bytes_per_second == DEVICES["gb200"].memory_bytes_per_second == 8e12


def test_step_seconds_follow_the_device():
    compute = Compute.parse({"flops": {"utilisation": 0.5}})
    assert compute.step_seconds(1e12, "h100") == 1e12 / (67e12 * 0.5)
    assert compute.step_seconds(1e12, "h100", half=True) == 1e12 / (989.5e12 * 0.5)
    assert Compute.parse({"flops": {"device": "t4", "dtype": "fp16"}}).step_seconds(26e12, "h100") == 1.0
    assert Compute.parse("3 s").step_seconds(1e12, "h100") == 3.0


def seconds_on(roofline, work):
    """Operations of `work` as (name, seconds, bound), after their making is left out."""
    taken = []
    with OperationWatch(lambda each: taken.append((each.name, *roofline.seconds(each)))):
        work()
    return taken


@pytest.fixture
def fp32_products():
    """Torch's setting of products of fp32 matrices, put back afterwards."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


SQUARE = 2 * 1024**3  # operations of a product of matrices of 1024


@pytest.mark.parametrize(
    ("dtype", "setting", "rate"),
    [
        (torch.float32, "ieee", 19.5e12),
        (torch.float32, "tf32", 156e12),
        (torch.bfloat16, "tf32", 312e12),
        (torch.float16, "ieee", 312e12),
        (torch.float64, "tf32", 19.5e12),
    ],
)
def test_products_go_by_the_dtype_of_their_operands_and_torchs_setting(dtype, setting, rate, fp32_products):
    fp32_products.fp32_precision = setting
    square = torch.empty(1024, 1024, dtype=dtype, device="meta")
    half = Roofline(find_device("a100"), "a100", 0.5, 0.5)
    assert seconds_on(half, lambda: square @ square) == [
        ("aten.mm", pytest.approx(SQUARE / (rate * 0.5)), "products")
    ]


def test_settings_of_convolutions_are_their_own(fp32_products):
    fp32_products.fp32_precision = "ieee"
    images, weights = torch.empty(8, 256, 66, 66, device="meta"), torch.empty(256, 256, 3, 3, device="meta")
    whole = Roofline(find_device("a100"), "a100", 1.0, 1.0)
    flops = 2 * 8 * 256 * 64 * 64 * 256 * 9
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        slow = seconds_on(whole, lambda: torch.conv2d(images, weights))
    fast = seconds_on(whole, lambda: torch.conv2d(images, weights))  # torch's default
    assert slow == [("aten.convolution", pytest.approx(flops / 19.5e12), "products")]
    assert fast == [("aten.convolution", pytest.approx(flops / 156e12), "products")]


def test_operations_without_products_go_by_the_bytes_that_they_read_and_write():
    large, small = torch.empty(4096, 4096, device="meta"), torch.empty(8, device="meta")
    rows = torch.empty(1024, dtype=torch.long, device="meta")
    num = large.numel()
    whole = Roofline(find_device("a100"), "a100", 1.0, 1.0)

    def work():
        large + large.t()  # a view is free, and one tensor read twice is two reads
        large.add_(1.0)
        large.zero_()
        small + small
        large[rows]
        torch.nn.functional.embedding(rows, large)
        torch.nn.functional.softmax(large, 1)
        large.expand(2, 4096, 4096).sum()  # repeated rows are read once
        torch.empty_like(large)
        large.to(torch.bfloat16)

    moved = [3 * 4 * num, 2 * 4 * num, 4 * num, None, *[2 * 1024 * 4096 * 4 + 8 * 1024] * 2]
    moved += [2 * 4 * num, 4 * num + 4, 4 * num + 2 * num]
    names = "add add_ zero_ add index embedding _softmax sum _to_copy"
    assert seconds_on(whole, work) == [
        (
            f"aten.{name}",
            *(
                (pytest.approx(5e-6), "launches")
                if size is None
                else (pytest.approx(size / 2039e9), "memory")
            ),
        )
        for name, size in zip(names.split(), moved, strict=True)
    ]


def test_attention_is_one_operation_and_a_causal_one_half_of_it():
    shape = (1, 1, 1024, 64)
    whole = Roofline(replace(find_device("a100"), launch_seconds=0.0), "a100", 1.0, 1.0)
    queries = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention

    def products(causal):
        def work():
            attention(queries, queries, queries, is_causal=causal).backward(torch.zeros(shape).bfloat16())

        return [seconds for _, seconds, bound in seconds_on(whole, work) if bound == "products"]

    forward = 2 * 2 * 1024**2 * 64 / 312e12
    assert products(causal=False) == [pytest.approx(forward), pytest.approx(2.5 * forward)]
    assert products(causal=True) == [pytest.approx(forward / 2), pytest.approx(2.5 * forward / 2)]


def test_a_product_of_complex_numbers_is_four_of_real_ones():
    taken: list[TorchOperation] = []
    factors = [torch.empty(8, 16, dtype=dtype, device="meta") for dtype in (torch.complex64, torch.float32)]
    with OperationWatch(taken.append):
        for each in factors:
            torch.mm(each, each.t())
    assert [each.flops for each in taken if each.flops] == [8 * 8 * 8 * 16, 2 * 8 * 8 * 16]


FACTORIZED = [  # of 2048 x 1024 (t), 1024 x 1024 (s) and 1024 x 512 (b), in units of 1024^3, counted by hand
    ("aten.linalg_cholesky_ex", lambda t, s, b: torch.linalg.cholesky_ex(s), 1 / 3),
    ("aten.cholesky_inverse", lambda t, s, b: torch.cholesky_inverse(s), 2 / 3),
    ("aten.cholesky_solve", lambda t, s, b: torch.cholesky_solve(b, s), 1),
    ("aten.linalg_lu_factor_ex", lambda t, s, b: torch.linalg.lu_factor_ex(t), 2 - 1 / 3),
    ("aten._linalg_solve_ex", lambda t, s, b: torch.linalg.solve_ex(s, b), 2 / 3 + 1),
    ("aten.linalg_solve_triangular", lambda t, s, b: torch.linalg.solve_triangular(s, b, upper=True), 1 / 2),
    ("aten.linalg_inv_ex", lambda t, s, b: torch.linalg.inv_ex(s), 2),
    ("aten.linalg_ldl_factor_ex", lambda t, s, b: torch.linalg.ldl_factor_ex(s), 1 / 3),
    ("aten.linalg_qr", lambda t, s, b: torch.linalg.qr(t, "r"), 4 - 2 / 3),
    ("aten.linalg_qr", lambda t, s, b: torch.linalg.qr(t), 8 - 4 / 3),
    ("aten.linalg_qr", lambda t, s, b: torch.linalg.qr(t, "complete"), (4 - 2 / 3) + (16 - 8 + 4 / 3)),
    ("aten._linalg_eigh", lambda t, s, b: torch.linalg.eigh(s), 9),
    ("aten.linalg_eig", lambda t, s, b: torch.linalg.eig(s), 25),
    ("aten._linalg_svd", lambda t, s, b: torch.linalg.svd(t, full_matrices=False), 6 * 2 + 20),
    ("aten._linalg_svd", lambda t, s, b: torch.linalg.svd(t.expand(3, -1, -1)), 3 * (4 * 4 + 22)),
]


@pytest.mark.parametrize(("name", "factorize", "count"), FACTORIZED)
def test_factorizations_go_by_published_counts_and_never_by_tf32(name, factorize, count, fp32_products):
    fp32_products.fp32_precision = "tf32"
    sizes = [(2048, 1024), (1024, 1024), (1024, 512)]
    matrices = [torch.empty(size, device="meta") for size in sizes]
    whole = Roofline(find_device("a100"), "a100", 1.0, 1.0)
    expected = count * 1024**3 / 19.5e12
    assert seconds_on(whole, lambda: factorize(*matrices)) == [
        (name, pytest.approx(expected, abs=1e-9), "products")
    ]


@pytest.mark.parametrize(
    ("make", "scaled", "num_moved"),
    [  # reads and writes of a parameter's elements in a step, by hand
        (partial(torch.optim.AdamW, fused=True), False, (4, 3)),
        (partial(torch.optim.AdamW, fused=True), True, (4, 4)),  # gradients are written, unscaled
        (partial(torch.optim.Adam, fused=True, amsgrad=True), False, (5, 4)),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), False, (3, 2)),
        # Decay, two averages, the root of one of them, corrected and divided by, and the update.
        (partial(torch.optim.AdamW, foreach=True), False, (1 + 2 + 1 + 2 + 1 + 1 + 1 + 3, 8)),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True), False, (1 + 2 + 2, 3)),
    ],
)
def test_optimizers_of_one_kernel_move_what_it_reads_and_writes(make, scaled, num_moved):
    parameters = [torch.zeros(1024, 1024, requires_grad=True) for _ in range(3)]
    optimizer = make(parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    taken = seconds_on(Roofline(find_device("a100"), "a100", 1.0, 1.0), optimizer.step)
    moving = sum(seconds for name, seconds, bound in taken if bound == "memory")
    # A scale and a flag of 4 bytes, and a step for each parameter, are part of a fused kernel.
    assert moving == pytest.approx(3 * 4 * 1024**2 * sum(num_moved) / 2039e9, abs=1e-9)


def test_shares_of_a_roofline_are_the_devices_own_measurement_by_default():
    assert Roofline(find_device("a100"), "a100").product_share == 0.869
    assert Roofline(find_device("t4"), "t4").product_share == PRODUCT_SHARE
    assert Roofline(find_device("a100"), "a100", 0.5).product_share == 0.5


def test_a_wrapped_tensor_is_seen_as_its_parts():
    """A DTensor's product over two ranks is half a product on each, and asking for its shape costs nothing."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        inputs = distribute_tensor(torch.ones(8, 16), mesh, [Replicate()])
        weights = distribute_tensor(torch.ones(16, 32), mesh, [Shard(1)])
        taken: list[TorchOperation] = []
        with OperationWatch(taken.append):
            inputs @ weights
        assert [(each.name, each.flops) for each in taken] == [("aten.mm", 2 * 8 * 16 * 16)]
    finally:
        torch.distributed.destroy_process_group()


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
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    count_flops(LossOf(model), torch.ones(8, 4))
    assert measure_seconds(LossOf(model), torch.ones(8, 4)) > 0
    assert measure_seconds(LossOf(model), torch.ones(8, 4), shared_cores=2) > 0
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


# --- what compressing costs ---------------------------------------------------------------------------------


def coding_seconds(strategy: Strategy, coding: Coding | None, num_ranks: int = 2, steps: int = 2) -> float:
    """Virtual seconds on a network where nothing but coding takes time worth telling."""
    model, batches = reference.make_problem(num_ranks, steps, 3, 8, seed=1)
    run = reference.run_strategy(strategy, model, batches, coding=coding, topology="two-datacenters")
    without = reference.run_strategy(strategy, model, batches, topology="two-datacenters")
    assert all(torch.equal(a, b) for a, b in zip(run.results, without.results, strict=True))
    assert [t.bytes_sent for t in run.traffic] == [t.bytes_sent for t in without.traffic]
    return run.virtual_seconds - without.virtual_seconds


def cost(encoded: float, decoded: float) -> float:
    return 4 * encoded / ENCODED + 4 * decoded / DECODED


NUM_VALUES = 8 * 3 + 8 + 8 * 6 + 1


def test_what_codecs_do_is_charged_to_the_second() -> None:
    """Of 81 values two ranks sum up 41 and 40: the slower one counts."""
    largest = 41
    once = cost(NUM_VALUES + largest, 2 * largest + NUM_VALUES)
    assert coding_seconds(AllReduceStrategy(codec="int8"), SPEEDS) == pytest.approx(2 * once, rel=1e-6)
    assert coding_seconds(FedAvgStrategy(codec="fp16", H=2), SPEEDS) == pytest.approx(once, rel=1e-6)
    assert coding_seconds(DiLoCoStrategy(codec="int8", H=2), SPEEDS) == pytest.approx(once, rel=1e-6)
    fed_back = once + cost(0, NUM_VALUES + largest)  # what is owed must be decoded
    feedback = DiLoCoStrategy(codec="int8", H=2, error_feedback=True)
    assert coding_seconds(feedback, SPEEDS) == pytest.approx(fed_back, rel=1e-6)
    robust = cost(NUM_VALUES, 2 * NUM_VALUES)
    median = DiLoCoStrategy(codec="int8", H=2, aggregate="median")
    assert coding_seconds(median, SPEEDS) == pytest.approx(robust, rel=1e-6)
    assert coding_seconds(DeMoStrategy(), SPEEDS) == pytest.approx(2 * cost(NUM_VALUES, NUM_VALUES), rel=1e-6)


def test_what_is_not_coded_costs_nothing() -> None:
    for strategy in (AllReduceStrategy(), DiLoCoStrategy(H=1), FedAvgStrategy(codec="fp32")):
        assert coding_seconds(strategy, SPEEDS) == 0
    assert coding_seconds(AllReduceStrategy(codec="int8"), Coding({})) == 0
    assert coding_seconds(DiLoCoStrategy(codec="int8", H=2), SPEEDS, num_ranks=1) == 0


def test_speeds_by_codec() -> None:
    speeds = Coding(dict.fromkeys(["fp16", "CastCodec"], both(ENCODED, DECODED)))
    assert coding_seconds(AllReduceStrategy(codec="fp16"), speeds) > 0
    assert coding_seconds(AllReduceStrategy(codec=CastCodec(torch.float16)), speeds) > 0
    line = "compute.coding: has no speed for codec 'int8', only for CastCodec, fp16; add one"
    with pytest.raises(InputError, match=line):
        coding_seconds(DiLoCoStrategy(codec="int8", H=100), speeds)  # before the first round


def fit(strategy: Strategy, **options: Any) -> Any:
    values = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    given = {"strategy": strategy, "topology": "two-datacenters", **options}
    return fitted(Squares(6, 6), TensorDataset(values, values), **given)


@pytest.mark.thorough
def test_measured_steps_and_speeds_are_stored_and_run_again_as_they_are(tmp_path: Path) -> None:
    compute = {"measured": {}, "coding": "measured", "updates": "measured"}
    strategy = DiLoCoStrategy(codec="quantile8bit", H=1, optim_spec="adamw")
    kept = {"checkpoint_interval": 2, "save_dir": tmp_path}
    measured = fit(strategy, compute=compute, **kept)
    found = Compute.parse(measured.compute)
    assert set(found.coding.speeds) == CODEC_NAMES
    assert min(speed for each in found.coding.speeds.values() for speed in (each.encode, each.decode)) > 0
    assert {"AdamW", "SGD", "SGD with momentum", "other"} <= set(found.updates.speeds)
    assert found.fixed is not None
    assert fit(strategy, compute=measured.compute).virtual_seconds == measured.virtual_seconds
    resumed = fit(strategy, compute=compute, checkpoint_interval=2, resume_from=measured.checkpoint_folder)
    assert resumed.resumed_step == 2
    assert resumed.compute == measured.compute, "the speeds of then hold now"
    assert resumed.virtual_seconds == measured.virtual_seconds


class Halves(Strategy):
    """Averages parameters in bf16 at each step; `charges` what that costs, or not."""

    def __init__(self, charges: bool, **options: Any) -> None:
        super().__init__(**options)
        self.charges = charges

    def step(self) -> None:
        self.optimizer_step()
        flat = torch.cat([parameter.detach().flatten() for parameter in self.trainable])
        sent = flat.to(torch.bfloat16)
        self.comm.all_reduce(sent, "avg")
        if self.charges:
            self.charge("halves", "encode", len(flat))
            self.charge("halves", "decode", len(flat))
        nn.utils.vector_to_parameters(sent.float(), self.trainable)
        super().step()


class TenthCodec(CastCodec):
    """One of one's own."""

    def __init__(self) -> None:
        super().__init__(torch.float16)


def test_own_coding_is_charged_or_reported() -> None:
    """At 10 kB/s 42 values take 16.8 ms to encode and as long to decode, three times."""
    slow = {"fixed": "1 s", "coding": "10 kB/s"}
    with pytest.warns(UserWarning, match="Halves: coding not charged: it sends encoded values"):
        free = fit(Halves(charges=False, lr=0.1), compute=slow)
    assert free.coding == "not charged"
    paid = fit(Halves(charges=True, lr=0.1), compute=slow)
    assert paid.coding == "charged"
    assert paid.virtual_seconds - free.virtual_seconds == pytest.approx(3 * 2 * 42 * 4 / 10_000, rel=1e-3)
    assert fit(Halves(charges=False, lr=0.1), compute="1 s").coding is None, "coding is free for all"
    drawn = DiLoCoStrategy(H=1, lr=0.1, clients_per_round=1)  # clients download the state
    for strategy in (AllReduceStrategy(lr=0.1), DiLoCoStrategy(H=2, lr=0.1), drawn):
        assert fit(strategy, compute=slow).coding is None, "nothing is encoded"
    assert fit(AllReduceStrategy(codec=TenthCodec(), lr=0.1), compute=slow).coding == "charged"


@pytest.mark.thorough
@pytest.mark.parametrize("coding", ["measured", {"int8": "2 GB/s"}])
def test_a_codec_of_ones_own_without_a_speed_is_measured(coding: Any, tmp_path: Path) -> None:
    compute = {"fixed": "10 ms", "coding": coding}
    strategy = DiLoCoStrategy(codec=TenthCodec(), H=1)
    kept = {"checkpoint_interval": 2, "save_dir": tmp_path}
    measured = fit(strategy, compute=compute, **kept)
    assert "TenthCodec" in measured.compute["coding"]
    assert measured.coding == "charged"
    again = fit(strategy, compute=compute, checkpoint_interval=2, resume_from=measured.checkpoint_folder)
    assert again.resumed_step == 2
    assert again.compute == measured.compute, "the speeds of then hold now"
    assert fit(DiLoCoStrategy(codec="int8", H=1), compute=measured.compute).coding == "charged"


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_shipped_strategy_encodes_for_nothing(name: str) -> None:
    options: dict[str, Any] = {"servers": 3} if name == "HALoS" else {}
    accepted = accepted_arguments(STRATEGIES[name])
    rounds = {"H": 2} if "H" in accepted and "tau" not in accepted else {}
    strategy = build_strategy(name, **rounds)
    compute = {"fixed": "10 ms", "coding": "1 GB/s"}
    assert fit(strategy, compute=compute, workers="threads", **options).coding in (None, "charged")


# --- what optimizers' steps cost ----------------------------------------------------------------------------

NUM_BYTES = 4 * (6 * 6 + 6)  # of the model that `fit` trains


def test_every_step_of_an_optimizer_is_charged_by_its_kind() -> None:
    """Local and outer ones; those that are not named take the speed of `other`."""

    def seconds(speeds: dict[str, str], strategy: Any) -> float:
        compute = {"fixed": "10 ms", "updates": speeds}
        return float(fit(strategy, compute=compute).virtual_seconds)

    nothing = "1e18 B/s"
    free = seconds({"other": nothing}, DiLoCoStrategy(H=3, optim_spec="adamw"))
    local = seconds({"AdamW": "1 kB/s", "other": nothing}, DiLoCoStrategy(H=3, optim_spec="adamw"))
    assert local - free == pytest.approx(3 * NUM_BYTES / 1000)
    outer = seconds(
        {"SGD with momentum": "1 kB/s", "other": nothing}, DiLoCoStrategy(H=3, optim_spec="adamw")
    )
    assert outer - free == pytest.approx(NUM_BYTES / 1000)
    both = seconds({"other": "1 kB/s"}, DiLoCoStrategy(H=3, optim_spec="adamw"))
    assert both - free == pytest.approx(4 * NUM_BYTES / 1000)
    plain = seconds({"SGD": "1 kB/s", "other": "1 B/s"}, AllReduceStrategy(optim_spec="sgd", lr=0.1))
    assert plain < free + 3 * NUM_BYTES / 1000 + 1


def test_others_work_while_it_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are cores; they are gone afterwards."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)

    def work() -> None:
        (tmp_path / str(os.getpid())).touch()

    assert seconds_of(work, shared_cores=3) > 0
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert len(pids) == 3
    assert os.getpid() in pids
    for pid in pids - {os.getpid()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- ranks that share the cores of one machine --------------------------------------------------------------

GRID = 2.0**-30
_Works = st.lists(st.lists(st.integers(0, 5 << 28), max_size=4), min_size=1, max_size=6)


def shared_ends(works: list[list[int]], num_cores: int) -> list[Fraction]:
    """The end of each rank's works (in steps of the grid), one after the other, by equal shares of all cores."""
    left = [[Fraction(each) for each in work if each] for work in works]
    now, ends = Fraction(0), [Fraction(0)] * len(works)
    while busy := [rank for rank, work in enumerate(left) if work]:
        speed = min(Fraction(1), Fraction(num_cores, len(busy)))
        step = min(left[rank][0] for rank in busy)
        now += step / speed
        for rank in busy:
            left[rank][0] -= step
            if not left[rank][0]:
                del left[rank][0]
                ends[rank] = now
    return ends


@given(_Works, st.integers(1, 7))
def test_computing_ranks_have_equal_shares(works: list[list[int]], num_cores: int) -> None:
    streams = [[Advance(each * GRID) for each in work] for work in works]
    kernel, _ = finished(streams, shared_cores=num_cores)
    expected = [float(end * Fraction(GRID)) for end in shared_ends(works, num_cores)]
    assert kernel.seconds.end == pytest.approx(expected, rel=0, abs=30 * GRID)
    assert all((end / GRID).is_integer() for end in kernel.seconds.end)
    assert max(kernel.seconds.end) * num_cores >= sum(map(sum, works)) * GRID - 30 * GRID
    if num_cores >= len(works):
        alone, _ = finished(streams)
        assert kernel.seconds.end == alone.seconds.end


def test_computing_is_what_it_takes_and_not_what_was_asked() -> None:
    """Three ranks on two cores: 1.5 times as long for each, until the shortest is through."""
    streams = [[Advance(1.0), Mark({})], [Advance(1.0), Mark({})], [Advance(3.0), Mark({})]]
    kernel, ports = finished(streams, shared_cores=2)
    assert [row.virtual_seconds for row in ports.rows] == [1.5, 1.5, 3.5]
    assert kernel.seconds.compute == [1.5, 1.5, 3.5]


@pytest.mark.parametrize("seconds", [1e7, 1e9])
def test_runs_of_years_end(seconds: float) -> None:
    """So far from zero the clock is coarser than the grid."""
    streams = [[Advance(seconds + 0.7 * rank), Advance(1 / 3), Advance(0.1)] for rank in range(3)]
    kernel, _ = finished(streams, shared_cores=2)
    assert kernel.seconds.end == pytest.approx([1.5 * seconds] * 3, rel=1e-6)


def test_a_crash_leaves_its_core_to_the_others() -> None:
    """Steps of 1 s of three ranks on two cores; the second's host is down from 1 s to 11 s, and its step is lost."""
    run = run_ranks(three_steps, 3, star(crash("b", 1.0, 10)), shared_cores=2)
    others, second = run.results[0], run.results[1]
    thirds = [1 + 1 / 3, 2 + 1 / 3, 3 + 1 / 3]
    assert others == run.results[2] == pytest.approx(thirds, abs=3 * GRID)
    assert second == [12.0, 13.0, 14.0]
    assert run.compute_seconds == pytest.approx([10 / 3, 3.0, 10 / 3], abs=3 * GRID)


def test_carriers_and_resumed_runs_agree(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "compute": {"fixed": "10 ms", "jitter": 0.5, "shared_cores": 2}
        | dict.fromkeys(("coding", "updates"), "1 MB/s"),
        "num_nodes": 4,
        "topology": "wan-4-regions",
        "checkpoint_interval": 3,
        "max_steps": 6,
    }
    strategy = DiLoCoStrategy(H=3, optim_spec="adamw", codec="int8")
    threads = fit(strategy, **options, save_dir=tmp_path)
    assert fit(strategy, **options, workers={"kind": "processes", "processes": 2}).history == threads.history
    resumed = fit(strategy, **options, resume_from=threads.checkpoint_folder)
    assert resumed.virtual_seconds == threads.virtual_seconds


# --- more workers than hosts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_nodes", "host", "steps"),
    [
        (6, {}, 4.0),
        (6, {"devices": 3}, 4.0),
        (6, {"devices": 1}, 12.0),
        (6, {"devices": 2}, 6.0),
        (2, {"devices": 1}, 4.0),
    ],
)
def test_workers_beyond_a_host_s_devices_share_them(
    num_nodes: int, host: dict[str, Any], steps: float
) -> None:
    """Three workers on one device computed as fast as one: 4 steps of 1 s, on hosts that nothing delays between."""
    network = chain_form({"a": host, "b": {}}, "1000 Gbit/s", "0 s")
    options = {"num_nodes": num_nodes, "max_steps": 4, "topology": network, "compute": 1.0, "batch_size": 2}
    assert fit(AllReduceStrategy(lr=0.1), **options).virtual_seconds == pytest.approx(steps, abs=1e-3)


def test_devices_are_kept_and_checked() -> None:
    given = {"regions": {"a": {"hosts": 2, "nic": "1 Gbit/s", "devices": 8}}, "hosts": {"h": {"devices": 2}},
             "links": [{"between": ["h", "a"], "bandwidth": "1 Gbit/s"}],  "protocol": "ideal"}  # fmt: skip
    topology = Topology.from_mapping(given)
    assert [host.devices for host in topology.hosts] == [8, 8, 2]
    assert Topology.from_mapping(topology.to_mapping()) == topology
