"""Gradients exchanged by ranks in other forms than their plain mean."""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.parts.average import Averaging, decoded, gathering, run
from exogym_core.strategy.parts.flat import in_buckets, widened
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.gradients import dense_gradient
from exogym_core.strategy.parts.state import State, Stateful

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.parts.codecs import Codec

__all__ = [
    "PowerIteration",
    "as_matrix",
    "average",
    "gathered",
    "interleaved",
    "low_rank_of",
    "orthonormal",
    "own_gradients",
    "set_gradients",
    "split",
    "zeros_like_gradients",
]


def as_matrix(tensor: Tensor) -> Tensor:
    """`tensor` as a matrix of its first dimension against the rest; a view."""
    return tensor.reshape(tensor.shape[0], -1)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of `columns` [n, r], r at most n (Householder; never fewer than r)."""
    spanning: Tensor = torch.linalg.qr(columns)[0]
    return spanning


def low_rank_of(values: Tensor, rank: int = 4) -> tuple[Tensor, Tensor]:
    """Compute both factors of flat `values` (a square of them) on one rank: the work of a step, to be timed."""
    matrix = values.view(int(len(values) ** 0.5), -1)
    left = orthonormal(matrix @ matrix[:rank].T)
    return left, matrix.T @ left


def split(tensors: Sequence[Tensor], mask: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors where `mask` holds, and the others."""
    return list(compress(tensors, mask)), list(compress(tensors, (not each for each in mask)))


def interleaved(chosen: Sequence[Tensor], others: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Tensors that `split` has separated, in their order."""
    ones, rest = iter(chosen), iter(others)
    return [next(ones) if each else next(rest) for each in mask]


@torch.no_grad()
def own_gradients(strategy: Strategy) -> list[Tensor]:
    """This rank's gradients, one a parameter, weighed by its samples, in fp32 at least; zeros where there is none.

    Under a GradScaler they are unscaled first, and overflows of this rank count as zero, so that no rank drops out.
    """
    strategy.unscale_gradients()
    weight = strategy.context.weight
    return [weight * widened(dense_gradient(parameter)) for parameter in strategy.held]


def set_gradients(strategy: Strategy, gradients: Sequence[Tensor]) -> None:
    """Set the exchanged gradients, for the optimizer."""
    for parameter, gradient in zip(strategy.held, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def zeros_like_gradients(strategy: Strategy) -> list[Tensor]:
    """Tensors of zeros, one a parameter, in the dtype in which gradients are exchanged."""
    return [torch.zeros_like(widened(parameter.detach())) for parameter in strategy.held]


def average(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Replace `tensors` by their means over ranks, as they are."""
    in_buckets(tensors, partial(Averaging().flat, comm))


def gathered(comm: Communicator, codec: Codec, flat: Tensor) -> Iterator[Tensor]:
    """Gather all ranks' `flat` in rank order, each encoded once and sent to all."""
    codec = codec.on(flat.device)
    return decoded(codec, run(gathering(comm, codec.encode(flat))), flat)


class PowerIteration(Stateful):
    """Mean of matrices over ranks as two thin factors each.

    Args:
        strategy: whose ranks these are.
        matrices: tensors like them.
        ranks: r of each matrix.
        name: of the draw of the first Q.

    Attributes:
        right: Q of every matrix, [columns, r], equal on all ranks.
    """

    state = State("right")

    def __init__(
        self, strategy: Strategy, matrices: Sequence[Tensor], ranks: Sequence[int], name: str
    ) -> None:
        self._strategy, self._charge = strategy, partial(strategy.charge, "low-rank")
        self._charge("encode", 0)  # a speed that is missing is missed now
        generator = shared_generator(strategy.seed, name)
        sizes = [(matrix.shape[1], r) for matrix, r in zip(matrices, ranks, strict=True)]
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        self.right = [orthonormal(q).to(matrix) for q, matrix in zip(drawn, matrices, strict=True)]

    def iterate(
        self, matrices: Sequence[Tensor], dense: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """P and R of every matrix, such that `P R^T` is the mean over ranks, projected on the columns of `P`.

        `P = orthonormal(mean(M Q))`, then `R = mean(M^T P)`; all ranks end with the same bits. `dense` tensors travel
        with the first of the two all-reduces, and is averaged in place.

        Args:
            matrices: this rank's M, [rows, columns] each.
            dense: tensors that are averaged as they are.

        References:
            Vogels et al., PowerSGD, arXiv 1905.13727, algorithm 1, lines 3 to 7.
        """
        num_values = sum(matrix.numel() for matrix in matrices)
        self._charge("encode", num_values)
        left = [matrix @ columns for matrix, columns in zip(matrices, self.right, strict=True)]
        average(self._strategy.peers, [*dense, *left])
        left = [orthonormal(columns) for columns in left]
        back = [matrix.T @ columns for matrix, columns in zip(matrices, left, strict=True)]
        average(self._strategy.peers, back)
        self._charge("decode", num_values)
        return left, back
