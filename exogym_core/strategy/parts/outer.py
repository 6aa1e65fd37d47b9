"""The outer step of local-update methods: the mean displacement as a gradient of a second optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.flat import flatten, plan_buckets, unflatten, write_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.options.optim import OptimSpec
    from exogym_core.strategy.sites.site import Workers

__all__ = ["OuterStep"]


class OuterStep:
    """The global parameters `theta` and the optimizer that moves them, kept alike by every rank.

    `round` averages the pseudo-gradients `theta - theta_i` over the workers (DiLoCo, arXiv 2311.08105,
    algorithm 1, line 12), updates `theta` with them and sets every replica to it. No rank is special, and
    nothing but the pseudo-gradients travels. With one worker it is the same without a message. Every rank
    holds the whole of `theta` and of the optimizer's state, also where a worker has several ranks.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optim_spec: OptimSpec, averaging: Averaging | None = None
    ) -> None:
        self.averaging = averaging if averaging is not None else Averaging()
        self.buckets = [[parameters[index] for index in bucket] for bucket in plan_buckets(parameters)]
        self.flats = [flatten(bucket) for bucket in self.buckets]
        # The optimizer sees parameters in their shapes, which are views of the flat copies.
        views = zip(self.flats, self.buckets, strict=True)
        self.anchors = [[nn.Parameter(view) for view in unflatten(flat, like)] for flat, like in views]
        rounds_off = self.averaging.error_feedback
        self.residuals: list[Tensor | None] = [
            torch.zeros_like(flat) if rounds_off else None for flat in self.flats
        ]
        self.optim = optim_spec.build([anchor for bucket in self.anchors for anchor in bucket])
        self._anchor_of = {
            id(parameter): anchor
            for bucket, anchors in zip(self.buckets, self.anchors, strict=True)
            for parameter, anchor in zip(bucket, anchors, strict=True)
        }

    def theta(self, parameter: Tensor) -> Tensor:
        """The global values of one of `parameters`, a view."""
        return self._anchor_of[id(parameter)].detach()

    @torch.no_grad()
    def round(self, workers: Workers | None) -> None:
        """End a round: average, update, and set this rank's parameters to the result. None: a rank alone."""
        gradients = self._pseudo_gradients()
        if workers is not None:
            for gradient, residual in zip(gradients, self.residuals, strict=True):
                workers.average(self.averaging, gradient, residual)
        self.apply(gradients)

    @torch.no_grad()
    def averaged(self, comm: Communicator, residuals: Sequence[Tensor | None]) -> list[Tensor]:
        """The mean pseudo-gradients over the ranks of `comm`, flat; changes nothing but `residuals`."""
        gradients = self._pseudo_gradients()
        for gradient, residual in zip(gradients, residuals, strict=True):
            self.averaging.flat(comm, gradient, residual)
        return gradients

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Update the global parameters with flat gradients, and set this rank's parameters to the result."""
        for flat, anchors in zip(gradients, self.anchors, strict=True):
            for anchor, gradient in zip(anchors, unflatten(flat, anchors), strict=True):
                anchor.grad = gradient
        self.optim.step()
        self.optim.zero_grad()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set this rank's parameters to the global ones."""
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            write_back(flat, bucket)

    def _pseudo_gradients(self) -> list[Tensor]:
        return [flat - flatten(bucket) for flat, bucket in zip(self.flats, self.buckets, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The global parameters, the optimizer's state, and what encoding has rounded off."""
        return {
            "theta": [flat.clone() for flat in self.flats],
            "optim": self.optim.state_dict(),
            "residuals": [residual.clone() for residual in self.residuals if residual is not None],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for flat, saved in zip(self.flats, state["theta"], strict=True):
            flat.copy_(saved)
        self.optim.load_state_dict(state["optim"])
        for residual, saved in zip(self.residuals, state["residuals"], strict=False):
            if residual is not None:
                residual.copy_(saved)
