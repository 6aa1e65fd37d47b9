"""Transfers that share a network: lists of them, read and timed; `netsim.flows` is the same in one call.

The list is a CSV file with the columns `start_s`, `src`, `dst` and `bytes`; other columns are kept. The
result has the same rows in the same order, and a last column `finish_s`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from netsim.errors import DeadlockError, InputError, locate_errors, unknown_name
from netsim.files.plain_files import read_text
from netsim.network.clock import raised_gc_threshold
from netsim.network.feed import Feed
from netsim.network.network import MOST_BYTES
from netsim.topology.protocol import Protocol, WindowLimit, window_limit
from netsim.topology.topology import Topology
from netsim.units import format_list, parse_bytes, parse_seconds, shown
from netsim.weather.faults import network_with_weather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.network.trace import Recorder
    from netsim.topology.topology import FloatArray

__all__ = [
    "Flow",
    "FlowTable",
    "FlowTimes",
    "flows",
    "host_index",
    "network_and_protocol",
    "read_flows",
    "simulate_flows",
    "time_flows",
]

_COLUMNS = ("start_s", "src", "dst", "bytes")
_FINISH = "finish_s"
_MOST_NAMED = 4
_MOST_BYTES = 1_000_000_000


class Flow(NamedTuple):
    """A transfer between two hosts.

    Attributes:
        start_seconds: virtual time at which it is sent.
        src, dst: index of the sending and of the receiving host.
        num_bytes: payload.
    """

    start_seconds: float
    src: int
    dst: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class FlowTable:
    """A list of transfers as it was read: the cells of its file, and what they mean."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    flows: tuple[Flow, ...]

    def write(self, finish_seconds: Sequence[float], out: TextIO) -> None:
        """Write the rows as they were, with the instants of delivery as a last column; rows at NaN are left out."""
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow((*self.header, _FINISH))
        ends = zip(self.rows, finish_seconds, strict=True)
        writer.writerows((*row, repr(finish)) for row, finish in ends if not math.isnan(finish))


def read_flows(path: str | Path, topology: Topology) -> FlowTable:
    """Read a list of transfers between hosts of a topology.

    The columns `src` and `dst` are names of hosts. Where no host's name is a number, a bare number k stands for
    host k in natural order, counted from 0.

    Args:
        path: CSV file in UTF-8 with the columns `start_s`, `src`, `dst` and `bytes`; bare numbers are seconds and
            bytes, other cells have their unit ("100 ms", "10 MB").
        topology: hosts that the list may name.

    Raises:
        InputError: the file cannot be read, or a line makes no sense; the error names line and column.
    """
    text = read_text(path, _MOST_BYTES, "split it")
    try:
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = tuple(cell.strip() for cell in next(lines, ()))
        _check_header(header, path)
        rows = tuple(map(tuple, filter(None, lines)))
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV file: {error}") from None
    hosts = {host.name: host.index for host in topology.hosts}
    names = list(hosts)
    if not any(name.isdigit() for name in names):
        hosts |= {str(index): index for index in range(len(names))}

    def host(name: str) -> int:
        if name not in hosts:
            raise unknown_name("host", name, names)
        return hosts[name]

    columns = [header.index(name) for name in _COLUMNS]
    read_seconds, read_bytes = _of_cell(parse_seconds), _of_cell(parse_bytes)
    if (plain := _plain_flows(rows, columns, hosts)) is not None:
        return FlowTable(header, rows, plain)
    flows = []
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    for line, row in [(lines.line_num, row) for row in lines if row][1:]:
        if len(row) != len(header):
            raise InputError(f"{path}:{line}: expected {len(header)} cells, got {len(row)}")
        cells = [row[column].strip() for column in columns]
        flows.append(_flow(f"{path}:{line}: column", cells, host, read_seconds, read_bytes))
    return FlowTable(header, rows, tuple(flows))


def _plain_flows(
    rows: Sequence[Sequence[str]], columns: Sequence[int], hosts: Mapping[str, int]
) -> tuple[Flow, ...] | None:
    """Transfers of rows without units and mistakes, column by column; None where a row needs a closer look."""
    try:
        cells = list(zip(*rows, strict=True))
        starts, sizes = (list(map(float, cells[columns[index]])) for index in (0, 3))
        sources, targets = (list(map(hosts.__getitem__, cells[columns[index]])) for index in (1, 2))
    except (ValueError, KeyError, IndexError):
        return None
    if not (all(map(math.isfinite, starts)) and min(starts) >= 0):
        return None
    if not (all(map(float.is_integer, sizes)) and 0 <= min(sizes) <= max(sizes) <= MOST_BYTES):
        return None
    return tuple(map(Flow._make, zip(starts, sources, targets, sizes, strict=True)))


def _check_header(header: tuple[str, ...], path: str | Path) -> None:
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        wanted = ",".join(_COLUMNS)
        raise InputError(f"{path}:1: no column {', '.join(missing)}: the first line must name {wanted}")
    for name in (*_COLUMNS, _FINISH):
        if header.count(name) > (name != _FINISH):
            again = "is what this command adds: remove it" if name == _FINISH else "is named twice"
            raise InputError(f"{path}:1: column {name} {again}")


def _of_cell(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Reader of a bare number, in the unit of its column, or of a quantity with its unit."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            return parse(text)

    return read


def _flow(
    where: str,
    row: Sequence[Any],
    host: Callable[[Any], int],
    read_seconds: Callable[[str], float],
    read_bytes: Callable[[str], float],
) -> Flow:
    """Check one transfer: start, hosts, bytes; `where` begins the line of an error, and text is read by the readers."""
    start, src, dst, size = row
    amounts = []
    for name, value, read in (("start_s", start, read_seconds), ("bytes", size, read_bytes)):
        number = math.nan
        if isinstance(value, str):
            with locate_errors(f"{where} {name}"):
                number = read(value)
        elif isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):  # of an int that is no float
                number = float(value)
        if not 0 <= number < math.inf:
            noun = "seconds" if name == "start_s" else name
            raise InputError(f"{where} {name}: expected a number of {noun}, zero or more, got {shown(value)}")
        amounts.append(float(number))
    if amounts[1] > MOST_BYTES:
        raise InputError(
            f"{where} bytes: expected at most {MOST_BYTES:g} bytes, got {size!r}: split the transfer"
        )
    if not amounts[1].is_integer():
        raise InputError(f"{where} bytes: expected whole bytes, got {size!r}")
    ends = []
    for name, end in (("src", src), ("dst", dst)):
        with locate_errors(f"{where} {name}"):
            ends.append(host(end))
    return Flow(amounts[0], ends[0], ends[1], amounts[1])


@dataclass(frozen=True)
class FlowTimes:
    """Delivery times of a list of transfers.

    Attributes:
        finish_seconds: when each is delivered, in their order; infinity for those that a crash has lost.
        window_limit: where a sender's window limits most, and what would help; None where links do.
        later_weather: entries of the topology's weather that begin after the last delivery; None where all were met.
    """

    finish_seconds: list[float]
    window_limit: WindowLimit | None = None
    later_weather: str | None = None


def flows(
    topology: Topology | str | Path | Mapping[str, Any],
    rows: str | Path | Sequence[Mapping[str, Any] | Sequence[Any]],
    protocol: str | Mapping[str, Any] | Protocol | None = None,
) -> FlowTimes:
    """Time transfers that share a network.

    Args:
        topology: a Topology, the name of a shipped one, the path of a file, or a mapping like it.
        rows: (start in seconds, from, to, whole bytes), hosts by name or index, quantities also as text with a unit
            ("100 ms", "25 MB"); or mappings with the keys `start_s`, `src`, `dst`, `bytes`; or a CSV file with these
            columns.
        protocol: how transfers use links; None: the topology's, else `linux-tcp`.

    Raises InputError (a ValueError) that names the row, DeadlockError where transfers can never arrive.

    >>> import netsim
    >>> pair = {"hosts": ["a", "b"], "links": [
    ...     {"between": ["a", "b"], "bandwidth": "80 Mbit/s", "latency": "10 ms"}]}
    >>> netsim.flows(pair, [(0, "a", "b", 10_000_000), (0, "b", "a", 5_000_000)], "ideal").finish_seconds
    [1.01, 0.51]
    """
    net, parsed = network_and_protocol(topology, protocol)
    if isinstance(rows, str | Path):
        listed: Sequence[Flow] = read_flows(rows, net).flows
    elif isinstance(rows, Iterable):
        listed = [_row(number, row, net) for number, row in enumerate(rows, 1)]
    else:
        raise InputError(f"flows: expected rows of transfers, or a CSV file, got {rows!r}")
    messages = [(flow.src, flow.dst, flow.num_bytes) for flow in listed]
    finish = [math.inf] * len(listed)
    simulate_flows(net, listed, parsed, finish)
    return FlowTimes(finish, window_limit(net, parsed, messages), later_weather(net, finish))


def later_weather(topology: Topology, finish_seconds: Sequence[float]) -> str | None:
    """Entries of the weather that begin after the last delivery, in a line; None where there are none."""
    return topology.weather.after(max(filter(math.isfinite, finish_seconds), default=0.0))


def network_and_protocol(
    topology: Topology | str | Path | Mapping[str, Any],
    protocol: str | Mapping[str, Any] | Protocol | None,
) -> tuple[Topology, Protocol]:
    """Load a topology, and parse the protocol: the given one, else the topology's."""
    if isinstance(topology, Topology):
        net = topology
    elif isinstance(topology, str | Path):
        net = Topology.load(topology)
    else:
        net = Topology.from_mapping(topology)
    return net, Protocol.resolve(protocol, net.protocol)


def host_index(topology: Topology, host: object) -> int:
    """Index of a host given by name or index."""
    if isinstance(host, str):
        return topology.host_index(host)
    if isinstance(host, Integral) and not isinstance(host, bool) and 0 <= int(host) < len(topology.hosts):
        return int(host)
    raise InputError(f"{host!r} is no host; give a name, or an index below {len(topology.hosts)}")


def _row(number: int, row: Mapping[str, Any] | Sequence[Any], topology: Topology) -> Flow:
    where = f"flows: row {number}:"
    if hasattr(row, "keys"):
        missing = [key for key in _COLUMNS if key not in row]
        if missing:
            raise InputError(f"{where} no {', '.join(missing)}; give start_s, src, dst and bytes")
        row = [row[key] for key in _COLUMNS]  # type: ignore[call-overload]
    if isinstance(row, str) or not hasattr(row, "__getitem__") or len(row) != 4:
        raise InputError(
            f"{where} {row!r}; give (start in seconds, from, to, bytes), or with units as text, such as "
            "('1 s', from, to, '5 MB')"
        )
    return _flow(where, row, partial(host_index, topology), parse_seconds, parse_bytes)


def time_flows(
    topology: Topology,
    flows: Sequence[Flow | tuple[float, int | str, int | str, float]],
    protocol: str | Mapping[str, Any] | Protocol | None = None,
    *,
    recorder: Recorder | None = None,
) -> FloatArray:
    """Instants in seconds at which transfers are delivered, in their order; infinity for lost ones.

    Args:
        topology, recorder: as for `simulate_flows`.
        flows: the transfers; also as tuples (start in seconds, from, to, bytes) of host names or indices.
        protocol: how transfers use links; None: the topology's, else `linux-tcp`.

    Raises DeadlockError if transfers wait for a link or host that never comes back.

    >>> from netsim import Topology
    >>> topology = Topology.from_mapping(
    ...     {"hosts": {"a": {}, "b": {}}, "links": [
    ...         {"between": ["a", "b"], "bandwidth": "80 Mbit/s", "latency": "10 ms"}]})
    >>> time_flows(topology, [(0.0, "a", "b", 10_000_000)], "ideal").tolist()
    [1.01]
    """
    import numpy as np

    listed = [
        flow if isinstance(flow, Flow) else _row(number, flow, topology)
        for number, flow in enumerate(flows, 1)
    ]
    finish = [math.inf] * len(listed)
    simulate_flows(topology, listed, Protocol.resolve(protocol, topology.protocol), finish, recorder=recorder)
    return np.array(finish, dtype=np.float64)


@raised_gc_threshold()
def simulate_flows(
    topology: Topology,
    flows: Sequence[Flow],
    protocol: Protocol,
    finish: list[float],
    *,
    on_delivered: Callable[[], None] | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Simulate transfers, and set `finish` of each at its delivery.

    The topology's weather applies. A transfer in flight from or to a host that crashes is lost.

    A transfer takes an idle connection between its hosts, or opens one: transfers between the same hosts that overlap
    share the route and do not queue.

    Args:
        topology: the network.
        flows: the transfers.
        protocol: how transfers use links.
        finish: instants in seconds, set one by one: an interrupted simulation leaves those that it came to.
        on_delivered: called at each delivery, to show progress.
        recorder: records events for a trace.

    Raises DeadlockError if transfers wait for a link or host that never comes back.
    """
    network, faults = network_with_weather(topology, protocol, recorder)
    starts, sizes = [float(flow.start_seconds) for flow in flows], [float(flow.num_bytes) for flow in flows]
    sources, targets = [flow.src for flow in flows], [flow.dst for flow in flows]
    feed = Feed(network.engine, starts, sources, targets, sizes, finish, on_delivered)

    def give_up(reason: str) -> None:
        """Raise DeadlockError with the waiting transfers; `reason` names the fault, if there is one."""
        rows = [feed.row_of[each.number] for each in network.transfers_waiting()]
        described = _described(topology, flows, rows or feed.unfinished())
        if not reason:
            raise DeadlockError(f"deadlock: {described}, and nothing that is still to happen can change that")
        raise DeadlockError(f"{reason}, and {described}: let an event bring it back")

    faults.on_stuck = give_up
    faults.run_until(lambda: not feed.num_under_way)


def _described(topology: Topology, flows: Sequence[Flow], numbers: Iterable[int]) -> str:
    """Describe waiting transfers by their position from 1, hosts and bytes."""
    names = [host.name for host in topology.hosts]
    waiting = [(number + 1, flows[number]) for number in sorted(numbers)]
    lines = [
        f"transfer {number} ({names[flow.src]} to {names[flow.dst]}, {flow.num_bytes:.0f} bytes)"
        for number, flow in waiting
    ]
    return f"{format_list(lines, _MOST_NAMED)} can never arrive"
