"""Order of sites in a ring."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import netsim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from netsim import Protocol, Topology
    from netsim.collectives.collective import CollectiveTimes

__all__ = [
    "EXACT_SITES",
    "best_cycle",
    "first_hosts",
    "pair_seconds",
    "ring_orders",
]

EXACT_SITES = 10
_MOST_EXCHANGED = 5_000_000  # sites in all cycles that are looked at: a second or two

Table = list[list[float]]


def pair_seconds(topology: Topology, hosts: Sequence[int], num_bytes: float) -> Table:
    """Seconds of a message from each host to each other on a quiet network: latency and its narrowest link."""

    def seconds(src: int, dst: int) -> float:
        links = [topology.links[link] for link in topology.route(src, dst)]
        narrowest = min((link.bits_per_second for link in links), default=float("inf"))
        return sum(link.latency_seconds for link in links) + num_bytes * 8 / narrowest

    return [[seconds(src, dst) for dst in hosts] for src in hosts]


def best_cycle(seconds: Table) -> list[int]:
    """The cycle from 0 with the fastest slowest step, and of those a short one.

    Exact up to `EXACT_SITES` (Held and Karp); beyond, 2-opt from the nearest-neighbour cycle, with a limited number of
    exchanges.

    >>> far, near = 9.0, 1.0
    >>> best_cycle([[0, far, near, near], [far, 0, near, near], [near, near, 0, far], [near, near, far, 0]])
    [0, 2, 1, 3]
    """
    if len(seconds) < 2:
        return [0] * len(seconds)
    return _exact(seconds) if len(seconds) <= EXACT_SITES else _improved(seconds)


def _length(cycle: Sequence[int], seconds: Table) -> tuple[float, float]:
    steps = [seconds[a][b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    return max(steps), sum(steps)


def _exact(seconds: Table) -> list[int]:
    @cache
    def shortest(visited: frozenset[int], last: int) -> tuple[float, float, tuple[int, ...]]:
        """(slowest step, sum, route) of the best route from 0 through all of `visited` that ends at `last`."""
        before = visited - {last}
        if not before:
            return seconds[0][last], seconds[0][last], (last,)
        routes = ((shortest(before, other), seconds[other][last]) for other in before)
        return min(
            (max(slowest, step), total + step, (*route, last)) for (slowest, total, route), step in routes
        )

    every = range(len(seconds) - 1, 0, -1)
    cycles = ([0, *shortest(frozenset(every), last)[2]] for last in every)
    return min(cycles, key=lambda cycle: _length(cycle, seconds))


def _improved(seconds: Table) -> list[int]:
    number = len(seconds)
    cycle, left = [0], set(range(1, number))
    while left:
        nearest = min(left, key=lambda other: (seconds[cycle[-1]][other], other))
        cycle.append(nearest)
        left.discard(nearest)
    improved, left_to_try = True, _MOST_EXCHANGED // number
    while improved:
        improved = False
        cost = _length(cycle, seconds)
        for i, j in itertools.combinations(range(1, number), 2):
            left_to_try -= 1
            if left_to_try < 0:
                return cycle
            other = cycle[:i] + cycle[i : j + 1][::-1] + cycle[j + 1 :]
            if _length(other, seconds) < cost:
                cycle, cost, improved = other, _length(other, seconds), True
    return cycle


def first_hosts(topology: Topology, hosts: Sequence[int]) -> dict[str, int]:
    """The first of `hosts` at each site, in their order."""
    first: dict[str, int] = {}
    for host in hosts:
        first.setdefault(topology.region_of(host), host)
    return first


def ring_orders(
    topology: Topology,
    workers: Sequence[int],
    num_bytes: int,
    protocol: str | Mapping[str, Any] | Protocol | None = None,
) -> dict[str, object]:
    """Simulate a ring over one host per site of `workers`, in natural and in best order; with the network's bound.

    Returns:
        `sites` in the best order, `seconds`, `natural_seconds`, `bound_seconds` (what no algorithm can beat), and
        `exact`, whether the order was searched through.
    """
    sites, hosts = map(list, zip(*first_hosts(topology, workers).items(), strict=True))
    cycle = best_cycle(pair_seconds(topology, hosts, num_bytes / max(len(hosts), 1)))
    named = [topology.hosts[host].name for host in hosts]

    def simulated(order: Sequence[int]) -> CollectiveTimes:
        return netsim.collective(
            topology,
            "all_reduce",
            num_bytes=num_bytes,
            algorithm="ring",
            ranks=[named[place] for place in order],
            protocol=protocol,
        )

    best, natural = simulated(cycle), simulated(range(len(hosts)))
    if natural.seconds < best.seconds:  # links that sites share are not in the table of pairs
        cycle, best = list(range(len(hosts))), natural
    return {
        "sites": [sites[place] for place in cycle],
        "seconds": best.seconds,
        "natural_seconds": natural.seconds,
        "bound_seconds": best.bound_seconds,
        "exact": len(hosts) <= EXACT_SITES,
    }
