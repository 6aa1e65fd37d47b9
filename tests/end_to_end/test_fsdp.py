"""Sharding is FSDP: the same parameters, clipping included, as torch's FullyShardedDataParallel over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from small_training import batch_of, make_model

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import AllReduceStrategy

if TYPE_CHECKING:
    from pathlib import Path

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
    model = make_model()
    options = {"ranks_per_node": WORLD_SIZE // 2} if "HYBRID" in name else {}
    strategy = AllReduceStrategy({"name": "adamw", **OPTIMIZER}, MAX_NORM, sharding=name, **options)
    strategy.setup(model, comm, STEPS, seed=0)
    for step in range(STEPS):
        strategy.zero_grad()
        strategy.before_backward(True)
        model(batch_of(comm.rank, step)).backward()
        strategy.step()
    strategy.close()
    return model.state_dict()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What FSDP ends with in processes of their own, by the name of the sharding."""
    folder: Path = tmp_path_factory.mktemp("fsdp")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    command = [sys.executable, __file__, str(folder / "rendezvous"), str(folder / "result.pt")]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in started]
        assert [process.returncode for process in started] == [0] * WORLD_SIZE, errors[0]
    finally:
        for process in started:
            process.kill()
    states: dict[str, dict[str, torch.Tensor]] = torch.load(folder / "result.pt", weights_only=True)
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
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    states = {name: train_with_fsdp(name) for name in NAMES}
    if rank == 0:
        torch.save(states, result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
