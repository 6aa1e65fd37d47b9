"""All_to_all whose sizes become known member by member, each member's as it enters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.direct import all_to_all_direct
from netsim.collectives.schedules.schedule import ListedPhase, Schedule
from netsim.collectives.times.collective import Collective

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.fluid.network import Network

__all__ = ["start_all_to_all"]


def start_all_to_all(
    network: Network,
    hosts: Sequence[int],
    whole: Callable[[tuple[tuple[int, ...], ...]], Schedule],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> tuple[Callable[[int, Sequence[int]], None], Callable[[], None]]:
    """Start an all_to_all of which nothing but its members is known.

    Args:
        network, hosts, group, on_done: as for `start_collective`.
        whole: the schedule with `rows[i][j]` bytes from member i to member j.

    Returns:
        What lets a member enter now with the bytes that it has for each member; and `Collective.cancel`.
    """
    num = len(hosts)
    num_bytes = np.zeros(num * (num - 1), np.int64)
    schedule = _of_sizes(num, num_bytes)
    started = Collective(network, schedule, tuple(hosts), group, on_done)
    rows: dict[int, tuple[int, ...]] = {}

    def enter(member: int, row: Sequence[int]) -> None:
        rows[member] = tuple(row)
        others = np.roll(np.array(row, np.int64), -member)[1:]  # as `all_to_all_direct` orders them
        num_bytes[member * (num - 1) : (member + 1) * (num - 1)] = others
        if len(rows) == num:
            # From here on it is one that may have been timed before, and is remembered as such.
            started.schedule = whole(tuple(rows[member] for member in range(num)))
        started.arrive(member)

    return enter, started.cancel


def _of_sizes(num: int, num_bytes: np.ndarray) -> Schedule:
    """A schedule that has its sizes in an array, which is filled in as time goes by."""
    layout = np.zeros(num * num + 1, np.int64)
    (phase,) = all_to_all_direct(num, layout)
    step = replace(phase.step(0), num_bytes=num_bytes)
    return Schedule("all_to_all", "direct", num, 0, (ListedPhase([step]),), layout)
