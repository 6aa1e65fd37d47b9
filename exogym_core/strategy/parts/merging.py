"""Displacements of several workers as one: by mean, or by mean length and mean direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["embeddings_of", "merged"]


def embeddings_of(model: nn.Module, parameters: Sequence[Tensor]) -> set[int]:
    """Which of `parameters` are tables of embeddings of `model`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {index for index, parameter in enumerate(parameters) if id(parameter) in tables}


def merged(parts: Sequence[Tensor], weights: Sequence[float], *, by_direction: bool) -> Tensor:
    """One tensor for several of one shape: the weighted mean.

    With `by_direction` it is as long as they are in the mean, along the mean of their directions; displacements that
    disagree then do not shrink each other. Zero where directions cancel.

    >>> parts = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    >>> merged(parts, [1, 1], by_direction=False)
    tensor([1., 2.])
    >>> round(float(merged(parts, [1, 1], by_direction=True).norm()), 6)
    3.0
    """
    total = sum(weights)
    if not by_direction:
        return _sum(parts, [weight / total for weight in weights])
    lengths = [float(part.norm()) for part in parts]
    units = [part / length if length else part for part, length in zip(parts, lengths, strict=True)]
    direction = _sum(units, weights)
    length = sum(weight * each for weight, each in zip(weights, lengths, strict=True)) / total
    norm = float(direction.norm())
    return direction * (length / norm) if norm else direction


def _sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    result = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        result.add_(part, alpha=weight)
    return result
