"""Attributes that a checkpoint keeps, by their names."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["kept_of", "restore"]


def kept_of(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Copies of these attributes: tensors, what has a `state_dict`, and plain values."""
    held = {name: getattr(owner, name) for name in names}
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else copy.deepcopy(value)
        for name, value in held.items()
    }


def restore(owner: object, kept: Mapping[str, Any]) -> None:
    """Give the attributes back what `kept_of` returned; tensors in place, as others may have views of them."""
    for name, saved in kept.items():
        held = getattr(owner, name)
        if isinstance(held, Tensor):
            held.copy_(saved)
        elif hasattr(held, "load_state_dict"):
            held.load_state_dict(saved)
        else:
            setattr(owner, name, copy.deepcopy(saved))
