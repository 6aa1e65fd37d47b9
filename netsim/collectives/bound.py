"""Lower bound of a collective's seconds on a network, whatever the algorithm, by the bytes that must cross its cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.topology.topology import Topology

__all__ = ["lower_bound_seconds"]

# Latencies are looked up pair by pair; of more members than this, so many stand for all.
_MOST_MEMBERS = 64

_FOR_EVERYONE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class _Side(NamedTuple):
    """Members on one side of a cut, and what the links across it carry."""

    members: frozenset[int]
    out_bytes_per_second: float
    in_bytes_per_second: float


def lower_bound_seconds(schedule: Schedule, hosts: Sequence[int], topology: Topology) -> float:
    """Least seconds from a common start until the last member finishes, whatever the algorithm.

    Only the request counts (operation, bytes, members), not how `schedule` does it. The largest of three
    bounds: the latency between members that must hear of each other; the bytes that must leave or enter a
    host or a region over all links across that cut, and the latency of the route; and the bytes that must
    pass between all hosts or all regions together, over what they can send together (an all-reduce among g
    parties takes 2 (g - 1) tensors in all: Patarasuk and Yuan 2009, theorem 1). Links have their nominal
    capacity, all of it payload.
    """
    if len(set(hosts)) < 2 or (not schedule.num_bytes and schedule.op != "barrier"):
        return 0.0
    latency = _Latencies(hosts, topology)
    bounds = [_latency_bound(schedule, latency)]
    if schedule.op != "barrier":
        for sides in _partitions(hosts, topology):
            bounds += [_cut_bound(schedule, side, latency) for side in sides]
            bounds.append(_partition_bound(schedule, sides, latency))
    return max(bounds)


class _Latencies:
    """Least one-way seconds from member to member, over other members where that is sooner.

    Of more than `_MOST_MEMBERS` members only some are looked up; then bounds do without the routes of the others.
    """

    def __init__(self, hosts: Sequence[int], topology: Topology) -> None:
        stride = -(-len(hosts) // _MOST_MEMBERS)
        chosen = list(dict.fromkeys([*hosts[::stride], hosts[-1]]))
        self._row = {host: row for row, host in enumerate(chosen)}
        self._hosts = hosts
        table = np.array([[topology.route_latency_seconds(src, dst) for dst in chosen] for src in chosen])
        for relay in range(len(chosen)):
            np.minimum(table, table[:, relay, None] + table[None, relay], out=table)
        self._table = table
        self._rows = np.array([self._row.get(host, -1) for host in hosts])
        self._is_whole = bool((self._rows >= 0).all())

    def largest(self) -> float:
        """Between any two members."""
        return float(self._table.max())

    def between(self, src: int, dst: int) -> float:
        """From one member to another."""
        return float(self._table[self._rows[src], self._rows[dst]])

    def farthest(self, root: int, *, is_source: bool) -> float:
        """Between a root and the member that is farthest from it; 0 where the root was not looked up."""
        row = self._row.get(self._hosts[root])
        if row is None:
            return 0.0
        return float((self._table[row] if is_source else self._table[:, row]).max())

    def across(self, members: frozenset[int], *, is_out: bool) -> np.ndarray:
        """Least seconds between each member outside and any of `members`; zero where not all are looked up."""
        if not self._is_whole:
            return np.zeros(1)
        inside = np.zeros(len(self._rows), np.bool_)
        inside[list(members)] = True
        table = self._table if is_out else self._table.T
        ways: np.ndarray = table[np.ix_(self._rows[inside], self._rows[~inside])].min(axis=0)
        return ways


def _latency_bound(schedule: Schedule, latency: _Latencies) -> float:
    """Seconds that a member waits at least for values of others: the latency of the route from them."""
    if schedule.op in _FOR_EVERYONE:
        return latency.largest()
    if schedule.op == "sendrecv":
        return latency.between(0, 1)
    return latency.farthest(schedule.root, is_source=schedule.op in ("broadcast", "scatter"))


def _partitions(hosts: Sequence[int], topology: Topology) -> Iterator[list[_Side]]:
    """Members by host, and by region where there are any, each with the links across.

    One host of each region is the same partition of members, but cut at the region's links.
    """
    by_host: dict[str, set[int]] = {}
    by_region: dict[str, set[int]] = {}
    for member, host in enumerate(hosts):
        by_host.setdefault(topology.hosts[host].name, set()).add(member)
        by_region.setdefault(topology.region_of(host), set()).add(member)
    party = {topology.hosts[host].name: topology.hosts[host].name for host in hosts}
    yield _sides(by_host, party, topology)
    if len(by_region) > 1 and set(by_region) != set(by_host):
        # All hosts of a region and the router that bears its name are on its side.
        party = {host.name: topology.region_of(host.index) for host in topology.hosts}
        party |= {name: name for name in topology.routers if name in by_region}
        yield _sides(by_region, party, topology)


def _sides(groups: dict[str, set[int]], party: dict[str, str], topology: Topology) -> list[_Side]:
    """Each group of members, with the total rates of the links out of and into its machines."""
    leaving = dict.fromkeys(groups, 0.0)
    entering = dict.fromkeys(groups, 0.0)
    for link in topology.links:
        source, target = party.get(link.source), party.get(link.target)
        if source == target:
            continue
        if source in leaving:
            leaving[source] += link.bits_per_second / 8
        if target in entering:
            entering[target] += link.bits_per_second / 8
    return [_Side(frozenset(groups[name]), leaving[name], entering[name]) for name in groups]


def _cut_bound(schedule: Schedule, side: _Side, latency: _Latencies) -> float:
    """The last byte to cross still has the route to its destination ahead; to the farthest one, if all need it."""
    leaving, entering = _crossing_bytes(schedule, side.members)
    out = into = 0.0
    if leaving:
        ways = latency.across(side.members, is_out=True)
        all_need_it = schedule.op in ("all_reduce", "all_gather", "broadcast")
        out = leaving / side.out_bytes_per_second + float(ways.max() if all_need_it else ways.min())
    if entering:
        into = entering / side.in_bytes_per_second + float(latency.across(side.members, is_out=False).min())
    return max(out, into)


def _partition_bound(schedule: Schedule, sides: Sequence[_Side], latency: _Latencies) -> float:
    num_bytes = _bytes_between(schedule, sides)
    if not num_bytes:
        return 0.0
    out = sum(side.out_bytes_per_second for side in sides)
    into = sum(side.in_bytes_per_second for side in sides)
    apart = min(float(latency.across(side.members, is_out=True).min()) for side in sides)
    return apart + num_bytes / min(out, into)


def _bytes_between(schedule: Schedule, sides: Sequence[_Side]) -> int:
    """Least bytes that pass from one party to another, all together."""
    num, total = len(sides), schedule.num_bytes
    if schedule.op == "all_reduce":
        return 2 * (num - 1) * total
    if schedule.op in ("broadcast", "reduce", "all_gather", "reduce_scatter"):
        return (num - 1) * total
    return sum(_crossing_bytes(schedule, side.members)[0] for side in sides)


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
