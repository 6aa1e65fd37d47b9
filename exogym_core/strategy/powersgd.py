"""PowerSGD: gradients of matrices travel as the two thin factors of a low-rank approximation."""

from __future__ import annotations

from itertools import compress

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option, options_of, positive_int, whole_number
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.gradients import (
    PowerIteration,
    as_matrix,
    average,
    interleaved,
    orthonormal,
    own_gradients,
    set_gradients,
    split,
    zeros_like_gradients,
)
from exogym_core.strategy.parts.state import State

__all__ = ["LowRankGradients", "PowerSGDStrategy"]


class PowerSGDStrategy(Strategy, name="PowerSGD"):
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
        approximation_rank: r (2), columns of a factor; at most the number of rows and of columns of the matrix. Also
            `matrix_approximation_rank`.
        start_step: plain averages before this step (counted from 0). Also `start_powerSGD_iter`.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `max_norm` (of the result), `lr_scheduler`, ...

    References:
        Vogels et al., PowerSGD, arXiv 1905.13727, algorithms 1 and 2; torch's powerSGD_hook.
    """

    approximation_rank: int = option(2, positive_int)
    start_step: int = option(0, whole_number)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "approximation_rank")

    round_steps = 1
    takes_sites = False
    healed = ("factors",)
    state = State("factors", "errors")

    def prepare(self) -> None:
        """Draw each Q, equal on all ranks, and begin without errors."""
        self.is_low_rank = [p.dim() > 1 and p.numel() > 0 for p in self.held]
        self.errors = [as_matrix(zeros) for zeros in compress(zeros_like_gradients(self), self.is_low_rank)]
        ranks = [min(self.approximation_rank, *matrix.shape) for matrix in self.errors]
        self.factors = PowerIteration(self, self.errors, ranks, "powersgd")

    @torch.no_grad()
    def before_update(self) -> None:
        """Lines 3 to 11 for matrices, plain means for the rest."""
        gradients = own_gradients(self)
        if self.local_step < self.start_step:
            average(self.peers, gradients)
            set_gradients(self, gradients)
            return
        thick, dense = split(gradients, self.is_low_rank)
        matrices = [as_matrix(g) + e for g, e in zip(thick, self.errors, strict=True)]
        left, back = self.factors.iterate(matrices, dense)
        means = [columns @ rows.T for columns, rows in zip(left, back, strict=True)]
        self.errors = [matrix - mean for matrix, mean in zip(matrices, means, strict=True)]
        self.factors.right = [orthonormal(rows) for rows in back]
        shaped = [mean.view_as(g) for mean, g in zip(means, thick, strict=True)]
        set_gradients(self, interleaved(shaped, dense, self.is_low_rank))


class LowRankGradients(PowerSGDStrategy, part="PowerSGD"):
    """PowerSGD as a member of a `Chain`."""
