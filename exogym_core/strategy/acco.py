"""ACCO: gradients travel while the next ones are computed, half of them at an estimate of the parameters."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.base import StepContext, Strategy
from exogym_core.strategy.parts.flat import flatten, unflatten, widened
from exogym_core.strategy.parts.gradients import dense_gradient
from exogym_core.strategy.parts.outer import KeptParameters
from exogym_core.strategy.parts.rounds import UnderWay
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACCOStrategy"]


class ACCOStrategy(Strategy, name="ACCO"):
    """Update once every two steps, whose mean gradients each arrive at the end of the step after.

    Steps 2t and 2t + 1 compute the gradients of update t, the first half at an estimate made meanwhile::

        a = mean gradient of step 2t, at theta~_t;  b = mean gradient of step 2t + 1, at theta_t
        theta~_{t+1} = Opt(theta_t, a)              on a copy of the optimizer's state
        theta_{t+1} = Opt(theta_t, (a + b) / 2)

    theta~_0 is theta_0. A step waits for the average of the step before alone. The authors let ranks accumulate
    gradients until that has arrived, and shard the optimizer; here a step is one batch and every rank has the whole
    state, with as many bytes. Learning-rate schedules count steps. A half without its second one is dropped at the end.

    Bytes: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step, as a reduce-scatter and an
    all-gather of the updated parameters do.

    Args:
        optim_spec: the optimizer (AdamW by default).
        max_norm: clip the norm of the mean gradient of an estimate or an update to this.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Nabli et al., ACCO: Accumulate While You Communicate for Communication-Overlapped Sharded LLM Training, arXiv
        2406.02613; the rule as in the authors' code, edouardoyallon/acco, `trainer_decoupled.py`.
    """

    positional = ("optim_spec", "max_norm")
    takes_sites = False

    judged = "outer"
    round_steps = 2
    state = State("outer", "first", "num_rounds", "under_way")

    def prepare(self) -> None:
        """Begin with the model's parameters and nothing under way."""
        self.outer, self.num_rounds = KeptParameters(self.held), 0
        self.first: list[Tensor] = []  # mean gradient of an update's first half, flat
        self.under_way = UnderWay(self.site)

    def step(self) -> None:
        """Take in the average of the step before, and send this step's gradient."""
        self.unscale_gradients()
        weight = self.context.weight
        own = [[weight * widened(dense_gradient(each)) for each in bucket] for bucket in self.buckets]
        before = self.under_way.take()
        mean = None if before is None else before.wait()
        self.under_way.send([flatten(gradients) for gradients in own])
        if mean is not None:
            self.arrived(mean, is_second=self.local_step % 2 == 0)
        elif self.scaler is not None:
            self.scaler.update()
        super().step()

    @torch.no_grad()
    def arrived(self, mean: list[Tensor], *, is_second: bool) -> None:
        """Estimate the parameters from the first half's mean gradient, or update them with both halves'."""
        before = copy.deepcopy(self.optim.state_dict())
        if is_second:
            mean = [(first + second) / 2 for first, second in zip(self.first, mean, strict=True)]
        self.load()
        for flat, bucket in zip(mean, self.buckets, strict=True):
            for parameter, gradient in zip(bucket, unflatten(flat, bucket), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
        self.clip_gradients()
        self.optimizer_step()
        if is_second:
            for kept, parameter in zip(self.outer.theta, self.held, strict=True):
                kept.copy_(parameter)
            self.num_rounds += 1
            return
        self.first = mean
        if not mean[0].is_meta:  # without values there is nothing to undo
            self.optim.load_state_dict(before)

    @torch.no_grad()
    def load(self) -> None:
        """Set this rank's parameters to theta."""
        for kept, parameter in zip(self.outer.theta, self.held, strict=True):
            parameter.copy_(kept)

    def finish(self) -> None:
        """Update with the last average, if it completes a pair; continue from theta."""
        if (last := self.under_way.take()) is not None:
            mean = last.wait()
            if self.local_step % 2 == 0:
                self.begin_step(StepContext())  # what has arrived is not scaled
                self.arrived(mean, is_second=True)
            self.load()
