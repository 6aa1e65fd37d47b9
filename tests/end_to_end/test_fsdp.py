"""Sharding is FSDP: the same parameters, clipping included, as torch's FullyShardedDataParallel over gloo."""

from __future__ import annotations

import pytest
import torch
from small_training import batch_of, joined, leave, make_model, results_of, train_with

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import AllReduceStrategy

WORLD_SIZE, STEPS, MAX_NORM = 4, 5, 0.3
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.1}
NAMES = ("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def train_with_fsdp(name: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, WORLD_SIZE // 2) if "HYBRID" in name else (WORLD_SIZE,))
    model = FullyShardedDataParallel(
        make_model(),
        sharding_strategy=ShardingStrategy[name],
        device_mesh=mesh,
        use_orig_params=True,  # as OpenDiLoCo sets it
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(torch.distributed.get_rank(), step)).backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return {key: value.clone() for key, value in model.module.state_dict().items()}


def train_with_shards(comm: Communicator, name: str) -> dict[str, torch.Tensor]:
    options = {"ranks_per_node": WORLD_SIZE // 2} if "HYBRID" in name else {}
    strategy = AllReduceStrategy({"name": "adamw", **OPTIMIZER}, MAX_NORM, sharding=name, **options)
    return train_with(strategy, comm, STEPS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What FSDP ends with in processes of their own, by the name of the sharding."""

    states: dict[str, dict[str, torch.Tensor]] = results_of(main, WORLD_SIZE, tmp_path_factory.mktemp("fsdp"))
    return states


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("name", NAMES)
def test_shards_equal_fully_sharded_data_parallel(
    name: str, expected: dict[str, dict[str, torch.Tensor]]
) -> None:
    for state in run_ranks(lambda comm: train_with_shards(comm, name), WORLD_SIZE).results:
        assert state.keys() == expected[name].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, expected[name][key], rtol=1e-5, atol=1e-6)


def main(rendezvous: str, result: str, rank: int) -> None:
    joined(rank, WORLD_SIZE, rendezvous)
    states = {name: train_with_fsdp(name) for name in NAMES}
    if rank == 0:
        torch.save(states, result)
    leave()
