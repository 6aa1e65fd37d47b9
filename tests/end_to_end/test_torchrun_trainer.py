"""A loop of one's own in processes that torchrun has started, and what `fit` refuses there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from experiments import fit
from forks import Fork, ranks, run_script

from exogym_core import Trainer
from exogym_core.strategy import AllReduceStrategy, AsyncDiLoCoStrategy
from netgym.tasks import MLP
from netsim.errors import InputError


def test_num_nodes_must_be_torchruns(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="num_nodes is 4, but torchrun has started 2 processes"):
        Trainer(MLP(), []).fit(strategy=AllReduceStrategy(), num_nodes=4, transport="gloo")


def test_servers_are_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="has 1 server, which processes of torchrun do not run"):
        Trainer(MLP(), []).fit(strategy=AsyncDiLoCoStrategy(), transport="gloo")


def test_a_run_that_joins_no_launcher_is_a_run_of_its_own(monkeypatch, tmp_path, capsys):
    """Shells of Slurm, MPI and accelerate have these variables."""
    place = {"RANK": "x", "WORLD_SIZE": "y", "SLURM_PROCID": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for transport in ("netsim", "gloo"):
        out = tmp_path / transport
        about = {"num_nodes": 2, "max_steps": 2, "transport": transport, "device": "cpu", "out": out}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(strategy=AllReduceStrategy(), **about)
        assert (out / "summary.json").is_file()
        assert "step 2" in capsys.readouterr().err
        named = f"fit: RANK={place['RANK']} is set, but not by torchrun"
        assert any(named in str(each.message) for each in told) == (transport == "gloo")


def test_a_rank_that_is_no_number_is_named(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "x", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="environment: RANK='x' is no whole number"):
        fit(strategy=AllReduceStrategy(), transport="gloo")


# --- a training loop of one's own ---------------------------------------------------------------------------

OWN_LOOP = """
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

warnings.simplefilter("error")
import torch

from exogym_core import DiLoCoOptimizer
from exogym_core.communicator import GlooCommunicator, run_ranks

SAMPLES = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def train(comm):
    torch.manual_seed(comm.rank)  # an own start on every rank: rank 0's is the one that counts
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = DiLoCoOptimizer(
        communicator=comm,
        batch_size=4,
        num_inner_steps=2,
        inner_optimizer=partial(torch.optim.AdamW, lr=4e-3, weight_decay=0.1, betas=(0.9, 0.95)),
        outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        params=model.parameters(),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3),
        grad_compression="fp16",
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(6):
        inputs = SAMPLES[comm.rank :: comm.world_size][4 * step % 16 :][:4]
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(dim=1))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer.inner_optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(scaler=scaler)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return {"losses": losses, "weights": weights, "bytes_sent": comm.traffic.bytes_sent,
            "lr": optimizer.param_groups[0]["lr"], "rounds": optimizer.local_epoch}


if "WORLD_SIZE" in os.environ:
    with GlooCommunicator.from_environment() as comm:
        outcome = train(comm)
        Path(sys.argv[1], f"{comm.rank}.json").write_text(json.dumps(outcome))
else:
    run = run_ranks(train, 2, topology="two-datacenters")
    assert run.virtual_seconds > 0
    for rank, outcome in enumerate(run.results):
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(outcome))
"""


def test_a_loop_of_ones_own_runs_simulated_and_under_torchrun_alike(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    outcomes: list[list[dict[str, Any]]] = []
    for name in ("simulated", "real"):
        folder = tmp_path / name
        folder.mkdir()
        call = (run_script, "train.py", name)
        ends = ranks(2, *call, folder=tmp_path) if name == "real" else [Fork(*call, folder=tmp_path).end()]
        assert [end.returncode for end in ends] == [0] * len(ends), ends[0].stderr
        outcomes.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)])
    ours, theirs = outcomes
    assert ours[0]["weights"] == ours[1]["weights"], "a round has ended: replicas are equal"
    assert theirs[0]["weights"] == theirs[1]["weights"]
    for simulated_rank, real_rank in zip(ours, theirs, strict=True):
        for name in ("losses", "weights"):
            assert real_rank[name] == pytest.approx(simulated_rank[name], rel=1e-4, abs=1e-6)
        for name in ("bytes_sent", "lr", "rounds"):
            assert real_rank[name] == simulated_rank[name]
