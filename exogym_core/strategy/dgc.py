"""Deep Gradient Compression: a thousandth of the gradient's values, with momentum where they accumulate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.exchange import GradientExchange, plain_sgd
from exogym_core.strategy.options import arguments
from exogym_core.strategy.options.arguments import Options, checked_options, option, refuse_unknown
from exogym_core.strategy.options.optim import OptimSpec
from exogym_core.strategy.parts.blocks import matrix_shape
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.flight import run
from exogym_core.strategy.parts.gathered import decoded, gathering
from exogym_core.strategy.parts.gradients import clip_norm
from exogym_core.strategy.parts.tensor_codecs import LargestCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.chain import Scope
    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["DGCOptions", "DGCStrategy", "LargestGradients"]

_STAGES = 5


@dataclass(frozen=True)
class DGCOptions(Options):
    """What DGC takes.

    Args:
        density: share of a matrix's values that is sent, one at least; above 0 and at most 1.
        momentum: mu, of each rank's own momentum.
        density_warmup_steps: steps over which the share goes down to `density`, in five stages of `density ** (i / 6)`.
        clip: each rank clips its gradient's norm to this over the square root of the number of ranks.
    """

    density: float = option(0.001, arguments.fraction)
    momentum: float = option(0.9, arguments.share)
    density_warmup_steps: int = option(0, arguments.whole_number)
    clip: float | None = option(None, arguments.number)


class LargestGradients(GradientExchange):
    """The mean of what ranks send of their accumulated momenta: the largest values of each matrix."""

    Options = DGCOptions
    work = "largest"
    kept = ("momenta", "waiting")

    def __init__(self, **options: Any) -> None:
        self.options, unknown = checked_options(type(self), DGCOptions, options)
        refuse_unknown(type(self), unknown)

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Without momentum yet."""
        scope = super().enter(strategy, scope)
        self.is_sparse = [p.dim() > 1 and p.numel() > 0 for p in scope.parameters]
        self.momenta = self.zeros_like_gradients()
        self.waiting = list(compress(self.zeros_like_gradients(), self.is_sparse))
        return scope

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
        self.average([g for g, is_sparse in zip(gradients, self.is_sparse, strict=True) if not is_sparse])
        for u, gradient in zip(self.momenta, gradients, strict=True):
            u.mul_(self.options.momentum).add_(gradient)
        for v, u in zip(self.waiting, compress(self.momenta, self.is_sparse), strict=True):
            v.add_(u)
        means = iter(self._means() if self.waiting else [])
        return [
            next(means) if is_sparse else u.clone()
            for u, is_sparse in zip(self.momenta, self.is_sparse, strict=True)
        ]

    def _means(self) -> list[Tensor]:
        shapes, density = [v.shape for v in self.waiting], self.density(self.strategy.local_step)
        counts = [math.ceil(density * shape.numel()) for shape in shapes]
        codec = self.charged(LargestCodec(shapes, [matrix_shape(shape) for shape in shapes], counts, 32))
        flat = flatten(self.waiting)
        total = torch.zeros_like(flat)
        for rank, values in enumerate(decoded(codec, run(gathering(self.comm, codec.encode(flat))), flat)):
            total += values
            if rank == self.comm.rank:
                sent = unflatten(values != 0, self.waiting)
        for u, v, mask in zip(compress(self.momenta, self.is_sparse), self.waiting, sent, strict=True):
            u.masked_fill_(mask, 0.0)
            v.masked_fill_(mask, 0.0)
        return unflatten(total / self.comm.world_size, self.waiting)


class DGCStrategy(Chain):
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

    Options = DGCOptions
    default_optim = OptimSpec(torch.optim.SGD, lr=0.1)

    def __init__(
        self, optim_spec: OptimizerLike | None = None, density: float | None = None, **options: Any
    ) -> None:
        largest, others = checked_options(type(self), DGCOptions, {"density": density, **options})
        super().__init__([LargestGradients(**vars(largest))], optim_spec, **others)
        plain_sgd(self, "corrected momenta")
