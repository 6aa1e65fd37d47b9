"""Tensors as c10d passes them, and as our collectives take them: reductions, dtypes, lists, splits, sparse sums."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from exogym_core.communicator.exchange import copy_values, reduce_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator import Communicator
    from exogym_core.communicator.base import Delivery
    from exogym_core.communicator.exchange import Empty

__all__ = [
    "add_up_sparse",
    "fill",
    "op_of",
    "plain_form",
    "reduce_as_gloo",
    "reducible",
    "refusal_of_gloo",
    "split_rows",
    "write",
    "write_all",
]

_WORDS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def op_of(opts: Any) -> Any:
    """The reduction that c10d's options name; a sum where there are none."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


# What gloo sends in collectives. Its messages may be of any dtype.
_OF_GLOO = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
}


def refusal_of_gloo(name: str, tensor: Tensor, op: Any = None) -> RuntimeError | None:
    """Error that gloo raises for a tensor in collective `name`, with reduction `op`; None where it takes it."""
    dtype, word = tensor.dtype, "" if op is None else word_of(op)
    if dtype not in _OF_GLOO or (name == "gather" and dtype.is_complex):
        return RuntimeError(f"{name} of {dtype}: Invalid scalar type")
    if word == "PREMUL_SUM":
        return RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")
    if dtype.is_complex and word not in ("", "SUM", "AVG"):
        return RuntimeError(f"{name} does not support {word} on complex tensors")
    if word in ("BAND", "BOR", "BXOR") and dtype.is_floating_point:
        return RuntimeError(f"Cannot use ReduceOp.{word} with non-integral dtype {dtype}")
    if word == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
        return RuntimeError(f"AVG: result type Float can't be cast to the desired output type {dtype}")
    if word == "AVG" and dtype == torch.complex32 and name != "all_reduce":
        return NotImplementedError("AVG: \"div_cpu\" not implemented for 'ComplexHalf'")
    return None


def word_of(op: Any) -> str:
    """Name of a reduction of c10d, such as SUM; "" of one that is not there."""
    return next((word for word in _WORDS if op == getattr(dist.ReduceOp, word)), "")


def reducible(tensor: Tensor, op: Any) -> tuple[Tensor, str, Callable[[Tensor], Tensor] | None]:
    """A tensor that our collectives reduce, how, and the way back, if there is one.

    Raises:
        RuntimeError: c10d's op has no meaning for the dtype.
    """
    plain = tensor.detach()
    if op == dist.ReduceOp.SUM and plain.dtype in (torch.float32, torch.bfloat16):  # nearly always
        return plain, "sum", None
    if not (word := word_of(op)):
        raise RuntimeError(f"netsim: no reduction {op!r}")
    name = word.lower()
    if word == "PREMUL_SUM":
        plain, name = plain * op.__getstate__()[1], "sum"
    back: Callable[[Tensor], Tensor] | None = None
    if plain.is_complex() and name in ("sum", "avg"):
        plain, back = torch.view_as_real(plain.resolve_conj()).contiguous(), torch.view_as_complex
    elif plain.dtype == torch.bool and name != "avg":
        name = name if name == "bxor" else "max" if name in ("sum", "max", "bor") else "min"
        plain, back = plain.to(torch.uint8), lambda value: value.to(torch.bool)
    if why := _why_unable(plain.dtype, name):
        raise RuntimeError(f"netsim: {word} of {tensor.dtype} has no meaning: {why}")
    return plain, name, back


@functools.cache
def _why_unable(dtype: torch.dtype, name: str) -> str:
    """Reason why torch cannot reduce values of this dtype; "" where it can."""
    try:
        reduce_tensors([torch.ones(1, dtype=dtype)] * 2, name)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


_SEGMENT_BYTES = 1 << 20


def reduce_as_gloo(tensors: Sequence[Tensor], op: str, empty: Empty | None = None) -> Tensor:
    """`reduce_tensors`; minima and maxima of NaN, and of zeros of both signs, are those that gloo's ring keeps.

    Rank r reduces the r-th chunk, in which values come to it from rank r - 1 down around the ring, and each rank keeps
    its own value unless the received one compares as smaller, or larger.
    """
    result = reduce_tensors(tensors, op, empty)
    if op not in ("min", "max") or not result.is_floating_point() or not result.numel():
        return result
    num_ranks, num_bytes = len(tensors), result.nbytes
    per_rank = -(-max(-(-num_bytes // _SEGMENT_BYTES), 2 * num_ranks) // num_ranks)  # segments
    length = -(-num_bytes // (per_rank * num_ranks) // result.element_size()) * per_rank
    chunks = zip(*(torch.split(tensor.reshape(-1), length) for tensor in tensors), strict=True)
    is_better = torch.lt if op == "min" else torch.gt
    for rank, (into, chunk) in enumerate(zip(torch.split(result.view(-1), length), chunks, strict=True)):
        kept = chunk[rank - 1]
        for own in (chunk[(rank - back) % num_ranks] for back in range(2, num_ranks + 1)):
            kept = torch.where(is_better(kept, own), kept, own)
        into.copy_(kept)
    return result


def plain_form(tensor: Tensor) -> Tensor:
    """Values of a tensor in the form that is sent: contiguous, conjugation resolved."""
    return tensor.detach().resolve_conj().contiguous()


def write(into: Tensor, back: Callable[[Tensor], Tensor] | None = None) -> Delivery[None]:
    """Write the one received tensor, converted by `back`, if this member gets one."""

    def deliver(got: Sequence[Tensor]) -> None:
        if got:
            value = got[0] if back is None else back(got[0])
            copy_values(into.detach(), value.view_as(into) if value.shape != into.shape else value)

    return deliver


def write_all(into: Sequence[Tensor]) -> Delivery[None]:
    """Write received tensors into tensors of the same sizes."""

    def deliver(got: Sequence[Tensor]) -> None:
        for tensor, part in zip(into, got, strict=True):
            copy_values(tensor.detach(), part.view(tensor.dtype).view_as(tensor))

    return deliver


def fill(output: Tensor) -> Delivery[None]:
    """Write parts one after the other into one tensor."""

    def deliver(got: Sequence[Tensor]) -> None:
        flat = output.detach()
        if not flat.is_contiguous():
            flat.copy_(torch.cat([part.reshape(-1) for part in got]).view_as(flat))
            return
        places = torch.split(flat.view(-1), [part.numel() for part in got])
        for place, part in zip(places, got, strict=True):
            copy_values(place, part.view(-1))

    return deliver


def split_rows(tensor: Tensor, sizes: Sequence[int] | None, num_ranks: int, which: str) -> Sequence[Tensor]:
    """Parts of a tensor's first dimension, one a rank; without sizes they are equal.

    Raises:
        RuntimeError: there are no such parts.
    """
    whole = tensor.shape[0] if tensor.dim() else 0
    if not sizes and (whole % num_ranks or not tensor.dim()):
        raise RuntimeError(
            f"all_to_all_single: the {which}'s first dimension is {whole}; give split sizes, or a multiple of the "
            f"world size {num_ranks}"
        )
    parts = list(sizes or [whole // num_ranks] * num_ranks)
    if len(parts) != num_ranks or sum(parts) != whole or min(parts) < 0:
        raise RuntimeError(
            f"all_to_all_single: split sizes {parts} of the {which} must be one for each of {num_ranks} ranks, and add "
            f"up to its first dimension, {whole}"
        )
    return torch.split(tensor.detach(), parts)


def add_up_sparse(comm: Communicator, tensor: Tensor) -> Tensor:
    """The sum over ranks of sparse tensors of one shape, with any numbers of elements.

    Each rank sends as many elements as the fullest one has.
    """
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    counts = [int(count) for count in comm.all_gather(torch.tensor([values.shape[0]]))]
    most = max(counts)
    all_indices = comm.all_gather(_padded(indices.t(), most))
    all_values = comm.all_gather(_padded(values, most))
    parts = zip(all_indices, all_values, counts, strict=True)
    kept = [(index[:count], value[:count]) for index, value, count in parts]
    index = torch.cat([index for index, _ in kept]).t()
    return torch.sparse_coo_tensor(index, torch.cat([value for _, value in kept]), own.shape).coalesce()


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))]).contiguous()
