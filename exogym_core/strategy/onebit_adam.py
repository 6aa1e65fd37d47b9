"""1-bit Adam: after a warm-up the variance stands still, and momenta travel as signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import (
    Options,
    number,
    option,
    positive_int,
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


__all__ = ["OneBitAdamOptions", "OneBitAdamStrategy", "OneBitMomenta"]


class OneBitAdamOptions(Options):
    """Options of 1-bit Adam.

    Args:
        freeze_step: steps of plain Adam before the variance stands still; 15 % of the run if it is not given.
        beta1: of the momentum.
        beta2: of the variance.
        eps: added to the variance's root.
    """

    freeze_step: int | None = option(None, positive_int)
    beta1: float = option(0.9, share)
    beta2: float = option(0.999, share)
    eps: float = option(1e-8, number)


class OneBitMomenta(GradientExchange, name="OneBitAdam"):
    """Adam's update, from mean gradients while it warms up, then from the mean of momenta sent as signs.

    Args:
        options: of `OneBitAdamOptions`.
    """

    Options = OneBitAdamOptions
    work = "sign"
    state = State("momentum", "variance", "error", "server_error")
    warmup_steps = property(lambda self: self.freeze_step)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Begin without moments and errors."""
        super()._init_node(model, rank, num_nodes)
        given = self.options.freeze_step
        self.freeze_step = _freeze_step(self.strategy.max_steps) if given is None else given
        self.momentum = flatten(self.zeros_like_gradients())
        self.variance, self.error = torch.zeros_like(self.momentum), torch.zeros_like(self.momentum)
        own = self.momentum.tensor_split(self.comm.world_size)[self.comm.rank]
        self.server_error = torch.zeros_like(own)

    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Algorithm 1: `momentum / (root of variance + eps)`."""
        options, flat = self.options, flatten(gradients)
        if self.strategy.local_step < self.freeze_step:
            self.average([flat])
            self.momentum.mul_(options.beta1).add_(flat, alpha=1 - options.beta1)
            self.variance.mul_(options.beta2).add_(flat.square(), alpha=1 - options.beta2)
        else:
            own = options.beta1 * self.momentum + (1 - options.beta1) * flat
            codec = self.strategy.charged(SignCodec("l2"))
            self.momentum = served_mean(self.comm, own, codec, self.error, self.server_error)
        update = self.momentum / (self.variance.sqrt() + options.eps)
        return unflatten(update.where(self.variance > 0, 0.0), gradients)


def _freeze_step(max_steps: int) -> int:
    return max(1, int(0.15 * max_steps))


class OneBitAdamStrategy(Composition, name="OneBitAdam"):
    """Adam whose momenta travel as signs once its variance is frozen.

    For `freeze_step` steps Adam on the mean gradient, without bias correction. Then, of this rank's gradient g and of
    the part j of all values that rank j serves::

        m_i = beta1 m + (1 - beta1) g_i
        s_i = C[m_i + e_i];  e_i = m_i + e_i - s_i             this rank's error
        m = C[mean of s_i + e_j];  e_j = mean of s_i + e_j - m  the server's
        x = x - lr (m / (sqrt(v) + eps) + weight_decay x)

    What has had no gradient until then has no variance, and stays as it is: a sign over it would throw it far (the
    authors' code asks for a mask). C sends signs and one scale, the root mean square, of each of the n parts (the
    authors' code has one for all n).

    Bytes: the payload is the gradient's own while it warms up, then a bit a value and 4 bytes a part; both ways
    `2 (n - 1) / n` times that leaves a rank each step.

    Args:
        optim_spec: the optimizer that applies the update: SGD without momentum (learning rate 1e-3 by default), or a
            factory of one's own. Others of torch's are refused: they would make another algorithm of it.
        freeze_step: steps of plain Adam.
        options: of `OneBitAdamOptions`, and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Tang et al., 1-bit Adam, arXiv 2102.02888, algorithm 1; eps, no bias correction and the scale from the authors'
        code (DeepSpeed's OnebitAdam), read second-hand.
    """

    default_optim = OptimSpec(torch.optim.SGD, lr=1e-3)
    module = OneBitMomenta
    positional = ("optim_spec", "freeze_step")
    applied = "Adam's updates"

    def of_length(self, max_steps: int) -> Sequence[int]:
        """The step at which the variance stands still too, where that is a share of the run."""
        own = [_freeze_step(max_steps)] if self.arguments.get("freeze_step") is None else []
        return [*super().of_length(max_steps), *own]
