"""Steps with an all-reduce in groups of those who are left, whatever becomes of the others' connections."""

import datetime

import torch
import torch.distributed as dist

import netgym

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
group, rank = dist.group.WORLD, dist.get_rank()
for step in range(4):
    netgym.advance(1.0)
    try:
        dist.all_reduce(present := torch.ones(1), group=group)
        print(f"rank {rank} step {step}: {int(present)}\n", end="", flush=True)
    except RuntimeError as error:
        print(f"rank {rank} step {step}: {str(error).rpartition(': ')[2]}\n", end="", flush=True)
        if rank == 1:
            break
        group = dist.new_group([0, 2], use_local_synchronization=True)
