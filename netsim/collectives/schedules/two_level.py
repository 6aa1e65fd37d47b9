"""Two-level all-reduce: few bytes over the slow links between regions.

Each region reduces to its first member, these leaders all-reduce among themselves, and each leader broadcasts
in its region. Over links between regions go 2 (g - 1) / g of the bytes per region, whatever its size: around a
ring, or straight from each leader to each other, which takes two latencies and uses all links at once.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.direct import all_reduce_direct
from netsim.collectives.schedules.ring import all_reduce_ring
from netsim.collectives.schedules.schedule import ListedPhase, Step, boundaries, step_of
from netsim.collectives.schedules.trees import broadcast_rounds, reduce_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.collectives.schedules.schedule import Phase, Ranks
    from netsim.collectives.schedules.trees import Rows

__all__ = ["all_reduce_two_level", "all_reduce_two_level_direct"]


def all_reduce_two_level(regions: Sequence[str], num_bytes: int, element_bytes: int) -> tuple[Phase, ...]:
    """Reduce in each region, ring all-reduce among the regions' first members, broadcast in each region."""

    def among(leaders: Ranks) -> tuple[Phase, ...]:
        return all_reduce_ring(leaders, boundaries(num_bytes, len(leaders), element_bytes))

    return _two_level(regions, num_bytes, among)


def all_reduce_two_level_direct(
    regions: Sequence[str], num_bytes: int, element_bytes: int
) -> tuple[Phase, ...]:
    """Reduce in each region, direct exchange among the regions' first members, broadcast in each region."""

    def among(leaders: Ranks) -> tuple[Phase, ...]:
        phases = all_reduce_direct(len(leaders), boundaries(num_bytes, len(leaders), element_bytes))
        return tuple(
            ListedPhase(
                [
                    Step(leaders[step.src], leaders[step.dst], step.offset, step.num_bytes)
                    for step in map(phase.step, range(phase.num_steps))
                ],
                reduce=phase.reduce,
            )
            for phase in phases
        )

    return _two_level(regions, num_bytes, among)


def _two_level(
    regions: Sequence[str], num_bytes: int, among: Callable[[Ranks], tuple[Phase, ...]]
) -> tuple[Phase, ...]:
    members = [
        np.array([rank for rank, other in enumerate(regions) if other == region], np.int64)
        for region in dict.fromkeys(regions)
    ]
    leaders = np.array([ranks[0] for ranks in members], np.int64)
    reduce = _together([reduce_rounds(ranks, num_bytes, 0) for ranks in members])
    broadcast = _together([broadcast_rounds(ranks, num_bytes, 0) for ranks in members])
    across = among(leaders) if len(leaders) > 1 else ()
    return (ListedPhase(reduce, reduce=True), *across, ListedPhase(broadcast))


def _together(schedules: list[list[Rows]]) -> list[Step]:
    """Several trees side by side: step i holds step i of each."""
    return [step_of([row for rows in step for row in rows]) for step in zip_longest(*schedules, fillvalue=[])]
