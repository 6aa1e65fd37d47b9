"""PowerSGD leads where torch's own hook does under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import joined, make_model, results_of, train_ddp, train_with
from torch import nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import PowerSGDStrategy
from exogym_core.strategy.parts.exchange import orthonormal
from exogym_core.strategy.parts.generators import shared_generator

WORLD_SIZE, STEPS, RANK, START = 2, 12, 2, 2  # the hook begins with plain means
OPTIMIZER = {"lr": 0.1, "momentum": 0.9}
SEED = 0


def train_with_the_hook(rendezvous: str, result: str, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.set_default_dtype(torch.float64)
    joined(rank, WORLD_SIZE, rendezvous)
    model = nn.parallel.DistributedDataParallel(make_model())
    state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=START, min_compression_rate=1)
    # The same first Q as ours: matrices come in the order of the model, or in the reverse one once DDP has seen it.
    generator = shared_generator(SEED, "powersgd")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    right = {
        id(p): orthonormal(
            torch.randn(p.shape[1], min(RANK, *p.shape), generator=generator, dtype=torch.float64)
        )
        for p in matrices
    }

    def hook(hooked, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
        if bucket.index() not in hooked.q_memory_dict and hooked.iter >= START:
            inside = [p for p in bucket.parameters() if p.dim() > 1]
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in inside:
                shapes.setdefault(p.shape, []).append(p)
            order = [p for same in shapes.values() for p in same]
            hooked.q_memory_dict[bucket.index()] = torch.cat([right[id(p)].reshape(-1) for p in order])
            num_left = sum(p.shape[0] * min(RANK, *p.shape) for p in order)
            hooked.p_memory_dict[bucket.index()] = torch.empty(num_left)
        return powerSGD_hook.powerSGD_hook(hooked, bucket)

    model.register_comm_hook(state, hook)
    train_ddp(model, rank, STEPS, OPTIMIZER, result)


def train_with_ours(comm: Communicator) -> dict[str, torch.Tensor]:
    strategy = PowerSGDStrategy(
        {"name": "sgd", **OPTIMIZER}, approximation_rank=RANK, start_powerSGD_iter=START
    )
    return train_with(strategy, comm, STEPS, SEED)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_powersgd_equals_torchs_hook(tmp_path: Path) -> None:
    """In fp64: in fp32 rounding, which differs between processors, grows to 4e-5 where singular values are close."""
    theirs = results_of(train_with_the_hook, WORLD_SIZE, tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        run = run_ranks(train_with_ours, WORLD_SIZE)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours in run.results:
        for name, value in ours.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-10)
