"""What no network can beat: the least time a collective takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.times.recurrence import undisturbed_seconds
from netsim.fluid.fork import Wires

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.topology.topology import Topology

__all__ = ["lower_bound_seconds"]

# Every cut looks at all pairs of members; beyond this the schedule's own bound has to do.
_MOST_MEMBERS = 64


def lower_bound_seconds(schedule: Schedule, hosts: Sequence[int], topology: Topology) -> float:
    """The least seconds from a common start until the last member is through.

    The larger of two bounds. The schedule's: every message has the network to itself, so a ring all-reduce
    on equal links takes 2 (n - 1) (latency + S / n / bandwidth). The operation's: the bytes that must leave
    or enter a host or a region, whatever the algorithm, over the narrowest links on the ways there, plus the
    least latency.
    """
    wires = Wires(
        topology.route, np.asarray(topology.latency_seconds), np.asarray(topology.bits_per_second) / 8
    )
    alone = undisturbed_seconds(schedule, hosts, wires)
    bounds = [] if alone is None else [float(alone.max())]
    if schedule.num_ranks <= _MOST_MEMBERS:
        bounds += [_cut_seconds(schedule, hosts, wires, inside) for inside in _cuts(hosts, topology)]
    return max(bounds, default=0.0)


def _cuts(hosts: Sequence[int], topology: Topology) -> Iterable[frozenset[int]]:
    """Members that share a host, and members that share a region."""
    groups: dict[object, set[int]] = {}
    for member, host in enumerate(hosts):
        groups.setdefault(host, set()).add(member)
        groups.setdefault(topology.region_of(host), set()).add(member)
    cuts = {frozenset(members) for members in groups.values()}
    return [members for members in cuts if len(members) < len(hosts)]


def _cut_seconds(schedule: Schedule, hosts: Sequence[int], wires: Wires, inside: frozenset[int]) -> float:
    outside = [member for member in range(len(hosts)) if member not in inside]
    leaving, entering = _crossing_bytes(schedule, inside)
    return max(
        _seconds(leaving, [(hosts[src], hosts[dst]) for src in inside for dst in outside], wires),
        _seconds(entering, [(hosts[src], hosts[dst]) for src in outside for dst in inside], wires),
    )


def _seconds(num_bytes: int, pairs: list[tuple[int, int]], wires: Wires) -> float:
    """Least seconds for bytes to take any of these ways, each of which has one link among the narrowest."""
    routes = [wires.route(src, dst) for src, dst in pairs]
    if not num_bytes or not all(routes):
        return 0.0
    narrowest = {min(route, key=lambda link: wires.bytes_per_second[link]) for route in routes}
    rate = sum(float(wires.bytes_per_second[link]) for link in narrowest)
    latency = min(sum(float(wires.latency_seconds[link]) for link in route) for route in routes)
    return latency + num_bytes / rate


def _crossing_bytes(schedule: Schedule, inside: frozenset[int]) -> tuple[int, int]:
    """Bytes that must leave the members `inside`, and bytes that must enter, by the operation's definition."""
    op, total, num = schedule.op, schedule.num_bytes, schedule.num_ranks
    has_root = schedule.root in inside
    if op == "all_reduce":
        return total, total
    if op in ("broadcast", "reduce"):
        return (total, 0) if has_root == (op == "broadcast") else (0, total)
    if op == "sendrecv":
        return (total if 0 in inside else 0), (total if 1 in inside else 0)
    if op == "barrier":
        return 0, 0
    parts = np.diff(schedule.layout)
    is_inside = np.isin(np.arange(num), list(inside))
    if op == "all_to_all":
        table = parts.reshape(num, num)
        return int(table[is_inside][:, ~is_inside].sum()), int(table[~is_inside][:, is_inside].sum())
    own, others = int(parts[is_inside].sum()), int(parts[~is_inside].sum())
    if op == "all_gather":
        return own, others
    if op == "reduce_scatter":
        return others, own
    out_of_root = (others, 0) if has_root else (0, own)  # scatter; gather is the other way
    return out_of_root if op == "scatter" else (out_of_root[1], out_of_root[0])
