"""DES-LOC: parameters and the optimizer's moments are averaged each at its own period."""

from __future__ import annotations

import math
from itertools import compress

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import name_in, option, options_of, positive_int
from exogym_core.strategy.parts.average import Buckets, RoundAveraging
from exogym_core.strategy.parts.means import MOMENTS, MomentMean, ParameterMean
from exogym_core.strategy.parts.state import State

__all__ = ["DESLOCStrategy", "MomentCommunicator"]


class DESLOCStrategy(Strategy, name="DESLOC", experimental=True):
    """Local steps of an adaptive optimizer; parameters, first and second moments are averaged at their own periods.

    After step t (from 1), with x the parameters, u and v the optimizer's moments (Adam's m and v):

        x_i <- mean(x) if t mod K_x = 0,  u_i <- mean(u) if t mod K_u = 0,  v_i <- mean(v) if t mod K_v = 0

    Moments change more slowly than parameters, so theirs may be longer. With equal periods this is Local Adam. It is
    `Chain([AveragingCommunicator(H), MomentCommunicator(first, Ku), MomentCommunicator(second, Kv)])`. A codec is for
    parameters only: rounded moments could become negative.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' bytes per worker every K_x, every K_u and every K_v steps.

    Args:
        optim_spec: the local optimizer (AdamW by default), as torch has it: the paper's algorithm has no bias
            correction, torch's Adam has. `max_norm` clips as in the paper.
        H: K_x, steps between averages of the parameters; also `local_steps`, `num_inner_steps` and `sync_every`.
        Ku, Kv: K_u and K_v, of first and second moments; 3 H and 6 H if None.
        codec, error_feedback, aggregate: of the parameters' mean, see `RoundAveraging`.
        buckets, exchange: of parameters and moments, see `RoundAveraging`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models, arXiv
        2505.22549. Second-hand: the rule is from a summary of algorithm 1.
    """

    H: int = option(100, positive_int)
    Ku: int | None = option(None, positive_int)
    Kv: int | None = option(None, positive_int)
    averaging: RoundAveraging = options_of(RoundAveraging)

    positional = ("optim_spec",)
    judged = "outer"
    # K_x, K_u and K_v
    periods = property(lambda self: (self.H, self.Ku or 3 * self.H, self.Kv or 6 * self.H))
    round_steps = property(lambda self: math.lcm(*self.periods))
    state = State("outer", "num_rounds")
    plain_steps = True

    def prepare(self) -> None:
        """Find the moments that the local optimizer keeps."""
        self.outer = ParameterMean(self.held, self.averaging.charged(self))
        self.moments = [MomentMean(self, each, self.averaging) for each in MOMENTS]
        self.num_rounds = 0

    def communicate(self, step: int) -> None:
        """Average parameters, first and second moments, each at its period."""
        is_due = [step % period == 0 for period in self.periods]
        if is_due[0]:
            self.outer.adopt(self.outer.mean_over(self.site))
            self.num_rounds += 1
        for moment in compress(self.moments, is_due[1:]):
            moment.take()


class MomentCommunicator(Strategy, part="Moments"):
    """Average the local optimizer's moments every `H` steps, as a member of a `Chain`.

    Args:
        moment: "first" or "second".
        H: steps from average to average.
        buckets, exchange: of the moments, see `Buckets`.
    """

    moment: str = option("first", name_in(*MOMENTS))
    H: int = option(1, positive_int)
    cut: Buckets = options_of(Buckets)
    positional = ()
    round_steps = property(lambda self: self.H)
    judged = ""
    plain_steps = True

    def prepare(self) -> None:
        """Find the moments that the local optimizer keeps."""
        self.mean = MomentMean(self, self.moment, self.cut)

    def communicate(self, step: int) -> None:
        """Average the moments, if that is due."""
        if step % self.H == 0:
            self.mean.take()
