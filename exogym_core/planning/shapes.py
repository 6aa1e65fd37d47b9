"""Cheaper ways to what plans need of a few of torch's operations: the shapes of what comes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["ShapesAlone", "arrive"]


class ShapesAlone(TorchFunctionMode):
    """Joins and copies of tensors without values are sized by hand, which takes a tenth of torch's own way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked."""
        if func is torch.cat and not kwargs and len(args) == 1 and _are_flat(args[0]):
            return _empty((sum(part.numel() for part in args[0]),), args[0][0])
        if func is torch.empty_like and not kwargs and args[0].is_meta and args[0].is_contiguous():
            return _empty(args[0].shape, args[0])
        return func(*args, **(kwargs or {}))


def _are_flat(parts: Sequence[Tensor]) -> bool:
    """Whether these have one dimension and one type, and no values."""
    return bool(parts) and all(
        [part.is_meta and part.dim() == 1 and part.dtype == parts[0].dtype for part in parts]  # noqa: C419 - twice as fast
    )


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def arrive(parameter: Tensor) -> None:
    """A gradient without values comes to a parameter, as if a backward pass had brought it."""
    if parameter._backward_hooks:  # what they do is torch's own affair
        torch.autograd.backward(parameter, torch.empty_like(parameter))
        return
    if parameter.grad is None:
        parameter.grad = _empty(parameter.shape, parameter)
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)
