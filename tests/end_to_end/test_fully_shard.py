"""Models that FSDP2's `fully_shard` has cut, in DiLoCo: as NetGym's own shards, and kept by torch's checkpoints."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import agent_store
from small_training import batch_of, joined, leave, make_model, results_of
from torch import nn

from exogym_core import DiLoCoOptimizer
from exogym_core.communicator import Communicator, run_ranks
from netsim.errors import InputError

WORLD_SIZE, SIZE, STEPS, H = 4, 2, 7, 3
MAX_NORM = 0.3
MOMENTUM = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def optimizer_of(model: nn.Module, comm: Communicator, **options: Any) -> DiLoCoOptimizer:
    return DiLoCoOptimizer(
        communicator=comm,
        batch_size=4,
        num_inner_steps=H,
        inner_optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        outer_optimizer=MOMENTUM,
        params=model.parameters(),
        **{"ranks_per_worker": SIZE, **options},
    )


def take_steps(model: nn.Module, optimizer: DiLoCoOptimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(batch_of(rank, step)).backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()


def cut_model(rank: int) -> nn.Module:
    """A model whose parameters its site's ranks hold in parts."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    site = DeviceMesh("cpu", torch.arange(WORLD_SIZE).view(-1, SIZE), mesh_dim_names=("sites", "shards"))[
        "shards"
    ]
    model = make_model()
    fully_shard(model, mesh=site)
    assert rank in site.mesh
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().detach().clone() for name, value in model.state_dict().items()}


def main(rendezvous: str, result: str, rank: int) -> None:
    from torch.distributed import checkpoint

    from exogym_core.communicator import GlooCommunicator

    joined(rank, WORLD_SIZE, rendezvous)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {
        "MASTER_PORT": Path(rendezvous + " port").read_text(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "NETGYM_SECRET": "known to this test alone",
    }
    found: dict[str, Any] = {}
    with GlooCommunicator.from_environment(timeout_seconds=60) as comm:
        for name, codec in (("plain", None), ("coded", "int8")):
            coded = {"codec": codec, "error_feedback": codec is not None}
            model = cut_model(rank)
            optimizer = optimizer_of(model, comm, **coded)
            take_steps(model, optimizer, rank, 0, STEPS)
            found[name] = whole(model)
            kept = optimizer.state_dict()
            own = sum(value.numel() for value in optimizer.strategy.outer.flats)
            found["share"] = own / sum(value.numel() for value in make_model().parameters())
            # Each site keeps its own, each rank its part; who reads it has other values and the same shapes.
            site = torch.distributed.new_group(
                [rank // SIZE * SIZE, rank // SIZE * SIZE + 1], use_local_synchronization=True
            )
            folder = f"{result} {name} {rank // SIZE}"
            checkpoint.save({"optimizer": kept}, checkpoint_id=folder, process_group=site)
            take_steps(model, optimizer, rank, STEPS, 2 * STEPS)
            expected = whole(model)
            again = cut_model(rank)
            resumed = optimizer_of(again, comm, **coded)
            take_steps(again, resumed, rank, 20, 20 + H)
            into = {"optimizer": resumed.state_dict()}
            checkpoint.load(into, checkpoint_id=folder, process_group=site)
            resumed.load_state_dict(into["optimizer"])
            take_steps(again, resumed, rank, STEPS, 2 * STEPS)
            found[f"{name} resumed"] = all(
                torch.equal(value, expected[key]) for key, value in whole(again).items()
            )
        found["refused"] = [
            refused(rank, comm, **options)
            for options in ({"ranks_per_worker": 1}, {"sharding": "FULL_SHARD"})
        ]
    if rank == 0:
        torch.save(found, result)
    leave()


def refused(rank: int, comm: Communicator, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        optimizer_of(cut_model(rank), comm, **options)
    return str(error.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What processes of two sites of two end with."""
    for name in ("checkpoint", "device_mesh", "fsdp"):  # here once, and not in each of the forks
        importlib.import_module(f"torch.distributed.{name}")
    folder, store = tmp_path_factory.mktemp("fully_shard"), agent_store()
    (folder / "rendezvous port").write_text(str(store.port))
    return dict(results_of(main, WORLD_SIZE, folder))


def test_a_model_cut_by_fully_shard_trains_as_one_that_is_whole(found: dict[str, Any]) -> None:
    """Rounds, clipping and the outer optimizer: as NetGym's own shards, which have other borders."""

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make_model()
        take_steps(model, optimizer_of(model, comm, sharding="FULL_SHARD"), comm.rank, 0, STEPS)
        return model.state_dict()

    expected = run_ranks(body, WORLD_SIZE).results[0]
    assert found["plain"].keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found["plain"][key], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["coded"][key], value, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("name", ["plain", "coded"])
def test_its_state_is_kept_by_torchs_distributed_checkpoints(found: dict[str, Any], name: str) -> None:
    """Both optimizers' states, theta and what was rounded off, to the same bits: saved whole, read in parts."""
    assert found[f"{name} resumed"]


def test_a_rank_holds_its_part_of_the_outer_optimizers_state(found: dict[str, Any]) -> None:
    assert found["share"] == pytest.approx(1 / SIZE, abs=0.1)


def test_what_does_not_go_with_it_is_refused_in_a_line(found: dict[str, Any]) -> None:
    assert found["refused"] == [
        "DiLoCoOptimizer: fully_shard has cut the parameters among 2 ranks, and ranks_per_worker is 1; make them equal",
        "DiLoCoOptimizer: fully_shard has cut the parameters already; leave out sharding='FULL_SHARD'",
    ]
