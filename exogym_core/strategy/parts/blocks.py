"""Tensors as matrices, cut into blocks of one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["block_shape", "cut", "joined", "largest_divisor", "matrix_shape"]


def largest_divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` that is at most `limit`."""
    return next((divisor for divisor in range(min(size, limit), 0, -1) if size % divisor == 0), 1)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns: vectors are one row, what has more dimensions keeps its first."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(rows, 1)


def block_shape(shape: torch.Size, limit: int) -> tuple[int, int]:
    """Both sides of a tensor's blocks: the largest divisors up to `limit`."""
    rows, columns = matrix_shape(shape)
    return largest_divisor(rows, limit), largest_divisor(columns, limit)


def cut(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """`tensor` as [number of blocks, values of a block]."""
    height, width = block
    rows, _ = matrix_shape(tensor.shape)
    return tensor.reshape(rows // height, height, -1, width).transpose(1, 2).reshape(-1, height * width)


def joined(blocks: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The tensor of that shape that was cut into `blocks`."""
    height, width = block
    rows, _ = matrix_shape(shape)
    return blocks.reshape(rows // height, -1, height, width).transpose(1, 2).reshape(shape)
