"""1-bit Adam: after a warm-up the variance stands still, and momenta travel as signs."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import number, option, options_of, positive_int, share
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.average import served_mean
from exogym_core.strategy.parts.flat import flatten, unflatten
from exogym_core.strategy.parts.gradients import average, own_gradients, set_gradients, zeros_like_gradients
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import SignCodec

__all__ = ["OneBitAdamStrategy", "OneBitMomenta"]


class OneBitAdamStrategy(Strategy, name="OneBitAdam"):
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

    Frozen after k steps, a variance without bias correction is `1 - beta2^k` of the squared gradients' mean. Updates
    are `1 / sqrt(1 - beta2^k)` times Adam's from then on: 18 times for k = 3, 3.2 for 100, 1.3 for 1,000. So a short
    warm-up diverges at Adam's rate, with exact momenta too: freeze late, or multiply `lr` by that root.

    Where ranks are absent, the others serve other parts. Each keeps the errors of values that it has served, and sends
    them when it serves these again.

    Bytes: the payload is the gradient's own while it warms up, then a bit a value and 4 bytes a part; both ways
    `2 (n - 1) / n` times that leaves a rank each step.

    Args:
        optim_spec: the optimizer that applies the update: SGD without momentum (learning rate 1e-3 by default), or a
            factory of your own. Others of torch's are refused: they would change the algorithm.
        freeze_step: steps of plain Adam before the variance stands still; 15 % of the run if it is not given.
        beta1, beta2: of the momentum, and of the variance.
        eps: added to the variance's root.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Tang et al., 1-bit Adam, arXiv 2102.02888, algorithm 1; eps, no bias correction and the scale as in the authors'
        code, microsoft/DeepSpeed, `runtime/fp16/onebit/adam.py` and `runtime/comm/nccl.py`.
    """

    freeze_step: int | None = option(None, positive_int)
    beta1: float = option(0.9, share)
    beta2: float = option(0.999, share)
    eps: float = option(1e-8, number)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "freeze_step")
    default_optim = OptimSpec(torch.optim.SGD, lr=1e-3)
    applies = "Adam's updates"

    round_steps = 1
    warmup_steps = property(lambda self: self.frozen_at(self.max_steps))
    takes_sites = False
    healed = ("momentum", "variance")
    state = State("momentum", "variance", "error", "server_error")

    def prepare(self) -> None:
        """Begin without moments and errors."""
        self.charge("sign", "encode", 0)
        self.momentum = flatten(zeros_like_gradients(self))
        self.variance, self.error, self.server_error = (torch.zeros_like(self.momentum) for _ in range(3))

    def frozen_at(self, max_steps: int) -> int:
        """The step at which the variance stands still."""
        return max(1, int(0.15 * max_steps)) if self.freeze_step is None else self.freeze_step

    def of_length(self, max_steps: int) -> list[int]:
        """The step at which the variance stands still too, where that is a share of the run."""
        own = [self.frozen_at(max_steps)] if self.freeze_step is None else []
        return [*super().of_length(max_steps), *own]

    @torch.no_grad()
    def before_update(self) -> None:
        """Algorithm 1: `momentum / (root of variance + eps)`."""
        gradients = own_gradients(self)
        flat = flatten(gradients)
        if self.local_step < self.warmup_steps:
            average(self.peers, [flat])
            self.momentum.mul_(self.beta1).add_(flat, alpha=1 - self.beta1)
            self.variance.mul_(self.beta2).add_(flat.square(), alpha=1 - self.beta2)
        else:
            own = self.beta1 * self.momentum + (1 - self.beta1) * flat
            codec = self.charged(SignCodec("l2"))
            served = self.server_error.tensor_split(self.peers.world_size)[self.peers.rank]
            self.momentum = served_mean(self.peers, own, codec, self.error, served)
        update = self.momentum / (self.variance.sqrt() + self.eps)
        set_gradients(self, unflatten(update.where(self.variance > 0, 0.0), gradients))


class OneBitMomenta(OneBitAdamStrategy, part="OneBitAdam"):
    """1-bit Adam's update as a member of a `Chain`, whose optimizer applies it."""
