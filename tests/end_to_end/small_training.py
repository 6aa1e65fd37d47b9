"""A small model and batches of it, for training here and with PyTorch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.tasks import build_model

if TYPE_CHECKING:
    from pathlib import Path

    from exogym_core.communicator import Communicator
    from exogym_core.strategy import Strategy


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


def results_of(program: str, world_size: int, folder: Path) -> Any:
    """What rank 0 of a program saves that trains with PyTorch's own: called with rendezvous, result file and rank."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    command = [sys.executable, program, str(folder / "rendezvous"), str(folder / "result.pt")]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in range(world_size)
    ]
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in started]
        assert [process.returncode for process in started] == [0] * world_size, errors[0]
    finally:
        for process in started:
            process.kill()
    return torch.load(folder / "result.pt", weights_only=True)


def train_ddp(
    model: nn.parallel.DistributedDataParallel, rank: int, steps: int, sgd: dict[str, float], result: str
) -> None:
    """Train with torch's own DDP; rank 0 saves the model's state as `result`."""
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(rank, step)).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), result)
    torch.distributed.destroy_process_group()
