"""Tensors as c10d passes them, and as our collectives take them: reductions, dtypes, lists, splits, sparse sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator import Communicator
    from exogym_core.communicator.base import Delivery

__all__ = [
    "add_up_sparse",
    "even_splits",
    "fill",
    "op_of",
    "plain_form",
    "reducible",
    "write",
    "write_all",
]

_OPS = {op.upper(): op for op in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")}
_OPS["PREMUL_SUM"] = "sum"


def op_of(opts: Any) -> Any:
    """The reduction that c10d's options name; a sum where there are none."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def reducible(tensor: Tensor, op: Any) -> tuple[Tensor, str, Callable[[Tensor], Tensor] | None]:
    """A tensor that our collectives reduce, how, and the way back, if there is one.

    Raises:
        InputError: c10d's op has no meaning for the dtype.
    """
    plain = tensor.detach()
    if op == dist.ReduceOp.SUM and plain.dtype.is_floating_point:  # nearly always
        return plain, "sum", None
    state = op.__getstate__() if hasattr(op, "__getstate__") else (op, None)
    kind, factor = (state[0], state[1]) if isinstance(state, tuple) else (op, None)
    word = str(getattr(kind, "name", kind)).rsplit(".", maxsplit=1)[-1].upper()
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
    return plain, _OPS[word], None


def plain_form(tensor: Tensor) -> Tensor:
    """Values of a tensor in the form that is sent: contiguous, conjugation resolved."""
    return tensor.detach().resolve_conj().contiguous()


def write(into: Tensor, back: Callable[[Tensor], Tensor] | None = None) -> Delivery[None]:
    """Write the one received tensor, converted by `back`, if this member gets one."""

    def deliver(got: Sequence[Tensor]) -> None:
        if got:
            value = got[0] if back is None else back(got[0])
            into.detach().copy_(value.view_as(into) if value.shape != into.shape else value)

    return deliver


def write_all(into: Sequence[Tensor]) -> Delivery[None]:
    """Write received tensors into tensors of the same sizes."""

    def deliver(got: Sequence[Tensor]) -> None:
        for tensor, part in zip(into, got, strict=True):
            tensor.detach().copy_(part.view(tensor.dtype).view_as(tensor))

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
            place.copy_(part.view(-1))

    return deliver


def even_splits(tensor: Tensor, size: int, which: str) -> list[int]:
    """Equal splits of a tensor's first dimension; raises ValueError where it has none."""
    if tensor.shape[0] % size:
        raise ValueError(
            f"all_to_all_single: the {which}'s first dimension is {tensor.shape[0]}; give split sizes, or a multiple "
            f"of the world size {size}"
        )
    return [tensor.shape[0] // size] * size


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
