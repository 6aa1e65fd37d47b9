"""Values of collectives, reduced once, in rank order.

Half precision is accumulated in fp32 and rounded once, at the end: a sum of 300 ones is no 300 in bfloat16, which
stops counting at 256, and 64 values of 2000 are no mean in fp16, whose largest number is 65504.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Combine", "Empty", "Outcome", "accumulator_dtype", "combine", "own_value", "reduce_tensors"]


@dataclass(frozen=True)
class Outcome:
    """Values for members: `shared` goes to everyone, `own[member]` to that member alone (instead)."""

    shared: tuple[Tensor, ...] = ()
    own: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def of(self, member: int) -> tuple[Tensor, ...]:
        """The tensors for one member; they belong to the exchange, so take copies."""
        return self.own.get(member, self.shared)


Combine = Callable[[str, Sequence[Sequence[Any]], str, int], Outcome]
"""(name, every member's input tensors, reduce op, root) -> what members get."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums of `dtype`: fp32 for halves, its own for all others."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes the tensor, of this shape and dtype, that a result is written into."""

# Results are found piece by piece, so that what is added up stays in a processor's cache.
_PIECE = 1 << 18


def reduce_tensors(tensors: Sequence[Tensor], op: str, empty: Empty | None = None) -> Tensor:
    """((t0 op t1) op t2) ..., so that the bits depend on the rank order alone.

    `op` is one of `sum avg product min max`, or of integers `band bor bxor`. With `empty`, the result is in what that
    makes.
    """
    first = tensors[0]
    into = empty(first.shape, first.dtype) if empty is not None else None
    if first.numel() <= _PIECE or not all(tensor.is_contiguous() and tensor.is_cpu for tensor in tensors):
        return _reduced(tensors, op, into)
    result = torch.empty(first.shape, dtype=first.dtype) if into is None else into
    flat, lines = result.view(-1), [tensor.view(-1) for tensor in tensors]
    for begin in range(0, flat.numel(), _PIECE):
        piece = slice(begin, begin + _PIECE)
        _reduced([line[piece] for line in lines], op, flat[piece])
    return result


def _reduced(tensors: Sequence[Tensor], op: str, into: Tensor | None = None) -> Tensor:
    """The reduction of whole tensors, in `into` if it is given."""
    dtype = tensors[0].dtype
    if into is not None and accumulator_dtype(dtype) == dtype:
        result = into.copy_(tensors[0])
    else:
        result = tensors[0].to(accumulator_dtype(dtype), copy=True)
    for tensor in tensors[1:]:
        if op in ("sum", "avg"):
            result.add_(tensor)
        elif op == "product":
            result.mul_(tensor)
        elif op in _BITWISE:
            _BITWISE[op](result, tensor, out=result)
        elif op == "min":
            torch.minimum(result, tensor.to(result.dtype), out=result)
        else:
            torch.maximum(result, tensor.to(result.dtype), out=result)
    if op == "avg":
        result.div_(len(tensors))
    if into is None:
        return result.to(dtype)
    return into if result is into else into.copy_(result)


def combine(
    name: str, inputs: Sequence[Sequence[Tensor]], reduce_op: str, root: int, empty: Empty | None = None
) -> Outcome:
    """The outcome of collective `name` over every member's input tensors, in member order.

    `reduce_scatter`, `scatter` (root only) and `all_to_all` take one tensor a member; the rest take one.
    `message` is member 0's tensor for member 1.
    """
    firsts = [tensors[0] for tensors in inputs if tensors]
    match name:
        case "all_reduce":
            return Outcome(shared=(reduce_tensors(firsts, reduce_op, empty),))
        case "reduce":
            return Outcome(own={root: (reduce_tensors(firsts, reduce_op, empty),)})
        case "broadcast":
            return Outcome(shared=(inputs[root][0],))
        case "all_gather":
            return Outcome(shared=tuple(firsts))
        case "gather":
            return Outcome(own={root: tuple(firsts)})
        case "scatter":
            return Outcome(own={member: (part,) for member, part in enumerate(inputs[root])})
        case "reduce_scatter":
            parts = zip(*inputs, strict=True)
            return Outcome(
                own={member: (reduce_tensors(part, reduce_op, empty),) for member, part in enumerate(parts)}
            )
        case "all_to_all":
            return Outcome(own=dict(enumerate(zip(*inputs, strict=True))))
        case "sendrecv":
            return Outcome(own={1: (inputs[0][0],)})
        case "barrier":
            return Outcome()
    raise AssertionError(f"no collective is called {name}")


def own_value(name: str, tensors: Sequence[Any], member: int, root: int, size: int) -> tuple[Any, ...]:
    """Value of a member that needs no other (`netsim.ranks.needs_nobody`), from its own inputs."""
    match name:
        case "scatter" | "reduce_scatter":
            return tuple(tensors[member : member + 1])
        case "all_gather":
            return tuple(tensors) * size
        case "gather":
            return tuple(tensors) * size if member == root else ()
        case "reduce":
            return tuple(tensors) if member == root else ()
    return tuple(tensors)
