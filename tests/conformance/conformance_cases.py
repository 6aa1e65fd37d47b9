"""One description of a collective, what it must give by definition, and how a rank makes the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from exogym_core.communicator import Communicator, RunResult, run_ranks

# A transport is a row here: arguments of `run_ranks`.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "threads": {"transport": "netsim", "workers": "threads"},
    "processes": {"transport": "netsim", "workers": {"kind": "processes", "processes": 2}},
    "gloo": {"transport": "gloo"},
}
SIMULATED = [name for name, row in TRANSPORTS.items() if row["transport"] == "netsim"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (0,), (1,), (5,), (3, 4), (2, 0, 3), (2, 3, 2))
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
OPERATIONS = (
    *REDUCING,
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_list",
    "barrier",
    "ring",
    "all_gather_object",
    "broadcast_object",
)
# Relative error that another order of summing may cause, for sums of a few numbers below 2.
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.float64: 1e-12}


def run(transport: str, body: Callable[[Communicator], Any], num_ranks: int, **more: Any) -> RunResult[Any]:
    """`run_ranks` over one of TRANSPORTS."""
    return run_ranks(body, num_ranks, **TRANSPORTS[transport], **more)


@dataclass(frozen=True)
class Case:
    """One call of every member of a group."""

    operation: str
    group: int  # which of the program's groups
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str  # how the tensors lie in memory: plain, transposed, strided
    reduce_op: str
    root: int  # modulo the group's size
    wait_after: int | None  # None: a synchronous call; else asynchronous, waited for so many calls later
    off_clock: bool
    seed: int

    def tensor(self, member: int, part: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """What `member` gives, in the case's layout; the same wherever it is made."""
        generator = torch.Generator().manual_seed((self.seed * 64 + member) * 64 + part)
        shape = self.shape if shape is None else shape
        if self.dtype == torch.bool:
            plain = torch.randint(0, 2, shape, generator=generator).bool()
        elif self.dtype.is_floating_point:
            plain = (torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2).to(self.dtype)
        else:  # sums and products overflow, and must wrap in the same way
            plain = torch.randint(-100, 100, shape, generator=generator).to(self.dtype)
        if self.layout == "transposed":
            backwards = tuple(reversed(range(plain.dim())))
            return plain.permute(backwards).contiguous().permute(backwards)
        if self.layout == "strided" and plain.dim():
            return torch.stack([plain, plain], dim=-1)[..., 0]
        return plain

    def whole(self, member: int, size: int) -> Tensor:
        """One tensor whose first dimension can be cut into `size` parts."""
        return self.tensor(member, shape=(2 * size, *self.shape[1:]))

    def part_shape(self, member: int, part: int) -> tuple[int, ...]:
        """The shape of the part that `member` sends to `part` in an uneven exchange."""
        return (*self.shape, (member + 2 * part + self.seed) % 3)

    def reduced(self, tensors: Sequence[Tensor]) -> Tensor:
        """The definition: in rank order, in the tensors' own dtype, of halves in fp32."""
        combine = {"sum": torch.add, "avg": torch.add, "product": torch.mul}.get(
            self.reduce_op, torch.minimum if self.reduce_op == "min" else torch.maximum
        )
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        total = reduce(combine, [tensor.float() for tensor in tensors] if is_half else tensors)
        return (total / len(tensors) if self.reduce_op == "avg" else total).to(tensors[0].dtype)


def expected(case: Case, size: int, member: int) -> Any:
    """What the call must return to `member` of a group of `size`."""
    given = [case.tensor(other) for other in range(size)]
    root = case.root % size
    match case.operation:
        case "all_reduce":
            return case.reduced(given)
        case "reduce":
            return case.reduced(given) if member == root else given[member]
        case "broadcast":
            return given[root]
        case "all_gather":
            return given
        case "gather":
            return given if member == root else None
        case "scatter":
            return case.tensor(root, member + 1)
        case "reduce_scatter":
            return case.reduced([case.whole(other, size).chunk(size)[member] for other in range(size)])
        case "reduce_scatter_list":
            return case.reduced([case.tensor(other, member) for other in range(size)])
        case "all_to_all":
            return torch.cat([case.whole(other, size).chunk(size)[member] for other in range(size)])
        case "all_to_all_list":
            return [case.tensor(other, member, case.part_shape(other, member)) for other in range(size)]
        case "ring":
            return [case.tensor((member - 1) % size, part) for part in (0, 1)]
        case "all_gather_object":
            return [{"member": other, "seed": case.seed} for other in range(size)]
        case "broadcast_object":
            return {"member": root, "seed": case.seed}
    return None


def call(case: Case, comm: Communicator) -> Callable[[], Any]:
    """Make the call; the result is a function that waits for what it returns."""
    size, member = comm.world_size, comm.rank
    root, later = case.root % size, case.wait_after is not None
    mine = case.tensor(member)
    match case.operation:
        case "all_reduce":
            done = comm.all_reduce(mine, case.reduce_op, async_op=later)
        case "reduce":
            done = comm.reduce(mine, root, case.reduce_op, async_op=later)
        case "broadcast":
            done = comm.broadcast(mine, root, async_op=later)
        case "all_gather":
            done = comm.all_gather(mine, async_op=later)
        case "gather":
            done = comm.gather(mine, root, async_op=later)
        case "scatter":
            parts = [case.tensor(member, part + 1) for part in range(size)] if member == root else None
            done = comm.scatter(mine, parts, root, async_op=later)
        case "reduce_scatter":
            mine = case.whole(member, size)
            done = comm.reduce_scatter(mine, case.reduce_op, async_op=later)
        case "reduce_scatter_list":
            parts = [case.tensor(member, part) for part in range(size)]
            done = comm.reduce_scatter(parts, case.reduce_op, async_op=later)
        case "all_to_all":
            mine = case.whole(member, size)
            done = comm.all_to_all(mine, async_op=later)
        case "all_to_all_list":
            parts = [case.tensor(member, part, case.part_shape(member, part)) for part in range(size)]
            done = comm.all_to_all(parts, async_op=later)
        case "barrier":
            done = comm.barrier(async_op=later)
        case "ring":
            return _ring(case, comm)
        case "all_gather_object":
            return partial(lambda got: got, comm.all_gather_object({"member": member, "seed": case.seed}))
        case "broadcast_object":
            return partial(
                lambda got: got, comm.broadcast_object({"member": member, "seed": case.seed}, root)
            )
    if not later:
        return lambda: done
    if case.operation != "reduce":  # inputs were read at the call; in-place results come at the wait
        mine.zero_()
    return done.wait


def _ring(case: Case, comm: Communicator) -> Callable[[], Any]:
    """Two messages to the next member, of two tags, received in the other order."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    into = [torch.empty_like(case.tensor(before)) for _ in (0, 1)]
    coming = [comm.irecv(into[part], before, tag=part) for part in (1, 0)]
    going = [comm.isend(case.tensor(comm.rank, part), after, tag=part) for part in (0, 1)]

    def wait() -> list[Tensor]:
        second, first = (handle.wait() for handle in coming)
        for handle in going:
            handle.wait()
        return [first, second]

    return wait


Program = tuple[list[tuple[int, ...]], list[Case]]


def carry_out(program: Program, comm: Communicator) -> list[tuple[int, Any]]:
    """One rank's part of a program: (number of the case, what it returned)."""
    groups, cases = program
    members = [comm.group(ranks) if comm.rank in ranks else None for ranks in groups]
    pending: list[tuple[int, int, Callable[[], Any]]] = []  # (when to wait, number, wait)
    results: list[tuple[int, Any]] = []
    for number, case in enumerate(cases):
        group = members[case.group]
        if group is not None:
            if case.off_clock:
                with group.off_clock():
                    wait = call(case, group)
            else:
                wait = call(case, group)
            pending.append((number + (case.wait_after or 0), number, wait))
        results += [(which, wait()) for when, which, wait in pending if when <= number]
        pending = [entry for entry in pending if entry[0] > number]
    return results + [(which, wait()) for _, which, wait in pending]


def check(program: Program, results: Sequence[list[tuple[int, Any]]], exact: bool) -> None:
    """All ranks' results against the definitions."""
    groups, cases = program
    for rank, returned in enumerate(results):
        numbers = [number for number, case in enumerate(cases) if rank in groups[case.group]]
        assert sorted(number for number, _ in returned) == numbers
        for number, got in returned:
            case = cases[number]
            ranks = groups[case.group]
            compare(got, expected(case, len(ranks), ranks.index(rank)), case, exact)


def compare(got: Any, wanted: Any, case: Case, exact: bool) -> None:
    """Equal values, shapes and dtypes; floats of another order of summing to their tolerance."""
    if isinstance(wanted, list):
        assert len(got) == len(wanted), case
        for one, other in zip(got, wanted, strict=True):
            compare(one, other, case, exact)
    elif isinstance(wanted, Tensor):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), case
        if exact or case.operation not in REDUCING or not case.dtype.is_floating_point:
            assert torch.equal(got, wanted), (case, got, wanted)
        else:
            tolerance = TOLERANCE[case.dtype]
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=str(case))
    else:
        assert got == wanted, case


@st.composite
def programs(draw: st.DrawFn, num_ranks: int, num_cases: int) -> Program:
    """Random groups (the whole world first), and random calls in them."""
    world = tuple(range(num_ranks))
    groups = [world]
    for _ in range(draw(st.integers(0, 2))):
        order = draw(st.permutations(world))
        groups.append(tuple(order[: draw(st.integers(1, num_ranks))]))
    cases = [draw(_cases(len(groups))) for _ in range(draw(st.integers(math.ceil(num_cases / 2), num_cases)))]
    return groups, cases


@st.composite
def _cases(draw: st.DrawFn, num_groups: int) -> Case:
    operation = draw(st.sampled_from(OPERATIONS))
    reduce_op = draw(st.sampled_from(("sum", "avg", "min", "max", "product")))
    dtypes = FLOATS if reduce_op == "avg" and operation in REDUCING else FLOATS + INTEGERS
    if operation not in REDUCING:
        dtypes = (*dtypes, torch.bool)
    return Case(
        operation,
        draw(st.integers(0, num_groups - 1)),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(SHAPES)),
        draw(st.sampled_from(("plain", "transposed", "strided"))),
        reduce_op,
        draw(st.integers(0, 4)),
        draw(st.none() | st.integers(0, 3)),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )
