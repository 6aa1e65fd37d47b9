"""Checks of arguments that are wrong by themselves, the same on every transport."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym_core.communicator.exchange import caller
from netsim.errors import InputError, UnknownNameError, unknown_name

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator

__all__ = ["CheckedArguments", "parts_of", "reduce_op_name", "scatter_parts"]

_OPS = ("sum", "avg", "min", "max", "product")

# Names in other libraries.
_ELSEWHERE = {
    "mean": "avg",
    "average": "avg",
    "add": "sum",
    "plus": "sum",
    "total": "sum",
    "minimum": "min",
    "maximum": "max",
    "prod": "product",
    "mul": "product",
    "multiply": "product",
}

# Those that torch can add up.
_REDUCIBLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


# Those that write into what they are given.
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "scatter", "recv", "average_present")


def reduce_op_name(op: object) -> str:
    """Name of a reduction (`sum avg min max product`), from a string or a `torch.distributed.ReduceOp`.

    Raises:
        UnknownNameError: `op` is none of them.

    >>> reduce_op_name("SUM"), reduce_op_name(torch.distributed.ReduceOp.AVG)
    ('sum', 'avg')
    """
    if type(op) is str and op in _OPS:
        return op
    text = op if isinstance(op, str) else str(op).rsplit(".", maxsplit=1)[-1].strip("<>: 0123456789")
    name = text.lower()
    kinds = torch.distributed.ReduceOp
    if isinstance(op, kinds):  # an object's text is its address
        name = next((known for known in _OPS if op == getattr(kinds, known.upper())), name)
    if name not in _OPS:
        raise unknown_name("reduce op", text, _OPS, _ELSEWHERE.get(name, ""))
    return name


class CheckedArguments:
    """The checks that communicators share.

    Attributes:
        rank: of the communicator, in its group.
        world_size: number of the group's members.
        transport: carrier of its tensors.
    """

    rank: int
    world_size: int
    transport: str

    def _check_rank(self, call: str, name: str, rank: int) -> int:
        """`rank` if it is a member's; `call` and `name` are for the error."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            raise self._wrong(call, f"{name}={rank!r} is not a rank; use 0 to {self.world_size - 1}")
        return rank

    def _check_peer(self, call: str, name: str, rank: int, tensor: object) -> None:
        """Refuse what is no member's rank, and what `_check_tensors` refuses."""
        self._check_rank(call, name, rank)
        self._check_tensors(call, [tensor])

    def _check_members(self, ranks: Sequence[int]) -> list[int]:
        """The members of a new group."""
        members = [self._check_rank("group", "ranks", rank) for rank in ranks]
        if self.rank not in members or len(set(members)) != len(members):
            raise self._wrong("group", f"{members} must name this rank, and each rank once")
        return members

    def _check_wait(self, wait: float) -> None:
        if not wait >= 0:
            raise InputError(f"rank {self.rank}, take: wait={wait!r}; give seconds from 0 up, or math.inf")

    def _check_tensors(self, call: str, given: Sequence[object]) -> None:
        """Refuse what is no tensor, and one that cannot be written where the call does so."""
        for each in given:
            if not isinstance(each, Tensor):
                # torch's all_gather takes the list for the results first
                hint = "; write tensors = comm.all_gather(tensor), which returns the list"
                got = type(each).__name__ + (hint if call == "all_gather" else "")
                raise self._wrong(call, f"takes a tensor, got {got}")
            if call not in _IN_PLACE or each.layout != torch.strided or each.is_contiguous():
                continue
            if any(size > 1 and not stride for size, stride in zip(each.shape, each.stride(), strict=True)):
                shape = list(each.shape)
                raise self._wrong(
                    call, f"writes into its tensor, and {shape} is expanded: call .contiguous() on it"
                )

    def _wrong(self, call: str, problem: str, kind: type[InputError] = InputError) -> InputError:
        """The error for arguments of `call`, with this rank and the place of the user's code that gave them."""
        path, line = caller()
        return kind(f"rank {self.rank}, {call}: {problem} (at {os.path.basename(path)}:{line})")

    def _check_present(self, seconds: float, averaging_seconds: float, weight: float) -> None:
        """Refuse a time-out or a weight without meaning."""
        problem = ""
        if not 0 <= seconds < math.inf:
            problem = f"seconds={seconds!r}; give a finite number from 0 up"
        elif not averaging_seconds > 0:
            problem = f"averaging_seconds={averaging_seconds!r}; give a number above 0"
        elif not 0 < weight < math.inf:
            problem = f"weight={weight!r}; give a finite number above 0"
        if problem:
            raise self._wrong("average_present", problem)

    def _check_op(self, call: str, op: object, tensor: Tensor) -> str:
        """The reduce op's name, refused where it has no meaning for this dtype."""
        self._check_tensors(call, [tensor])
        try:
            name = reduce_op_name(op)
        except UnknownNameError as error:
            raise self._wrong(call, str(error), UnknownNameError) from None
        if tensor.dtype not in _REDUCIBLE_DTYPES:
            raise self._wrong(call, f"{tensor.dtype} cannot be reduced; convert it first")
        if name == "avg" and not tensor.is_floating_point():
            raise self._wrong(call, f"op='avg' of {tensor.dtype} would round; convert to floats")
        return name

    def _not_here(self, call: str) -> InputError:
        return InputError(
            f"rank {self.rank}, {call}: not over transport {self.transport!r}, which waits for every member; "
            "use 'netsim', or leave time-outs for absent ranks out"
        )

    def _still_in_flight(self, call: object) -> InputError:
        return InputError(
            f"rank {self.rank}, checkpoint: {call} is still in flight at the end of the step; "
            "wait for its handle before, or leave checkpoints out"
        )

    def _mail_not_kept(self) -> InputError:
        return InputError(
            f"rank {self.rank}, checkpoint: over real sockets messages in mailboxes cannot be saved; leave checkpoints "
            "out, or use transport 'netsim'"
        )


def parts_of(comm: Communicator, call: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A tensor for each rank, from a list or by cutting one tensor along its first dimension.

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
