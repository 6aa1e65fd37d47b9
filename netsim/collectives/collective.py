"""`netsim.collective`: the time of one collective, in one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netsim.collectives.bound import lower_bound_seconds
from netsim.collectives.choice import schedule
from netsim.collectives.schedules.algorithms import algorithm_names, default_algorithm
from netsim.collectives.start import time_collective
from netsim.errors import InputError
from netsim.topology.protocol import WindowLimit, window_limit
from netsim.transfers import host_index, network_and_protocol
from netsim.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.start import Timing
    from netsim.network.trace import Recorder
    from netsim.topology.protocol import Protocol
    from netsim.topology.topology import Topology

__all__ = ["CollectiveTimes", "collective"]


@dataclass(frozen=True)
class CollectiveTimes:
    """Times, bytes and costs of a collective.

    Attributes:
        seconds: from the common start until the last rank finishes; of several repetitions, the last.
        rank_seconds: likewise, by rank.
        link_bytes: payload that crossed each link (`"a->b"`) in the last repetition, of those that carried any.
        algorithm: by which it went.
        bound_seconds: the least that any algorithm could take on this network.
        repeat_seconds: of each repetition.
        window_limit: where a sender's window limits it, and what would help; None where links do.
        dollars: what its traffic costs, by the links' `egress`, in the last repetition.
        schedule: the messages that it consisted of.
        timing: the same figures by link and rank, as the network ran them.
    """

    seconds: float
    rank_seconds: list[float]
    link_bytes: dict[str, int]
    algorithm: str
    bound_seconds: float
    repeat_seconds: list[float]
    window_limit: WindowLimit | None = None
    dollars: float = 0.0
    schedule: Schedule = field(repr=False, default=None)  # type: ignore[assignment]
    timing: Timing = field(repr=False, default=None)  # type: ignore[assignment]


def collective(
    topology: Topology | str | Path | Mapping[str, Any],
    op: str,
    *,
    num_bytes: int | str | None = None,
    algorithm: str = "auto",
    ranks: Sequence[str | int] | None = None,
    root: int = 0,
    protocol: str | Mapping[str, Any] | Protocol | None = None,
    repeat: int = 1,
    pause_seconds: float = 0.0,
    recorder: Recorder | None = None,
) -> CollectiveTimes:
    """Time one collective that begins everywhere at once.

    Args:
        topology: a Topology, the name of a shipped one, the path of a file, or a mapping like it.
        op: such as `all_reduce`.
        num_bytes: the whole tensor for all_reduce, broadcast and reduce; the sum over ranks for all_gather, gather,
            scatter and reduce_scatter; what each rank has for all others together for all_to_all; the message for
            sendrecv, from the first rank to the second. Also as text, such as "25 MB". Only barrier needs none.
        algorithm: `auto` for the fastest here (gloo's own under the protocol `gloo`), or a name such as `ring`.
        ranks: hosts in rank order, by name or index; None: all in natural order (two for sendrecv).
        root: position of the root among the ranks.
        protocol: how transfers use links; None: the topology's, else `linux-tcp`.
        repeat: how many times over; connections keep their state.
        pause_seconds: between repetitions.
        recorder: keeps what happens, for a trace.

    Raises InputError (a ValueError) for what does not exist or makes no sense, DeadlockError where the
    topology's weather never lets it end.

    >>> import netsim
    >>> took = netsim.collective("wan-4-regions", "all_reduce", num_bytes="25 MB")
    >>> took.algorithm, took.seconds < netsim.collective(
    ...     "wan-4-regions", "all_reduce", num_bytes="25 MB", algorithm="ring").seconds
    ('two-level-direct', True)
    """
    net, parsed = network_and_protocol(topology, protocol)
    hosts = _hosts(net, ranks, op)
    if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
        raise InputError(f"collective: repeat is {repeat!r}; give a whole number from 1 up")
    if num_bytes is None and op != "barrier":
        raise InputError(f'collective: {op} needs a size; give num_bytes, such as num_bytes="25 MB"')
    size = 0 if op == "barrier" else parse_bytes(num_bytes)
    made = _plan(net, parsed, op, hosts, size, algorithm, root)
    timing = time_collective(
        net, parsed, made, hosts, repeat=repeat, pause_seconds=pause_seconds, recorder=recorder
    )
    return CollectiveTimes(
        seconds=timing.seconds[-1],
        rank_seconds=timing.rank_seconds,
        link_bytes=net.bytes_by_name(timing.link_bytes),
        algorithm=made.algorithm,
        bound_seconds=lower_bound_seconds(made, hosts, net),
        repeat_seconds=timing.seconds,
        window_limit=window_limit(
            net, parsed, [(hosts[src], hosts[dst], size) for src, dst, size in made.pair_bytes]
        ),
        dollars=net.egress_dollars(timing.link_bytes),
        schedule=made,
        timing=timing,
    )


def _hosts(topology: Topology, ranks: Sequence[str | int] | None, op: str) -> tuple[int, ...]:
    algorithm_names(op)  # raises for an unknown operation before anything else
    every = tuple(range(len(topology.hosts)))
    if ranks is None:
        return every[:2] if op == "sendrecv" else every
    hosts = tuple(host_index(topology, host, f"{op}: ranks") for host in ranks)
    if op == "sendrecv" and len(hosts) != 2:
        raise InputError(f"sendrecv: {len(hosts)} ranks given; name two, sender and receiver")
    return hosts


def _plan(
    topology: Topology,
    protocol: Protocol,
    op: str,
    hosts: tuple[int, ...],
    size: int,
    algorithm: str,
    root: int,
) -> Schedule:
    if op == "all_to_all":
        size *= len(hosts)
    if algorithm == "auto" and protocol.rendezvous:
        algorithm = default_algorithm(op, gloo=True)
    return schedule(
        op,
        len(hosts),
        num_bytes=size,
        algorithm=algorithm,
        root=root,
        # Elements matter to gloo, which rounds its segments to them; all others cut to the byte.
        element_bytes=4 if algorithm == "gloo" and size % 4 == 0 else 1,
        hosts=hosts,
        topology=topology,
        protocol=protocol,
    )
