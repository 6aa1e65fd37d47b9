"""Decoders: GPT-2's architecture in the sizes that EXO Gym's users know, a byte-level one, and Llama's."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exogym_core.stages.split import StagePart
from netgym.tasks.images import Classifier
from netsim.errors import InputError, about_option, unknown_name

__all__ = ["GPT", "GPT_PRESETS", "LLAMA_PRESETS", "Decoder", "Llama", "TokenEmbedding", "rotated"]


class TokenEmbedding(nn.Embedding):
    """`nn.Embedding` that reports a token outside the vocabulary in one line (on a CPU; a GPU asserts).

    Raises:
        InputError: a token is not below the number of vectors.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """The vector of each token."""
        try:
            return super().forward(tokens)
        except IndexError:
            lowest, highest = int(tokens.min()), int(tokens.max())
            token = highest if lowest >= 0 else lowest
            raise InputError(
                f"token {token} is outside the vocabulary of {self.num_embeddings}: "
                "give the task (or the model) its vocab_size"
            ) from None


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


def _sizes(
    model: str, preset: str, presets: dict[str, dict[str, int]], given: dict[str, int | None], **defaults: int
) -> dict[str, int]:
    """Sizes of a model: those given, else the preset's, else defaults."""
    if preset not in presets:
        with about_option("preset"):
            raise unknown_name(f"{model} preset", preset, presets)
    return defaults | presets[preset] | {name: value for name, value in given.items() if value is not None}


class Decoder(Classifier):
    """A language model; subclasses compute `logits` of at most `block_size` tokens.

    A batch is `(tokens, targets)`, both (samples, length) of integers; the output is the mean cross-entropy.

    Attributes:
        block_size: longest sequence.
        tokens: embedding of the vocabulary.
        blocks: its layers, `num_layers` of them.
    """

    block_size: int
    tokens: nn.Embedding
    blocks: nn.ModuleList

    def _checked_length(self, tokens: Tensor) -> int:
        length = tokens.shape[1]
        if length > self.block_size:
            name = type(self).__name__
            raise InputError(
                f"{name}: a sequence of {length} tokens is longer than block_size {self.block_size}"
            )
        return length


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


class GPT(Decoder):
    """A decoder with learnt positions, pre-normalisation and tied embeddings (Radford et al., GPT-2, 2019).

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

    stream_writers = ("tokens.weight", "positions.weight", "*.attention.output.*", "*.mlp.2.*")

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
        given = {"vocab_size": vocab_size, "block_size": block_size, "width": width}
        given |= {"num_layers": num_layers, "num_heads": num_heads}
        sizes = _sizes("GPT", preset, GPT_PRESETS, given, vocab_size=50304, block_size=1024)
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
        # GPT-2: normal(0, 0.02); layers that add to the residual stream are scaled by 1 / sqrt(2 layers).
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                into_residual = name.endswith(("attention.output.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=residual if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, tokens: Tensor) -> Tensor:
        """Unnormalised log-probabilities of each next token, (samples, length, vocabulary)."""
        hidden = self._embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self._unembed(hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        length = self._checked_length(tokens)
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        return embedded

    def _unembed(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.tokens.weight)

    def logit_parts(self) -> list[nn.Module]:
        """Parts of `logits`, for stages."""
        first = StagePart(self._embed, self.tokens, self.positions, self.dropout)
        return [first, *self.blocks, StagePart(self._unembed, self.norm, self.tokens)]


LLAMA_PRESETS: dict[str, dict[str, int]] = {
    "2m": {"width": 64, "mlp_width": 256, "num_layers": 2, "num_heads": 2, "vocab_size": 1024},
    "14m": {"width": 128, "mlp_width": 512, "num_layers": 6, "num_heads": 4},
    "60m": {"width": 1024, "mlp_width": 2688, "num_layers": 3, "num_heads": 16},
    "150m": {"width": 1024, "mlp_width": 2688, "num_layers": 12, "num_heads": 16},
    "1b": {"width": 2048, "mlp_width": 5632, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4},
}
"""OpenDiLoCo's sizes; vocabulary 32000 but for 2m. Names are not sizes: 150m has 215.0 million parameters."""


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of features by their position's angles (RoPE); the halves of a head are the pairs."""
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

        query = rotated(split(self.query(hidden), self.num_heads), cosine, sine)
        key = rotated(split(self.key(hidden), self.num_kv_heads), cosine, sine)
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


class _Rotations(nn.Module):
    """The buffers that the blocks of a `Llama` share."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.register_buffer("cosine", model.cosine, persistent=False)
        self.register_buffer("sine", model.sine, persistent=False)


class Llama(Decoder):
    """A decoder with rotary positions, RMS norms, gated MLPs and grouped heads (Touvron et al., 2302.13971).

    Args:
        preset: a name from `LLAMA_PRESETS`; the other arguments override it.
        vocab_size: number of tokens.
        block_size: longest sequence.
        width, mlp_width, num_layers, num_heads, num_kv_heads: sizes; query heads share key heads evenly.
    """

    stream_writers = ("tokens.weight", "*.attention.output.weight", "*.down.weight")
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
        given = {"vocab_size": vocab_size, "width": width, "mlp_width": mlp_width, "num_layers": num_layers}
        given |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        sizes = _sizes("Llama", preset, LLAMA_PRESETS, given, vocab_size=32000)
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
        exponents = torch.arange(0, hidden // heads, 2, dtype=torch.float32) / (hidden // heads)
        angle = torch.outer(torch.arange(self.block_size, dtype=torch.float32), 10000.0**-exponents)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, tokens: Tensor) -> Tensor:
        """Unnormalised log-probabilities of each next token, (samples, length, vocabulary)."""
        hidden = self._embed(tokens)
        for block in self.blocks:
            hidden = self._through(block, hidden)
        output: Tensor = self.head(self.norm(hidden))
        return output

    def _embed(self, tokens: Tensor) -> Tensor:
        self._checked_length(tokens)
        embedded: Tensor = self.tokens(tokens)
        return embedded

    def _through(self, block: nn.Module, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        mixed: Tensor = block(hidden, self.cosine[:length], self.sine[:length])
        return mixed

    def logit_parts(self) -> list[nn.Module]:
        """Parts of `logits`, for stages."""
        blocks = [StagePart(partial(self._through, block), block, _Rotations(self)) for block in self.blocks]
        return [StagePart(self._embed, self.tokens), *blocks, self.norm, self.head]
