"""Deep Gradient Compression: a thousandth of the gradient's values, with momentum where they accumulate."""

from __future__ import annotations

import math
from itertools import compress
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import (
    Options,
    fraction,
    number,
    option,
    share,
    whole_number,
)
from exogym_core.strategy.parts.exchange import GradientExchange, interleaved, split
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.gradients import clip_norm
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import LargestCodec, matrix_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


__all__ = ["DGCOptions", "DGCStrategy", "LargestGradients"]

_STAGES = 5


class DGCOptions(Options):
    """Options of DGC: the share of values sent, its warm-up, momentum and clipping.

    Args:
        density: share of a matrix's values that is sent, one at least; above 0 and at most 1.
        momentum: mu, of each rank's own momentum.
        density_warmup_steps: steps over which the share goes down to `density`, in five stages of `density ** (i / 6)`.
        clip: each rank clips its gradient's norm to this over the square root of the number of ranks.
    """

    density: float = option(0.001, fraction)
    momentum: float = option(0.9, share)
    density_warmup_steps: int = option(0, whole_number)
    clip: float | None = option(None, number)


class LargestGradients(GradientExchange, name="DGC"):
    """The mean of what ranks send of their accumulated momenta: the largest values of each matrix."""

    Options = DGCOptions
    options: DGCOptions
    work = "largest"
    state = State("momenta", "waiting")

    warmup_steps = property(lambda self: self.options.density_warmup_steps)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Choose the tensors that are sent sparsely, with zero momentum and nothing held back."""
        super()._init_node(model, rank, num_nodes)
        self.is_sparse = [p.dim() > 1 and p.numel() > 0 for p in self.scope.parameters]
        self.momenta = self.zeros_like_gradients()
        self.waiting = list(compress(self.zeros_like_gradients(), self.is_sparse))

    def density(self, step: int) -> float:
        """The share that the 0-based `step` sends."""
        if step >= self.options.density_warmup_steps:
            return self.options.density
        stage = 1 + step * _STAGES // self.options.density_warmup_steps
        return float(self.options.density ** (stage / (_STAGES + 1)))

    def before_update(self) -> None:
        """Clip this rank's gradient, then exchange."""
        if self.options.clip is not None:
            self.strategy.unscale_gradients()
            clip_norm(self.scope.parameters, self.options.clip * self.comm.world_size**-0.5)
        super().before_update()

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Algorithm 2: `u = mu u + g; v = v + u`; the largest of v are sent, and zero in u and v from then on."""
        self.average(split(gradients, self.is_sparse)[1])
        for u, gradient in zip(self.momenta, gradients, strict=True):
            u.mul_(self.options.momentum).add_(gradient)
        for v, u in zip(self.waiting, compress(self.momenta, self.is_sparse), strict=True):
            v.add_(u)
        dense = [u.clone() for u in split(self.momenta, self.is_sparse)[1]]
        return interleaved(self._means() if self.waiting else [], dense, self.is_sparse)

    def _means(self) -> list[Tensor]:
        shapes, density = [v.shape for v in self.waiting], self.density(self.strategy.local_step)
        counts = [math.ceil(density * shape.numel()) for shape in shapes]
        codec = self.strategy.charged(
            LargestCodec(shapes, [matrix_shape(shape) for shape in shapes], counts, 32)
        )
        flat = flatten(self.waiting)
        total = torch.zeros_like(flat)
        for rank, values in enumerate(self.gathered(codec, flat)):
            total += values
            if rank == self.comm.rank:
                sent = unflatten(values != 0, self.waiting)
        for u, v, mask in zip(compress(self.momenta, self.is_sparse), self.waiting, sent, strict=True):
            u.masked_fill_(mask, 0.0)
            v.masked_fill_(mask, 0.0)
        return unflatten(total / self.comm.world_size, self.waiting)


class DGCStrategy(Composition, name="DGC"):
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
        density: share of a matrix's values that is sent.
        options: of `DGCOptions`, and of every Strategy: `lr`, `max_norm` (of the mean), `lr_scheduler`, ...

    References:
        Lin et al., arXiv 1712.01887, algorithm 2; the warm-up, local clipping and dense vectors from the authors' code.
    """

    default_optim = OptimSpec(torch.optim.SGD, lr=0.1)
    module = LargestGradients
    positional = ("optim_spec", "density")
    applied = "corrected momenta"
