"""Dion: orthonormal updates of matrices from a low-rank share of each rank's own momentum."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import fraction, option, options_of, share
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.gradients import (
    PowerIteration,
    interleaved,
    own_gradients,
    set_gradients,
    split,
    zeros_like_gradients,
)
from exogym_core.strategy.parts.muon import DirectionsAndAdamW, hidden_matrices, split_by_shape
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DionDirections", "DionStrategy"]


class DionStrategy(Strategy, name="Dion"):
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
        rank_fraction: r over the shorter side of a matrix, rounded up; above 0 and at most 1.
        mu: the part of the momentum's low-rank share that remains after a step.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv 2504.05295, algorithm 1; microsoft/dion. P comes
        from a Householder QR, where the code may take a randomised Cholesky QR.
    """

    rank_fraction: float = option(0.25, fraction)
    mu: float = option(0.95, share)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "rank_fraction")
    default_optim = OptimSpec(DirectionsAndAdamW, params=split_by_shape)
    applies = "directions"

    round_steps = 1
    takes_sites = False
    healed = ("factors",)
    state = State("factors", "momenta")

    def prepare(self) -> None:
        """Draw each Q, equal on all ranks."""
        inside = {id(p) for p in hidden_matrices(self.model)}
        self.is_matrix = [id(p) in inside for p in self.held]
        self.momenta = [_tall(zeros) for zeros in compress(zeros_like_gradients(self), self.is_matrix)]
        ranks = [int(-(-min(m.shape) * self.rank_fraction // 1)) for m in self.momenta]
        self.factors = PowerIteration(self, self.momenta, ranks, "dion")
        # Laid out as after a step: products of matrices differ in last bits with how these lie in memory.
        self.factors.right = [columns.contiguous() for columns in self.factors.right]

    @torch.no_grad()
    def before_update(self) -> None:
        """Take a step of the power iteration on the mean momentum, and subtract its low-rank part."""
        matrices, dense = split(own_gradients(self), self.is_matrix)
        for momentum, gradient in zip(self.momenta, matrices, strict=True):
            momentum.add_(_tall(gradient))
        left, back = self.factors.iterate(self.momenta, dense)
        right = self.factors.right = [rows / (rows.norm(dim=0, keepdim=True) + 1e-8) for rows in back]
        for momentum, columns, rows in zip(self.momenta, left, back, strict=True):
            momentum.sub_((1 - self.mu) * columns @ rows.T)
        factors = zip(left, right, matrices, strict=True)
        directions = [_shaped(p @ q.T, matrix) for p, q, matrix in factors]
        set_gradients(self, interleaved(directions, dense, self.is_matrix))


def _tall(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has at least as many rows as columns."""
    return matrix if len(matrix) >= matrix.shape[1] else matrix.T


def _shaped(direction: Tensor, like: Tensor) -> Tensor:
    """A direction of a tall matrix for one of this shape, in units of its rate."""
    rows, columns = like.shape
    scale: float = (rows / columns) ** 0.5
    return scale * (direction if rows >= columns else direction.T)


class DionDirections(DionStrategy, part="Dion"):
    """Dion's directions as a member of a `Chain`, whose optimizer steps along them."""
