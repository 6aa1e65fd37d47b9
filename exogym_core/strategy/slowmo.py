"""SlowMo: rounds of local steps whose mean displacement, in units of the learning rate, has a slow momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.desloc import MOMENTS, MomentCommunicator
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import name_in, number, option, positive_int
from exogym_core.strategy.parts.average import AveragingOptions
from exogym_core.strategy.parts.rounds import OuterRounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.strategy.chain import Module

__all__ = ["SlowMoCommunicator", "SlowMoOptions", "SlowMoStrategy"]


class SlowMoOptions(AveragingOptions):
    """Options of SlowMo: local steps a round, the slow step, and the local optimizer's state.

    Args:
        H: local steps a round, tau.
        outer_lr: alpha, the slow learning rate.
        outer_momentum: beta, the slow momentum.
        buffers: what becomes of the local optimizer's state at the end of a round: "maintain", "reset" or "average".
    """

    H: int = option(48, positive_int)
    outer_lr: float = option(1.0, number)
    outer_momentum: float = option(0.5, number)
    buffers: str = option("maintain", name_in("maintain", "reset", "average"))


class SlowMoCommunicator(OuterRounds, name="SlowMo"):
    """A slow momentum step every `H` steps, with `SlowMoOptions`. Modules before it are its base algorithm."""

    Options = SlowMoOptions

    def parts(self) -> Sequence[Module]:
        """List this module, and those that average the local optimizer's moments if `buffers` asks for that."""
        averages = [MomentCommunicator(moment=moment, H=self.options.H) for moment in MOMENTS]
        return [self, *averages] if self.options.buffers == "average" else [self]

    def outer_spec(self) -> OptimSpec:
        """SGD with heavy-ball momentum."""
        return OptimSpec(torch.optim.SGD, lr=self.options.outer_lr, momentum=self.options.outer_momentum)

    def end_round(self, number: int) -> None:
        """Lines 6 to 8: u <- beta u + (x_0 - mean x) / gamma, x_0 <- x_0 - alpha gamma u, gamma the local rate."""
        gamma = self.strategy.learning_rate
        displacements = self.begin().wait()
        self.outer.optim.param_groups[0]["lr"] = self.options.outer_lr * gamma
        self.advance([d / gamma if gamma else torch.zeros_like(d) for d in displacements])
        if self.options.buffers == "reset":
            self.strategy.optim.state.clear()


class SlowMoStrategy(Composition, name="SlowMo"):
    """`H` local steps, then a step of slow momentum along the mean displacement in units of the local learning rate.

    With x_0 where the round began, gamma the local learning rate, alpha `outer_lr` and beta `outer_momentum`
    (algorithm 1, lines 6 to 8):

        u <- beta u + (x_0 - mean(x)) / gamma,  x_0 <- x_0 - alpha gamma u

    With beta = 0 and alpha = 1 it is LocalSGD; with a constant rate DiLoCo with heavy-ball momentum. Its base may
    communicate too: `Chain([AveragingCommunicator(H=3), SlowMoCommunicator(H=48)])` is fairscale's default.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' (and averaged moments') bytes per worker every `H` steps.

    Args:
        optim_spec: the local optimizer (AdamW by default; the paper's are SGD with Nesterov momentum and Adam).
        H, outer_lr, outer_momentum, buffers: see `SlowMoOptions`; fairscale's values by default.
        options: of `SlowMoOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, arXiv 1910.00643,
        algorithm 1; facebookresearch/fairscale, `SlowMoDistributedDataParallel`.
    """

    module = SlowMoCommunicator
