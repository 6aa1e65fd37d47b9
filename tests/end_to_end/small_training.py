"""A small model and batches of it, for training here and with PyTorch's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from forks import Fork
from torch import nn

from exogym_core.communicator import Communicator
from exogym_core.strategy import Strategy
from netgym.tasks import build_model


def make_model() -> nn.Module:
    return build_model("mlp", inputs=6, hidden=[16, 8], classes=3, seed=0)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(4, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def train_with(strategy: Strategy, comm: Communicator, steps: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The model's state on this rank after so many steps with a strategy of ours."""
    model = make_model()
    strategy.setup(model, comm, steps, seed)
    for step in range(steps):
        strategy.zero_grad()
        strategy.before_backward(True)
        model(batch_of(comm.rank, step)).backward()
        strategy.step()
    strategy.close()
    return model.state_dict()


def joined(rank: int, world_size: int, rendezvous: str) -> None:
    """Join torch's own process group over gloo."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)


def results_of(main: Callable[[str, str, int], None], world_size: int, folder: Path) -> Any:
    """Values saved by rank 0 of a program with PyTorch's own, called with rendezvous, file of results and rank."""
    files = [str(folder / name) for name in ("rendezvous", "result.pt")]
    environment = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    ranks = [Fork(main, *files, rank, environment=environment) for rank in range(world_size)]
    try:
        ends = [rank.end() for rank in ranks]
        assert [end.returncode for end in ends] == [0] * world_size, ends[0].stderr
    finally:
        for rank in ranks:
            rank.process.kill()
    return torch.load(files[1], weights_only=True)


def train_ddp(
    model: nn.parallel.DistributedDataParallel, rank: int, steps: int, sgd: dict[str, float], result: str
) -> NoReturn:
    """Train with torch's own DDP and leave; rank 0 saves the model's state as `result`."""
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(rank, step)).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), result)
    leave()


def leave() -> NoReturn:
    """End this rank after all are done, with nothing destroyed.

    The destructor of torch's gloo group joins its threads with the interpreter's lock held, which they may wait for.
    """
    torch.distributed.barrier()
    os._exit(0)
