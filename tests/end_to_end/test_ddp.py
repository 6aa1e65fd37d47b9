"""AllReduce is data-parallel training: the same parameters as torch's DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from small_training import batch_of, make_model
from torch import nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import SimpleReduceStrategy

if TYPE_CHECKING:
    from pathlib import Path

WORLD_SIZE, STEPS = 2, 5
# Not Adam, to which a sum of gradients looks like their mean.
OPTIMIZER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def train_with_ddp(rank: int, rendezvous: str, result: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(rank, step)).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), result)
    torch.distributed.destroy_process_group()


def train_with_all_reduce(comm: Communicator) -> dict[str, torch.Tensor]:
    model = make_model()
    strategy = SimpleReduceStrategy({"name": "sgd", **OPTIMIZER}, bucket_bytes=200)
    strategy.setup(model, comm, STEPS, seed=0)
    for step in range(STEPS):
        strategy.zero_grad()
        strategy.before_backward(True)
        model(batch_of(comm.rank, step)).backward()
        strategy.step()
    strategy.close()
    return model.state_dict()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_all_reduce_equals_distributed_data_parallel(tmp_path: Path) -> None:
    rendezvous, result = tmp_path / "rendezvous", tmp_path / "ddp.pt"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    command = [sys.executable, __file__, str(rendezvous), str(result)]
    started = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORLD_SIZE)]
    try:
        assert [process.wait(timeout=60) for process in started] == [0] * WORLD_SIZE
    finally:
        for process in started:
            process.kill()
    expected = torch.load(result, weights_only=True)
    for state in run_ranks(train_with_all_reduce, WORLD_SIZE).results:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    train_with_ddp(int(sys.argv[3]), sys.argv[1], sys.argv[2])
