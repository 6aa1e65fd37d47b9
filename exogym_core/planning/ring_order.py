"""The order in which a ring visits sites: the best there is for few, a good one for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import netsim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.topology.topology import Topology

__all__ = ["EXACT_SITES", "best_cycle", "pair_seconds", "ring_orders"]

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
    """The cycle whose slowest step is fastest, and of those one that is short in sum; it begins with 0.

    Exact up to `EXACT_SITES` (every subset once, by its last member); beyond, exchanges of two edges from the
    nearest neighbours' cycle until none helps, or as many have been tried as are worth it.

    >>> far, near = 9.0, 1.0
    >>> best_cycle([[0, far, near, near], [far, 0, near, near], [near, near, 0, far], [near, near, far, 0]])
    [0, 2, 1, 3]
    """
    number = len(seconds)
    if number <= 3:
        both = [list(range(number)), [0, *range(number - 1, 0, -1)]]
        return min(both, key=lambda cycle: _cost(cycle, seconds))
    return _exact(seconds) if number <= EXACT_SITES else _improved(seconds)


def _cost(cycle: Sequence[int], seconds: Table) -> tuple[float, float]:
    steps = [seconds[a][b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    return max(steps), sum(steps)


def _exact(seconds: Table) -> list[int]:
    number = len(seconds)
    # (visited, last) -> (slowest step, sum, way); a set of sites is a number whose bits they are.
    layer: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {
        (1 << i, i): (seconds[0][i], seconds[0][i], (i,)) for i in range(1, number)
    }
    for _ in range(number - 2):
        following: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {}
        for (visited, last), (slowest, total, way) in layer.items():
            for other in range(1, number):
                if visited >> other & 1:
                    continue
                step = seconds[last][other]
                made = (max(slowest, step), total + step, (*way, other))
                key = (visited | 1 << other, other)
                if key not in following or made < following[key]:
                    following[key] = made
        layer = following
    return min(([0, *way] for _, _, way in layer.values()), key=lambda cycle: _cost(cycle, seconds))


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
        cost = _cost(cycle, seconds)
        for i in range(1, number - 1):
            for j in range(i + 1, number):
                left_to_try -= 1
                if left_to_try < 0:
                    return cycle
                other = cycle[:i] + cycle[i : j + 1][::-1] + cycle[j + 1 :]
                if _cost(other, seconds) < cost:
                    cycle, cost, improved = other, _cost(other, seconds), True
    return cycle


def ring_orders(topology: Topology, num_bytes: int, protocol: object = None) -> dict[str, object]:
    """A ring over one host a site, in natural order and in the best, beside the network's bound; simulated.

    Returns:
        `sites` in the best order, `seconds`, `natural_seconds`, `bound_seconds` (what no algorithm can beat), and
        `exact`, whether the order was searched through.
    """
    first: dict[str, int] = {}
    for host in topology.hosts:
        first.setdefault(topology.region_of(host.index), host.index)
    sites, hosts = list(first), list(first.values())
    cycle = best_cycle(pair_seconds(topology, hosts, num_bytes / max(len(hosts), 1)))
    named = [topology.hosts[host].name for host in hosts]

    def simulated(order: Sequence[int]) -> netsim.CollectiveTimes:
        return netsim.collective(
            topology,
            "all_reduce",
            num_bytes=num_bytes,
            algorithm="ring",
            ranks=[named[place] for place in order],
            protocol=protocol,  # type: ignore[arg-type]
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
