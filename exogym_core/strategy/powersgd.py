"""PowerSGD: gradients of matrices travel as the two thin factors of a low-rank approximation."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import (
    Options,
    option,
    positive_int,
    whole_number,
)
from exogym_core.strategy.parts.exchange import (
    PowerIteration,
    as_matrix,
    interleaved,
    orthonormal,
    split,
)
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


__all__ = ["LowRankGradients", "PowerSGDOptions", "PowerSGDStrategy"]


class PowerSGDOptions(Options):
    """Options of PowerSGD: the rank of the factors, and the first step that sends them.

    Args:
        approximation_rank: r, columns of a factor; a matrix with fewer rows or columns has as many as these. Also
            `matrix_approximation_rank`.
        start_step: plain averages before this step (counted from 0). Also `start_powerSGD_iter`.
    """

    approximation_rank: int = option(2, positive_int)
    start_step: int = option(0, whole_number)


class LowRankGradients(PowerIteration, name="PowerSGD"):
    """Mean gradient of every matrix, projected on r columns; the rest is added in the next step.

    Args:
        options: of `PowerSGDOptions`.
    """

    Options = PowerSGDOptions
    state = State("errors")

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Draw each Q, equal on all ranks, and begin without errors."""
        super()._init_node(model, rank, num_nodes)
        self.is_low_rank = [p.dim() > 1 and p.numel() > 0 for p in self.scope.parameters]
        thick = compress(self.zeros_like_gradients(), self.is_low_rank)
        self.errors = [as_matrix(zeros) for zeros in thick]
        ranks = [min(self.options.approximation_rank, *matrix.shape) for matrix in self.errors]
        self.draw(self.errors, ranks, "powersgd")

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Lines 3 to 11 for matrices, plain means for the rest."""
        if self.strategy.local_step < self.options.start_step:
            self.average(gradients)
            return gradients
        thick, dense = split(gradients, self.is_low_rank)
        matrices = [as_matrix(g) + e for g, e in zip(thick, self.errors, strict=True)]
        left, back = self.iterate(matrices, dense)
        means = [columns @ rows.T for columns, rows in zip(left, back, strict=True)]
        self.errors = [matrix - mean for matrix, mean in zip(matrices, means, strict=True)]
        self.right = [orthonormal(rows) for rows in back]
        shaped = [mean.view_as(g) for mean, g in zip(means, thick, strict=True)]
        return interleaved(shaped, dense, self.is_low_rank)


class PowerSGDStrategy(Composition, name="PowerSGD"):
    """Low-rank mean gradients with error feedback.

    Of every parameter with two dimensions or more, as a matrix M of its first one against the rest::

        M = gradient + e                          error feedback, line 4 of algorithm 2
        P = orthonormal(mean over ranks of M Q)   lines 3 to 5 of algorithm 1
        R = mean over ranks of M^T P              lines 6 and 7
        gradient = P R^T;  e = M - P R^T;  Q = orthonormal(R)

    Q is kept from step to step (warm start). As in torch's hook, and other than in the paper, it is orthonormal too: P
    stays the same but for rounding, and a matrix without full rank loses no column. Vectors and scalars are averaged
    as they are. At full rank it is AllReduce. The optimizer, momentum included, sees the result.

    Bytes: the payload is `r (rows + columns)` values a matrix and all those of vectors, each step, in two all-reduces:
    a ring sends `2 (n - 1) / n` times that per worker.

    Args:
        optim_spec: the optimizer (AdamW by default).
        approximation_rank: r (2).
        options: of `PowerSGDOptions`, and of every Strategy: `lr`, `max_norm` (of the result), `lr_scheduler`, ...

    References:
        Vogels et al., PowerSGD, arXiv 1905.13727, algorithms 1 and 2; torch's powerSGD_hook.
    """

    module = LowRankGradients
    positional = ("optim_spec", "approximation_rank")
