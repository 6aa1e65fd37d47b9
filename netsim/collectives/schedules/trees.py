"""Binomial trees, recursive halving and doubling, and two levels: trees in regions, few bytes between them.

Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005), sections
4.1 to 4.5. Trees are drawn in virtual ranks v = (position - root) mod n: v hangs below v without its highest
bit.

Two levels: each region reduces to its first member, these leaders all-reduce among themselves, and each leader
broadcasts in its region. Links between regions carry 2 (g - 1) / g of the bytes per region, whatever its size: around
a ring, or directly from each leader to each other, which takes two latencies and uses all links at once.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.direct import all_reduce_direct
from netsim.collectives.schedules.ring import all_reduce_ring
from netsim.collectives.schedules.schedule import ListedPhase, Step, boundaries, step_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from netsim.collectives.schedules.schedule import Phase, Problem, Ranks

__all__ = [
    "all_reduce_halving_doubling",
    "all_reduce_tree",
    "all_reduce_two_level",
    "all_reduce_two_level_direct",
    "broadcast_tree",
    "reduce_tree",
]

Rows = list[tuple[int, int, int, int]]


def _broadcast_rounds(ranks: Ranks, num_bytes: int, root: int) -> list[Rows]:
    """Rows of a binomial broadcast among `ranks` from the member at position `root`, one list a round.

    In round j every v < 2^j, which has the tensor, sends it to v + 2^j.
    """
    num = len(ranks)
    name = [int(ranks[(root + virtual) % num]) for virtual in range(num)]
    rounds = range(max(num - 1, 0).bit_length())
    return [
        [
            (name[virtual], name[virtual + (1 << power)], 0, num_bytes)
            for virtual in range(1 << power)
            if virtual + (1 << power) < num
        ]
        for power in rounds
    ]


def _reduce_rounds(ranks: Ranks, num_bytes: int, root: int) -> list[Rows]:
    """Rows of a binomial reduce to the member at position `root`: the broadcast, backwards."""
    rounds = _broadcast_rounds(ranks, num_bytes, root)
    return [[(dst, src, low, high) for src, dst, low, high in rows] for rows in reversed(rounds)]


def broadcast_tree(p: Problem) -> tuple[Phase, ...]:
    """Binomial broadcast of the whole tensor in ceil(log2 n) rounds."""
    return (ListedPhase([step_of(rows) for rows in _broadcast_rounds(p.ranks, p.num_bytes, p.root)]),)


def reduce_tree(p: Problem) -> tuple[Phase, ...]:
    """Binomial reduce of the whole tensor in ceil(log2 n) rounds."""
    rounds = _reduce_rounds(p.ranks, p.num_bytes, p.root)
    return (ListedPhase([step_of(rows) for rows in rounds], reduce=True),)


def all_reduce_tree(p: Problem) -> tuple[Phase, ...]:
    """Binomial reduce to member 0, then broadcast from it: 2 ceil(log2 n) rounds of the whole tensor."""
    to_first = replace(p, root=0)
    return reduce_tree(to_first) + broadcast_tree(to_first)


def all_reduce_halving_doubling(p: Problem) -> tuple[Phase, ...]:
    """Reduce-scatter by halving, all-gather by doubling: 2 log2 p rounds, 2 (p - 1) / p of the bytes.

    With p = 2^floor(log2 n), the first 2 (n - p) members pair up before (odd ones fold into their even
    neighbour) and after (they get the result), as in section 4.5.
    """
    if p.num_ranks == 1:
        return ()
    core = 1 << (p.num_ranks.bit_length() - 1)
    extra = p.num_ranks - core
    ranks = p.ranks.tolist()
    members = [ranks[2 * position if position < extra else position + extra] for position in range(core)]
    pairs = [ranks[2 * pair : 2 * pair + 2] for pair in range(extra)]
    fold = step_of([(odd, even, 0, p.num_bytes) for even, odd in pairs])
    unfold = step_of([(even, odd, 0, p.num_bytes) for even, odd in pairs])
    # Partners at distance p/2, p/4, ..., 1 exchange halves of what they still hold; p ends with chunk p.
    bounds = boundaries(p.num_bytes, core, p.element_bytes).tolist()
    halving: list[Step] = []
    distance = core // 2
    while distance:
        rows = []
        for position in range(core):
            partner = position ^ distance
            first = partner & ~(distance - 1)  # the half in which the partner ends
            rows.append((members[position], members[partner], bounds[first], bounds[first + distance]))
        halving.append(step_of(rows))
        distance //= 2
    doubling = [Step(step.dst, step.src, step.offset, step.num_bytes) for step in reversed(halving)]
    return (
        ListedPhase([fold, *halving] if extra else halving, reduce=True),
        ListedPhase([*doubling, unfold] if extra else doubling),
    )


def all_reduce_two_level(p: Problem) -> tuple[Phase, ...]:
    """Reduce in each region, ring all-reduce among the regions' first members, broadcast in each region."""
    return _two_level(p, all_reduce_ring)


def all_reduce_two_level_direct(p: Problem) -> tuple[Phase, ...]:
    """Reduce in each region, direct exchange among the regions' first members, broadcast in each region."""
    return _two_level(p, all_reduce_direct)


def _two_level(p: Problem, among: Callable[[Problem], tuple[Phase, ...]]) -> tuple[Phase, ...]:
    regions, num_bytes = p.regions, p.num_bytes
    members = [
        np.array([rank for rank, other in enumerate(regions) if other == region], np.int64)
        for region in dict.fromkeys(regions)
    ]
    leaders = tuple(int(ranks[0]) for ranks in members)
    reduce = _merge([_reduce_rounds(ranks, num_bytes, 0) for ranks in members])
    broadcast = _merge([_broadcast_rounds(ranks, num_bytes, 0) for ranks in members])
    across = among(replace(p, num_ranks=len(leaders), members=leaders)) if len(leaders) > 1 else ()
    return (ListedPhase(reduce, reduce=True), *across, ListedPhase(broadcast))


def _merge(schedules: list[list[Rows]]) -> list[Step]:
    """Merge several trees: step i holds step i of each."""
    return [step_of([row for rows in step for row in rows]) for step in zip_longest(*schedules, fillvalue=[])]
