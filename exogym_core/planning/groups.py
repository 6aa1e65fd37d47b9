"""Which hosts act as one: groups of equal size whose members are near each other, for rounds between groups."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import netsim
from exogym_core.planning.ring_order import pair_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from netsim.topology.topology import Topology

__all__ = ["Grouping", "best_groups", "group_seconds", "groupings"]

Groups = list[list[int]]
Table = list[list[float]]


class Grouping(NamedTuple):
    """Ranks' places in an order in which each `size` of them are a group."""

    size: int
    order: list[int]


_MOST_LOOKED_AT = 2_000_000  # pairs of members in all exchanges that are tried: a second or so


def groupings(topology: Topology, hosts: Sequence[int], num_bytes: float) -> Iterator[Grouping]:
    """For each number of groups that divides the hosts, the places of `hosts` ordered group by group; not one, nor all.

    Groups of a size are those whose farthest members are nearest, so that steps inside them are fast; ranks on one host
    are nearest. Orders whose groups are no nearer than any two hosts are left out, as there is nothing to gain.

    Args:
        topology: the network.
        hosts: of each rank.
        num_bytes: of a message, by which ways are compared.
    """
    seconds = pair_seconds(topology, hosts, num_bytes)
    number = len(hosts)
    farthest = max((seconds[a][b] for a in range(number) for b in range(number) if a != b), default=0.0)
    for size in range(2, number // 2 + 1):
        if number % size:
            continue
        groups = best_groups(seconds, size)
        if _cost(groups, seconds)[0] < farthest:
            yield Grouping(size, [place for group in groups for place in group])


def group_seconds(
    topology: Topology, hosts: Sequence[int], grouping: Grouping, num_bytes: int
) -> tuple[float, float]:
    """About what an all-reduce takes inside the slowest group, and between one host of each.

    By `netsim.collective`, ideally shared; to tell one number of groups from another, not to plan.

    Args:
        topology: the network.
        hosts: of each rank.
        grouping: of them.
        num_bytes: of what is averaged.
    """
    size, order = grouping
    names = [topology.hosts[hosts[place]].name for place in order]
    groups = [names[at : at + size] for at in range(0, len(names), size)]

    def seconds(members: Sequence[str]) -> float:
        apart = list(dict.fromkeys(members))
        if len(apart) < 2:
            return 0.0
        return netsim.collective(
            topology, "all_reduce", num_bytes=num_bytes, ranks=apart, protocol="ideal"
        ).seconds

    return max(map(seconds, groups)), seconds([group[0] for group in groups])


def best_groups(seconds: Table, size: int) -> Groups:
    """Groups of `size` whose slowest way inside is fastest, and of those the sum of ways inside is small.

    Begun by the widest gaps: each group takes who is nearest to all that it has. Then two members of two groups are
    exchanged while that helps.

    Args:
        seconds: from each to each.
        size: a divisor of their number.

    >>> near, far = 1.0, 9.0
    >>> best_groups([[0, far, near, far], [far, 0, far, near], [near, far, 0, far], [far, near, far, 0]], 2)
    [[0, 2], [1, 3]]
    """
    both = [
        [max(there, back) for there, back in zip(row, column, strict=True)]
        for row, column in zip(seconds, zip(*seconds, strict=True), strict=True)
    ]
    groups = _grown(both, size)
    left = _MOST_LOOKED_AT
    improved = True
    while improved:
        improved = False
        for one, other in itertools.combinations(range(len(groups)), 2):
            for i, j in itertools.product(range(size), range(size)):
                left -= 2 * size * size
                if left < 0:
                    return _in_order(groups)
                before = _cost([groups[one], groups[other]], both)
                groups[one][i], groups[other][j] = groups[other][j], groups[one][i]
                if _cost([groups[one], groups[other]], both) < before:
                    improved = True
                else:
                    groups[one][i], groups[other][j] = groups[other][j], groups[one][i]
    return _in_order(groups)


def _grown(both: Table, size: int) -> Groups:
    """Begin with who is farthest from all others; add who is nearest to the group, until it is full."""
    left = list(range(len(both)))
    groups = []
    while left:
        seed = max(left, key=lambda each: (sum(both[each][other] for other in left), -each))
        group = [seed]
        left.remove(seed)
        while len(group) < size:
            nearest = min(left, key=lambda each: (max(both[each][member] for member in group), each))
            group.append(nearest)
            left.remove(nearest)
        groups.append(group)
    return groups


def _cost(groups: Groups, seconds: Table) -> tuple[float, float]:
    """(slowest way inside a group, sum of ways inside)."""
    ways = [seconds[a][b] for group in groups for a in group for b in group if a != b]
    return max(ways, default=0.0), sum(ways)


def _in_order(groups: Groups) -> Groups:
    return sorted(sorted(group) for group in groups)
