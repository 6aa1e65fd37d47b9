"""The checks of arguments that are one tensor a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator

__all__ = ["gathered_tensor", "parts_of", "scatter_parts"]


def parts_of(comm: Communicator, call: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor a rank, from a list or by cutting one tensor along its first dimension.

    Raises:
        InputError: no tensors, not one a rank, not equal parts, or not one dtype.
    """
    size = comm.world_size
    if not isinstance(tensors, Tensor):
        if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
            got = type(tensors).__name__
            raise comm._wrong(call, f"takes a tensor, or a list of one a rank, got {got}")
        comm._check_tensors(f"{call}: each of the list", tensors)
        if len(tensors) != size:
            raise comm._wrong(call, f"{len(tensors)} tensors given, not one for each of {size} ranks")
        if len({part.dtype for part in tensors}) > 1:
            raise comm._wrong(call, "the tensors have several dtypes; give one dtype")
        return list(tensors)
    if tensors.dim() == 0 or tensors.shape[0] % size:
        raise comm._wrong(
            call,
            f"a tensor of shape {list(tensors.shape)} cannot be cut into {size} equal parts along its "
            "first dimension; pad it or give a list",
        )
    return list(tensors.chunk(size)) if len(tensors) else [tensors] * size


def scatter_parts(comm: Communicator, tensor: Tensor, given: Sequence[Tensor] | None) -> list[Tensor]:
    """The source's `scatter_list`, checked against its `tensor`.

    Raises:
        InputError: not one a rank, or not like `tensor`.
    """
    parts = parts_of(comm, "scatter", given if given is not None else [])
    for part in parts:
        if part.shape != tensor.shape or part.dtype != tensor.dtype:
            raise comm._wrong(
                "scatter",
                f"scatter_list has {part.dtype}{list(part.shape)}, tensor is "
                f"{tensor.dtype}{list(tensor.shape)}; make them equal",
            )
    return parts


def gathered_tensor(comm: Communicator, tensor: object) -> Tensor:
    """What a rank gives to `all_gather`, where torch's function takes the list for the results first.

    Raises:
        InputError: it is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise comm._wrong(
            "all_gather",
            f"takes a tensor, got {type(tensor).__name__}; write tensors = comm.all_gather(tensor), which returns "
            "the list",
        )
    return tensor
