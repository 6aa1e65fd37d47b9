"""Calls of collectives as data: arguments, results by definition, tensors of all layouts, programs that show them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from exogym_core.workers.run import Transport
from netsim.testing.laws import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exogym_core.communicator.base import Communicator

__all__ = [
    "DTYPES",
    "FLOATS",
    "IN_PLACE",
    "LAYOUTS",
    "OPERATIONS",
    "REDUCE_OPS",
    "REDUCING",
    "ROOTED",
    "SHAPES",
    "CallSequence",
    "GroupCall",
    "TensorForm",
    "difference",
    "import_of",
    "laid_out",
    "name_of",
    "short_repr",
    "source_of",
]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SHAPES = ((1,), (), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 2))
LAYOUTS = ("plain", "transposed", "strided")
REDUCE_OPS = ("sum", "avg", "min", "max", "product")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
IN_PLACE = ("all_reduce", "broadcast", "reduce", "scatter")
OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"),
    *("barrier", "ring", "all_gather_object", "broadcast_object"),
)
"""Operations of `GroupCall`: methods of a communicator, and `ring`, two messages to the next member."""

# Relative error that another order of summing may cause, for sums of a few numbers below 2.
_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.float64: 1e-12}


def short_repr(record: Any, num_positional: int) -> str:
    """Call that makes a record: its first fields, and by name those that are not the default."""
    if isinstance(record, tuple):
        rows = [(name, getattr(record, name), record._field_defaults.get(name)) for name in record._fields]  # type: ignore[attr-defined]
    else:
        rows = [(each.name, getattr(record, each.name), each.default) for each in fields(record)]
    given = [repr(value) for _, value, _ in rows[:num_positional]]
    given += [f"{name}={value!r}" for name, value, default in rows[num_positional:] if value != default]
    return f"{type(record).__name__}({', '.join(given)})"


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Copy of a tensor in another layout: "plain"; "transposed", in Fortran's order; "strided", with gaps.

    >>> laid_out(torch.ones(2, 3), "transposed").stride(), laid_out(torch.ones(3), "strided").stride()
    ((1, 2), (2,))
    """
    if layout == "transposed":
        backwards = tuple(reversed(range(tensor.dim())))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if layout == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.clone(memory_format=torch.contiguous_format)


def source_of(value: Any, layout: str = "plain") -> str:
    """Python expression for a tensor of a layout, for a plain value, or for a list of these.

    >>> source_of([torch.ones(2), None])
    '[torch.tensor([1.0, 1.0]), None]'
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(source_of(each, layout) for each in value)}]"
    if not isinstance(value, Tensor):
        return repr(value)
    shape, is_default = tuple(value.shape), value.dtype in (torch.float32, torch.int64) and value.numel()
    text = f"torch.tensor({value.flatten().tolist()}{'' if is_default else f', dtype={value.dtype}'})"
    text += "" if len(shape) == 1 else f".reshape({shape})"
    return text if layout == "plain" else f"laid_out({text}, {layout!r})"


def name_of(value: Any) -> str:
    """Name of a function, class or transport in a program; of a name, its text."""
    if isinstance(value, str):
        return repr(value)
    name = place_of(value, value.host if isinstance(value, Transport) else value)[1]
    return name or str(getattr(value, "__qualname__", repr(value))).rpartition(".")[2]


def import_of(value: Any) -> list[str]:
    """Line that imports it, or says that it is in no module."""
    if isinstance(value, str):
        return []
    module, name = place_of(value, value.host if isinstance(value, Transport) else value)
    return [
        f"from {module} import {name}"
        if module
        else f"# {name_of(value)} is local: move it into a module, and import it here"
    ]


class TensorForm(NamedTuple):
    """Form of the tensors of a call.

    Attributes:
        dtype: their dtype.
        shape: their shape, where sizes are even.
        layout: one of LAYOUTS.
        seed: of their values.
        is_rough: floats are any numbers from -2 to 2; else quarters, whose sums are exact in every order.
    """

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (1,)
    layout: str = "plain"
    seed: int = 0
    is_rough: bool = False

    def __repr__(self) -> str:
        return short_repr(self, 2)

    def tensor(self, member: int = 0, part: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        """Tensor of a member, and of one of its parts; the same values wherever it is made."""
        generator = torch.Generator().manual_seed((self.seed * 64 + member) * 64 + part)
        shape = self.shape if shape is None else tuple(shape)
        if self.dtype == torch.bool:
            values = torch.randint(0, 2, shape, generator=generator)
        elif not self.dtype.is_floating_point:  # sums and products overflow, and must wrap in the same way
            values = torch.randint(-100, 100, shape, generator=generator)
        elif self.is_rough:
            values = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2
        else:
            values = torch.randint(-8, 9, shape, generator=generator) / 4
        return laid_out(values.to(self.dtype), self.layout)


TENSOR = TensorForm()


@dataclass(frozen=True)
class GroupCall:
    """A call of every member of a group.

    Attributes:
        operation: one of OPERATIONS.
        form: of the tensors.
        group: position of the group in a sequence's.
        reduce_op: of a reduction.
        root: of the operation, modulo the number of members.
        is_uneven: members, or parts, have tensors of other sizes.
        is_listed: reduce_scatter and all_to_all are given lists, not one tensor.
        wait_after: number of calls after which an asynchronous call is waited for; None: a synchronous call.
        off_clock: the call is made off the clock.
    """

    operation: str
    form: TensorForm = TENSOR
    group: int = 0
    reduce_op: str = "sum"
    root: int = 0
    is_uneven: bool = False
    is_listed: bool = False
    wait_after: int | None = None
    off_clock: bool = False

    def __repr__(self) -> str:
        return short_repr(self, 1)

    def _part(self, member: int, part: int) -> Tensor:
        """Part `part` of a member's tensors; in an uneven exchange its first dimension depends on both."""
        shape = self.form.shape
        if self.is_uneven:
            sender = 0 if self.operation == "reduce_scatter" else member
            shape = ((sender + 2 * part + self.form.seed) % 3, *shape[1:])
        return self.form.tensor(member, part, shape)

    def _whole(self, member: int, size: int) -> Tensor:
        """One tensor whose first dimension can be cut into `size` parts."""
        return self.form.tensor(member, shape=(2 * size, *self.form.shape[1:]))

    def _object(self, member: int) -> dict[str, int]:
        return {"member": member, "seed": self.form.seed}

    def arguments(self, size: int, member: int) -> list[Any]:
        """Arguments of a member of `size`, without the reduce op."""
        root = self.root % size
        match self.operation:
            case "barrier":
                return []
            case "all_gather_object":
                return [self._object(member)]
            case "broadcast_object":
                return [self._object(member), root]
            case "scatter":
                parts = [self._part(root, part + 1) for part in range(size)]
                mine = self.form.tensor(member, shape=parts[member].shape)
                return [mine, parts if member == root else None, root]
            case "reduce_scatter" | "all_to_all" if self.is_listed:
                return [[self._part(member, part) for part in range(size)]]
            case "reduce_scatter" | "all_to_all":
                return [self._whole(member, size)]
        return [self._part(member, 0), *([root] if self.operation in ROOTED else [])]

    def expected(self, size: int, member: int) -> Any:
        """Result of a member of `size`, by the operation's definition."""
        root = self.root % size
        given = [self._part(other, 0) for other in range(size)]
        match self.operation:
            case "all_reduce":
                return self._reduced(given)
            case "reduce":
                return self._reduced(given) if member == root else given[member]
            case "broadcast":
                return given[root]
            case "all_gather":
                return given
            case "gather":
                return given if member == root else None
            case "scatter":
                return self._part(root, member + 1)
            case "reduce_scatter" if self.is_listed:
                return self._reduced([self._part(other, member) for other in range(size)])
            case "reduce_scatter":
                return self._reduced([self._whole(other, size).chunk(size)[member] for other in range(size)])
            case "all_to_all" if self.is_listed:
                return [self._part(other, member) for other in range(size)]
            case "all_to_all":
                return torch.cat([self._whole(other, size).chunk(size)[member] for other in range(size)])
            case "ring":
                return [self.form.tensor((member - 1) % size, part) for part in (0, 1)]
            case "all_gather_object":
                return [self._object(other) for other in range(size)]
            case "broadcast_object":
                return self._object(root)
        return None

    def _reduced(self, tensors: Sequence[Tensor]) -> Tensor:
        """Reduction in rank order, in the tensors' own dtype, of halves in fp32."""
        names = {"sum": "add", "avg": "add", "product": "mul", "min": "minimum", "max": "maximum"}
        combine: Callable[[Tensor, Tensor], Tensor] = getattr(torch, names[self.reduce_op])
        is_half = self.form.dtype in (torch.float16, torch.bfloat16)
        total = reduce(combine, [tensor.float() if is_half else tensor for tensor in tensors])
        return (total / len(tensors) if self.reduce_op == "avg" else total).to(tensors[0].dtype)

    def tolerance(self, exact: bool) -> float:
        """Error that the result may have, relative and absolute, where sums are in another order."""
        is_exact = exact or self.operation not in REDUCING
        return 0.0 if is_exact else _TOLERANCES.get(self.form.dtype, 0.0)

    def start(self, comm: Communicator) -> Callable[[], Any]:
        """Make the call; the result is a function that waits for what it returns."""
        size, member, later = comm.world_size, comm.rank, self.wait_after is not None
        if self.operation == "ring":
            return self._start_ring(comm)
        arguments = self.arguments(size, member)
        options: dict[str, Any] = {"op": self.reduce_op} if self.operation in REDUCING else {}
        is_object = self.operation.endswith("_object")
        done = getattr(comm, self.operation)(
            *arguments, **options, **({} if is_object else {"async_op": later})
        )
        if not later or is_object:
            return lambda: done
        if arguments and isinstance(arguments[0], Tensor) and self.operation != "reduce":
            arguments[0].zero_()  # inputs were read at the call; in-place results come at the wait
        return done.wait  # type: ignore[no-any-return]

    def _start_ring(self, comm: Communicator) -> Callable[[], list[Tensor]]:
        """Two messages to the next member, of two tags, received in the other order."""
        after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        into = [torch.empty_like(self.form.tensor(before)) for _ in (0, 1)]
        coming = [comm.irecv(into[part], before, tag=part) for part in (1, 0)]
        going = [comm.isend(self.form.tensor(comm.rank, part), after, tag=part) for part in (0, 1)]

        def wait() -> list[Tensor]:
            second, first = (handle.wait() for handle in coming)
            for handle in going:
                handle.wait()
            return [first, second]

        return wait


@dataclass(frozen=True)
class CallSequence:
    """Calls of groups, one after the other.

    Attributes:
        num_ranks: ranks of the world.
        calls: in the order in which every rank makes those of its groups.
        groups: ranks of each group; by default one group of all.
    """

    num_ranks: int
    calls: Sequence[GroupCall]
    groups: Sequence[Sequence[int]] = field(default=())

    def _members(self, call: GroupCall) -> Sequence[int]:
        return self.groups[call.group] if self.groups else range(self.num_ranks)

    def body(self, comm: Communicator) -> list[tuple[int, Any]]:
        """Make one rank's calls; return (number of the call, its result) as they are waited for."""
        world = list(range(comm.world_size))  # a wrapper's own calls; it may leave groups as they are
        members = [
            None if comm.rank not in ranks else comm if list(ranks) == world else comm.group(ranks)
            for ranks in self.groups or [world]
        ]
        pending: list[tuple[int, int, Callable[[], Any]]] = []  # (when to wait, number, wait)
        results: list[tuple[int, Any]] = []
        for number, call in enumerate(self.calls):
            group = members[call.group]
            if group is not None:
                if call.off_clock:
                    with group.off_clock():
                        wait = call.start(group)
                else:
                    wait = call.start(group)
                pending.append((number + (call.wait_after or 0), number, wait))
            results += [(which, wait()) for when, which, wait in pending if when <= number]
            pending = [entry for entry in pending if entry[0] > number]
        return results + [(which, wait()) for _, which, wait in pending]

    def problem(self, results: Sequence[list[tuple[int, Any]]], exact: bool) -> str:
        """First difference of all ranks' results from the definitions, in a line; "" where there is none."""
        for rank, returned in enumerate(results):
            for number, got in sorted(returned, key=lambda each: each[0]):
                call = self.calls[number]
                ranks = list(self._members(call))
                wanted = call.expected(len(ranks), ranks.index(rank))
                if found := difference(got, wanted, call.tolerance(exact)):
                    return f"rank {rank}, {call!r} by {len(ranks)} ranks: {found}"
        return ""


def difference(got: Any, wanted: Any, tolerance: float = 0.0, absolute: float | None = None) -> str:
    """Difference of a result from what it must be, in a line; "" where there is none.

    Args:
        got, wanted: tensors, plain values, None or lists of these.
        tolerance: relative error of floats; 0: all are equal.
        absolute: their absolute error; None: as the relative one.
    """
    if isinstance(wanted, list):
        if not isinstance(got, list | tuple) or len(got) != len(wanted):
            return f"is {_shown(got)}, not a list of {len(wanted)}"
        pairs = enumerate(zip(got, wanted, strict=True))
        return next(
            (f"[{at}] {line}" for at, pair in pairs if (line := difference(*pair, tolerance, absolute))), ""
        )
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        is_same = type(got) is type(wanted) and got == wanted
        return "" if is_same else f"is {_shown(got)}, not {_shown(wanted)}"
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"is {got.dtype}{list(got.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.is_floating_point:
        is_same = torch.allclose(
            got, wanted, tolerance, tolerance if absolute is None else absolute, equal_nan=True
        )
    else:
        is_same = torch.equal(got, wanted)
    return "" if is_same else f"is {_shown(got)}, not {_shown(wanted)}"


def _shown(value: Any) -> str:
    text = str(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."
