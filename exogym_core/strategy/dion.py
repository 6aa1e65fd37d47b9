"""Dion: orthonormal updates of matrices from a low-rank share of each rank's own momentum."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import (
    Options,
    fraction,
    option,
    share,
)
from exogym_core.strategy.parts.exchange import PowerIteration, interleaved, split
from exogym_core.strategy.parts.muon import DirectionsAndAdamW, hidden_matrices, split_by_shape
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


__all__ = ["DionDirections", "DionOptions", "DionStrategy"]


class DionOptions(Options):
    """Options of Dion: the rank of a momentum's factors, and its decay.

    Args:
        rank_fraction: r over the shorter side of a matrix, rounded up; above 0 and at most 1.
        mu: what is left of the momentum's low-rank share after a step.
    """

    rank_fraction: float = option(0.25, fraction)
    mu: float = option(0.95, share)


class DionDirections(PowerIteration, name="Dion"):
    """A direction for every hidden matrix, the mean gradient for the rest.

    Args:
        options: of `DionOptions`.
    """

    Options = DionOptions
    state = State("momenta")

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Draw each Q, equal on all ranks."""
        super()._init_node(model, rank, num_nodes)
        inside = {id(p) for p in hidden_matrices(self.strategy.model)}
        self.is_matrix = [id(p) in inside for p in self.scope.parameters]
        self.momenta = [_tall(zeros) for zeros in compress(self.zeros_like_gradients(), self.is_matrix)]
        ranks = [int(-(-min(m.shape) * self.options.rank_fraction // 1)) for m in self.momenta]
        self.draw(self.momenta, ranks, "dion")
        # Laid out as after a step: products of matrices differ in last bits with how these lie in memory.
        self.right = [columns.contiguous() for columns in self.right]

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take a step of the power iteration on the mean momentum, and subtract its low-rank part."""
        matrices, dense = split(gradients, self.is_matrix)
        for momentum, gradient in zip(self.momenta, matrices, strict=True):
            momentum.add_(_tall(gradient))
        left, back = self.iterate(self.momenta, dense)
        self.right = [rows / (rows.norm(dim=0, keepdim=True) + 1e-8) for rows in back]
        for momentum, columns, rows in zip(self.momenta, left, back, strict=True):
            momentum.sub_((1 - self.options.mu) * columns @ rows.T)
        factors = zip(left, self.right, matrices, strict=True)
        directions = [_shaped(p @ q.T, matrix) for p, q, matrix in factors]
        return interleaved(directions, dense, self.is_matrix)


def _tall(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has as many rows as columns at least."""
    return matrix if len(matrix) >= matrix.shape[1] else matrix.T


def _shaped(direction: Tensor, like: Tensor) -> Tensor:
    """A direction of a tall matrix for one of this shape, in units of its rate."""
    rows, columns = like.shape
    scale: float = (rows / columns) ** 0.5
    return scale * (direction if rows >= columns else direction.T)


class DionStrategy(Composition, name="Dion"):
    """Orthonormal updates from low-rank factors of momenta that ranks keep apart.

    Of every hidden matrix X (embeddings, heads, vectors: AdamW on mean gradients), M being this rank's, both transposed
    where X has more columns than rows::

        M = M + G;  P = orthonormal(mean over ranks of M Q);  R = mean over ranks of M^T P
        M = M - (1 - mu) P R^T;  Q = R with columns of length 1
        X = (1 - lr weight_decay) X - lr sqrt(rows / columns) P Q^T

    As all of it is linear in M but for the mean factors, n ranks do what one would with the mean gradient.

    Bytes: the payload is `r (rows + columns)` values a matrix and all those of the rest, in two all-reduces a step: a
    ring sends `2 (n - 1) / n` times that per worker.

    Args:
        optim_spec: SGD without momentum to have it apply directions and mean gradients alike, or a factory; with AdamW
            for what is no hidden matrix if it is not given (learning rate 0.01, weight decay 0.01 for both).
        rank_fraction: r over the shorter side of a matrix.
        options: of `DionOptions`, and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv 2504.05295, algorithm 1; microsoft/dion. P comes
        from a Householder QR, where the code may take a randomised Cholesky QR.
    """

    module = DionDirections
    positional = ("optim_spec", "rank_fraction")
    applied = "directions"
    default_optim = OptimSpec(DirectionsAndAdamW, params=split_by_shape)
