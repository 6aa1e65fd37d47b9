"""Hosts of the ranks of workers that are chains."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from exogym_core.stages.options import Stages
    from netsim import Topology

__all__ = ["hosts_of"]

_MOST_PERMUTED = 7  # hosts of a chain whose orders are all compared


def hosts_of(
    topology: Topology, num_workers: int, stages: Stages | None, placement: Sequence[str] | None
) -> Sequence[int]:
    """Host of each rank, worker by worker.

    Without a `placement` a worker's ranks are in one region where it has as many hosts, in the order with the least sum
    of one-way latencies: the longest hop is crossed least often (Yuan et al., DT-FM, arXiv 2206.01288). Of more than
    seven hosts each is followed by the nearest one left.

    Raises:
        InputError: the placement does not fit the ranks or the topology.
    """
    count = 1 if stages is None else stages.count
    hosts = topology.place(num_workers * count, placement)
    if count == 1 or placement is not None:
        return hosts
    places: list[int] = []
    for first in range(0, len(hosts), count):
        own = hosts[first : first + count]

        def length(order: Iterable[int]) -> float:
            return sum(topology.route_latency_seconds(a, b) for a, b in pairwise(order))

        if count <= _MOST_PERMUTED:
            places += min(permutations(own), key=length)
            continue
        left, chain = list(own[1:]), [own[0]]
        while left:
            nearest = min(left, key=lambda host: topology.route_latency_seconds(chain[-1], host))
            left.remove(nearest)
            chain.append(nearest)
        places += chain
    return places
