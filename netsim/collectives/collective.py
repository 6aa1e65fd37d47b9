"""`netsim.collective`: time of one collective in one call, and a lower bound for any algorithm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from netsim.collectives.choice import library_algorithm, schedule
from netsim.collectives.estimate import Estimator
from netsim.collectives.operations import OPERATIONS, Side
from netsim.collectives.schedules.algorithms import (
    ALGORITHMS,
    algorithm_names,
    build,
    find_algorithm,
)
from netsim.collectives.schedules.schedule import Problem
from netsim.collectives.start import time_collective
from netsim.errors import InputError, locate_errors
from netsim.network.clock import raised_gc_threshold
from netsim.topology.protocol import WindowLimit, window_limit
from netsim.transfers import host_index, network_and_protocol
from netsim.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.start import Timing
    from netsim.network.trace import Recorder
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["CollectiveTimes", "collective", "lower_bound_seconds", "resolve_request", "ring_seconds"]


@dataclass(frozen=True)
class CollectiveTimes:
    """Times, bytes and costs of a collective.

    Attributes:
        seconds: from the common start until the last rank finishes, in the last repetition.
        rank_seconds: from the common start until each rank finishes, in the last repetition.
        link_bytes: payload that crossed each link (`"a->b"`) in the last repetition, of those that carried any.
        algorithm: name of the algorithm used.
        bound_seconds: lower bound of `seconds` for any algorithm on this network.
        repeat_seconds: `seconds` of each repetition.
        window_limit: route on which a sender's window is the limit, and the remedy; None if links are.
        later_weather: weather entries that begin after its end; None if all took effect.
        dollars: cost of its traffic by the links' `egress`, in the last repetition.
        estimate: how the times were estimated; None: every message was simulated.
        schedule: its messages.
        timing: the same figures by index of link and rank.
    """

    seconds: float
    rank_seconds: list[float]
    link_bytes: dict[str, int]
    algorithm: str
    bound_seconds: float
    repeat_seconds: list[float]
    window_limit: WindowLimit | None = None
    later_weather: str | None = None
    dollars: float = 0.0
    estimate: str | None = None
    schedule: Schedule = field(repr=False, default=None)  # type: ignore[assignment]
    timing: Timing = field(repr=False, default=None)  # type: ignore[assignment]


@raised_gc_threshold()
def collective(
    topology: Topology | str | Path | Mapping[str, Any],
    op: str,
    *,
    num_bytes: int | str | None = None,
    algorithm: str = "auto",
    ranks: Sequence[str | int] | None = None,
    root: int | str = 0,
    protocol: str | Mapping[str, Any] | Protocol | None = None,
    repeat: int = 1,
    calls: int = 1,
    pause_seconds: float = 0.0,
    recorder: Recorder | None = None,
) -> CollectiveTimes:
    """Time one collective that begins everywhere at once.

    Args:
        topology: a Topology, the name of a shipped one, the path of a file, or a mapping like it.
        op: such as `all_reduce`.
        num_bytes: the whole tensor for all_reduce, broadcast and reduce; the sum over ranks for all_gather, gather,
            scatter and reduce_scatter; the tensor of each rank for all_to_all, of which its own part stays; the message
            for sendrecv, from the first rank to the second; none for barrier. A number of bytes, or a text with a unit,
            such as 25MB.
        algorithm: `auto` for the fastest here (the library's choice under `gloo`, `hivemind` and `nccl-sockets`), or a
            name such as `ring`.
        ranks: hosts in rank order, by name or index; None: all in natural order (two for sendrecv).
        root: position of the root among the ranks, or the name of its host.
        protocol: how transfers use links; None: the topology's, else `linux-tcp`.
        repeat: number of repetitions, in which connections keep their state.
        calls: of each repetition, back to back: a rank enters the next one when it has finished its own, as calls that
            are queued on a GPU. Times, bytes and costs are of all of them; `bound_seconds` is of one.
        pause_seconds: between repetitions.
        recorder: records events for a trace.

    Raises InputError (a ValueError) for wrong arguments, DeadlockError if the topology's weather never lets it end.

    >>> import netsim
    >>> took = netsim.collective("wan-4-regions", "all_reduce", num_bytes="25 MB")
    >>> took.algorithm, took.seconds < netsim.collective(
    ...     "wan-4-regions", "all_reduce", num_bytes="25 MB", algorithm="ring").seconds
    ('two-level-direct', True)
    """
    net, parsed = network_and_protocol(topology, protocol)
    for name, number in (("repeat", repeat), ("calls", calls)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{op}: {name} is {number!r}; give a whole number from 1 up")
    if not isinstance(pause_seconds, int | float) or not 0 <= pause_seconds < math.inf:
        raise InputError(f"{op}: pause_seconds is {pause_seconds!r}; give a number of seconds, zero or more")
    hosts, size, root = resolve_request(net, op, num_bytes, ranks, root)
    parsed = parsed.for_ranks(hosts)
    size *= len(hosts) if OPERATIONS[op].is_per_pair else 1
    if algorithm == "auto":
        algorithm = library_algorithm(parsed, op, hosts, size) or algorithm
    made = schedule(
        op,
        len(hosts),
        num_bytes=size,
        algorithm=algorithm,
        root=root,
        # Elements matter to gloo, which rounds its segments to them; all others cut to the byte.
        element_bytes=4 if algorithm == "gloo" and size % 4 == 0 else 1,
        hosts=hosts,
        topology=net,
        protocol=parsed,
    )
    timing, estimate = Estimator(net, parsed).timing(
        made, hosts, repeat=repeat, calls=calls, pause_seconds=pause_seconds, recorder=recorder
    )
    return CollectiveTimes(
        seconds=timing.seconds[-1],
        rank_seconds=timing.rank_seconds,
        link_bytes=net.bytes_by_name(timing.link_bytes),
        algorithm=made.algorithm,
        bound_seconds=lower_bound_seconds(made, hosts, net),
        repeat_seconds=timing.seconds,
        window_limit=window_limit(
            net, parsed, ((hosts[src], hosts[dst], sent) for src, dst, sent in made.pair_bytes)
        ),
        later_weather=net.weather.after(sum(timing.seconds) + pause_seconds * (repeat - 1)),
        dollars=net.egress_dollars(timing.link_bytes),
        estimate=estimate,
        schedule=made,
        timing=timing,
    )


def ring_seconds(
    made: Schedule, hosts: Sequence[int], topology: Topology, protocol: Protocol, repeat: int = 1
) -> float | None:
    """Estimate a collective by the ring that most libraries run; None where it has none, or goes by one.

    Args:
        made: the collective, by any algorithm.
        hosts: the host of each member.
        topology: the network.
        protocol: how transfers use it.
        repeat: repetitions, of which the last counts.
    """
    ring = "ring"
    if ring not in ALGORITHMS[made.op] or made.algorithm in (ring, "gloo"):
        return None
    if not find_algorithm(made.op, made.algorithm).is_offered:
        return None
    problem = Problem(made.op, ring, made.num_ranks, made.num_bytes, made.root, 1, None, ())
    protocol = protocol.for_ranks(hosts)
    if topology.weather:
        return time_collective(topology, protocol, build(problem), hosts, repeat=repeat).seconds[-1]
    return Estimator(topology, protocol).seconds(problem, hosts, repeat)


def resolve_request(
    topology: Topology,
    op: str,
    num_bytes: int | str | None,
    ranks: Sequence[str | int] | None,
    root: int | str,
) -> tuple[tuple[int, ...], int, int]:
    """Check a request, as `collective` takes it; return the host of each rank, the bytes, and the rank of the root."""
    algorithm_names(op)  # raises for an unknown operation before anything else
    operation = OPERATIONS[op]
    hosts = tuple(host.index for host in topology.rank_hosts)[: 2 if operation.is_message else None]
    if ranks is not None:
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise InputError(f"{op}: ranks is {ranks!r}; give a list of hosts")
        with locate_errors(f"{op}: ranks"):
            hosts = tuple(host_index(topology, host) for host in ranks)
        if operation.is_message and len(hosts) != 2:
            raise InputError(f"{op}: {len(hosts)} ranks given; name two, sender and receiver")
    if operation.has_size and num_bytes is None:
        raise InputError(f"{op}: give the size (--bytes or num_bytes), such as 25MB")
    with locate_errors(f"{op}: size"):
        size = parse_bytes(0 if num_bytes is None else num_bytes)
    if size and not operation.has_size:
        raise InputError(f"{op}: leave out the size: a {op} has none")
    if root and not operation.has_root:
        rooted = ", ".join(name for name, each in OPERATIONS.items() if each.has_root)
        raise InputError(f"{op}: leave out root, which {rooted} take")
    if isinstance(root, str):
        with locate_errors(f"{op}: root"):
            host = topology.host_index(root)
        if host not in hosts:
            raise InputError(f"{op}: root {root} is not among the ranks: add it to them")
        root = hosts.index(host)
    if isinstance(root, bool) or not isinstance(root, int):
        raise InputError(f"{op}: root is {root!r}; give a rank, or the name of its host")
    return hosts, size, root


# Members of which each pair's latency is measured.
_MOST_MEMBERS = 64


def lower_bound_seconds(schedule: Schedule, hosts: Sequence[int], topology: Topology) -> float:
    """Least seconds from a common start until the last member finishes, whatever the algorithm.

    Only the request counts (operation, bytes, members), not how `schedule` does it. The largest of three
    bounds: the latency between members that must hear of each other; the bytes that must leave or enter a
    host or a region over all links across that cut, and the latency of the route; and the bytes that must
    pass between all hosts or all regions together, over what they can send together (an all-reduce among g
    parties takes 2 (g - 1) tensors in all: Patarasuk and Yuan 2009, theorem 1). Links have their nominal
    capacity, all of it payload.
    """
    operation = OPERATIONS[schedule.op]
    if len(set(hosts)) < 2 or (operation.has_size and not schedule.num_bytes):
        return 0.0
    latency = _Latencies(hosts, topology)
    giver, taker = (operation.member(side, schedule.root) for side in (operation.gives, operation.takes))
    bounds = [latency.largest(giver, taker)]
    for sides in _partitions(hosts, topology) if operation.has_size else ():
        num_bytes, nearest = 0, math.inf
        for members, out_rate, in_rate in sides:
            leaving = operation.crossing_bytes(schedule, members)
            entering = operation.crossing_bytes(schedule, ~members)
            away, back = latency.across(members, is_out=True), latency.across(members, is_out=False)
            num_bytes, nearest = num_bytes + leaving, min(nearest, float(away.min()))
            if leaving:  # the last byte goes to the farthest member if all need it
                last = away.max() if operation.takes is Side.ALL else away.min()
                bounds.append(leaving / out_rate + float(last))
            if entering:
                bounds.append(entering / in_rate + float(back.min()))
        if Side.ALL in (operation.gives, operation.takes):
            num_bytes = operation.total_passes(len(sides)) * schedule.num_bytes
        if num_bytes:
            _, out_rates, in_rates = zip(*sides, strict=True)
            bounds.append(nearest + num_bytes / min(sum(out_rates), sum(in_rates)))
    return max(bounds)


class _Latencies:
    """Least one-way seconds between members, relayed by other members if that is faster.

    Of more than `_MOST_MEMBERS` members a sample is measured; bounds then leave out the routes of the others.
    """

    def __init__(self, hosts: Sequence[int], topology: Topology) -> None:
        stride = -(-len(hosts) // _MOST_MEMBERS)
        chosen = list(dict.fromkeys([*hosts[::stride], hosts[-1]]))
        row = {host: row for row, host in enumerate(chosen)}
        table = np.array([[topology.route_latency_seconds(src, dst) for dst in chosen] for src in chosen])
        for relay in range(len(chosen)):
            np.minimum(table, table[:, relay, None] + table[None, relay], out=table)
        self._table = table
        self._rows = np.array([row.get(host, -1) for host in hosts])
        self._is_whole = bool((self._rows >= 0).all())

    def largest(self, src: int | None, dst: int | None) -> float:
        """Largest latency from member `src` to member `dst`, None for any; 0 for a member outside the sample."""
        rows, columns = (
            slice(None) if member is None else self._rows[[member]][self._rows[[member]] >= 0]
            for member in (src, dst)
        )
        return float(self._table[rows][:, columns].max(initial=0.0))

    def across(self, inside: npt.NDArray[np.bool_], *, is_out: bool) -> np.ndarray:
        """Least seconds between each member outside and any `inside`; zero if members are sampled."""
        if not self._is_whole:
            return np.zeros(1)
        table = self._table if is_out else self._table.T
        nearest: np.ndarray = table[np.ix_(self._rows[inside], self._rows[~inside])].min(axis=0)
        return nearest


_Cut: TypeAlias = "tuple[npt.NDArray[np.bool_], float, float]"
"""Mask of the members on one side of a cut, and the rates of all links out of it and into it, in bytes per second."""


def _partitions(hosts: Sequence[int], topology: Topology) -> Iterator[list[_Cut]]:
    """Cuts around each host, and around each region if there are several, one list each.

    One host of each region is the same partition of members, but cut at the region's links.
    """
    names = [topology.hosts[host].name for host in hosts]
    regions = [topology.region_of(host) for host in hosts]
    yield _cuts(names, {name: name for name in names}, topology)
    if len(set(regions)) > 1 and set(regions) != set(names):
        # All hosts of a region and the router that bears its name are on its side.
        party = {host.name: topology.region_of(host.index) for host in topology.hosts}
        party |= {name: name for name in topology.routers if name in regions}
        yield _cuts(regions, party, topology)


def _cuts(labels: Sequence[str], party: dict[str, str], topology: Topology) -> list[_Cut]:
    """A cut around the members of each label, at the links out of and into the nodes of its party."""
    leaving, entering = defaultdict[str | None, float](float), defaultdict[str | None, float](float)
    for link in topology.links:
        source, target = party.get(link.source), party.get(link.target)
        if source != target:
            leaving[source] += link.bits_per_second / 8
            entering[target] += link.bits_per_second / 8
    sides, column = dict.fromkeys(labels), np.array(labels)
    return [(column == name, leaving[name], entering[name]) for name in sides]
