"""GPA: data-parallel steps of any optimizer, smoothed by an exponential average of its iterates."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import fraction, option, options_of, share
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.participation.site import GradientOptions
from exogym_core.strategy.parts.outer import KeptParameters
from exogym_core.strategy.parts.state import State

__all__ = ["GPAStrategy"]


class GPAStrategy(Strategy, name="GPA"):
    """Average gradients over all ranks at each step; a base optimizer moves z, whose average x is the model.

    With d(y) the base optimizer's step for the mean gradient at y, weight decay of z included::

        y = mu_y x + (1 - mu_y) z
        z <- z + d(y)
        x <- mu_x x + (1 - mu_x) z

    With `mu_x = 0` it is AllReduce. SNOO with K steps is near `mu_x = 0.9 ** (1 / K)`: 0.9869 for 8, 0.9934 for 16,
    0.9967 for 32, 0.9984 for 64. Schedule-Free's average of equal weights is not included. In the authors' code y
    misses a part of the weight decay of z.

    Bytes: as AllReduce's: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step.

    Args:
        optim_spec: the base optimizer (AdamW by default).
        mu_x: share of x that stays at each step; also `eval_interp_coeff`. Defaults are those of the authors' page.
        mu_y: share of x in the point at which gradients are computed; also `train_interp_coeff`.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of `exogym_core.strategy.participation.site:GradientOptions`, as AllReduce's; and of every Strategy:
            `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, arXiv 2512.17131; the rule
        as in the authors' code, facebookresearch/optimizers, `gpa/gpa_adamw.py`.
    """

    mu_x: float = option(0.9967, share)
    mu_y: float = option(0.7, fraction)
    sites: GradientOptions = options_of(GradientOptions)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "mu_x", "mu_y")

    judged = "outer"
    round_steps = 1
    weighs_by_samples = True
    healed = ("outer", "z", "num_rounds")
    state = State("outer", "z", "num_rounds")

    def prepare(self) -> None:
        """Begin with x, y and z equal."""
        self.outer, self.num_rounds = KeptParameters(self.held), 0
        self.z = [parameter.detach().clone() for parameter in self.held]

    @torch.no_grad()
    def optimizer_step(self) -> None:
        """Take the base optimizer's step from z with the gradient at y, and average."""
        for parameter, z in zip(self.held, self.z, strict=True):
            parameter.copy_(z)
        super().optimizer_step()
        for parameter, x, z in zip(self.held, self.outer.theta, self.z, strict=True):
            z.copy_(parameter)
            if not self.context.is_skipped:
                x.lerp_(z, 1 - self.mu_x)
            parameter.lerp_(x, self.mu_y)
        self.num_rounds += 1
