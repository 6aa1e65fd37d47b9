"""SignSGD with majority vote: a bit a value, both ways."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import one_of, option, options_of, share
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.average import served_mean
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.gradients import gathered, own_gradients, set_gradients, zeros_like_gradients
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import SignCodec

__all__ = ["MajorityOfSigns", "SignSGDStrategy"]


class SignSGDStrategy(Strategy, name="SignSGD"):
    """Steps along the sign that most ranks vote for.

    Of this rank's gradient g::

        m = (1 - beta) g + beta m
        x = x - lr (sign(sum over ranks of sign(m)) + weight_decay x)

    A sign is one bit on the wire, 1 for what is not negative, so there is no zero: a tie, and a value whose gradient
    was always zero, count as plus. Both ways of counting give the same bits.

    Bytes: the payload is a bit a value. Servers send `2 (n - 1) / n` of it a rank and step, as signs go to a server
    and the majority's come back; "all" gathers, `n - 1` times it.

    Args:
        optim_spec: the optimizer that applies the signs: SGD without momentum (learning rate 1e-4 by default), or a
            factory of your own. Others of torch's are refused: they would change the algorithm.
        momentum: beta, of the momentum whose sign is sent; 0 sends the gradient's.
        vote: ranks that count: "servers", each rank for its part of the values, or "all", each rank all values.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, arXiv 1810.05291.
    """

    momentum: float = option(0.9, share)
    vote: str = option("servers", one_of("servers", "all"))
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "momentum")
    default_optim = OptimSpec(torch.optim.SGD, lr=1e-4)
    applies = "signs"

    round_steps = 1
    takes_sites = False
    state = State("momenta")

    def prepare(self) -> None:
        """Begin with zero momentum of each parameter."""
        self.charge("sign", "encode", 0)
        self.momenta = zeros_like_gradients(self)

    @torch.no_grad()
    def before_update(self) -> None:
        """Algorithm 1: `m = (1 - beta) g + beta m`; its signs are counted."""
        for momentum, gradient in zip(self.momenta, own_gradients(self), strict=True):
            momentum.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
        flat, codec = flatten(self.momenta), self.charged(SignCodec())
        if self.vote == "servers":
            majority = served_mean(self.peers, flat, codec)
        else:
            total = torch.zeros_like(flat)
            for signs in gathered(self.peers, codec, flat):
                total += signs
            majority = (total >= 0).to(total.dtype) * 2 - 1
        set_gradients(self, unflatten(majority, self.momenta))


class MajorityOfSigns(SignSGDStrategy, part="SignSGD"):
    """SignSGD as a member of a `Chain`, whose optimizer steps along the signs."""
