"""Memory of a process whose site trains a model of 100 MB: what of it is a share, and what a replica.

    python benchmarks/site_memory.py

Two sites of two processes on this machine train three rounds of two steps with AdamW and DiLoCo's outer momentum.
Counted are the bytes of all tensors that are alive between two steps (parameters, both optimizers' states, theta,
buckets), and the process's peak less what it was when everything had been imported.
"""

import gc
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import harness

WAYS = ("NO_SHARD", "SHARD_GRAD_OP", "fully_shard")
SITES, SIZES = 2, (2,)


def peak_bytes():
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def of_tensors():
    import torch

    gc.collect()
    seen = {}
    for each in gc.get_objects():
        if issubclass(
            type(each), torch.Tensor
        ):  # isinstance would ask objects for their class, and some warn
            own = each._local_tensor if hasattr(each, "_local_tensor") else each
            storage = own.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def train(way, size):
    import torch
    import torch._dynamo
    import torch.distributed
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from exogym_core import DiLoCoOptimizer
    from exogym_core.communicator import GlooCommunicator

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    site = DeviceMesh("cpu", torch.arange(SITES * size).view(-1, size), mesh_dim_names=("sites", "ranks"))[
        "ranks"
    ]
    before = peak_bytes()
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers)
    num_bytes = sum(value.nbytes for value in model.parameters())
    if way == "fully_shard":
        for layer in layers:
            fully_shard(layer, mesh=site)
        fully_shard(model, mesh=site)
    with GlooCommunicator.from_environment() as comm:
        optimizer = DiLoCoOptimizer(
            communicator=comm,
            batch_size=8,
            num_inner_steps=2,
            inner_optimizer=partial(torch.optim.AdamW, lr=1e-4),
            params=model.parameters(),
            ranks_per_worker=size,
            sharding="NO_SHARD" if way == "fully_shard" else way,
        )
        for _ in range(6):
            model(torch.randn(8, 2048)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == size - 1:
            alive, peak = of_tensors() / num_bytes, (peak_bytes() - before) / num_bytes
            harness.row(size, way, f"{alive:.2f}", f"{peak:.2f}")
    torch.distributed.destroy_process_group()


def main():
    alive, peak = "alive between steps, in models", "peak, in models"
    harness.heading("processes a site", "how they divide the model", alive, peak)
    for size in SIZES:
        for way in WAYS:
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={SITES * size}".split()
            quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, *torchrun, __file__, way, str(size)], env=quiet, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        main()
