"""Exchange of the ranks' values in host time: calls are matched, compared and combined once.

Knows nothing of virtual time. A rank waits here until the members have posted whose values its own is made of; the
root of a broadcast and a member of a gather that is not its root wait for none. When the last member has posted, all
must agree. Whenever a rank blocks or ends, the wait-for graph is checked, so that a deadlock is reported at once.

Values are reduced once, in rank order. Half precision is accumulated in fp32 and rounded once, at the end: a sum of 300
ones is no 300 in bfloat16, which stops counting at 256, and 64 values of 2000 are no mean in fp16, whose largest number
is 65504.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

import netsim
from netsim.errors import DeadlockError, MemberEndedError, MismatchError, NetsimError
from netsim.ranks import FROM_ROOT, group_of, needs_nobody

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from netsim.ranks import Key

__all__ = [
    "Empty",
    "Exchange",
    "Part",
    "Reduce",
    "Signature",
    "Slot",
    "accumulator_dtype",
    "caller",
    "combine",
    "copy_values",
    "deadlock_error",
    "mismatch_error",
    "own_value",
    "rank_names",
    "ranks_stuck",
    "reduce_tensors",
    "signature_of",
]


Reduce = Callable[[Sequence[Any], str], Any]
"""(tensors in rank order, reduce op) -> their reduction."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums of `dtype`: fp32 for halves, its own for all others."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


_LARGE_BYTES = 1 << 20  # for a copy by the C library


def copy_values(into: Tensor, values: Tensor) -> None:
    """`into.copy_(values)`, large ones by the C library, which unlike torch writes past caches that are too small."""
    both = into, values
    if (
        values.nbytes >= _LARGE_BYTES
        and (into.dtype, into.shape) == (values.dtype, values.shape)
        and all(type(each) is Tensor and each.is_cpu and each.is_contiguous() for each in both)
        and not any(each.is_conj() or each.is_neg() for each in both)
    ):
        ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)
        torch.autograd.graph.increment_version(into)
    else:
        into.copy_(values)


Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes the tensor, of this shape and dtype, that a result is written into."""

# Results are found piece by piece, so that what is added up stays in a processor's cache. Pieces are shorter than those
# that torch shares out among OpenMP's threads (2**15 elements): these wait by spinning, which on a machine with other
# work takes many times as long as the sum.
_PIECE = (1 << 15) - 64
_OF_A_THREAD = 1 << 18  # elements that are worth one


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
    pieces = list(
        zip(
            torch.split(result.view(-1), _PIECE),
            *(torch.split(tensor.view(-1), _PIECE) for tensor in tensors),
            strict=True,
        )
    )
    num_threads = min(torch.get_num_threads(), first.numel() // _OF_A_THREAD)

    def reduce_pieces(mine: Iterable[tuple[Tensor, ...]]) -> None:
        with torch.inference_mode():  # a thread has modes of its own; this one may write to all tensors
            for piece, *given in mine:
                _reduced(given, op, piece)

    if num_threads < 2:
        reduce_pieces(pieces)
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(reduce_pieces, [pieces[i::num_threads] for i in range(num_threads)]))
    return result


def _reduced(tensors: Sequence[Tensor], op: str, into: Tensor | None = None) -> Tensor:
    """The reduction of whole tensors, in `into` if it is given."""
    reduction, (first, *others) = _REDUCTIONS[op], tensors
    dtype = first.dtype
    if others and accumulator_dtype(dtype) == dtype:  # without a copy of the first
        result = reduction(first, others.pop(0), out=into)
    else:
        result = first.to(accumulator_dtype(dtype), copy=True)
    for tensor in others:
        reduction(result, tensor, out=result)
    if op == "avg":
        result.div_(len(tensors))
    if into is None:
        return result.to(dtype)
    return into if result is into else into.copy_(result)


def combine(
    name: str,
    inputs: Sequence[Sequence[Any]],
    reduce_op: str,
    root: int,
    reduce: Reduce = reduce_tensors,
) -> list[tuple[Any, ...]]:
    """Values of each member after collective `name` over every member's input tensors, all in member order.

    `reduce_scatter`, `scatter` (root only) and `all_to_all` take one tensor a member; the rest take one.
    Of `sendrecv` that is member 0's tensor for member 1. Members with the same values have one tuple.
    """
    firsts = [tensors[0] for tensors in inputs if tensors]
    match name:
        case "all_reduce":
            return [(reduce(firsts, reduce_op),)] * len(inputs)
        case "broadcast":
            return [(inputs[root][0],)] * len(inputs)
        case "all_gather":
            return [tuple(firsts)] * len(inputs)
        case "reduce" | "gather":
            of_root = tuple(firsts) if name == "gather" else (reduce(firsts, reduce_op),)
            return [of_root if member == root else () for member in range(len(inputs))]
        case "scatter":
            return [(part,) for part in inputs[root]]
        case "reduce_scatter":
            return [(reduce(part, reduce_op),) for part in zip(*inputs, strict=True)]
        case "all_to_all":
            return list(zip(*inputs, strict=True))
        case "sendrecv":
            return [(), (inputs[0][0],)]
        case "barrier":
            return [()] * len(inputs)
    raise AssertionError(f"no collective is called {name}")


def own_value(signature: Signature, tensors: Sequence[Any], member: int, size: int) -> tuple[Any, ...]:
    """Value of a member that needs no other (`netsim.ranks.needs_nobody`), from its own inputs."""
    if signature.name in ("reduce", "gather", "scatter") and member != signature.root:
        return ()
    return combine(signature.name, [tensors] * size, signature.reduce_op, signature.root)[member]


# Code between a user and a call: ours, and torch's own where it calls us as a backend of torch.distributed.
_BETWEEN = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(__file__),
        os.path.join(os.path.dirname(os.path.dirname(netsim.__file__)), "netgym", "launch"),
        os.path.dirname(torch.__file__),
    )
)


def caller() -> tuple[str, int]:
    """File and line of the user's call: of the nearest frame outside of these packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# Calls that all members make alike, so at one place too: two of them that are swapped would mix up their values.
_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# Of those that have a root, the argument that names it.
_ROOTS = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src"}


class Signature(NamedTuple):
    """Call of one member: first the fields that must agree among members, then `where` and all behind it.

    `place` is of `where` what must agree too, if anything. `alone`: the root, and any other member, waits for nobody;
    neither does a member whose tensors have shapes without values. Where a member lacks values that others need, those
    receive none.
    """

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    reduce_op: str
    root: int
    place: tuple[str, int] | None
    where: tuple[str, int]
    side: str = ""  # "send" or "recv" for a message
    on_clock: bool = True
    alone: tuple[bool, bool] = (False, False)
    has_values: bool = True

    def agreed(self) -> tuple[object, ...]:
        """The part that members must share."""
        return self[:_NUM_AGREED]

    def needs_nobody(self, member: int) -> bool:
        """True if this member of the call has its value at once; disagreement then ends the run."""
        return self.alone[member != self.root] or not self.has_values

    def __str__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        what = [f"{self.dtype}{shapes}"] if self.dtype else []
        what += [f"op={self.reduce_op}"] if self.reduce_op else []
        what += [f"{_ROOTS[self.name]}={self.root}"] if self.name in _ROOTS else []
        path, line = self.where
        return f"{self.side or self.name}({', '.join(what)}) at {os.path.basename(path)}:{line}"


@lru_cache(maxsize=512)
def signature_of(
    name: str,
    dtype: torch.dtype | None,
    shapes: tuple[tuple[int, ...], ...],
    reduce_op: str,
    root: int,
    where: tuple[str, int],
    side: str,
    on_clock: bool,
    compares_places: bool,
    has_values: bool = True,
) -> Signature:
    """A signature, made once: a program makes the same calls at every step.

    Places are compared where that is wanted, and usual for such a call: all members make it at the same one.
    """
    text = str(dtype).removeprefix("torch.") if dtype is not None else ""
    # Machines differ in folders.
    place = (os.path.basename(where[0]), where[1]) if compares_places and name in _ALIKE else None
    is_empty = all(0 in shape for shape in shapes)
    alone = (needs_nobody(name, True, is_empty), needs_nobody(name, False, is_empty))
    return Signature(name, text, shapes, reduce_op, root, place, where, side, on_clock, alone, has_values)


_NUM_AGREED = Signature._fields.index("where")


class Part(NamedTuple):
    """A member's part of a call.

    Attributes:
        key: of the call.
        ranks: its members, as ranks of the run.
        member: this one's position among them.
        signature: of the call as this member made it.
        tensors: that it gives; between processes, the references of them.
    """

    key: Key
    ranks: tuple[int, ...]
    member: int
    signature: Signature
    tensors: Sequence[Any]


@dataclass(slots=True, eq=False)
class Slot:
    """A call, until its last member has posted.

    Attributes:
        values: of each member; those of `served` members are final.
        error: raised in `served` members instead.
        ends_run: the error is not for members, some of which had gone on before all had posted.
        served: members that can take their values; those that need no other are never among them.
        waiters: (rank, member) of each wait.
    """

    key: Key
    ranks: tuple[int, ...]
    signatures: list[Signature | None]
    inputs: list[Sequence[Tensor]]
    missing: set[int]
    values: list[tuple[Tensor, ...]] = field(default_factory=list)
    error: NetsimError | None = None
    ends_run: bool = False
    is_over: bool = False
    served: set[int] = field(default_factory=set)
    waiters: list[tuple[int, int]] = field(default_factory=list)

    def awaited(self, member: int) -> set[int]:
        """The ranks that this member waits for."""
        signature = self.signatures[member]
        assert signature is not None
        if signature.name in FROM_ROOT and self.signatures[signature.root] is None:
            return {self.ranks[signature.root]}
        return self.missing

    def servable(self, posted: int) -> list[int]:
        """Members of a call `FROM_ROOT` that can have their values now that this one has posted, before all have."""
        signature = self.signatures[posted]
        assert signature is not None
        root = self.signatures[signature.root]
        if root is None:
            return []
        members = range(len(self.ranks)) if posted == signature.root else (posted,)
        posts = [(member, self.signatures[member]) for member in members]
        return [
            member
            for member, post in posts
            if post is not None and post.agreed() == root.agreed() and not root.needs_nobody(member)
        ]


class Exchange:
    """Matches calls by key, combines values in rank order, and finds ranks that wait for ever.

    Args:
        num_ranks: all ranks of the run.
        on_served: called with a slot and the members whose values or error have just become known.
        reduce: computes reductions.

    Attributes:
        running: ranks that wait for nothing.
        stored: tensors of messages that have not been taken, by (box and sender, number), and published states.
        ends_close: the clock ends calls undone that wait for a rank that has ended.
    """

    def __init__(
        self,
        num_ranks: int,
        on_served: Callable[[Slot, Sequence[int]], None],
        reduce: Reduce = reduce_tensors,
    ) -> None:
        self._slots: dict[Key, Slot] = {}
        self._on_served, self._reduce = on_served, reduce
        self.running, self._num_ranks = set(range(num_ranks)), num_ranks
        self._blocked: dict[int, tuple[Slot, int] | None] = {}  # as a member of a call; None: by the clock
        self._exited: set[int] = set()
        self.stored: dict[tuple[Hashable, Hashable], tuple[Tensor, ...]] = {}
        self.ends_close = False
        self._broken: set[Hashable] = set()
        self._undone: set[Key] = set()

    def put(self, part: Part) -> Slot:
        """Post one member's part; members whose dependencies are met have their values, all with the last part."""
        key, ranks, member, signature, tensors = part
        slot = self._slots.get(key)
        if slot is None:
            size = len(ranks)
            slot = self._slots[key] = Slot(key, ranks, [None] * size, [()] * size, set(ranks))
        slot.signatures[member] = signature
        slot.inputs[member] = tensors
        slot.missing.discard(ranks[member])
        if (self._undone and key in self._undone) or (self._broken and group_of(key.group) in self._broken):
            self._fail(slot)
            return slot
        # A message to oneself has two members and one rank.
        if not slot.missing and None not in slot.signatures:
            del self._slots[key]
            calls = cast("list[Signature]", slot.signatures)
            first = calls[0]
            odd = [call for call in calls if call is not first and call.agreed() != first.agreed()]
            if not odd:
                slot.values = slot.values or self._values(first, slot)
            else:
                agreed, shown = [call.agreed() for call in calls], list(map(str, calls))
                slot.error = mismatch_error(ranks, agreed, shown)
                slot.ends_run = any(call.needs_nobody(each) for each, call in enumerate(calls))
            self._finish(slot)
        elif signature.name in FROM_ROOT and (members := slot.servable(member)):
            slot.values = slot.values or self._values(signature, slot)
            self._serve(slot, members)
            slot.waiters = [waiter for waiter in slot.waiters if waiter[1] not in slot.served]
        return slot

    def _finish(self, slot: Slot) -> None:
        slot.inputs, slot.is_over = [], True
        posted = [
            member
            for member, signature in enumerate(slot.signatures)
            if signature is not None and member not in slot.served and not signature.needs_nobody(member)
        ]
        self._serve(slot, posted)

    def _serve(self, slot: Slot, members: Sequence[int]) -> None:
        slot.served.update(members)
        for rank, member in slot.waiters:
            if member in slot.served:
                self.unblock(rank)
        self._on_served(slot, members)

    def open_call(self, key: Key) -> Slot | None:
        """A call that some members have posted and not all."""
        return self._slots.get(key)

    def withdraw(self, key: Key) -> None:
        """The receiver of a message takes its post back; where the sender has posted in host time, its values stay."""
        self._slots.pop(key, None)

    def break_group(self, group: Hashable) -> None:
        """End a group's calls without values: those that wait for members, and those posted from now on."""
        self._broken.add(group)
        for slot in [slot for slot in self._slots.values() if group_of(slot.key.group) == group]:
            self._fail(slot)

    def break_call(self, key: Key) -> None:
        """End one call without values, for those that wait for members and those that post it from now on."""
        self._undone.add(key)
        if key in self._slots:
            self._fail(self._slots[key])

    def _fail(self, slot: Slot) -> None:
        del self._slots[slot.key]
        why = (
            "a member of this call has ended"
            if slot.key in self._undone
            else "the group of this call is broken"
        )
        slot.error = MemberEndedError(f"Connection closed by peer: {why}")
        self._finish(slot)

    def _values(self, first: Signature, slot: Slot) -> list[tuple[Tensor, ...]]:
        none: list[tuple[Tensor, ...]] = [()] * len(slot.ranks)
        is_given = first.name in (*FROM_ROOT, "sendrecv")
        givers = [slot.signatures[first.root]] if is_given else slot.signatures
        if not all(giver is not None and giver.has_values for giver in givers):
            return none  # nobody knows them, though others may have given theirs
        if first.name not in ("publish", "fetch", "put", "taken", "forget"):
            return combine(first.name, slot.inputs, first.reduce_op, first.root, self._reduce)
        assert isinstance(slot.key.group, tuple)
        name = (slot.key.group[1], slot.key.number)  # a box and a sender, or whose state; and which one
        if first.name == "forget":
            self._slots.pop(slot.key.group[1:], None)  # type: ignore[call-overload]
        elif first.name == "taken":
            return [self.stored.pop(name)]
        elif first.name == "fetch":
            return [self.stored[name]]
        elif name not in self.stored:
            self.stored[name] = tuple(tensor.clone() for tensor in slot.inputs[0])
        return none

    # --- messages ------------------------------------------------------------------------------------------

    def forget(self, group: Hashable, numbers: Collection[int]) -> None:
        """Drop the group's publications except these numbers and newer ones."""
        newest = max(numbers)
        for place in list(self.stored):
            if place[0] == group and place[1] < newest and place[1] not in numbers:  # type: ignore[operator]
                del self.stored[place]

    # --- the wait-for graph --------------------------------------------------------------------------------

    def block(self, rank: int, slot: Slot, member: int) -> DeadlockError | None:
        """`rank` waits for its value as a member of a call; returns the deadlock this completes, if any."""
        self._blocked[rank] = (slot, member)
        self.running.discard(rank)
        slot.waiters.append((rank, member))
        # Nothing new can be stuck while every rank it waits for is running, as all are that do not wait for this call.
        runs = (
            len(self.running) + len(slot.waiters) == self._num_ranks or slot.awaited(member) <= self.running
        )
        return None if runs else self.deadlock()

    def block_for_clock(self, rank: int) -> None:
        """`rank` waits for the clock's answer."""
        self._blocked[rank] = None
        self.running.discard(rank)

    def unblock(self, rank: int) -> None:
        """`rank` has what it waited for."""
        self._blocked.pop(rank, None)
        self.running.add(rank)

    def exit(self, rank: int) -> DeadlockError | None:
        """`rank` has ended; returns the deadlock that leaves behind, if any."""
        self.running.discard(rank)
        self._exited.add(rank)
        if self._blocked:
            return self.deadlock()
        return self._unmatched() if not self.running else None

    @property
    def is_clock_awaited(self) -> bool:
        """True if a rank waits for the clock."""
        return None in self._blocked.values()

    def has_open_call(self, rank: int) -> bool:
        """True if a call that `rank` has posted waits for other members."""
        slots = [slot for slot in self._slots.values() if rank in slot.ranks]
        return any(slot.signatures[slot.ranks.index(rank)] is not None for slot in slots)

    def calls_in_flight(self) -> list[str]:
        """Every call that waits for members, as one line each."""
        return [self._posted(slot) for slot in self._slots.values()]

    def deadlock(self, kernel_needs: int | None = None) -> DeadlockError | None:
        """The error if some rank can never make progress.

        Args:
            kernel_needs: the rank whose next request the clock waits for, if it does: then ranks that wait
                for the clock wait for that rank.
        """

        def can_go_on(rank: int, able: AbstractSet[int]) -> bool:
            reason = self._blocked[rank]
            if reason is None:
                return kernel_needs is None or kernel_needs in able
            slot, member = reason
            return slot.awaited(member) <= able

        able = self.running | self._exited if self.ends_close else self.running
        stuck = ranks_stuck(self._blocked, able, can_go_on)
        if not stuck:
            return None
        waits = {rank: self._waits(rank, kernel_needs) for rank in stuck}
        ended = dict.fromkeys(sorted(self._exited), "has ended")
        return deadlock_error(waits, {rank: f"waits for {text}" for rank, text in waits.items()} | ended)

    def _waits(self, rank: int, kernel_needs: int | None) -> str:
        reason = self._blocked[rank]
        if reason is None:
            return f"the clock, which waits for rank {kernel_needs}"
        slot, member = reason
        return f"{_ranks(slot.awaited(member), self._exited)} in {slot.signatures[member]}"

    def _unmatched(self) -> DeadlockError | None:
        """Calls that were posted and never matched, when every rank has ended."""
        unmatched = [
            f"{self._posted(slot)} was never matched by {_ranks(slot.missing, set())}"
            for slot in self._slots.values()
        ]
        if not unmatched:
            return None
        lines = [f"every rank has ended, but {unmatched[0]}", *(f"  {text}" for text in unmatched)]
        return DeadlockError("\n".join(lines))

    def _posted(self, slot: Slot) -> str:
        posted = zip(slot.ranks, slot.signatures, strict=True)
        return ", ".join(f"rank {rank}'s {signature}" for rank, signature in posted if signature is not None)


def _ranks(ranks: set[int], exited: set[int]) -> str:
    ended = ", ".join(map(str, sorted(ranks & exited)))
    return rank_names(sorted(ranks)) + (f" (ended: {ended})" if ended else "")


def rank_names(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ranks_stuck(
    waiting: Collection[int], running: Collection[int], can_go_on: Callable[[int, AbstractSet[int]], bool]
) -> list[int]:
    """Waiting ranks that can never make progress, in order.

    Args:
        waiting: ranks that wait.
        running: ranks that may do anything.
        can_go_on: (rank, able) -> whether a waiting rank can make progress once all of `able` can.
    """
    able = set(running)
    while free := {rank for rank in waiting if rank not in able and can_go_on(rank, able)}:
        able |= free
    return sorted(set(waiting) - able)


def deadlock_error(stuck: Mapping[int, str], table: Mapping[int, str]) -> DeadlockError:
    """Error with a line that names the first ranks that wait for ever, and a table of all ranks.

    Args:
        stuck: by rank that can never make progress, its wait.
        table: by rank, in the order of the lines, its state.
    """
    shown = "; ".join(f"rank {rank} waits for {text}" for rank, text in list(stuck.items())[:4])
    more = f"; and {len(stuck) - 4} more ranks" if len(stuck) > 4 else ""
    lines = [f"  rank {rank}: {text}" for rank, text in table.items()]
    return DeadlockError("\n".join([f"deadlock: {shown}{more}", *lines]))


def mismatch_error(ranks: Sequence[int], agreed: Sequence[object], calls: Sequence[str]) -> MismatchError:
    """Error with a line that names the sides, and a table of all members.

    Args:
        ranks: the members.
        agreed: values that had to be equal, one a member.
        calls: call and place of each.
    """
    sides: dict[object, list[int]] = {}
    for member, key in enumerate(agreed):
        sides.setdefault(key, []).append(member)
    called = [
        f"{rank_names([ranks[member] for member in members])} called {calls[members[0]]}"
        for members in sides.values()
    ]
    table = [f"  rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True)]
    return MismatchError("\n".join([f"ranks disagree: {'; '.join(called)}", *table]))
