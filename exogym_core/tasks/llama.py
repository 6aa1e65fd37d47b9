"""Llama decoders in the exact sizes of OpenDiLoCo's configurations; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exogym_core.tasks.embedding import TokenEmbedding
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LLAMA_PRESETS", "Llama"]

LLAMA_PRESETS: dict[str, dict[str, int]] = {
    "2m": {"width": 64, "mlp_width": 256, "num_layers": 2, "num_heads": 2, "vocab_size": 1024},
    "14m": {"width": 128, "mlp_width": 512, "num_layers": 6, "num_heads": 4},
    "60m": {"width": 1024, "mlp_width": 2688, "num_layers": 3, "num_heads": 16},
    "150m": {"width": 1024, "mlp_width": 2688, "num_layers": 12, "num_heads": 16},
    "1b": {"width": 2048, "mlp_width": 5632, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4},
}
"""OpenDiLoCo's sizes; vocabulary 32000 but for 2m. Names are not sizes: 150m has 215.0 million parameters."""


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class _LlamaAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = num_heads, num_kv_heads, width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        samples, length, width = hidden.shape

        def split(joint: Tensor, heads: int) -> Tensor:
            return joint.view(samples, length, heads, self.head_width).transpose(1, 2)

        query = _rotate(split(self.query(hidden), self.num_heads), cosine, sine)
        key = _rotate(split(self.key(hidden), self.num_kv_heads), cosine, sine)
        value = split(self.value(hidden), self.num_kv_heads)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.num_kv_heads != self.num_heads
        )
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(samples, length, width))
        return output


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, mlp_width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = _LlamaAttention(width, num_heads, num_kv_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosine, sine)
        normed = self.mlp_norm(hidden)
        output: Tensor = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return output


class Llama(nn.Module):
    """A decoder with rotary positions, RMS norms, gated MLPs and grouped heads (Touvron et al., 2302.13971).

    A batch is `(tokens, targets)`, both (samples, length) of integers; the output is the mean cross-entropy.

    Args:
        preset: a name from `LLAMA_PRESETS`; the other arguments override it.
        vocab_size: number of tokens.
        block_size: longest sequence.
        width, mlp_width, num_layers, num_heads, num_kv_heads: sizes; query heads share key heads evenly.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        preset: str = "2m",
        *,
        vocab_size: int | None = None,
        block_size: int = 1024,
        width: int | None = None,
        mlp_width: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if preset not in LLAMA_PRESETS:
            raise unknown_name("Llama preset", preset, LLAMA_PRESETS)
        sizes = {"vocab_size": 32000, **LLAMA_PRESETS[preset]}
        given = {
            "vocab_size": vocab_size,
            "width": width,
            "mlp_width": mlp_width,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
        }
        sizes.update({name: value for name, value in given.items() if value is not None})
        sizes.setdefault("num_kv_heads", sizes["num_heads"])
        if sizes["width"] % sizes["num_heads"] or sizes["num_heads"] % sizes["num_kv_heads"]:
            raise InputError(
                f"Llama: width {sizes['width']}, num_heads {sizes['num_heads']} and num_kv_heads "
                f"{sizes['num_kv_heads']} must each be divisible by the next"
            )
        self.block_size = block_size
        hidden, heads = sizes["width"], sizes["num_heads"]
        self.tokens = TokenEmbedding(sizes["vocab_size"], hidden)
        self.blocks = nn.ModuleList(
            _LlamaBlock(hidden, sizes["mlp_width"], heads, sizes["num_kv_heads"])
            for _ in range(sizes["num_layers"])
        )
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, sizes["vocab_size"], bias=False)
        self._add_rotations(hidden // heads)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def _add_rotations(self, head_width: int) -> None:
        frequency = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angle = torch.outer(torch.arange(self.block_size, dtype=torch.float32), frequency)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """Unnormalised log-probabilities of each next token, (samples, length, vocabulary)."""
        length = tokens.shape[1]
        if length > self.block_size:
            raise InputError(
                f"Llama: a sequence of {length} tokens is longer than block_size {self.block_size}"
            )
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.cosine[:length], self.sine[:length])
        output: Tensor = self.head(self.norm(hidden))
        return output

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        """The mean cross-entropy of the targets in nats a token."""
        tokens, targets = batch
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
