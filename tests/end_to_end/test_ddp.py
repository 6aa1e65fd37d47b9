"""AllReduce is data-parallel training: the same parameters as torch's DistributedDataParallel over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import joined, make_model, results_of, train_ddp, train_with
from torch import nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import SimpleReduceStrategy

WORLD_SIZE, STEPS = 2, 5
# Not Adam, to which a sum of gradients looks like their mean.
OPTIMIZER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def train_with_ddp(rendezvous: str, result: str, rank: int) -> None:
    joined(rank, WORLD_SIZE, rendezvous)
    train_ddp(nn.parallel.DistributedDataParallel(make_model()), rank, STEPS, OPTIMIZER, result)


def train_with_all_reduce(comm: Communicator) -> dict[str, torch.Tensor]:
    strategy = SimpleReduceStrategy({"name": "sgd", **OPTIMIZER}, bucket_bytes=200)
    return train_with(strategy, comm, STEPS)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_all_reduce_equals_distributed_data_parallel(tmp_path: Path) -> None:
    expected = results_of(train_with_ddp, WORLD_SIZE, tmp_path)
    for state in run_ranks(train_with_all_reduce, WORLD_SIZE).results:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
