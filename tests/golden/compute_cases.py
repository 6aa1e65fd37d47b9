"""Computing times by the roofline of `netgym launch --compute "flops a100"`, for steps whose times are published.

Models run on tensors without values. Published are the chapters of "Let's reproduce GPT-2 (124M)" (Karpathy, 2024: one
A100 of 80 GB, 16 sequences of 1,024 tokens) and the page performance.md of TorchTitan's docs at 1ea476e9 (April 2024:
FSDP2 on 64 A100 of 80 GB).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exogym_core.cost.devices import find_device
from exogym_core.cost.operations import OperationWatch
from exogym_core.cost.roofline import Roofline

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 64  # GPUs of TorchTitan's runs
A100 = Roofline(find_device("a100"), "a100")


def seconds_of(work: Callable[[], object]) -> Counter[str]:
    """Seconds of the operations of `work` by what bounds them."""
    parts: Counter[str] = Counter()

    def add(operation):
        seconds, bound = A100.seconds(operation)
        parts[bound] += seconds

    with OperationWatch(add):
        work()
    return parts


class Gpt2(nn.Module):
    """GPT-2 of 124M parameters with its attention written out, as the lecture has it before flash attention."""

    def __init__(self, dtype, width=768, heads=12, layers=12, vocabulary=50257, length=1024):
        super().__init__()
        self.dtype, self.heads = dtype, heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    *(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)),
                    *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)),
                ]
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, places: Tensor, hidden: Tensor) -> Tensor:
        """Logits; `hidden` masks later tokens."""
        x = self.tokens(tokens) + self.places(places)
        samples, length, width = x.shape

        # Casts are those of CUDA's autocast: products in its dtype, norms and softmax in fp32.
        def linear(layer: nn.Linear, values: Tensor) -> Tensor:
            bias = None if layer.bias is None else layer.bias.to(self.dtype)
            return F.linear(values.to(self.dtype), layer.weight.to(self.dtype), bias)

        for norm, qkv, out, second, up, down in self.layers:
            q, k, v = (
                each.view(samples, length, self.heads, -1).transpose(1, 2)
                for each in linear(qkv, norm(x)).split(width, dim=2)
            )
            scores = ((q @ k.transpose(-2, -1)) * (1.0 / 8)).masked_fill(hidden, float("-inf"))
            weights = F.softmax(scores.float(), dim=-1).to(self.dtype)
            x = x + linear(out, (weights @ v).transpose(1, 2).contiguous().view(samples, length, width))
            x = x + linear(down, F.gelu(linear(up, second(x)), approximate="tanh"))
        return linear(self.head, self.norm(x))


def gpt2(setting: str) -> Counter[str]:
    """A training step of GPT-2 in `fp32`, `tf32` or `bf16` (autocast, tf32)."""
    torch.set_float32_matmul_precision("highest" if setting == "fp32" else "high")
    with torch.device("meta"):
        model = Gpt2(torch.bfloat16 if setting == "bf16" else torch.float32)
        tokens, targets = torch.zeros(16, 1024, dtype=torch.long), torch.zeros(16, 1024, dtype=torch.long)
        places, hidden = torch.zeros(1024, dtype=torch.long), torch.zeros(1024, 1024, dtype=torch.bool)

    def step():
        logits = model(tokens, places, hidden)
        F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.view(-1)).backward()

    parts = seconds_of(step)
    torch.set_float32_matmul_precision("highest")
    return parts + adamw_seconds(sum(each.numel() for each in model.parameters()))


def adamw_seconds(num_values: int) -> Counter[str]:
    """A step of AdamW in fp32 as torch's `foreach` runs it, on one tensor of all values."""
    values = torch.nn.Parameter(torch.empty(num_values, device="meta"))
    values.grad = torch.empty_like(values)
    optimizer = torch.optim.AdamW([values], foreach=True)
    optimizer.step()  # makes its state
    return seconds_of(optimizer.step)


@dataclass(frozen=True)
class Llama:
    """A Llama and how TorchTitan trained it: tokens of a GPU's sequences, and recomputed layers of all."""

    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    sequences: int
    length: int
    recomputed: float

    def step(self) -> Counter[str]:
        """A training step of one GPU under FSDP2, whose communication is hidden, in bf16 with fp32 gradients."""
        size = self.width // self.heads
        inner = self.groups * size
        shapes = [
            (self.width, self.width),
            (inner, self.width),
            (inner, self.width),
            (self.width, self.width),
        ]
        shapes += [(self.hidden, self.width), (self.hidden, self.width), (self.width, self.hidden)]
        half = {"dtype": torch.bfloat16, "requires_grad": True}
        with torch.device("meta"):
            weights = [torch.zeros(shape, **half) for shape in shapes]
            norms = [torch.ones(self.width, **half) for _ in range(3)]
            x = torch.zeros(self.sequences, self.length, self.width, **half)
            phases = torch.zeros(1, self.length, 1, size // 2, dtype=torch.complex64)
            table = torch.zeros(self.vocabulary, self.width, **half)
            tokens = torch.zeros(self.sequences, self.length, dtype=torch.long)

        def rotated(values: Tensor) -> Tensor:
            pairs = torch.view_as_complex(values.float().reshape(*values.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * phases).flatten(3).type_as(values)

        def norm(values: Tensor, weight: Tensor) -> Tensor:
            return F.layer_norm(values, (self.width,), weight)  # one fused kernel each way, as its RMS norm

        def heads(values: Tensor) -> Tensor:
            return values.view(self.sequences, self.length, -1, size)

        def repeated(values: Tensor) -> Tensor:
            return (
                values.repeat_interleave(self.heads // self.groups, dim=2)
                if self.groups < self.heads
                else values
            )

        def layer() -> Tensor:
            wq, wk, wv, wo, gate, up, down = weights
            y = norm(x, norms[0])
            q, k, v = rotated(heads(y @ wq.T)), rotated(heads(y @ wk.T)), heads(y @ wv.T)
            q, k, v = (each.transpose(1, 2) for each in (q, repeated(k), repeated(v)))
            seen = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
            h = x + seen.transpose(1, 2).contiguous().view(self.sequences, self.length, -1) @ wo.T
            y = norm(h, norms[1])
            return h + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T

        def ends() -> None:
            F.embedding(tokens, table).sum().backward()
            logits = (norm(x, norms[2]) @ table.T).float()
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

        forward = seconds_of(layer)
        both = seconds_of(lambda: layer().backward(x.detach()))
        of_layer = sum(each.numel() for each in (*weights, *norms[:2]))
        num_values = self.layers * of_layer + 2 * table.numel()
        total: Counter[str] = Counter()
        for parts, times in (
            (both, self.layers),
            (forward, self.layers * self.recomputed),
            (seconds_of(ends), 1),
        ):
            for name, seconds in parts.items():
                total[name] += seconds * times
        # FSDP2 copies gathered weights out twice, and gradients in bf16 into one buffer in fp32.
        total["memory"] += (
            num_values * (2 * 4 + 6) / (A100.device.memory_bytes_per_second * A100.memory_share)
        )
        return total + adamw_seconds(num_values // WORLD)


#: Tokens a second of a GPU as published: of GPT-2 from milliseconds a step.
PUBLISHED = {
    "GPT-2, fp32": 16 * 1024 / 1.0,
    "GPT-2, tf32": 16 * 1024 / 0.333,
    "GPT-2, bf16": 16 * 1024 / 0.300,
    "Llama 3 8B, selective layer": 2904,
    "Llama 3 70B, full": 331,
    "Llama 2 13B, no recomputing": 2162,
    "Llama 2 13B, selective layer": 1914,
    "Llama 2 70B, full": 353,
}

#: Seconds of a step as predicted in 9d19d0af, before the published ones were compared.
FIRST = {
    "GPT-2, fp32": 0.9487,
    "GPT-2, tf32": 0.2522,
    "GPT-2, bf16": 0.2007,
    "Llama 3 8B, selective layer": 2.1706,
    "Llama 3 70B, full": 20.1865,
    "Llama 2 13B, no recomputing": 2.9388,
    "Llama 2 13B, selective layer": 3.3923,
    "Llama 2 70B, full": 19.2769,
}

LLAMAS = {
    "Llama 3 8B, selective layer": Llama(4096, 32, 32, 8, 14336, 128256, 1, 8192, 0.5),
    "Llama 3 70B, full": Llama(8192, 80, 64, 8, 28672, 128256, 1, 8192, 1.0),
    "Llama 2 13B, no recomputing": Llama(5120, 40, 40, 40, 13824, 32000, 2, 4096, 0.0),
    "Llama 2 13B, selective layer": Llama(5120, 40, 40, 40, 13824, 32000, 2, 4096, 0.5),
    "Llama 2 70B, full": Llama(8192, 80, 64, 8, 28672, 32000, 2, 4096, 1.0),
}


def predictions() -> dict[str, tuple[Counter[str], int]]:
    """Seconds of a step by what bounds them, and tokens of a step of one GPU, by case."""
    cases = {f"GPT-2, {name}": (gpt2(name), 16 * 1024) for name in ("fp32", "tf32", "bf16")}
    return cases | {name: (llama.step(), llama.sequences * llama.length) for name, llama in LLAMAS.items()}
