"""Tensors as c10d hands them over, and as our collectives take them: reductions, dtypes, lists and splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["copy_all", "even_splits", "fill", "first_of", "op_of", "plain_form", "reducible"]

_OPS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "sum",
}


def op_of(opts: Any) -> Any:
    """The reduction that c10d's options name; a sum where there are none."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def reducible(tensor: Tensor, op: Any) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
    """A tensor that our collectives reduce, how, and the way back.

    Raises:
        InputError: c10d's op has no meaning for the dtype.
    """
    state = op.__getstate__() if hasattr(op, "__getstate__") else (op, None)
    kind, factor = (state[0], state[1]) if isinstance(state, tuple) else (op, None)
    word = str(getattr(kind, "name", kind)).rsplit(".", maxsplit=1)[-1].upper()
    plain = tensor.detach()
    if word not in _OPS:
        word = next((name for name in _OPS if op == getattr(dist.ReduceOp, name, None)), word)
    if word not in _OPS:
        raise InputError(f"netsim: no reduction {op!r}")
    if factor is not None:
        plain = plain * factor
    if plain.is_complex():
        if _OPS[word] not in ("sum", "avg"):
            raise InputError(f"netsim: {word} of {tensor.dtype} has no meaning; use SUM or AVG")
        return torch.view_as_real(plain).contiguous(), _OPS[word], torch.view_as_complex
    if plain.dtype == torch.bool:
        name = "max" if _OPS[word] in ("sum", "max", "bor") else "min"
        name = "bxor" if word == "BXOR" else name
        return plain.to(torch.uint8), name, lambda value: value.to(torch.bool)
    return plain, _OPS[word], lambda value: value


def plain_form(tensor: Tensor) -> Tensor:
    """What travels: the tensor's values without its sparse or conjugate form."""
    return tensor.detach().resolve_conj().contiguous()


def first_of(like: Tensor) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """What has come, or on members that get nothing their own."""
    return lambda got: got[0].clone() if got else like.detach()


def copy_all(into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Write what has come into tensors of the same sizes, one for each."""
    for tensor, part in zip(into, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.dtype).view_as(tensor))


def fill(output: Tensor, parts: Sequence[Tensor]) -> None:
    """Write parts one after the other into one tensor."""
    flat = output.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat
    gathered = torch.cat([part.reshape(-1) for part in parts])
    flat.copy_(gathered.view_as(flat))


def even_splits(tensor: Tensor, size: int, which: str) -> list[int]:
    """Equal splits of a tensor's first dimension; raises ValueError where it has none."""
    if tensor.shape[0] % size:
        raise ValueError(
            f"all_to_all_single: the {which}'s first dimension is {tensor.shape[0]}; give split sizes, or a multiple "
            f"of the world size {size}"
        )
    return [tensor.shape[0] // size] * size
