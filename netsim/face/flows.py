"""Lists of transfers: when does each one arrive?

The list is a CSV file with the columns `start_s`, `src`, `dst` and `bytes`; other columns are kept. The
result has the same rows in the same order, and a last column `finish_s`.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from netsim.files.errors import DeadlockError, InputError, unknown_name
from netsim.files.plain_files import input_file
from netsim.network.clock import Clock
from netsim.network.network import BackgroundConnection, Network
from netsim.topology.protocol import Protocol
from netsim.weather.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    import simpy

    from netsim.network.recorder import Recorder
    from netsim.topology.topology import FloatArray, Topology

__all__ = ["Flow", "FlowTable", "read_flows", "time_flows"]

_COLUMNS = ("start_s", "src", "dst", "bytes")
_FINISH = "finish_s"
_MOST_TOLD = 4


@dataclass(frozen=True, slots=True)
class Flow:
    """One transfer: `num_bytes` from host `src` to host `dst` (indices), sent at `start_seconds`."""

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

    def write(self, finish_seconds: Sequence[float] | FloatArray, out: TextIO) -> None:
        """Write the rows as they were, with the instants of delivery as a last column."""
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow((*self.header, _FINISH))
        for row, finish in zip(self.rows, finish_seconds, strict=True):
            writer.writerow((*row, repr(float(finish))))


def read_flows(path: str | Path, topology: Topology) -> FlowTable:
    """Read a list of transfers between hosts of a topology.

    `src` and `dst` are names of hosts. Where no host's name is a number, a bare number k stands for host k in
    natural order, counted from 0.

    Raises InputError, which names line and column, for what does not make sense.
    """
    try:
        with io.TextIOWrapper(input_file(path), newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            header = tuple(cell.strip() for cell in next(lines, ()))
            _check_header(header, path)
            numbered = [(lines.line_num, tuple(row)) for row in lines if row]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8: {error}") from None
    read = _RowReader(path, header, topology)
    flows = tuple(read(line, row) for line, row in numbered)
    return FlowTable(header, tuple(row for _, row in numbered), flows)


def _check_header(header: tuple[str, ...], path: str | Path) -> None:
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        wanted = ",".join(_COLUMNS)
        raise InputError(f"{path}:1: no column {', '.join(missing)}: the first line must name {wanted}")
    for name in (*_COLUMNS, _FINISH):
        if header.count(name) > (name != _FINISH):
            again = "is what this command adds: remove it" if name == _FINISH else "is named twice"
            raise InputError(f"{path}:1: column {name} {again}")


class _RowReader:
    """Makes flows of rows, and errors that name line and column."""

    def __init__(self, path: str | Path, header: tuple[str, ...], topology: Topology) -> None:
        self._path = path
        self._header = header
        self._columns = [header.index(name) for name in _COLUMNS]
        self._names = [host.name for host in topology.hosts]
        self._hosts = _host_names(topology)

    def __call__(self, line: int, row: tuple[str, ...]) -> Flow:
        if len(row) != len(self._header):
            raise InputError(f"{self._path}:{line}: expected {len(self._header)} cells, got {len(row)}")
        start, src, dst, num_bytes = (row[column].strip() for column in self._columns)
        return Flow(
            self._number(line, "start_s", start, "seconds"),
            self._host(line, "src", src),
            self._host(line, "dst", dst),
            self._number(line, "bytes", num_bytes, "bytes"),
        )

    def _number(self, line: int, column: str, text: str, unit: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise InputError(
                f"{self._path}:{line}: column {column}: expected a number of {unit}, zero or more, got {text!r}"
            )
        if unit == "bytes" and not number.is_integer():
            raise InputError(f"{self._path}:{line}: column {column}: expected whole bytes, got {text!r}")
        return number

    def _host(self, line: int, column: str, text: str) -> int:
        index = self._hosts.get(text)
        if index is None:
            error = unknown_name("host", text, self._names)
            raise type(error)(f"{self._path}:{line}: column {column}: {error}")
        return index


def _host_names(topology: Topology) -> dict[str, int]:
    """Host index by what a list may call it."""
    names = {host.name: host.index for host in topology.hosts}
    if not any(name.isdigit() for name in names):
        names |= {str(index): index for index in range(len(topology.hosts))}
    return names


def time_flows(
    topology: Topology,
    flows: Sequence[Flow | tuple[float, int | str, int | str, float]],
    protocol: str | Mapping[str, Any] | Protocol | None = None,
    *,
    on_delivered: Callable[[], None] | None = None,
    recorder: Recorder | None = None,
) -> FloatArray:
    """The instants in seconds at which transfers are delivered, in their order; infinity for those that are not.

    The topology's weather applies. A transfer that is in flight from or to a host that crashes is lost.

    A transfer takes a connection between its hosts that is idle, or a new one: transfers between the same hosts
    that overlap share the way, they do not queue.

    Args:
        topology: the network.
        flows: the transfers; also as tuples (start in seconds, from, to, bytes) of host names or indices.
        protocol: as `Protocol.parse` takes it; None: what the topology's file says.
        on_delivered: called whenever one is delivered, to show progress.
        recorder: keeps what happens.

    Raises DeadlockError where transfers wait for a link or host that is never to come back.

    >>> from netsim import Topology
    >>> topology = Topology.from_mapping(
    ...     {"hosts": {"a": {}, "b": {}}, "links": [
    ...         {"between": ["a", "b"], "bandwidth": "80 Mbit/s", "latency": "10 ms"}]})
    >>> time_flows(topology, [(0.0, "a", "b", 10_000_000)]).tolist()
    [1.01]
    """
    parsed = Protocol.parse(topology.protocol if protocol is None else protocol)
    listed = [_as_flow(flow, topology) for flow in flows]
    return _time_on_network(topology, listed, parsed, on_delivered, recorder)


def _as_flow(flow: Flow | tuple[float, int | str, int | str, float], topology: Topology) -> Flow:
    if isinstance(flow, Flow):
        return flow
    start, src, dst, num_bytes = flow
    source = topology.host_index(src) if isinstance(src, str) else src
    target = topology.host_index(dst) if isinstance(dst, str) else dst
    if not (0 <= start < math.inf and 0 <= num_bytes < math.inf):
        raise InputError(f"flow {flow}: start and bytes must be finite and not negative")
    return Flow(float(start), source, target, float(num_bytes))


def _time_on_network(
    topology: Topology,
    flows: list[Flow],
    protocol: Protocol,
    on_delivered: Callable[[], None] | None,
    recorder: Recorder | None,
) -> FloatArray:
    clock = Clock()
    network = Network(clock, topology, protocol)
    if recorder is not None:
        recorder.watch(network)
    faults = Faults(network)
    run = _FlowRun(clock, network, flows, on_delivered)
    faults.on_stuck = run.give_up
    clock.process(run.start())
    faults.run_until(lambda: not run.under_way)
    return run.finish


class _FlowRun:
    """A list of transfers on its way over a network.

    Attributes:
        finish: when each is delivered; infinity before.
        under_way: those that are neither delivered nor lost.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        flows: list[Flow],
        on_delivered: Callable[[], None] | None,
    ) -> None:
        self.finish = np.full(len(flows), math.inf)
        self.under_way = set(range(len(flows)))
        self._clock, self._network = clock, network
        self._flows, self._on_delivered = flows, on_delivered
        self._row_of: dict[int, int] = {}  # by transfer
        self._idle: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # connections by hosts
        self._num_opened: defaultdict[tuple[int, int], int] = defaultdict(int)

    def start(self) -> Generator[simpy.Event, None, None]:
        """Send each when it is time, on a connection of its hosts that is idle, or a new one."""
        clock, flows = self._clock, self._flows
        for number in sorted(range(len(flows)), key=lambda number: flows[number].start_seconds):
            flow = flows[number]
            if flow.start_seconds > clock.now:
                yield clock.at(flow.start_seconds)
            hosts = (flow.src, flow.dst)
            if self._idle[hosts]:
                connection = heappop(self._idle[hosts])
            else:
                connection = self._num_opened[hosts]
                self._num_opened[hosts] += 1
            sent = self._network.send(
                flow.src,
                flow.dst,
                flow.num_bytes,
                partial(self._deliver, number, hosts, connection),
                connection=connection,
                on_dropped=partial(self._end, number, hosts, connection),
            )
            self._row_of[sent] = number

    def _deliver(self, number: int, hosts: tuple[int, int], connection: int) -> None:
        self.finish[number] = self._clock.now
        self._end(number, hosts, connection)
        if self._on_delivered is not None:
            self._on_delivered()

    def _end(self, number: int, hosts: tuple[int, int], connection: int) -> None:
        self.under_way.discard(number)
        heappush(self._idle[hosts], connection)

    def give_up(self, reason: str) -> None:
        """Raise DeadlockError, which tells who waits; `reason` says for what, if the weather knows."""
        network = self._network
        waiting = network.transfers_waiting(lambda connection: isinstance(connection, BackgroundConnection))
        rows = [self._row_of[each.number] for each in waiting]
        told = _told(network.topology, self._flows, rows or self.under_way)
        if not reason:
            raise DeadlockError(f"deadlock: {told}, and nothing that is still to happen can change that")
        raise DeadlockError(f"{reason}, and {told}: let an event bring it back")


def _told(topology: Topology, flows: list[Flow], numbers: Iterable[int]) -> str:
    """Which transfers wait, by their position from 1, hosts and bytes."""
    names = [host.name for host in topology.hosts]
    waiting = sorted(numbers)
    told = [
        f"transfer {number + 1} ({names[flow.src]} to {names[flow.dst]}, {flow.num_bytes:.0f} bytes)"
        for number in waiting[:_MOST_TOLD]
        for flow in [flows[number]]
    ]
    more = f" and {len(waiting) - len(told)} more" if len(waiting) > len(told) else ""
    return f"{', '.join(told)}{more} can never arrive"
