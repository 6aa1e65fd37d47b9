"""Dimensions of models of plans by name, and choices of their memory; imported without torch."""

from __future__ import annotations

__all__ = ["MEMORY_CHOICES", "PLANNED_MODELS", "listed_models"]


_DIMENSIONS = ("width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "vocab_size")

#: Dimensions as published: OpenDiLoCo (arXiv 2407.07852) for 150m and 1b, Llama (2302.13971), Llama 2 (2307.09288),
#: Llama 3 (2407.21783) and INTELLECT-1 (2412.01152). Embedding and head are not tied.
_SIZES = {
    "llama-150m": (1024, 2688, 12, 16, 16, 32000),
    "llama-1b": (2048, 5632, 22, 32, 4, 32000),
    "llama-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-33b": (6656, 17920, 60, 52, 52, 32000),
    "llama-65b": (8192, 22016, 80, 64, 64, 32000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": (16384, 53248, 126, 128, 8, 128256),
    "intellect-1": (4096, 14336, 42, 32, 8, 128256),
}
PLANNED_MODELS: dict[str, dict[str, int]] = {
    name: dict(zip(_DIMENSIONS, sizes, strict=True)) for name, sizes in _SIZES.items()
}


def listed_models() -> list[tuple[str, str]]:
    """Names and dimensions for `netgym list`."""
    return [
        (name, f"{sizes['num_layers']} layers of width {sizes['width']}, for netgym plan")
        for name, sizes in PLANNED_MODELS.items()
    ]


#: Choices by which a worker keeps less in memory.
MEMORY_CHOICES: dict[str, str] = {
    "bf16": "weights, gradients and optimizer states in two bytes a number instead of four",
    "8bit": "optimizer states in one byte a number",
    "offload": "optimizer and outer states in the machine's memory",
    "checkpointing": "of activations the layers' inputs alone, the rest computed again",
}
