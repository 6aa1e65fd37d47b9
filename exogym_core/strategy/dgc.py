"""Deep Gradient Compression: a thousandth of the gradient's values, with momentum where they accumulate."""

from __future__ import annotations

import math
from itertools import compress
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import fraction, number, option, options_of, share, whole_number
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.gradients import (
    average,
    clip_norm,
    gathered,
    interleaved,
    own_gradients,
    set_gradients,
    split,
    zeros_like_gradients,
)
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import LargestCodec, matrix_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DGCStrategy", "LargestGradients"]

_STAGES = 5


class DGCStrategy(Strategy, name="DGC"):
    """The largest of accumulated momenta, the rest waits.

    Of each matrix, on each rank::

        u = mu u + g;  v = v + u             momentum correction, equation 8
        s = the largest values of v          of magnitude, exactly, where the authors sample a threshold
        u = 0, v = 0 where s is not          momentum factor masking, equation 9
        x = x - lr mean over ranks of s

    Vectors go whole and have the same momentum. With `density=1` and `momentum=0` it is AllReduce with plain SGD.

    Bytes: 8 a value sent (a place of 32 bits, fp32), n - 1 times each step; the vectors' own `2 (n - 1) / n` times.

    Args:
        optim_spec: applies it: SGD without momentum (lr 0.1) or a factory; others are refused, momentum is in it.
        density: share of a matrix's values that is sent, one at least; above 0 and at most 1.
        momentum: mu, of each rank's own momentum.
        density_warmup_steps: steps over which the share goes down to `density`, in five stages of
            `density ** (i / 6)`.
        clip: each rank clips its gradient's norm to this over the square root of the number of ranks.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `max_norm` (of the mean), `lr_scheduler`, ...

    References:
        Lin et al., arXiv 1712.01887, algorithm 2; the warm-up, local clipping and dense vectors from the authors' code.
    """

    density: float = option(0.001, fraction)
    momentum: float = option(0.9, share)
    density_warmup_steps: int = option(0, whole_number)
    clip: float | None = option(None, number)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "density")
    default_optim = OptimSpec(torch.optim.SGD, lr=0.1)
    applies = "corrected momenta"

    round_steps = 1
    warmup_steps = property(lambda self: self.density_warmup_steps)
    takes_sites = False
    state = State("momenta", "waiting")
    healed = ("dense_momenta",)

    def prepare(self) -> None:
        """Choose the tensors that are sent sparsely, with zero momentum and nothing held back."""
        self.charge("largest", "encode", 0)
        self.is_sparse = [p.dim() > 1 and p.numel() > 0 for p in self.held]
        self.momenta = zeros_like_gradients(self)
        self.waiting = list(compress(zeros_like_gradients(self), self.is_sparse))

    @property
    def dense_momenta(self) -> list[Tensor]:
        """Momenta of vectors, which all ranks have of the mean gradient."""
        return split(self.momenta, self.is_sparse)[1]

    @torch.no_grad()
    def before_update(self) -> None:
        """Algorithm 2: `u = mu u + g; v = v + u`; the largest of v are sent, and zero in u and v from then on."""
        if self.clip is not None:
            self.unscale_gradients()
            clip_norm(self.held, self.clip * self.peers.world_size**-0.5)
        gradients = own_gradients(self)
        average(self.peers, split(gradients, self.is_sparse)[1])
        for u, gradient in zip(self.momenta, gradients, strict=True):
            u.mul_(self.momentum).add_(gradient)
        for v, u in zip(self.waiting, compress(self.momenta, self.is_sparse), strict=True):
            v.add_(u)
        dense = [u.clone() for u in self.dense_momenta]
        sparse = self.means_of_largest() if self.waiting else []
        set_gradients(self, interleaved(sparse, dense, self.is_sparse))

    def means_of_largest(self) -> list[Tensor]:
        """Means over ranks of the largest values of v, which leave u and v."""
        shapes = [v.shape for v in self.waiting]
        density, step = self.density, self.local_step
        if step < self.density_warmup_steps:
            density **= (1 + step * _STAGES // self.density_warmup_steps) / (_STAGES + 1)
        counts = [math.ceil(density * shape.numel()) for shape in shapes]
        codec = self.charged(LargestCodec(shapes, [matrix_shape(shape) for shape in shapes], counts, 32))
        flat = flatten(self.waiting)
        total = torch.zeros_like(flat)
        for rank, values in enumerate(gathered(self.peers, codec, flat)):
            total += values
            if rank == self.peers.rank:
                sent = unflatten(values != 0, self.waiting)
        for u, v, mask in zip(compress(self.momenta, self.is_sparse), self.waiting, sent, strict=True):
            u.masked_fill_(mask, 0.0)
            v.masked_fill_(mask, 0.0)
        return unflatten(total / self.peers.world_size, self.waiting)


class LargestGradients(DGCStrategy, part="DGC"):
    """DGC as a member of a `Chain`, whose optimizer steps along the corrected momenta."""
