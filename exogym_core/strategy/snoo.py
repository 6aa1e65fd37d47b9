"""SNOO: data-parallel steps, whose displacement over K steps is the gradient of an outer Nesterov step."""

from __future__ import annotations

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import number, option, options_of, positive_int, share
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.participation.site import GradientOptions
from exogym_core.strategy.parts.outer import OuterStep, nesterov
from exogym_core.strategy.parts.state import State

__all__ = ["SNOOStrategy"]


class SNOOStrategy(Strategy, name="SNOO"):
    """Average gradients over all ranks at each step, and take an outer Nesterov step every `H` steps.

    With w the slow weights, all ranks one worker, and v its weights after H steps from w::

        s = w - v,  b <- mu b + s,  w <- w - eta (mu b + s)

    It is DiLoCo with one worker: the outer step sends nothing. The judged model is w, as DiLoCo's is.

    Bytes: as AllReduce's: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        H: K, steps from outer step to outer step; also `local_steps`, `num_inner_steps` and `sync_every`. Defaults are
            those of the authors' record with Muon and a GPT of 350M parameters; the record's first round has one step.
        outer_lr: eta.
        outer_momentum: mu; 0 is Lookahead.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of `exogym_core.strategy.participation.site:GradientOptions`, as AllReduce's; and of every Strategy:
            `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Kallusky et al., SNOO: Step-K Nesterov Outer Optimizer, arXiv 2510.15830; the rule as in the first author's
        code, KellerJordan/modded-nanogpt, `records/track_2_medium/2025-09-16_Snoo`.
    """

    H: int = option(28, positive_int)
    outer_lr: float = option(0.68, number)
    outer_momentum: float = option(0.37, share)
    sites: GradientOptions = options_of(GradientOptions)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "H")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    weighs_by_samples = True
    healed = ("outer", "num_rounds")
    state = State("outer", "num_rounds")

    def prepare(self) -> None:
        """Begin with slow weights that are the model's."""
        self.outer = OuterStep(self.held, nesterov(self.outer_lr, self.outer_momentum))
        self.num_rounds = 0

    def optimizer_step(self) -> None:
        """Update; at the end of a round take an outer step along the displacement, which all ranks have."""
        super().optimizer_step()
        if (self.local_step + 1) % self.H == 0:
            self.outer.step(self.outer.values())
            self.num_rounds += 1
