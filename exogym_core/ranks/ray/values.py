"""Tensors in Ray's object store: put by who has them, reduced piece by piece at an owner, fetched by who wants them.

The process of the simulation handles references; only small tensors pass through it. Reductions go in rank order
within each piece, so the bits are those that one process gets from whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exogym_core.communicator.values import Outcome, combine, reduce_tensors
from exogym_core.ranks.processes.arena import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.ranks.processes.arena import Block

__all__ = ["FarTensor", "ObjectStore", "combined_far", "fetched", "reduced_piece"]

_INLINE_BYTES = 1 << 16  # below this a copy by way of the simulation is cheaper than the store
_PIECE_BYTES = 1 << 18  # at least, where a tensor is cut for several owners


@dataclass(frozen=True)
class FarTensor:
    """A tensor whose values are elsewhere: in pieces of its flattened elements, each an object of the store.

    It stands where the exchange of values has tensors, and is never changed.
    """

    pieces: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def clone(self) -> FarTensor:
        """This: nobody can change it."""
        return self


class ObjectStore:
    """One side's way to tensors of the other, as `Arena` is within one machine; nothing needs to be freed by hand.

    Args:
        ray: the module.
        num_owners: into how many pieces a large tensor is cut at most.
    """

    def __init__(self, ray: Any, num_owners: int) -> None:
        self._ray, self._num_owners = ray, num_owners

    def put(self, tensor: Tensor | FarTensor) -> TensorRef:
        """Where the other side can read it from."""
        if isinstance(tensor, FarTensor):
            return TensorRef(tensor, tensor.nbytes, tensor.shape, tensor.dtype)  # type: ignore[arg-type]
        shape, num_bytes = tuple(tensor.shape), tensor.nbytes
        flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        if num_bytes <= _INLINE_BYTES:
            content: Any = flat.view(torch.uint8).numpy().tobytes()
        else:
            num_pieces = min(self._num_owners, -(-num_bytes // _PIECE_BYTES))
            pieces = [self._ray.put(piece.view(torch.uint8).numpy()) for piece in flat.chunk(num_pieces)]
            content = FarTensor(tuple(pieces), shape, tensor.dtype)
        return TensorRef(content, num_bytes, shape, tensor.dtype)

    def get(self, ref: TensorRef) -> Tensor:
        """The tensor behind `ref`."""
        content: Any = ref.content
        if isinstance(content, FarTensor):
            return fetched(self._ray, content)
        return _tensor(np.frombuffer(bytearray(content), dtype=np.uint8), ref.dtype, ref.shape)

    def reference(self, ref: TensorRef) -> Any:
        """The tensor behind `ref`, left where it is if it is large."""
        content: Any = ref.content
        return content if isinstance(content, FarTensor) else self.get(ref)

    def free(self, blocks: Sequence[Block]) -> None:
        """Nothing: an object goes when nobody has a reference any more."""

    def owner(self, block: Block) -> int:
        """There are no blocks."""
        raise AssertionError(block)


def fetched(ray: Any, tensor: Any) -> Tensor:
    """The values of a far tensor; any other as it is."""
    if not isinstance(tensor, FarTensor):
        return tensor  # type: ignore[no-any-return]
    return _tensor(np.concatenate(ray.get(list(tensor.pieces))), tensor.dtype, tensor.shape)


def reduced_piece(ray: Any, pieces: Sequence[Any], dtype: torch.dtype, op: str) -> Any:
    """One piece of every member reduced in their order, at whoever calls."""
    parts = [_tensor(np.array(raw), dtype, (-1,)) for raw in ray.get(list(pieces))]
    return reduce_tensors(parts, op).view(torch.uint8).numpy()


def combined_far(
    reduce_at: Callable[[int, Sequence[Any], torch.dtype, str], Any],
) -> Callable[[str, Sequence[Sequence[Any]], str, int], Outcome]:
    """What stands for `exogym_core.communicator.values:combine`, reductions of far tensors done by their owners.

    Args:
        reduce_at: (number of a piece, that piece of every member, dtype, op) -> a reference to the reduced piece.
    """

    def reduced(tensors: Sequence[Any], op: str, first_owner: int = 0) -> Any:
        if not isinstance(tensors[0], FarTensor):
            return reduce_tensors(tensors, op)
        head = tensors[0]
        pieces = [
            reduce_at(first_owner + number, each, head.dtype, op)
            for number, each in enumerate(zip(*(tensor.pieces for tensor in tensors), strict=True))
        ]
        return FarTensor(tuple(pieces), head.shape, head.dtype)

    def far(name: str, inputs: Sequence[Sequence[Any]], reduce_op: str, root: int) -> Outcome:
        if name in ("all_reduce", "reduce"):
            total = reduced([tensors[0] for tensors in inputs if tensors], reduce_op)
            return Outcome(shared=(total,)) if name == "all_reduce" else Outcome(own={root: (total,)})
        if name == "reduce_scatter":
            parts = enumerate(zip(*inputs, strict=True))
            return Outcome(own={member: (reduced(part, reduce_op, member),) for member, part in parts})
        return combine(name, inputs, reduce_op, root)  # hands on what it is given

    return far


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw.size:
        return torch.empty([max(size, 0) for size in shape], dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(shape)
