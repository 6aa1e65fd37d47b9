"""Programs launched without values: the figures of launching them with values, and no decision by a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from netgym.cli.main import main
from tests.end_to_end.conftest import Launch

DDP_GPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (y.view(*x.shape[:2], 4, 16).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [nn.Embedding(300, 64), Block(), nn.LayerNorm(64), nn.Linear(64, 300)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
scaler = torch.amp.GradScaler("cpu", enabled=True)
tokens = torch.randint(0, 300, (500,))
data = torch.utils.data.TensorDataset(torch.stack([tokens[at : at + 17] for at in range(0, 480, 5)]))
sampler = torch.utils.data.DistributedSampler(data, seed=3)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
total = 0.0
for number, (batch,) in enumerate(loader):
    model.require_backward_grad_sync = number % 2 == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / 2
    scaler.scale(loss).backward()
    total += loss.item()
    if number % 2:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss {loss:.3f} {loss.item():.3f} {total / (number + 1):.3f} norm {norm:.3f}")
    if number == 3:
        break
dist.destroy_process_group()
"""

SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 64))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cpu")
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    tokens = torch.randint(0, 64, (2, 8))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), norm.full_tensor().item())
mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
mlp(torch.randn(4, 16)).sum().backward()
whole = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
(whole @ whole.redistribute(mesh, [Replicate()])).full_tensor()
"""

DILOCO = """
import torch, torch.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model.to(torch.bfloat16).cpu().float().to("cpu")
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
shared = [each.detach().clone() for each in model.parameters()]
for each in shared:
    dist.broadcast(each, 0)
outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
for step in range(2):
    inputs, labels = torch.randn(32, 16), torch.randint(0, 10, (32,))
    logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    inner.zero_grad()
    loss.backward()
    inner.step()
    correct = (logits.argmax(-1) == labels).sum().item()
    if step % 2:
        for each, own in zip(shared, model.parameters()):
            each.grad = each - own.detach()
            dist.all_reduce(each.grad, op=dist.ReduceOp.AVG)
        outer.step()
        with torch.no_grad():
            [own.copy_(each) for each, own in zip(shared, model.parameters())]
    print("loss", loss.item(), round(loss.item(), 2), f"{correct}", correct / 32, logits.mean(0).tolist()[0])
everyone = [None] * size
dist.all_gather_object(everyone, {"rank": rank, "loss": loss.item()})
assert [each["rank"] for each in everyone] == list(range(size))
box = [{"seed": 3} if rank == 0 else None]
dist.broadcast_object_list(box, 0)
assert box == [{"seed": 3}]
"""

PROGRAMS = {
    "gpt": (2, DDP_GPT),
    "sharded": (2, SHARDED),
    "diloco": (3, DILOCO),
}


def launched(launch_here: Launch, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Report and output of a launch into `folder`."""
    at = ["--topology", "two-datacenters", "--compute", "flops h100 0.4", "--out", str(folder)]
    code, out, err = launch_here(*at, *options)
    assert code == 0, err
    return json.loads((folder / "launch.json").read_text()), out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["diloco", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt", "sharded"))]
)
def test_figures_are_those_of_launching_with_values(launch_here: Launch, name: str, tmp_path: Path) -> None:
    """Times, calls, bytes and computing are equal to the bit; losses are unknown; the requests can be timed again."""
    num_ranks, text = PROGRAMS[name]
    script = tmp_path / "train.py"
    script.write_text(text)
    ranks = ["-n", str(num_ranks)]
    expected, _ = launched(launch_here, tmp_path / "with", *ranks, str(script))
    report, out = launched(launch_here, tmp_path / "without", *ranks, "--meta", str(script))
    differing = {"run_folder": str(tmp_path / "without"), "has_values": False}
    assert report == expected | differing
    losses = [line for line in out.splitlines() if line.startswith("loss")]
    assert losses
    assert all("nan" in line for line in losses)
    assert "launched without values" in out
    assert "launched without values" in (tmp_path / "without" / "report.html").read_text()
    if name == "diloco":  # one will do
        for folder in ("with", "without"):
            there = ["--topology", "wan-4-regions", "--out", str(tmp_path / f"{folder}-there")]
            assert main(["retime", str(tmp_path / folder), *there]) == 0
        again, first = (
            json.loads((tmp_path / f"{folder}-there" / "launch.json").read_text())
            for folder in ("without", "with")
        )
        assert again == first | differing | {
            "run_folder": str(tmp_path / "without-there"),
            "retimed_from": "../without",
        }


DECISIONS = {
    "tensor": "if loss < best: pass",
    "shape": "outputs[outputs > 0]",
    "count": "range(int(outputs.argmax()))",
    "received": "flag = torch.ones(1); flag.copy_(loss.detach()); dist.all_reduce(flag); assert flag",
}


@pytest.mark.parametrize(
    "decision",
    ["tensor", "received", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("shape", "count"))],
)
def test_a_value_that_decides_is_refused_with_its_line(
    launch_here: Launch, decision: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""import torch, torch.distributed as dist
dist.init_process_group("gloo")
best = 3.0
outputs = torch.nn.Linear(4, 4)(torch.nn.init.trunc_normal_(torch.empty(2, 4), std=0.02))
loss = outputs.sum()
dist.all_reduce(loss.detach())
{DECISIONS[decision]}
""")
    code, _, err = launch_here("-n", "2", "--meta", "--compute", "flops h100", str(script))
    assert code == 2
    assert err.startswith("error: train.py:7: the value")
    assert "without values it is unknown: run without --meta" in err


def test_measured_computing_is_refused(launch_here: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code, _, err = launch_here("-n", "2", "--meta", str(tmp_path / "train.py"))
    assert (code, err.count("\n")) == (2, 1)
    assert "--meta computes no values" in err
