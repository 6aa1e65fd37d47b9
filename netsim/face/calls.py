"""The library in two calls: the time of a collective, and of a list of transfers. `netsim` offers both by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netsim.collectives.bound import lower_bound_seconds
from netsim.collectives.choice import schedule
from netsim.collectives.schedules.algorithms import algorithm_names, default_algorithm
from netsim.collectives.timing import time_collective
from netsim.face.flows import read_flows, time_flows
from netsim.files.errors import InputError
from netsim.files.units import parse_bytes, parse_seconds
from netsim.topology.protocol import Protocol
from netsim.topology.topology import Topology
from netsim.topology.windows import WindowLimit, window_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.collectives.timing import Timing
    from netsim.network.recorder import Recorder

__all__ = ["CollectiveTimes", "FlowTimes", "collective", "flows"]


@dataclass(frozen=True)
class CollectiveTimes:
    """What a collective took.

    Attributes:
        seconds: from the common start until the last rank is through; of several repetitions, the last.
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


@dataclass(frozen=True)
class FlowTimes:
    """What became of a list of transfers.

    Attributes:
        finish_seconds: when each is delivered, in their order; infinity for those that a crash has lost.
        window_limit: where a sender's window limits most, and what would help; None where links do.
    """

    finish_seconds: list[float]
    window_limit: WindowLimit | None = None


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
        protocol: how transfers use links; None: the topology's.
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
    net, parsed = _network(topology, protocol)
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
    names = [f"{link.source}->{link.target}" for link in net.links]
    carried = zip(names, map(round, timing.link_bytes), strict=True)
    return CollectiveTimes(
        seconds=timing.seconds[-1],
        rank_seconds=timing.rank_seconds,
        link_bytes={name: num for name, num in carried if num},
        algorithm=made.algorithm,
        bound_seconds=lower_bound_seconds(made, hosts, net),
        repeat_seconds=timing.seconds,
        window_limit=window_limit(net, parsed, _messages(made, hosts)),
        dollars=net.egress_dollars(timing.link_bytes),
        schedule=made,
        timing=timing,
    )


def flows(
    topology: Topology | str | Path | Mapping[str, Any],
    rows: str | Path | Sequence[Mapping[str, Any] | Sequence[Any]],
    protocol: str | Mapping[str, Any] | Protocol | None = None,
) -> FlowTimes:
    """When transfers that share a network are delivered.

    Args:
        topology: a Topology, the name of a shipped one, the path of a file, or a mapping like it.
        rows: (start in seconds, from, to, whole bytes), hosts by name or index, quantities also as text with a unit
            ("100 ms", "25 MB"); or mappings with the keys `start_s`, `src`, `dst`, `bytes`; or a CSV file with these
            columns.
        protocol: how transfers use links; None: the topology's.

    Raises InputError (a ValueError) that names the row, DeadlockError where transfers can never arrive.

    >>> import netsim
    >>> pair = {"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "80 Mbit/s", "latency": "10 ms"}]}
    >>> netsim.flows(pair, [(0, "a", "b", 10_000_000), (0, "b", "a", 5_000_000)]).finish_seconds
    [1.01, 0.51]
    """
    net, parsed = _network(topology, protocol)
    if isinstance(rows, str | Path):
        listed: list[Any] = list(read_flows(rows, net).flows)
        ways = [(flow.src, flow.dst, flow.num_bytes) for flow in listed]
    else:
        listed = [_row(number, row, net) for number, row in enumerate(rows, 1)]
        ways = [row[1:] for row in listed]
    finish = [float(seconds) for seconds in time_flows(net, listed, parsed)]
    return FlowTimes(finish, window_limit(net, parsed, ways))


def _network(
    topology: Topology | str | Path | Mapping[str, Any],
    protocol: str | Mapping[str, Any] | Protocol | None,
) -> tuple[Topology, Protocol]:
    if isinstance(topology, Topology):
        net = topology
    elif isinstance(topology, str | Path):
        net = Topology.load(topology)
    else:
        net = Topology.from_mapping(topology)
    return net, Protocol.parse(net.protocol if protocol is None else protocol)


def _hosts(topology: Topology, ranks: Sequence[str | int] | None, op: str) -> tuple[int, ...]:
    algorithm_names(op)  # an unknown operation is told before anything else
    every = tuple(range(len(topology.hosts)))
    if ranks is None:
        return every[:2] if op == "sendrecv" else every
    hosts = tuple(_host(topology, host, f"{op}: ranks") for host in ranks)
    if op == "sendrecv" and len(hosts) != 2:
        raise InputError(f"sendrecv: {len(hosts)} ranks given; name two, sender and receiver")
    return hosts


def _host(topology: Topology, host: object, where: str) -> int:
    if isinstance(host, str):
        return topology.host_index(host)
    if isinstance(host, int) and not isinstance(host, bool) and 0 <= host < len(topology.hosts):
        return host
    raise InputError(f"{where}: {host!r} is no host; give a name, or an index below {len(topology.hosts)}")


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
        # Elements matter to gloo, which rounds its segments to them; everybody else cuts to the byte.
        element_bytes=4 if algorithm == "gloo" and size % 4 == 0 else 1,
        hosts=hosts,
        topology=topology,
        protocol=protocol,
    )


def _messages(made: Schedule, hosts: Sequence[int]) -> list[tuple[int, int, float]]:
    """What each pair of hosts has to carry one way."""
    return [(hosts[src], hosts[dst], num_bytes) for src, dst, num_bytes in made.pair_bytes]


def _row(
    number: int, row: Mapping[str, Any] | Sequence[Any], topology: Topology
) -> tuple[float, int, int, float]:
    where = f"flows: row {number}"
    if hasattr(row, "keys"):
        missing = [key for key in ("start_s", "src", "dst", "bytes") if key not in row]
        if missing:
            raise InputError(f"{where}: no {', '.join(missing)}; give start_s, src, dst and bytes")
        row = [row[key] for key in ("start_s", "src", "dst", "bytes")]  # type: ignore[call-overload]
    if isinstance(row, str) or len(row) != 4:
        raise InputError(
            f"{where}: {row!r}; give (start in seconds, from, to, bytes), or with units as text, such as "
            "('1 s', from, to, '5 MB')"
        )
    start, src, dst, num_bytes = row
    try:
        start = parse_seconds(start) if isinstance(start, str) else start
        num_bytes = parse_bytes(num_bytes) if isinstance(num_bytes, str) else num_bytes
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    for value in (start, num_bytes):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
            raise InputError(f"{where}: {value!r} is no finite number from 0 up")
    if num_bytes != int(num_bytes):
        raise InputError(f"{where}: {num_bytes!r} bytes; give a whole number, or text such as '5 MB'")
    return float(start), _host(topology, src, where), _host(topology, dst, where), float(num_bytes)
