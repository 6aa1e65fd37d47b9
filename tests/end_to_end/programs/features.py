"""What lies above c10d: hooks, sharded optimizers, pipelines, checkpoints, meshes. Prints results, the same on gloo."""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()


def tell(name: str, value: float) -> None:
    if rank == 0:
        print(f"{name} {value:.5f}", flush=True)


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> float:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(torch.randn(4, 8, generator=generator)) ** 2).mean()
        loss.backward()
        optimizer.step()
    total = torch.stack([p.detach().abs().sum() for p in net.parameters()]).sum()
    dist.all_reduce(total)
    return float(total)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
    net = DistributedDataParallel(model())
    # By another name: torch lets its own bfloat16 hook be registered where there is NCCL alone.
    net.register_comm_hook(None, lambda state, bucket, hook=hook: hook(state, bucket))
    tell(hook.__name__, train(net, sgd(net)))

net = DistributedDataParallel(model())
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
tell("powerSGD", train(net, sgd(net)))

net = DistributedDataParallel(model())
with net.join(divide_by_initial_world_size=False):
    for _ in range(2 + rank):
        net(torch.ones(4, 8)).square().mean().backward()
tell("uneven", sum(float(parameter.grad.abs().sum()) for parameter in net.parameters()))

net = DistributedDataParallel(model())
local, _ = dist.new_subgroups(1)
net.register_comm_hook(
    post_localSGD_hook.PostLocalSGDState(None, local, start_localSGD_iter=2),
    post_localSGD_hook.post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: E402

tell(
    "post_localSGD", train(net, PostLocalSGDOptimizer(sgd(net), PeriodicModelAverager(2, warmup_steps=2)), 6)
)

net = DistributedDataParallel(model())
tell("zero", train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)))

mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
tell("mesh", float(mesh["dp"].size() * 10 + mesh.get_local_rank("tp")))
sharded = distribute_tensor(torch.arange(16.0).view(4, 4), mesh["tp"], [Shard(0)])
tell("dtensor", float((sharded @ sharded.T).full_tensor().sum()))
net = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
tell("tensor_parallel", float(net(torch.ones(2, 8)).sum()))

for kind in (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
):
    torch.manual_seed(0)
    is_single = issubclass(kind, PipelineScheduleSingle)
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size if is_single else 2 * size)]
    second = 2 * size - 1 - rank if kind is ScheduleZBVZeroBubble else size + rank
    mine = [rank] if is_single else [rank, second]
    stages = [PipelineStage(parts[index], index, len(parts), torch.device("cpu")) for index in mine]
    made = kind(
        stages[0] if is_single else stages, 8, loss_fn=lambda out, target: ((out - target) ** 2).mean()
    )
    losses: list[torch.Tensor] = []
    last = {"target": torch.zeros(16, 8), "losses": losses} if len(parts) - 1 in mine else {}
    made.step(*([torch.ones(16, 8)] if rank == 0 else []), **last)
    grads = sum(float(each.grad.detach().abs().sum()) for index in mine for each in parts[index].parameters())
    sums = torch.tensor([grads, float(torch.stack(losses).detach().mean()) if losses else 0.0])
    dist.all_reduce(sums)
    tell(kind.__name__, float(sums[0]) + 1000 * float(sums[1]))

folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
saved = {
    "weight": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (size,)), [Shard(0)]),
    "step": 3,
}
dcp.save(saved, checkpoint_id=folder[0])
saved["weight"] = saved["weight"] * 0
dcp.load(saved, checkpoint_id=folder[0])
tell("checkpoint", float(saved["weight"].full_tensor().sum()))

parts = [torch.tensor([float(rank)])] * 2
work = dist._functional_collectives.all_reduce(parts[0], "sum", dist.group.WORLD)
tell("functional", float(work))
scaled = torch.ones(2)
dist.all_reduce(
    scaled, op=dist._make_nccl_premul_sum(0.5)
) if dist.get_backend() == "netsim" else dist.all_reduce(scaled.mul_(0.5))
tell("premul_sum", float(scaled.sum()))
dist.barrier()
dist.destroy_process_group()
