"""Optimizers beside torch's: Lion; and some that treat hidden matrices by one rule, all other parameters by AdamW."""

from __future__ import annotations

import re
from abc import ABC
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from exogym_core.strategy.options import number
from exogym_core.strategy.parts.flat import widened
from netsim.errors import InputError, about_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "DirectionsAndAdamW",
    "Lion",
    "MuLoCoMuon",
    "OfMatrices",
    "Together",
    "TorchMuon",
    "hidden_matrices",
    "orthogonalized",
    "split_by_shape",
]


class OfMatrices(ABC):  # noqa: B024
    """Declares an optimizer whose update of a value needs others of the same matrix, which shards would cut.

    Derive an optimizer of your own from it too, or register its class: `@OfMatrices.register`.
    """


for _each in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
    OfMatrices.register(_each)


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
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            with about_option(name):
                number("optimizer Lion", name, value)
        are_two = isinstance(betas, list | tuple) and len(betas) == 2
        if not are_two or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise InputError(
                f"optimizer Lion: betas={betas!r} must be two numbers from 0 up to but without 1, such as [0.9, 0.99]",
                about=("betas",),
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


#: Names of input and output matrices, which Muon leaves to AdamW.
_OUTSIDE = re.compile(
    r"(^|[._])(embed\w*|embeddings?|wte|wpe|tok\w*|lm_head|head|heads|output|router|gate)([._]|$)"
)

# Coefficients of five Newton-Schulz steps, one triple each.
_STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The trainable parameters with two dimensions, without embeddings, heads and routers (by type and by name)."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        p
        for name, p in model.named_parameters()
        if p.requires_grad
        and p.dim() == 2
        and p.numel()
        and id(p) not in embeddings
        and not _OUTSIDE.search(name)
    ]


def split_by_shape(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, `{"params": ..., "matrices": True or False}`; without the one that would be empty."""
    matrices = hidden_matrices(model)
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
    return [group for group in groups if group["params"]]


class Together(Optimizer):
    """Two optimizers as one: one for groups with `matrices`, one for the rest; all keep their state here.

    Args:
        params: groups as of `split_by_shape`.
        of_matrices, of_others: make the optimizers from groups.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        of_matrices: Callable[[list[Any]], Optimizer],
        of_others: Callable[[list[Any]], Optimizer],
    ) -> None:
        groups = list(params)
        self._optimizers = [
            make(chosen)
            for make, is_for_matrices in ((of_matrices, True), (of_others, False))
            if (chosen := [group for group in groups if group["matrices"] == is_for_matrices])
        ]
        super().__init__([group for optimizer in self._optimizers for group in optimizer.param_groups], {})
        self._link()

    def _link(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self._optimizers:
            optimizer.state = self.state
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with each optimizer."""
        for optimizer in self._optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of both optimizers."""
        super().load_state_dict(state_dict)
        self._link()


def orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, nearly: by five Newton-Schulz steps."""
    wide: Tensor = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for a, b, c in _STEPS:
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if len(matrix) <= matrix.shape[1] else wide.T


class _PapersMuon(Optimizer):
    """`m = mu m + g; w = w (1 - lr wd); w = w - lr sqrt(rows / columns) orthogonalized(m)`."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices with their orthogonalised momenta."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                direction = orthogonalized(widened(momentum))
                p.add_(direction.to(p.dtype), alpha=-group["lr"] * (p.shape[0] / p.shape[1]) ** 0.5)


@OfMatrices.register
class MuLoCoMuon(Together):
    """Muon as in MuLoCo's code for hidden matrices, AdamW for the rest.

    Without Nesterov; each of five Newton-Schulz steps has its own coefficients, computed in fp32 at least.

    Args:
        params: groups as of `split_by_shape`.
        lr: of both.
        momentum: mu.
        weight_decay: of both, decoupled.
        betas: AdamW's.

    References:
        The code of MuLoCo, arXiv 2505.23725 (facebookresearch/MuLoCo).
    """

    muon: type[Optimizer] = _PapersMuon

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(
            params,
            lambda groups: self.muon(groups, **options),
            lambda groups: AdamW(groups, lr, betas, weight_decay=weight_decay),
        )


class TorchMuon(MuLoCoMuon):
    """torch.optim.Muon for hidden matrices (Nesterov, one triple of coefficients, bf16), AdamW for the rest."""

    muon = torch.optim.Muon


class DirectionsAndAdamW(Together):
    """Takes gradients of hidden matrices for directions, with decoupled weight decay; AdamW for the rest.

    Args:
        params: groups as of `split_by_shape`.
        lr: of both.
        weight_decay: of both.
        betas: AdamW's.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.01,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__(
            params,
            lambda groups: torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay),
            lambda groups: AdamW(groups, lr=lr, weight_decay=weight_decay, betas=betas),
        )
