"""Dimensions of planned models by name, and choices that save memory; imported without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netsim.files.documents import load_document

__all__ = ["MEMORY_CHOICES", "PLANNED_MODELS", "listed_models"]


_FILE: Any = load_document(Path(__file__).with_name("planned_models.yaml")).data
PLANNED_MODELS: dict[str, dict[str, int]] = _FILE


def listed_models() -> list[tuple[str, str]]:
    """Names and dimensions for `netgym list`."""
    return [
        (name, f"{sizes['num_layers']} layers of width {sizes['width']}, for netgym plan")
        for name, sizes in PLANNED_MODELS.items()
    ]


#: Choices by which a worker keeps less in memory: weights, gradients and optimizer states in two bytes a number;
#: optimizer states in one; optimizer and outer states in the machine's memory; activations but the layers' inputs
#: computed again.
MEMORY_CHOICES = ("bf16", "8bit", "offload", "checkpointing")
