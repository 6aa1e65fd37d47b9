"""A job for several GPUs of one machine in the style of PyTorch's DDP tutorial series: it spawns its ranks itself."""

import os
import sys

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    torch.cuda.set_device(rank)
    init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))


def main(rank, world_size, path):
    ddp_setup(rank, world_size)
    data = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    loader = DataLoader(data, batch_size=16, pin_memory=True, sampler=DistributedSampler(data))
    model = DistributedDataParallel(torch.nn.Linear(20, 1).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        for source, targets in loader:
            source, targets = source.to(rank), targets.to(rank)
            optimizer.zero_grad()
            F.mse_loss(model(source), targets).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    barrier(device_ids=[rank])
    model.module.load_state_dict(torch.load(path, map_location=f"cuda:{rank}"))
    generator = torch.Generator(device=f"cuda:{rank}").manual_seed(3)
    torch.randn(3, device="cuda", generator=generator)
    assert torch.cuda.current_device() == rank
    print(f"[GPU{rank}] {len(loader)} batches", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size, sys.argv[2]), nprocs=world_size)
