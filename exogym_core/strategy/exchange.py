"""Gradients exchanged by ranks in other forms than their plain mean."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Module
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.gradients import dense_gradient
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from exogym_core.strategy.chain import Chain, Scope
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["GradientExchange", "plain_sgd", "refuse_sites"]


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


def plain_sgd(strategy: Chain, what: str) -> None:
    """Refuse an optimizer of torch's that would take `what`, a whole update already, for gradients.

    Raises:
        InputError: it is not SGD, or has momentum.
    """
    spec = strategy.optim_spec
    given = spec.cls if isinstance(spec.cls, type) else torch.optim.SGD
    if not issubclass(given, torch.optim.SGD) or spec.kwargs.get("momentum"):
        raise InputError(
            f"{type(strategy).__name__}: optim_spec={given.__name__} would take {what} for gradients, which is another "
            "algorithm; leave optim_spec out and write lr= (SGD without momentum applies them)"
        )


class GradientExchange(Module):
    """Once a step, after the backward pass: every gradient becomes what all ranks have made of theirs together.

    Gradients are weighed by samples; a parameter without one counts as zero. Under a GradScaler they are unscaled
    first, and what has overflowed on this rank counts as zero, so that no rank drops out.

    Attributes:
        work: the name of its coding in `compute.coding`.
        kept: names of the attributes, tensors or lists of tensors, that are kept between steps.
    """

    work = ""
    kept: tuple[str, ...] = ()

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

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps."""
        return {name: [tensor.clone() for tensor in self._kept(name)] for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        for name in self.kept:
            for tensor, saved in zip(self._kept(name), state[name], strict=True):
                tensor.copy_(saved)

    def _kept(self, name: str) -> Sequence[Tensor]:
        value: Tensor | Sequence[Tensor] = getattr(self, name)
        return [value] if isinstance(value, torch.Tensor) else value

    def zeros_like_gradients(self) -> list[Tensor]:
        """One tensor of zeros a parameter, in the dtype in which gradients are exchanged."""
        return [torch.zeros_like(_widened(parameter.detach())) for parameter in self.scope.parameters]

    def charged(self, codec: Codec) -> Codec:
        """`codec`, its work on the clock where that costs time."""
        return self.strategy.charged(codec)

    def spend(self, way: str, num_values: int) -> None:
        """The virtual time that coding so many values takes, `way` being "encode" or "decode"."""
        self.strategy.charge(self.work, way, num_values)


def _widened(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
