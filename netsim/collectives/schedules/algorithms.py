"""The table of collective algorithms, and `build`, which makes a schedule by one of them.

A new algorithm is one function in a file of its own and one row here; the row inherits every test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules import direct, gloo, ring, trees
from netsim.collectives.schedules.schedule import Phase, Problem, Schedule
from netsim.errors import InputError, unknown_name
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ALGORITHMS", "Algorithm", "algorithm_names", "build", "default_algorithm"]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of one operation.

    Attributes:
        build: builds its phases.
        needs_regions: reads `Problem.regions`.
        num_messages: largest number of messages in a step, by the number of members (of regions, if it needs regions).
    """

    build: Callable[[Problem], tuple[Phase, ...]]
    needs_regions: bool
    num_messages: Callable[[int], int]


def _a_member(num: int) -> int:
    return num


def _a_pair(num: int) -> int:
    return num * (num - 1)


def _flat(build: Callable[[Problem], tuple[Phase, ...]]) -> Algorithm:
    """An algorithm with at most one message a member in a step."""
    return Algorithm(build, needs_regions=False, num_messages=_a_member)


def _crowd(build: Callable[[Problem], tuple[Phase, ...]]) -> Algorithm:
    """An algorithm with a message from each member to each other in one step."""
    return Algorithm(build, needs_regions=False, num_messages=_a_pair)


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": _flat(ring.all_reduce_ring),
        "halving-doubling": _flat(trees.all_reduce_halving_doubling),
        "tree": _flat(trees.all_reduce_tree),
        "direct": _crowd(direct.all_reduce_direct),
        "two-level": Algorithm(trees.all_reduce_two_level, needs_regions=True, num_messages=_a_member),
        "two-level-direct": Algorithm(
            trees.all_reduce_two_level_direct, needs_regions=True, num_messages=_a_pair
        ),
        "gloo": _flat(gloo.all_reduce_gloo),
    },
    "all_gather": {
        "ring": _flat(ring.all_gather_ring),
        "direct": _crowd(direct.all_gather_direct),
        "gloo": _flat(gloo.all_gather_gloo),
    },
    "reduce_scatter": {
        "ring": _flat(ring.reduce_scatter_ring),
        "direct": _crowd(direct.reduce_scatter_direct),
        "gloo": _flat(gloo.all_reduce_gloo),
    },
    "broadcast": {
        "tree": _flat(trees.broadcast_tree),
        "direct": _flat(direct.broadcast_direct),
        "gloo": _flat(gloo.broadcast_gloo),
    },
    "reduce": {
        "tree": _flat(trees.reduce_tree),
        "direct": _flat(direct.reduce_direct),
        "gloo": _flat(gloo.reduce_gloo),
    },
    "gather": dict.fromkeys(("direct", "gloo"), _flat(direct.gather_direct)),
    "scatter": dict.fromkeys(("direct", "gloo"), _flat(direct.scatter_direct)),
    "all_to_all": dict.fromkeys(("direct", "gloo"), _crowd(direct.all_to_all_direct)),
    "barrier": dict.fromkeys(("dissemination", "gloo"), _flat(direct.barrier_dissemination)),
    "sendrecv": dict.fromkeys(("direct", "gloo"), _flat(direct.sendrecv_direct)),
}
"""Algorithms by operation and name; the first of an operation is its default."""


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


def build(p: Problem) -> Schedule:
    """Build the schedule of one collective; equal problems return the same object.

    Raises:
        InputError: the algorithm moves fewer bytes than the operation needs.
    """
    needs_regions = ALGORITHMS[p.op][p.algorithm].needs_regions
    return _build(replace(p, regions=(p.regions or ("",) * p.num_ranks) if needs_regions else ()))


@lru_cache(maxsize=512)
def _build(p: Problem) -> Schedule:
    """Build a schedule; cached, since training asks for the same few again and again."""
    operation = OPERATIONS[p.op]
    phases = ALGORITHMS[p.op][p.algorithm].build(p) if p.num_bytes or operation.is_sent_empty else ()
    made = Schedule(p.op, p.algorithm, p.num_ranks, p.num_bytes, phases, p.layout, p.root, p.element_bytes)
    needed = operation.total_passes(p.num_ranks) * int(p.layout[-1]) - operation.kept_bytes(made)
    if (sent := int(made.sent_bytes.sum())) < needed:
        raise InputError(
            f"{p.op} by {p.algorithm}: its messages carry {format_bytes(sent)} in all, and {format_bytes(needed)} have "
            f"to pass between {p.num_ranks} ranks; register an algorithm that looks at regions with needs_regions=True"
        )
    return made
