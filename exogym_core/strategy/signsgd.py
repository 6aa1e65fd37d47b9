"""SignSGD with majority vote: a bit a value, both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.exchange import GradientExchange, plain_sgd
from exogym_core.strategy.options.arguments import (
    Options,
    checked_options,
    one_of,
    option,
    refuse_unknown,
    share,
)
from exogym_core.strategy.options.optim import OptimSpec
from exogym_core.strategy.parts.few_bits import SignCodec
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.flight import run
from exogym_core.strategy.parts.gathered import decoded, gathering, served_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.chain import Scope
    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["MajorityOfSigns", "SignSGDOptions", "SignSGDStrategy"]


@dataclass(frozen=True)
class SignSGDOptions(Options):
    """What SignSGD takes.

    Args:
        momentum: beta, of the momentum whose sign is sent; 0 sends the gradient's.
        vote: who counts: "servers", each rank for its part of the values, or "all", everyone everything.
    """

    momentum: float = option(0.9, share)
    vote: str = option("servers", one_of("servers", "all"))


class MajorityOfSigns(GradientExchange):
    """The sign that most ranks' momenta have, value by value; a tie is plus.

    Args:
        options: of `SignSGDOptions`.
    """

    Options = SignSGDOptions
    work = "sign"
    kept = ("momenta",)

    def __init__(self, **options: Any) -> None:
        self.options, unknown = checked_options(type(self), SignSGDOptions, options)
        refuse_unknown(type(self), unknown)

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Without momentum yet."""
        scope = super().enter(strategy, scope)
        self.momenta = self.zeros_like_gradients()
        return scope

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Algorithm 1: `m = (1 - beta) g + beta m`; its signs are counted."""
        beta = self.options.momentum
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            momentum.mul_(beta).add_(gradient, alpha=1 - beta)
        flat, codec = flatten(self.momenta), self.charged(SignCodec())
        if self.options.vote == "servers":
            return unflatten(served_mean(self.comm, flat, codec), gradients)
        total = torch.zeros_like(flat)
        for signs in decoded(codec, run(gathering(self.comm, codec.encode(flat))), flat):
            total += signs
        return unflatten((total >= 0).to(total.dtype) * 2 - 1, gradients)


class SignSGDStrategy(Chain):
    """Steps along the sign that most ranks vote for.

    Of this rank's gradient g::

        m = (1 - beta) g + beta m
        x = x - lr (sign(sum over ranks of sign(m)) + weight_decay x)

    A sign is one bit on the wire, 1 for what is not negative, so there is no zero: a tie, and a value whose gradient
    was always zero, count as plus. Both ways of counting give the same bits.

    Bytes: the payload is a bit a value. Servers send `2 (n - 1) / n` of it a rank and step, as signs go to who counts
    and the majority's come back; "all" gathers, `n - 1` times it.

    Args:
        optim_spec: the optimizer that applies the signs: SGD without momentum (learning rate 1e-4 by default), or a
            factory of one's own. Others of torch's are refused: they would make another algorithm of it.
        momentum: beta.
        options: of `SignSGDOptions`, and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, arXiv 1810.05291.
    """

    Options = SignSGDOptions
    default_optim = OptimSpec(torch.optim.SGD, lr=1e-4)

    def __init__(
        self, optim_spec: OptimizerLike | None = None, momentum: float | None = None, **options: Any
    ) -> None:
        signs, others = checked_options(type(self), SignSGDOptions, {"momentum": momentum, **options})
        super().__init__([MajorityOfSigns(**vars(signs))], optim_spec, **others)
        plain_sgd(self, "signs")
