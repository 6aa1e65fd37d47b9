"""Reductions of half precision: added up in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch

from exogym_core.communicator import run_ranks
from exogym_core.communicator.values import reduce_tensors
from exogym_core.ranks.gloo.ranks import launch_gloo

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
    simulated, real = run_ranks(averaged, 3).results, launch_gloo(averaged, 3).results
    for mine, theirs in zip(simulated, real, strict=True):
        assert all(torch.equal(first, second) for first, second in zip(mine, theirs, strict=True))
