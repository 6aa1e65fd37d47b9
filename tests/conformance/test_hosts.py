"""Hosts: every place where ranks live runs the same body, and passes on the same rows and snapshots."""

from __future__ import annotations

import socket

import pytest
import torch

from exogym_core.communicator.simulated.simulation import World
from exogym_core.workers.gloo.ranks import GlooHost
from exogym_core.workers.host import Sinks
from exogym_core.workers.processes.process_runner import ProcessHost
from exogym_core.workers.runner import ThreadHost
from exogym_core.workers.spec import WorkerSpec
from exogym_core.workers.torchrun.rank import TorchrunHost


def simulated(kind, num_ranks):
    host = ThreadHost if kind == "threads" else ProcessHost
    world = World.build(num_ranks, None, None, None, "auto")
    return host(world, 3, WorkerSpec(kind=kind, processes=None if kind == "threads" else num_ranks))


HOSTS = {
    "threads": (lambda: simulated("threads", 2), 2),
    "processes": (lambda: simulated("processes", 2), 2),
    "gloo": (lambda: GlooHost(2, seed=3), 2),
    "torchrun": (lambda: TorchrunHost(lambda: "nothing to go on from", seed=3), 1),
}


def body(comm):
    comm.mark({"step": 1})
    comm.deposit({"step": 1}, [torch.full((2,), float(comm.rank))])
    comm.mark({"step": 2})
    return float(comm.all_reduce(torch.ones(1))), float(torch.rand(1))


@pytest.mark.parametrize("place", HOSTS)
def test_results_rows_and_snapshots(place, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    make, num_ranks = HOSTS[place]
    rows, snapshots = [], []
    sinks = Sinks(
        lambda row: rows.append((row.rank, row.row["step"])),
        lambda rank, note, tensors: snapshots.append((rank, note["step"], tensors[0].tolist())),
    )
    run = make().run(body, sinks)
    assert [total for total, _ in run.results] == [float(num_ranks)] * num_ranks
    assert len({value for _, value in run.results}) == num_ranks
    assert sorted(rows) == [(rank, step) for rank in range(num_ranks) for step in (1, 2)]
    assert sorted(snapshots) == [(rank, 1, [rank, rank]) for rank in range(num_ranks)]
    assert run.rows == []
    assert len(run.traffic) == num_ranks
