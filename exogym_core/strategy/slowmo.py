"""SlowMo: rounds of local steps whose mean displacement, in units of the learning rate, has a slow momentum."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import name_in, number, option, options_of, positive_int
from exogym_core.strategy.parts.means import MOMENTS, MomentMean
from exogym_core.strategy.parts.outer import OuterAveraging, OuterStep
from exogym_core.strategy.parts.state import State

__all__ = ["SlowMoCommunicator", "SlowMoStrategy"]


class SlowMoStrategy(Strategy, name="SlowMo"):
    """`H` local steps, then a step of slow momentum along the mean displacement in units of the local learning rate.

    With x_0 where the round began, gamma the local learning rate, alpha `outer_lr` and beta `outer_momentum`
    (algorithm 1, lines 6 to 8):

        u <- beta u + (x_0 - mean(x)) / gamma,  x_0 <- x_0 - alpha gamma u

    With beta = 0 and alpha = 1 it is LocalSGD; with a constant rate DiLoCo with heavy-ball momentum. Its base may
    communicate too: `Chain([AveragingCommunicator(H=3), SlowMoCommunicator(H=48)])` is fairscale's default.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' (and averaged moments') bytes per worker every `H` steps.

    Args:
        optim_spec: the local optimizer (AdamW by default; the paper's are SGD with Nesterov momentum and Adam).
        H: local steps a round, tau. As the others, fairscale's value by default.
        outer_lr: alpha, the slow learning rate.
        outer_momentum: beta, the slow momentum.
        buffers: what becomes of the local optimizer's state at the end of a round: "maintain", "reset" or "average".
        codec, error_feedback, aggregate, buckets, exchange: of the mean, see `OuterAveraging`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, arXiv 1910.00643,
        algorithm 1; facebookresearch/fairscale, `SlowMoDistributedDataParallel`.
    """

    H: int = option(48, positive_int)
    outer_lr: float = option(1.0, number)
    outer_momentum: float = option(0.5, number)
    buffers: str = option("maintain", name_in("maintain", "reset", "average"))
    averaging: OuterAveraging = options_of(OuterAveraging)

    positional = ("optim_spec",)
    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "num_rounds")
    plain_steps = True

    def prepare(self) -> None:
        """Begin with the same x_0 on every rank."""
        spec = OptimSpec(torch.optim.SGD, lr=self.outer_lr, momentum=self.outer_momentum)
        self.outer = OuterStep(self.held, spec, self.averaging.charged(self))
        self.moments = (
            [MomentMean(self, each, self.averaging) for each in MOMENTS] if self.buffers == "average" else []
        )
        self.num_rounds = 0

    def communicate(self, step: int) -> None:
        """Lines 6 to 8: u <- beta u + (x_0 - mean x) / gamma, x_0 <- x_0 - alpha gamma u, gamma the local rate."""
        if step % self.H:
            return
        gamma = self.learning_rate
        displacements = self.outer.mean_over(self.site)
        self.outer.optim.param_groups[0]["lr"] = self.outer_lr * gamma
        self.outer.step([d / gamma if gamma else torch.zeros_like(d) for d in displacements])
        self.num_rounds += 1
        if self.buffers == "reset":
            self.optim.state.clear()
        for moment in self.moments:
            moment.take()


class SlowMoCommunicator(SlowMoStrategy, part="SlowMo"):
    """SlowMo as a member of a `Chain`, whose members before it are its base algorithm."""
