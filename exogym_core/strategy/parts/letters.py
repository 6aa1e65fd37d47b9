"""Flat tensors with a few numbers behind them, as strategies put them into mailboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["opened", "sealed"]


class _WithoutValues(Tensor):
    """A letter on the meta device: a shape, and the numbers behind it, which steer who gets it."""

    numbers: tuple[float, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As for any tensor; copies, as communicators make them, keep the numbers."""
        made = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if func in (Tensor.clone, Tensor.detach):
            made.numbers = args[0].numbers
        return made


def sealed(flat: Tensor, *numbers: float) -> Tensor:
    """`flat` (1-D, floating) with `numbers` behind, in its dtype.

    Without values the numbers are kept beside, so that plans go where training would.

    >>> sealed(torch.zeros(2), 3, 0.5).tolist(), opened(sealed(torch.zeros(2, device="meta"), 3, 0.5), 2)[1]
    ([0.0, 0.0, 3.0, 0.5], [3.0, 0.5])
    """
    behind = torch.tensor(numbers, dtype=flat.dtype, device="cpu" if flat.is_meta else flat.device)
    if not flat.is_meta:
        return torch.cat([flat, behind])
    letter = flat.new_empty(len(flat) + len(numbers)).as_subclass(_WithoutValues)
    letter.numbers = tuple(behind.tolist())  # rounded as they would be
    return letter


def opened(letter: Tensor, count: int) -> tuple[Tensor, list[float]]:
    """The flat tensor of a letter, and the last `count` numbers behind it."""
    if isinstance(letter, _WithoutValues):
        return letter.as_subclass(Tensor)[:-count], list(letter.numbers[-count:])
    return letter[:-count], letter[-count:].tolist()
