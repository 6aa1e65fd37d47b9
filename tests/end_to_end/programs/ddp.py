"""A DistributedDataParallel loop as PyTorch's examples write it; prints rank 0's mean losses."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
model = DistributedDataParallel(network, bucket_cap_mb=0.002)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for step in range(4):
    inputs = torch.randn(8, 16, generator=generator)
    labels = torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {step} {mean.item() / size:.6f}", flush=True)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": each} for each in range(size)]
dist.barrier()
dist.destroy_process_group()
