"""The table of collective algorithms, and `build`, which makes a schedule by one of them.

A new algorithm is one function in a file of its own and one row here; the row inherits every test. Algorithms that
users add to the table are checked when their schedules are built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING

from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules import direct, gloo, nccl, ring, trees
from netsim.collectives.schedules.check import check_bytes, check_result
from netsim.collectives.schedules.schedule import Phase, Problem, Schedule
from netsim.errors import InputError, unknown_name
from netsim.units import format_bytes, shown

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "algorithm_names",
    "build",
    "default_algorithm",
    "find_algorithm",
    "make_schedule",
]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of one operation.

    Attributes:
        build: builds its phases, or a schedule of them.
        needs_regions: reads `Problem.regions`.
        num_messages: largest number of messages in a step, by the number of members (of regions, if it needs regions).
        most_bytes: largest `Problem.num_bytes`, where pieces of a fixed size are listed.
        is_wasteful: sends bytes on which no result depends, as the library does whose algorithm it is.
        is_offered: `auto` compares it; False: it is taken where it is named, or the library whose it is takes it.
        differs: False for a problem in which an earlier algorithm of the table sends the same messages; `auto` then
            compares that one alone.
    """

    build: Callable[[Problem], tuple[Phase, ...] | Schedule]
    needs_regions: bool
    num_messages: Callable[[int], int]
    most_bytes: float = math.inf
    is_wasteful: bool = False
    is_offered: bool = True
    differs: Callable[[Problem], bool] = lambda p: True

    def __post_init__(self) -> None:
        for name in ("build", "num_messages", "differs"):
            if not callable(getattr(self, name)):
                raise InputError(f"Algorithm: {name} must be a function, got {shown(getattr(self, name))}")
        for name, value in (("num_messages(2)", self.num_messages(2)), ("most_bytes", self.most_bytes)):
            if not isinstance(value, Real):
                raise InputError(f"Algorithm: {name} must be a number, got {shown(value)}")


_MOST_SEGMENTED_BYTES = 1e13  # ten million segments, a gigabyte of memory


def _a_member(num: int) -> int:
    return num


def _a_pair(num: int) -> int:
    return num * (num - 1)


def _flat(build: Callable[[Problem], tuple[Phase, ...]]) -> Algorithm:
    """An algorithm with at most one message a member in a step."""
    return Algorithm(build, needs_regions=False, num_messages=_a_member)


def _segmented(build: Callable[[Problem], tuple[Phase, ...]]) -> Algorithm:
    """A ring whose segments of at most 1 MiB are listed."""
    return replace(_flat(build), most_bytes=_MOST_SEGMENTED_BYTES)


def _nccl(build: Callable[[Problem], tuple[Phase, ...]]) -> Algorithm:
    """An algorithm of NCCL, whose slices of at most 1 MiB are listed; chosen as NCCL chooses."""
    return replace(_segmented(build), is_offered=False)


def _crowd(build: Callable[[Problem], tuple[Phase, ...]]) -> Algorithm:
    """An algorithm with a message from each member to each other in one step."""
    return Algorithm(build, needs_regions=False, num_messages=_a_pair)


def _of_three(algorithm: Algorithm) -> Algorithm:
    """An algorithm that differs from the operation's default among three members or more."""
    return replace(algorithm, differs=lambda p: p.num_ranks > 2)


def _two_level(
    build: Callable[[Problem], tuple[Phase, ...]], least: int, count: Callable[[int], int]
) -> Algorithm:
    """An algorithm for `least` regions or more, some with several members; else it is a tree, or a flat one."""
    return Algorithm(
        build,
        needs_regions=True,
        num_messages=count,
        differs=lambda p: least <= len(set(p.regions)) < p.num_ranks,
    )


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": _flat(ring.all_reduce_ring),
        "halving-doubling": _of_three(_flat(trees.all_reduce_halving_doubling)),
        "tree": _flat(trees.all_reduce_tree),
        "direct": _of_three(_crowd(direct.all_reduce_direct)),
        "two-level": _two_level(trees.all_reduce_two_level, 2, _a_member),
        "two-level-direct": _two_level(trees.all_reduce_two_level_direct, 3, _a_pair),
        "gloo": _segmented(gloo.all_reduce_gloo),
        "nccl-ring": _nccl(nccl.all_reduce_nccl_ring),
        "nccl-tree": _nccl(nccl.all_reduce_nccl_tree),
    },
    "all_gather": {
        "ring": _flat(ring.all_gather_ring),
        "direct": _of_three(_crowd(direct.all_gather_direct)),
        "gloo": _flat(gloo.all_gather_gloo),
        "nccl-ring": _nccl(nccl.all_gather_nccl_ring),
    },
    "reduce_scatter": {
        "ring": _flat(ring.reduce_scatter_ring),
        "direct": _of_three(_crowd(direct.reduce_scatter_direct)),
        "gloo": replace(_segmented(gloo.all_reduce_gloo), is_wasteful=True),
        "nccl-ring": _nccl(nccl.reduce_scatter_nccl_ring),
    },
    "broadcast": {
        "tree": _flat(trees.broadcast_tree),
        "direct": _of_three(_flat(direct.broadcast_direct)),
        "gloo": _flat(gloo.broadcast_gloo),
        "nccl-ring": _nccl(nccl.broadcast_nccl_ring),
    },
    "reduce": {
        "tree": _flat(trees.reduce_tree),
        "direct": _of_three(_flat(direct.reduce_direct)),
        "gloo": replace(_segmented(gloo.reduce_gloo), is_wasteful=True),
        "nccl-ring": _nccl(nccl.reduce_nccl_ring),
    },
    "gather": dict.fromkeys(("direct", "gloo"), _flat(direct.gather_direct)),
    "scatter": dict.fromkeys(("direct", "gloo"), _flat(direct.scatter_direct)),
    "all_to_all": dict.fromkeys(("direct", "gloo"), _crowd(direct.all_to_all_direct)),
    "barrier": {
        **dict.fromkeys(("dissemination", "gloo"), _flat(direct.barrier_dissemination)),
        "nccl-ring": _nccl(nccl.barrier_nccl(nccl.all_reduce_nccl_ring)),
        "nccl-tree": _nccl(nccl.barrier_nccl(nccl.all_reduce_nccl_tree)),
    },
    "sendrecv": dict.fromkeys(("direct", "gloo"), _flat(direct.sendrecv_direct)),
}
"""Algorithms by operation and name; the first of an operation is its default."""

_SHIPPED = {algorithm for rows in ALGORITHMS.values() for algorithm in rows.values()}  # proven by tests


def algorithm_names(op: str) -> tuple[str, ...]:
    """The algorithms for `op`, its default first. Raises UnknownNameError for an unknown operation."""
    if op not in OPERATIONS:
        raise unknown_name("collective", str(op), OPERATIONS)
    return tuple(ALGORITHMS[op])


def find_algorithm(op: str, name: str) -> Algorithm:
    """A row of the table; raises InputError for a row that is no `Algorithm`."""
    row = ALGORITHMS[op][name]
    if not isinstance(row, Algorithm):
        raise InputError(f"{op} by {name}: the table holds {shown(row)}: make it an Algorithm(build, ...)")
    return row


def default_algorithm(op: str) -> str:
    """Name of the algorithm for the operation `op` where none is chosen: the first of its row in `ALGORITHMS`."""
    return algorithm_names(op)[0]


def build(p: Problem) -> Schedule:
    """Build the schedule of one collective; equal problems return the same object.

    Raises:
        InputError: there are too many bytes for the algorithm, or it is not shipped and does not compute its operation.
    """
    algorithm = find_algorithm(p.op, p.algorithm)
    if p.num_bytes > algorithm.most_bytes:
        raise InputError(
            f"{p.op} by {p.algorithm}: expected at most {format_bytes(algorithm.most_bytes)}, got "
            f"{format_bytes(p.num_bytes)}: split it, or choose another algorithm"
        )
    regions = (p.regions or ("",) * p.num_ranks) if algorithm.needs_regions else ()
    return _build(replace(p, regions=regions), algorithm)


@lru_cache(maxsize=512)
def _build(p: Problem, algorithm: Algorithm) -> Schedule:
    """Build a schedule; cached, since training asks for the same few again and again."""
    if algorithm in _SHIPPED:
        return make_schedule(p, algorithm)
    try:
        made = make_schedule(p, algorithm)
        check_bytes(made)
        _check_small(_small(p), algorithm)
    except Exception as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        hint = (
            ""
            if kind or algorithm.needs_regions
            else " (to read regions an algorithm needs needs_regions=True)"
        )
        line = " ".join(f"{kind}{error}".split())
        raise InputError(f"{p.op} by {p.algorithm}: {line}{hint}") from (error if kind else None)
    return made


@lru_cache(maxsize=512)
def _check_small(p: Problem, algorithm: Algorithm) -> None:
    check_result(make_schedule(p, algorithm))


def make_schedule(p: Problem, algorithm: Algorithm) -> Schedule:
    """Make the schedule of a problem by an algorithm, unchecked and not cached; raises InputError for no phases."""
    phases = algorithm.build(p) if p.num_bytes or OPERATIONS[p.op].is_sent_empty else ()
    phases = phases.phases if isinstance(phases, Schedule) else phases
    if not isinstance(phases, tuple) or not all(isinstance(phase, Phase) for phase in phases):
        kinds = [type(each).__name__ for each in phases] if isinstance(phases, tuple) else []
        got = f"({', '.join(kinds)})" if kinds else type(phases).__name__
        raise InputError(
            f"{getattr(algorithm.build, '__name__', 'build')} returned {got}: return a tuple of phases, such as"
            " (ListedPhase([step_of(rows)]),)"
        )
    return Schedule(p.op, p.algorithm, p.num_ranks, p.num_bytes, phases, p.layout, p.root, p.element_bytes)


_MOST_PLAYED = 64


def _small(p: Problem) -> Problem:
    """The same problem with a few elements a member, among at most `_MOST_PLAYED`."""
    num = min(p.num_ranks, _MOST_PLAYED)
    parts = None
    if p.parts is not None and num == p.num_ranks:
        parts = tuple(min(part, 3 * p.element_bytes) for part in p.parts)
    most_elements = 3 * max(OPERATIONS[p.op].num_parts(num), num) + 1
    return replace(
        p,
        num_ranks=num,
        num_bytes=min(p.num_bytes, most_elements * p.element_bytes) if parts is None else sum(parts),
        root=min(p.root, num - 1),
        regions=p.regions[:num],
        parts=parts,
    )
