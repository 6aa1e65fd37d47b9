"""Data-parallel, sharded and PowerSGD training: the same parameters as torch's DDP, FSDP and hook over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import batch_of, joined, leave, make_model, results_of, train_ddp, train_with
from torch import nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import AllReduceStrategy, PowerSGDStrategy, SimpleReduceStrategy
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.gradients import orthonormal

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


# --- sharding is FSDP ---------------------------------------------------------------------------------------

FSDP_RANKS, FSDP_STEPS, MAX_NORM = 4, 3, 0.3
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
NAMES = ("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def train_with_fsdp(name: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, FSDP_RANKS // 2) if "HYBRID" in name else (FSDP_RANKS,))
    model = FullyShardedDataParallel(
        make_model(),
        sharding_strategy=ShardingStrategy[name],
        device_mesh=mesh,
        use_orig_params=True,  # as OpenDiLoCo sets it
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(FSDP_STEPS):
        optimizer.zero_grad()
        model(batch_of(torch.distributed.get_rank(), step)).backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return {key: value.clone() for key, value in model.module.state_dict().items()}


def train_with_shards(comm: Communicator, name: str) -> dict[str, torch.Tensor]:
    options = {"ranks_per_node": FSDP_RANKS // 2} if "HYBRID" in name else {}
    strategy = AllReduceStrategy({"name": "adamw", **ADAMW}, MAX_NORM, sharding=name, **options)
    return train_with(strategy, comm, FSDP_STEPS)


@pytest.fixture(scope="module")
def fsdp_states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What FSDP ends with in processes of their own, by the name of the sharding."""

    states: dict[str, dict[str, torch.Tensor]] = results_of(
        fsdp_main, FSDP_RANKS, tmp_path_factory.mktemp("fsdp")
    )
    return states


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("name", NAMES)
def test_shards_equal_fully_sharded_data_parallel(
    name: str, fsdp_states: dict[str, dict[str, torch.Tensor]]
) -> None:
    for state in run_ranks(lambda comm: train_with_shards(comm, name), FSDP_RANKS).results:
        assert state.keys() == fsdp_states[name].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, fsdp_states[name][key], rtol=1e-5, atol=1e-6)


def fsdp_main(rendezvous: str, result: str, rank: int) -> None:
    joined(rank, FSDP_RANKS, rendezvous)
    states = {name: train_with_fsdp(name) for name in NAMES}
    if rank == 0:
        torch.save(states, result)
    leave()


# --- powerSGD leads where torch's own hook does -------------------------------------------------------------

HOOK_RANKS, HOOK_STEPS, RANK, START = 2, 12, 2, 2  # the hook begins with plain means
HOOK_SGD = {"lr": 0.1, "momentum": 0.9}
SEED = 0


def train_with_the_hook(rendezvous: str, result: str, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.set_default_dtype(torch.float64)
    joined(rank, HOOK_RANKS, rendezvous)
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
    train_ddp(model, rank, HOOK_STEPS, HOOK_SGD, result)


def train_with_ours(comm: Communicator) -> dict[str, torch.Tensor]:
    strategy = PowerSGDStrategy(
        {"name": "sgd", **HOOK_SGD}, approximation_rank=RANK, start_powerSGD_iter=START
    )
    return train_with(strategy, comm, HOOK_STEPS, SEED)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_powersgd_equals_torchs_hook(tmp_path: Path) -> None:
    """In fp64: in fp32 rounding, which differs between processors, grows to 4e-5 where singular values are close."""
    theirs = results_of(train_with_the_hook, HOOK_RANKS, tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        run = run_ranks(train_with_ours, HOOK_RANKS)
    finally:
        torch.set_default_dtype(torch.float32)
    for ours in run.results:
        for name, value in ours.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-10)
