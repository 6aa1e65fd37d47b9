"""Dimensions of models of plans by name; imported by `netgym list`, without torch."""

from __future__ import annotations

__all__ = ["PLANNED_MODELS", "listed_models"]


def _llama(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    return {
        "width": width,
        "mlp_width": mlp,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": vocabulary,
    }


#: Dimensions as published: OpenDiLoCo (arXiv 2407.07852) for 150m and 1b, Llama (2302.13971), Llama 2 (2307.09288),
#: Llama 3 (2407.21783) and INTELLECT-1 (2412.01152). Embedding and head are not tied.
PLANNED_MODELS: dict[str, dict[str, int]] = {
    "llama-150m": _llama(1024, 2688, 12, 16, 16, 32000),
    "llama-1b": _llama(2048, 5632, 22, 32, 4, 32000),
    "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama-33b": _llama(6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _llama(8192, 22016, 80, 64, 64, 32000),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "intellect-1": _llama(4096, 14336, 42, 32, 8, 128256),
}


def listed_models() -> list[tuple[str, str]]:
    """Names and dimensions for `netgym list`."""
    return [
        (name, f"{sizes['num_layers']} layers of width {sizes['width']}, for netgym plan")
        for name, sizes in PLANNED_MODELS.items()
    ]
