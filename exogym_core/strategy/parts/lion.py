"""Lion: steps of equal size along the sign of an interpolated momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from exogym_core.strategy.options import number
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2), with decoupled weight decay.

    A step is theta -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay theta), then m = beta2 m + (1 - beta2) g: one
    state value a parameter, as of SGD with momentum. The sign of zero is zero.

    Args:
        params: parameters or groups.
        lr: learning rate; the paper takes a third to a tenth of AdamW's.
        betas: weights of the momentum in the step and in its update, from 0 up to but without 1.
        weight_decay: at least 0; the paper takes 3 to 10 times AdamW's.

    Raises:
        InputError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        number("optimizer Lion", "lr", lr)
        number("optimizer Lion", "weight_decay", weight_decay)
        are_two = isinstance(betas, list | tuple) and len(betas) == 2
        if not are_two or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise InputError(
                f"optimizer Lion: betas={betas!r} must be two numbers from 0 up to but without 1, such as [0.9, 0.99]"
            )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the loss of `closure`, if given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            step_weight, kept = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum"], parameter.grad
                direction = torch.lerp(gradient, momentum, step_weight).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - kept)
        return loss
