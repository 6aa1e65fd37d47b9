"""The learner of plans: gradients have shapes and cost time, and no data are touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.context import StepContext

__all__ = ["PlannedLearner"]

_FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


class PlannedLearner:
    """Leaves a gradient without values in every parameter, and moves the rank's clock by a step's computing.

    Where the strategy sends gradients while the backward pass goes on, each parameter's gradient comes when
    its share of that pass is done, the last parameters' first.

    Args:
        model: on the meta device.
        comm: the rank's.
        strategy: its own, set up.
        seconds: of computing, by 0-based step.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, strategy: Strategy, seconds: Callable[[int], float]
    ) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self._comm, self._strategy, self._seconds = comm, strategy, seconds
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = sum(parameter.numel() for parameter in self._parameters) or 1

    def gradients(self, step: None, context: StepContext) -> float:
        """Forward and backward pass of the step that `context` numbers; there is no loss."""
        seconds = self._seconds(context.number)
        self._strategy.before_backward(last_micro_batch=True)
        if not self._strategy.overlaps_backward:
            self._comm.advance(seconds)
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            return math.nan
        self._comm.advance(seconds * _FORWARD_SHARE)
        backward = seconds * (1 - _FORWARD_SHARE)
        for parameter in reversed(self._parameters):
            self._comm.advance(backward * parameter.numel() / self._total)
            # The pass of this parameter alone: it sets the gradient and runs the hooks that wait for it.
            torch.autograd.backward(parameter, torch.empty_like(parameter))
        return math.nan

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a plan is made at once."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    def close(self) -> None:
        """There is nothing to let go of."""
