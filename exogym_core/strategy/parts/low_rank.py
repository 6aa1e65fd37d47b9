"""Matrices of all ranks as two thin factors of their mean: one step of a power iteration, shared by two all-reduces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["as_matrix", "low_rank_of", "orthonormal", "power_step"]


def as_matrix(tensor: Tensor) -> Tensor:
    """`tensor` as a matrix of its first dimension against the rest; a view."""
    return tensor.reshape(tensor.shape[0], -1)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of `columns` [n, r], r at most n (Householder; never fewer than r)."""
    spanning: Tensor = torch.linalg.qr(columns)[0]
    return spanning


def power_step(
    average: Callable[[Sequence[Tensor]], None],
    matrices: Sequence[Tensor],
    right: Sequence[Tensor],
    dense: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """P and R of every matrix, such that `P R^T` is the mean over ranks, projected on the columns of `P`.

    `P = orthonormal(mean(M Q))`, then `R = mean(M^T P)`; all ranks end with the same bits. What is `dense` travels
    with the first of the two all-reduces, and is averaged in place.

    Args:
        average: replaces tensors by their means over ranks, in place.
        matrices: this rank's M, [rows, columns] each.
        right: Q of each, [columns, r], alike on all ranks.
        dense: tensors that are averaged as they are.

    References:
        Vogels et al., PowerSGD, arXiv 1905.13727, algorithm 1, lines 3 to 7.
    """
    left = [matrix @ columns for matrix, columns in zip(matrices, right, strict=True)]
    average([*dense, *left])
    left = [orthonormal(columns) for columns in left]
    back = [matrix.T @ columns for matrix, columns in zip(matrices, left, strict=True)]
    average(back)
    return left, back


def low_rank_of(values: Tensor, rank: int = 4) -> tuple[Tensor, Tensor]:
    """Both factors of flat `values` (a square of them) on one rank: the work of a step, to be timed."""
    matrix = values.view(int(len(values) ** 0.5), -1)
    left = orthonormal(matrix @ matrix[:rank].T)
    return left, matrix.T @ left
