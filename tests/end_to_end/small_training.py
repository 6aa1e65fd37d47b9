"""A small model and batches of it, for training here and with PyTorch's own."""

from __future__ import annotations

import torch
from torch import nn

from exogym_core.tasks import build_model


def make_model() -> nn.Module:
    return build_model("mlp", inputs=6, hidden=[16, 8], classes=3, seed=0)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(4, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)
