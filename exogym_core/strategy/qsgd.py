"""QSGD: gradients rounded at random to a few levels of their norm, without bias."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import one_of, option, options_of, positive_int
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.gradients import gathered, own_gradients, set_gradients
from exogym_core.strategy.parts.tensor_codecs import QSGDCodec

__all__ = ["QSGDStrategy", "StochasticGradients"]


class QSGDStrategy(Strategy, name="QSGD"):
    """The mean of gradients that are rounded at random to a few levels.

    Each rank cuts its gradient v, all parameters in a row, into buckets, and sends of each its norm and::

        Q_s(v_i) = |v| sign(v_i) xi_i,  xi_i = l / s or (l + 1) / s,  l = floor(s |v_i| / |v|)

    with the probabilities that make the mean of xi_i `|v_i| / |v|` (section 3.1); `s = 2 ** (bits - 1) - 1`. It draws
    them from a generator of its own for each rank and step. The optimizer gets the mean over ranks.

    Bytes: the payload is `bits` a value and 4 bytes a bucket; all-gathered: n - 1 times that leaves a rank each step.
    Codes have one length: the paper's Elias code, shorter where most levels are zero, is not used.

    Args:
        optim_spec: the optimizer (AdamW by default).
        bits: of a value, 2 to 8: a sign and one of `2 ** (bits - 1)` levels.
        bucket: values that share a norm.
        norm: of a bucket: "l2", or "max", its largest magnitude.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `max_norm` (of the mean), `lr_scheduler`, ...

    References:
        Alistarh et al., QSGD, arXiv 1610.02132, algorithm 1; buckets of 512, and the norm "max", from section 5.
    """

    bits: int = option(4, one_of(*range(2, 9)))
    bucket: int = option(512, positive_int)
    norm: str = option("l2", one_of("l2", "max"))
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "bits")

    round_steps = 1
    takes_sites = False

    def prepare(self) -> None:
        """Miss a speed of coding that is missing now."""
        self.charge("qsgd", "encode", 0)

    @torch.no_grad()
    def before_update(self) -> None:
        """Algorithm 1: everyone's message to all."""
        gradients = own_gradients(self)
        flat = flatten(gradients)
        generator = shared_generator(self.seed, "qsgd", self.local_step, self.comm.rank)
        codec = self.charged(QSGDCodec(self.bits, self.bucket, self.norm, generator))
        total = torch.zeros_like(flat)
        for values in gathered(self.peers, codec, flat):
            total += values
        set_gradients(self, unflatten(total / self.peers.world_size, gradients))


class StochasticGradients(QSGDStrategy, part="QSGD"):
    """QSGD as a member of a `Chain`."""
