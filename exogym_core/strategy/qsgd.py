"""QSGD: gradients rounded at random to a few levels of their norm, without bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import (
    Options,
    one_of,
    option,
    positive_int,
)
from exogym_core.strategy.parts.exchange import GradientExchange
from exogym_core.strategy.parts.few_bits import QSGDCodec
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.generators import shared_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


__all__ = ["QSGDOptions", "QSGDStrategy", "StochasticGradients"]


class QSGDOptions(Options):
    """Options of QSGD: bits of a value, and the norm that values share.

    Args:
        bits: of a value, 2 to 8: a sign and one of `2 ** (bits - 1)` levels.
        bucket: values that share a norm.
        norm: of a bucket: "l2", or "max", its largest magnitude.
    """

    bits: int = option(4, one_of(*range(2, 9)))
    bucket: int = option(512, positive_int)
    norm: str = option("l2", one_of("l2", "max"))


class StochasticGradients(GradientExchange, name="QSGD"):
    """The mean of all ranks' quantised gradients.

    Args:
        options: of `QSGDOptions`.
    """

    Options = QSGDOptions
    work = "qsgd"

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Algorithm 1: everyone's message to all."""
        flat, options = flatten(gradients), self.options
        generator = shared_generator(self.seed, "qsgd", self.strategy.local_step, self.comm.rank)
        codec = self.strategy.charged(QSGDCodec(options.bits, options.bucket, options.norm, generator))
        total = torch.zeros_like(flat)
        for values in self.gathered(codec, flat):
            total += values
        return unflatten(total / self.comm.world_size, gradients)


class QSGDStrategy(Composition, name="QSGD"):
    """The mean of gradients that are rounded at random to a few levels.

    Each rank cuts its gradient v, all parameters in a row, into buckets, and sends of each its norm and::

        Q_s(v_i) = |v| sign(v_i) xi_i,  xi_i = l / s or (l + 1) / s,  l = floor(s |v_i| / |v|)

    with the probabilities that make the mean of xi_i `|v_i| / |v|` (section 3.1); `s = 2 ** (bits - 1) - 1`. It draws
    them from a generator of its own for each rank and step. The optimizer gets the mean over ranks.

    Bytes: the payload is `bits` a value and 4 bytes a bucket; all-gathered: n - 1 times that leaves a rank each step.
    Codes have one length: the paper's Elias code, shorter where most levels are zero, is not used.

    Args:
        optim_spec: the optimizer (AdamW by default).
        bits: of a value.
        options: of `QSGDOptions`, and of every Strategy: `lr`, `max_norm` (of the mean), `lr_scheduler`, ...

    References:
        Alistarh et al., QSGD, arXiv 1610.02132, algorithm 1; buckets of 512, and the norm "max", from section 5.
    """

    module = StochasticGradients
    positional = ("optim_spec", "bits")
