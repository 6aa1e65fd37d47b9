"""The learner of plans: gradients have shapes and cost time, and no data are touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.planning.shapes import arrive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.context import StepContext

__all__ = ["PlannedLearner"]

_FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


class PlannedLearner:
    """Leaves a gradient without values in every parameter, and tells of a step's computing.

    Where the strategy sends gradients while the backward pass goes on, each parameter's gradient comes when
    its share of that pass is done, the last parameters' first.

    Args:
        model: on the meta device.
        strategy: its own, set up.
        computing: told (step, share) of what is computed, as it is: all of a 0-based step is a share of 1.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, computing: Callable[[int, float], None]) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self._strategy, self._computing = strategy, computing
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = sum(parameter.numel() for parameter in self._parameters) or 1

    def gradients(self, step: None, context: StepContext) -> float:
        """Forward and backward pass of the step that `context` numbers; there is no loss."""
        context.last_micro_batch = True
        self._strategy.before_backward(last_micro_batch=True)
        if not self._strategy.overlaps_backward:
            self._computing(context.number, 1.0)
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            return math.nan
        self._computing(context.number, _FORWARD_SHARE)
        backward = 1 - _FORWARD_SHARE
        for parameter in reversed(self._parameters):
            self._computing(context.number, backward * parameter.numel() / self._total)
            arrive(parameter)
        return math.nan

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a plan is made at once."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    def close(self) -> None:
        """There is nothing to let go of."""
