"""FSDP2's fully_shard, a DTensor and a functional collective; prints rank 0's losses."""

import sys

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(2)]
)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16, generator=generator)).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {step} {mean.item() / dist.get_world_size():.6f}", flush=True)
sharded = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
product = (sharded @ sharded.redistribute(mesh, [Replicate()])).full_tensor()
assert torch.equal(product, torch.arange(16.0).view(4, 4) @ torch.arange(16.0).view(4, 4))
summed = all_reduce(torch.full((3,), float(rank)), "sum", mesh) + 0
assert summed[0].item() == sum(range(dist.get_world_size()))
dist.barrier()
dist.destroy_process_group()
