"""Which host each rank runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["spread"]


def spread(num_ranks: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Place ranks evenly over groups of hosts (regions), contiguous within a group.

    Every host gets a rank before any gets a second one. Where the number does not divide, earlier groups
    get one more; a group that is full leaves its share to the others. Returns each rank's host.

    >>> spread(4, [[0, 1, 2], [3, 4, 5]])
    (0, 1, 3, 4)
    >>> spread(5, [[0, 1, 2], [3]])
    (0, 1, 2, 0, 3)
    """
    num_hosts = sum(len(group) for group in groups)
    rounds, rest = divmod(num_ranks, num_hosts)
    extra = [0] * len(groups)
    while rest:
        for position, group in enumerate(groups):
            if rest and extra[position] < len(group):
                extra[position] += 1
                rest -= 1
    return tuple(
        group[slot % len(group)]
        for group, more in zip(groups, extra, strict=True)
        for slot in range(rounds * len(group) + more)
    )
