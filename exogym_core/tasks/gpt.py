"""GPT-2 style decoders in the sizes EXO Gym's users know, and a byte-level one of a million parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from exogym_core.tasks.embedding import TokenEmbedding
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GPT", "GPT_PRESETS"]

GPT_PRESETS: dict[str, dict[str, int]] = {
    "byte": {"num_layers": 5, "num_heads": 4, "width": 128, "vocab_size": 256, "block_size": 128},
    "small": {"num_layers": 4, "num_heads": 4, "width": 128},
    "sbase": {"num_layers": 8, "num_heads": 8, "width": 512},
    "base": {"num_layers": 12, "num_heads": 12, "width": 768},
    "medium": {"num_layers": 24, "num_heads": 16, "width": 1024},
    "large": {"num_layers": 36, "num_heads": 20, "width": 1280},
    "xl": {"num_layers": 48, "num_heads": 25, "width": 1600},
}
"""Size by name. `byte` has 1.04 million parameters; the others are EXO Gym's (base to xl are GPT-2's)."""


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        joint = self.inputs(hidden).view(samples, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each (samples, heads, length, head width)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(samples, length, width))
        return F.dropout(output, self.dropout, self.training)


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class GPT(nn.Module):
    """A decoder with learnt positions, pre-normalisation and tied embeddings (Radford et al., GPT-2, 2019).

    A batch is `(tokens, targets)`, both (samples, length) of integers; the output is the mean cross-entropy.

    Args:
        preset: a name from `GPT_PRESETS`; the other arguments override it.
        vocab_size: number of tokens; 50304 (GPT-2's, padded) where neither this nor the preset says.
        block_size: longest sequence; 1024 where neither this nor the preset says.
        num_layers: blocks.
        num_heads: attention heads; divides `width`.
        width: size of the hidden state.
        dropout: rate after embeddings, attention and each block.

    >>> sum(parameter.numel() for parameter in GPT("byte").parameters())
    1040768
    """

    def __init__(
        self,
        preset: str = "byte",
        *,
        vocab_size: int | None = None,
        block_size: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        width: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if preset not in GPT_PRESETS:
            raise unknown_name("GPT preset", preset, GPT_PRESETS)
        sizes = {"vocab_size": 50304, "block_size": 1024, **GPT_PRESETS[preset]}
        given = {
            "vocab_size": vocab_size,
            "block_size": block_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "width": width,
        }
        sizes.update({name: value for name, value in given.items() if value is not None})
        if sizes["width"] % sizes["num_heads"]:
            raise InputError(
                f"GPT: width {sizes['width']} is not divisible by num_heads {sizes['num_heads']}"
            )
        self.block_size = sizes["block_size"]
        self.tokens = TokenEmbedding(sizes["vocab_size"], sizes["width"])
        self.positions = nn.Embedding(self.block_size, sizes["width"])
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            _Block(sizes["width"], sizes["num_heads"], dropout) for _ in range(sizes["num_layers"])
        )
        self.norm = nn.LayerNorm(sizes["width"])
        self._initialise()

    def _initialise(self) -> None:
        # GPT-2: normal(0, 0.02), and what is added to the residual stream scaled by 1 / sqrt(2 layers).
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                into_residual = name.endswith(("attention.output.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=residual if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, tokens: Tensor) -> Tensor:
        """Unnormalised log-probabilities of each next token, (samples, length, vocabulary)."""
        length = tokens.shape[1]
        if length > self.block_size:
            raise InputError(
                f"GPT: a sequence of {length} tokens is longer than block_size {self.block_size}"
            )
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        """The mean cross-entropy of the targets in nats a token."""
        tokens, targets = batch
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
