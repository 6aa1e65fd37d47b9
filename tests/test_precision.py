"""Half precision: what computes in it, and that fp16's scaled losses and overflows do no harm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experiments import fitted, samples

from exogym_core.communicator import run_ranks
from exogym_core.communicator.exchange import reduce_tensors
from exogym_core.strategy import STRATEGIES, build_strategy
from netgym.tasks import MLP

DATA = samples(64)


class Watched(MLP):
    """Tells in which dtypes its last layer computed; its loss can be made to overflow."""

    factor = 1.0

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, [5], 3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().logits(inputs)
        self.seen[[torch.float32, torch.bfloat16, torch.float16].index(output.dtype)] += 1
        return output

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) * self.factor


def fit(strategy: Any, factor: float = 1.0, **options: Any) -> Any:
    model = Watched()
    model.factor = factor
    return fitted(model, DATA, DATA, **{"strategy": strategy, "max_steps": 6, "minibatch_size": 2, **options})


@pytest.mark.parametrize(("autocast", "place"), [(False, 0), (True, 1), ("bf16", 1), ("fp16", 2)])
def test_forward_passes_compute_in_what_was_asked_for(autocast: Any, place: int) -> None:
    seen = fit(build_strategy("AllReduce"), autocast=autocast).rank_states[0]["seen"].tolist()
    assert seen[place] >= 12
    assert sum(seen) == seen[place]


@pytest.mark.parametrize("name", STRATEGIES)
def test_fp16_trains_as_fp32_does_nearly(name: str) -> None:
    half, full = (fit(build_strategy(name), autocast=autocast) for autocast in ("fp16", False))
    for one, other in zip(half.history, full.history, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-2)
    assert half.final_loss == pytest.approx(full.final_loss, rel=2e-2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_that_overflow_are_left_out(name: str) -> None:
    # 2**16, where the scale begins, times this is beyond fp16: the scale must be halved before a step counts.
    result = fit(build_strategy(name), factor=64.0, autocast="fp16")
    assert result.first_non_finite_step is None
    assert all(torch.isfinite(value).all() for state in result.rank_states for value in state.values())


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Any) -> None:
    scales: list[float] = []

    class Seen(STRATEGIES["DiLoCo"]):  # type: ignore[misc]
        def step(self) -> None:
            scales.append(self.scaler.get_scale())
            super().step()

    options = {"factor": 4096.0, "autocast": "fp16"}
    stopped = fit(Seen(H=2), **options, max_steps=4, checkpoint_interval=1, save_dir=tmp_path)
    del scales[:]
    resumed = fit(Seen(H=2), **options, resume_from=stopped.checkpoint_folder)
    after = scales[:]
    assert resumed.resumed_step == 4
    assert resumed.history == fit(Seen(H=2), **options).history
    assert after == scales[-4:] or sorted(after) == sorted(scales[-4:])
    assert max(after) < 2.0**16


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("num_ranks", [300, 512])
def test_the_mean_of_ones_is_one(num_ranks):
    """bfloat16 stops counting at 256."""
    ones = [torch.ones(3, dtype=torch.bfloat16)] * num_ranks
    assert torch.equal(reduce_tensors(ones, "avg"), ones[0])


def test_a_mean_within_range_does_not_overflow_on_the_way():
    values = [torch.full((3,), 2000.0, dtype=torch.float16)] * 64
    assert torch.equal(reduce_tensors(values, "avg"), values[0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
def test_every_operation_is_that_of_fp32_rounded_once(dtype, op):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(50, generator=generator).to(dtype) for _ in range(9)]
    wide = reduce_tensors([part.float() for part in parts], op)
    assert torch.equal(reduce_tensors(parts, op), wide.to(dtype))
    assert all(part.dtype == dtype for part in parts)


def averaged(comm):
    part = torch.arange(4, dtype=torch.bfloat16) + torch.tensor(0.01 * comm.rank, dtype=torch.bfloat16)
    everyone = comm.all_reduce(part.clone(), "avg")
    piece = comm.reduce_scatter([part.clone() for _ in range(comm.world_size)], "avg")
    root = comm.reduce(part.clone(), 0, "sum")
    return everyone, piece, root if comm.rank == 0 else part


def test_sockets_widen_too():
    """gloo itself adds halves up as halves."""
    simulated, real = run_ranks(averaged, 3).results, run_ranks(averaged, 3, transport="gloo").results
    for mine, theirs in zip(simulated, real, strict=True):
        assert all(torch.equal(first, second) for first, second in zip(mine, theirs, strict=True))
