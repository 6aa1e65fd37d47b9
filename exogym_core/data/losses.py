"""What a model must return for a batch: its mean loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from netsim.files.errors import InputError

__all__ = ["as_loss", "as_mean_loss"]


def as_mean_loss(output: Any, where: str) -> Tensor:
    """A model's output, which must be a scalar tensor; `where` begins the error's line."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        is_tensor = isinstance(output, Tensor)
        what = f"a tensor of shape {list(output.shape)}" if is_tensor else type(output).__name__
        raise InputError(
            f"{where}: the model returned {what}; it must return the batch's mean loss, a scalar tensor"
        )
    return output


def as_loss(output: Any, where: str) -> Tensor:
    """Likewise, with a gradient."""
    if isinstance(output, Tensor) and output.requires_grad and output.numel() == 1:
        return output
    as_mean_loss(output, where)
    raise InputError(f"{where}: the model returned a loss without a gradient; do not detach it")
