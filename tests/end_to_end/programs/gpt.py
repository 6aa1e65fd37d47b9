"""The start and the loop of a nanoGPT-like train.py, written for one machine with GPUs."""

import os
import threading
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)

    def forward(self, x, y):
        torch.arange(0, x.size(1), dtype=torch.long, device=x.device)
        hidden = self.embedding(x)
        hidden = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        return torch.nn.functional.cross_entropy(self.head(hidden).view(-1, 64), y.view(-1))


def get_batch():
    ix = torch.randint(len(data) - 16, (4,))
    x = torch.stack([data[i : i + 16] for i in ix])
    y = torch.stack([data[i + 1 : i + 17] for i in ix])
    if device_type == "cuda":
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
init_process_group(backend="nccl")
local_rank = int(os.environ["LOCAL_RANK"])
device = f"cuda:{local_rank}"
torch.cuda.set_device(device)
torch.manual_seed(1337 + local_rank)
torch.backends.cuda.matmul.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
assert torch.empty(4, device="cuda", pin_memory=True).shape == (4,)
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type, dtype=getattr(torch, dtype))
data = torch.randint(0, 64, (1000,))
model = Net()
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
model = DistributedDataParallel(model, device_ids=[local_rank])
X, Y = get_batch()
for _ in range(3):
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        with ctx:
            loss = model(X, Y) / 2
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
torch.cuda.synchronize()
assert (dtype, torch.cuda.device_count()) == ("bfloat16", int(os.environ["LOCAL_WORLD_SIZE"]))

attend = torch.nn.functional.scaled_dot_product_attention
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(1)
heads = torch.randn(2, 4, 8, 16, device=device)
sharded = distribute_tensor(heads, mesh, [Shard(1)])  # tensor parallel: some heads on each rank
whole = attend(sharded, sharded, sharded, is_causal=True).full_tensor()
torch.testing.assert_close(whole, attend(heads, heads, heads, is_causal=True))

pinned = []  # as data loaders do, in a thread of its own
thread = threading.Thread(target=lambda: pinned.append(torch.ones(2).pin_memory()))
thread.start()
thread.join()
assert torch.equal(pinned[0], torch.ones(2))
FullyShardedDataParallel(Net().to(local_rank))(X, Y).backward()
destroy_process_group()
