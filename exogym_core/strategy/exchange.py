"""Gradients exchanged by ranks in other forms than their plain mean."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Module
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.gradients import dense_gradient
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.chain import Chain, Scope

__all__ = ["GradientExchange", "refuse_sites"]


def refuse_sites(module: Module, scope: Scope) -> None:
    """Refuse to stand behind `Sites`.

    Raises:
        InputError: ranks of the chain form sites.
    """
    if scope.gradients is not None or scope.site.inside is not None:
        raise InputError(
            f"{type(module.strategy).__name__}: {type(module).__name__} brings single ranks together, not sites; "
            "leave Sites out"
        )


class GradientExchange(Module):
    """Once a step, after the backward pass: every gradient becomes what all ranks have made of theirs together.

    Gradients are weighed by samples; a parameter without one counts as zero. Under a GradScaler they are unscaled
    first, and what has overflowed on this rank counts as zero, so that no rank drops out.

    Attributes:
        work: the name of its coding in `compute.coding`.
    """

    work = ""

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Join a chain of single ranks.

        Raises:
            InputError: the chain has sites, or `compute.coding` has no speed for `work`.
        """
        super().enter(strategy, scope)
        refuse_sites(self, scope)
        self.spend("encode", 0)
        return scope

    @torch.no_grad()
    def before_update(self) -> None:
        """Exchange."""
        strategy, parameters = self.strategy, self.scope.parameters
        strategy.unscale_gradients()
        weight = strategy.context.weight
        gradients = [weight * _widened(dense_gradient(parameter)) for parameter in parameters]
        for parameter, gradient in zip(parameters, self.exchange(gradients), strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    @abstractmethod
    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the optimizer gets for `gradients`, which are this rank's, one a parameter, in fp32 at least."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by their means over ranks, as they are."""
        Averaging().tensors(self.comm, tensors)

    def spend(self, way: str, num_values: int) -> None:
        """The virtual time that coding so many values takes, `way` being "encode" or "decode"."""
        if self.strategy.coding is not None:
            self.comm.advance(self.strategy.coding.seconds(self.work, way, num_values))


def _widened(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
