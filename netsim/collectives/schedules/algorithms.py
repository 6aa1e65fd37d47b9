"""The table of collective algorithms, and `schedule`, which makes a collective from it.

A new algorithm is one function in a file of its own and one row here; the row inherits every test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from netsim.collectives.schedules import direct, gloo, ring, trees
from netsim.collectives.schedules.schedule import ONE_PART, Phase, Problem, Schedule
from netsim.errors import InputError, unknown_name

__all__ = ["ALGORITHMS", "OPERATIONS", "Parts", "algorithm_names", "default_algorithm", "schedule"]

Parts = Sequence[int] | Sequence[Sequence[int]]

# Operations that send messages even without elements: the receiver learns that its part is empty.
_NEVER_EMPTY = ("all_to_all", "barrier", "sendrecv")

Builder = Callable[[Problem], tuple[Phase, ...]]

ALGORITHMS: Mapping[str, Mapping[str, Builder]] = {
    "all_reduce": {
        "ring": ring.all_reduce_ring,
        "halving-doubling": trees.all_reduce_halving_doubling,
        "tree": trees.all_reduce_tree,
        "direct": direct.all_reduce_direct,
        "two-level": trees.all_reduce_two_level,
        "two-level-direct": trees.all_reduce_two_level_direct,
        "gloo": gloo.all_reduce_gloo,
    },
    "all_gather": {
        "ring": ring.all_gather_ring,
        "direct": direct.all_gather_direct,
        "gloo": gloo.all_gather_gloo,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter_ring,
        "direct": direct.reduce_scatter_direct,
        "gloo": gloo.all_reduce_gloo,
    },
    "broadcast": {
        "tree": trees.broadcast_tree,
        "direct": direct.broadcast_direct,
        "gloo": gloo.broadcast_gloo,
    },
    "reduce": {"tree": trees.reduce_tree, "direct": direct.reduce_direct, "gloo": gloo.reduce_gloo},
    "gather": dict.fromkeys(("direct", "gloo"), direct.gather_direct),
    "scatter": dict.fromkeys(("direct", "gloo"), direct.scatter_direct),
    "all_to_all": dict.fromkeys(("direct", "gloo"), direct.all_to_all_direct),
    "barrier": dict.fromkeys(("dissemination", "gloo"), direct.barrier_dissemination),
    "sendrecv": dict.fromkeys(("direct", "gloo"), direct.sendrecv_direct),
}
"""Builders of phases by operation and name of the algorithm; the first algorithm of an operation is its default."""

OPERATIONS = tuple(ALGORITHMS)
"""Names of all operations."""

ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Operations in which one member sends to all, or receives from all."""


def algorithm_names(op: str) -> tuple[str, ...]:
    """The algorithms for `op`, its default first. Raises UnknownNameError for an unknown operation."""
    if op not in ALGORITHMS:
        raise unknown_name("collective", op, OPERATIONS)
    return tuple(ALGORITHMS[op])


def default_algorithm(op: str, *, gloo: bool = False) -> str:
    """Name of the algorithm for the operation `op` where none is chosen: the first of its row in `ALGORITHMS`.

    Under the protocol gloo (`gloo` is True) it is gloo's own.
    """
    names = algorithm_names(op)
    return "gloo" if gloo else names[0]


def schedule(
    op: str,
    num_ranks: int,
    *,
    num_bytes: int = 0,
    algorithm: str | None = None,
    root: int = 0,
    element_bytes: int = 1,
    regions: Sequence[str] = (),
    parts: Parts | None = None,
) -> Schedule:
    """The schedule of one collective; pure data, the same object for the same arguments.

    `num_bytes` is the whole tensor for all_reduce, broadcast and reduce; the sum over ranks for all_gather,
    gather, scatter, reduce_scatter and all_to_all; the message for sendrecv (from member 0 to member 1).
    `parts` gives uneven shares instead of equal ones: bytes of each rank, or from i to j as n rows of n for
    all_to_all; `num_bytes` is then their sum and need not be given. `algorithm` is a name of the table, None
    for the operation's default. `regions` names each member's region; without them all members are in one.
    A collective of no bytes has no messages, but for all_to_all, whose members learn of each part that it is empty.

    Raises UnknownNameError for an operation or algorithm that does not exist, InputError for a wrong number
    or size.
    """
    names = algorithm_names(op)
    chosen = names[0] if algorithm is None else algorithm
    if chosen not in names:
        raise unknown_name(f"algorithm for {op}", chosen, (*names, "auto"))
    _check(op, num_ranks, num_bytes, root, element_bytes)
    flat = None if parts is None else _flat_parts(op, num_ranks, parts)
    total = int(num_bytes) if flat is None else sum(flat)
    where = (tuple(regions) or ("",) * num_ranks) if chosen.startswith("two-level") else ()
    return _made(Problem(op, chosen, num_ranks, total, root, element_bytes, flat, where))


@lru_cache(maxsize=512)
def _made(p: Problem) -> Schedule:
    """Build a schedule, kept because training asks for the same few again and again."""
    phases = ALGORITHMS[p.op][p.algorithm](p) if p.num_bytes or p.op in _NEVER_EMPTY else ()
    return Schedule(p.op, p.algorithm, p.num_ranks, p.num_bytes, phases, p.layout, p.root, p.element_bytes)


def _check(op: str, num_ranks: int, num_bytes: int, root: int, element_bytes: int) -> None:
    least = 2 if op == "sendrecv" else 1
    if num_ranks < least:
        raise InputError(f"{op}: {num_ranks} ranks given; it takes at least {least}")
    if num_bytes < 0:
        raise InputError(f"{op}: num_bytes is {num_bytes}; it must be 0 or more")
    if not 0 <= root < num_ranks:
        raise InputError(f"{op}: root {root} is not a member; it must be from 0 to {num_ranks - 1}")
    if element_bytes < 1:
        raise InputError(f"{op}: element_bytes is {element_bytes}; it must be 1 or more")


def _flat_parts(op: str, num_ranks: int, parts: Parts) -> tuple[int, ...]:
    if op in ONE_PART:
        raise InputError(f"{op}: it has no parts; give num_bytes instead")
    rows = [[row] if isinstance(row, int) else list(row) for row in parts]
    wanted = num_ranks if op == "all_to_all" else 1
    if len(rows) != num_ranks or any(len(row) != wanted for row in rows):
        shape = f"{num_ranks} rows of {num_ranks}" if op == "all_to_all" else f"{num_ranks} numbers"
        raise InputError(f"{op}: parts must be {shape} of bytes for {num_ranks} ranks")
    flat = tuple(chain.from_iterable(rows))
    if min(flat) < 0:
        raise InputError(f"{op}: parts must be 0 bytes or more, got {min(flat)}")
    return flat
