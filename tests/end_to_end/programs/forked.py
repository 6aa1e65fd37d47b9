"""PyTorch's tutorial on writing distributed applications: two processes with explicit ranks; they go on for ever."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    """All-reduces without an end."""
    tensor = torch.ones(1)
    while True:
        dist.all_reduce(tensor)


def init_process(rank, size, fn, backend="gloo"):
    """Initialize the distributed environment."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = sys.argv[1]
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    processes = []
    for rank in range(2):
        processes.append(mp.Process(target=init_process, args=(rank, 2, run)))
        processes[-1].start()
    for process in processes:
        process.join()
