"""SignSGD with majority vote: a bit a value, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import (
    Options,
    one_of,
    option,
    share,
)
from exogym_core.strategy.parts.average import served_mean
from exogym_core.strategy.parts.exchange import GradientExchange
from exogym_core.strategy.parts.few_bits import SignCodec
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


__all__ = ["MajorityOfSigns", "SignSGDOptions", "SignSGDStrategy"]


class SignSGDOptions(Options):
    """Options of SignSGD: the momentum whose sign is sent, and the ranks that count votes.

    Args:
        momentum: beta, of the momentum whose sign is sent; 0 sends the gradient's.
        vote: ranks that count: "servers", each rank for its part of the values, or "all", each rank all values.
    """

    momentum: float = option(0.9, share)
    vote: str = option("servers", one_of("servers", "all"))


class MajorityOfSigns(GradientExchange, name="SignSGD"):
    """The sign that most ranks' momenta have, value by value; a tie is plus.

    Args:
        options: of `SignSGDOptions`.
    """

    Options = SignSGDOptions
    work = "sign"
    state = State("momenta")

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Begin with zero momentum of each parameter."""
        super()._init_node(model, rank, num_nodes)
        self.momenta = self.zeros_like_gradients()

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Algorithm 1: `m = (1 - beta) g + beta m`; its signs are counted."""
        beta = self.options.momentum
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            momentum.mul_(beta).add_(gradient, alpha=1 - beta)
        flat, codec = flatten(self.momenta), self.strategy.charged(SignCodec())
        if self.options.vote == "servers":
            return unflatten(served_mean(self.comm, flat, codec), gradients)
        total = torch.zeros_like(flat)
        for signs in self.gathered(codec, flat):
            total += signs
        return unflatten((total >= 0).to(total.dtype) * 2 - 1, gradients)


class SignSGDStrategy(Composition, name="SignSGD"):
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
            factory of one's own. Others of torch's are refused: they would make another algorithm of it.
        momentum: beta.
        options: of `SignSGDOptions`, and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, arXiv 1810.05291.
    """

    default_optim = OptimSpec(torch.optim.SGD, lr=1e-4)
    module = MajorityOfSigns
    positional = ("optim_spec", "momentum")
    applied = "signs"
