"""Record of a run: transfers, use of links, spans of ranks; written as a trace file for Perfetto.

    recorder = Recorder()
    recorder.watch(network)
    ...
    write_trace(recorder, "trace.json.gz")      # open it at https://ui.perfetto.dev, or at chrome://tracing

The file has a process for each rank (and each host with none, or several) with rows for what it computes, its
collectives, its waits, the messages it sends and receives, with an arrow for each message, and for when its
host was down; and a process of counters, one a link, of what it carries, and
one more of what it could where the weather changes that. What has not ended goes as far as it
has come. Its format is Chrome's Trace Event Format (JSON). The same run gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from netsim.errors import InputError
from netsim.files.plain_files import check_output, output_file
from netsim.network.network import BackgroundConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from netsim.network.network import Network

__all__ = ["Recorder", "Span", "TransferRecord", "tracing", "write_trace"]

_FIRST_HOST = 100_000  # process ids: ranks from 1, hosts and links from here
_LINKS = 1_000_000
_ROWS = ("compute", "communication", "wait", "sends", "receives", "lost", "down")
_EVENTS_AT_ONCE = 1000
_MOST_LANES = 100  # of a row, for what overlaps


class Span(NamedTuple):
    """An interval of a rank's activity.

    Attributes:
        rank: whose.
        kind: `compute`; `communication`, from the Post of a call until it is done; `wait`, for such a call;
            `lost`, what was computed in vain, since the host crashed.
        name: the call's op; the kind where there is none.
        begin_seconds, end_seconds: when.
        num_bytes: the call's, None where there is none.
        key: the call's, of `communication`.
    """

    rank: int
    kind: Literal["compute", "communication", "wait", "lost"]
    name: str
    begin_seconds: float
    end_seconds: float
    num_bytes: int | None = None
    key: Hashable = None


@dataclass(slots=True)
class TransferRecord:
    """A transfer of a trace.

    Attributes:
        source, target: host indices.
        num_bytes: payload.
        begin_seconds: when it was sent.
        connection: as its sender named it.
        arriving_seconds: when its first byte arrived; None before.
        end_seconds: when all were there, or it was given up; None before.
        delivered_bytes: payload that was delivered.
    """

    source: int
    target: int
    num_bytes: float
    begin_seconds: float
    connection: Hashable
    arriving_seconds: float | None = None
    end_seconds: float | None = None
    delivered_bytes: float = 0.0


class Recorder:
    """Records the transfers and links of a network, and spans of ranks.

    Attributes:
        transfers: by id.
        link_use: link index -> (instant, payload bytes per second from then on), in order.
        link_capacity: (instant, bits per second that it carries), for links whose capacity has changed.
        spans: what ranks did; give `spans.append` to `netsim.ranks.kernel.Kernel` as `on_span`.
        network: that it watches, if any yet.
        unfinished_spans: called for what ranks are doing when the file is written; a kernel's, where there is one.
    """

    def __init__(self) -> None:
        self.transfers: dict[int, TransferRecord] = {}
        self.link_use: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self.link_capacity: dict[int, list[tuple[float, float]]] = {}
        self.spans: list[Span] = []
        self.unfinished_spans: Callable[[], list[Span]] = list
        self.network: Network | None = None
        self._rates: dict[int, float] = {}
        self._users: defaultdict[int, dict[int, None]] = defaultdict(dict)  # transfers by link

    def watch(self, network: Network) -> None:
        """Keep what happens on a network from now on; raises InputError if this recorder watches one already."""
        if self.network is not None:
            raise InputError("Recorder.watch: it watches a network already: make a Recorder for each")
        self.network = network
        network.observe(self)

    # -- calls of the network ------------------------------------------------------------------------------

    def transfer_started(
        self, transfer: int, source: int, target: int, num_bytes: float, connection: Hashable
    ) -> None:
        """Record a transfer that is sent now.

        Args:
            transfer: id of the transfer.
            source, target: host indices.
            num_bytes: payload.
            connection: as its sender named it.
        """
        self.transfers[transfer] = TransferRecord(source, target, num_bytes, self._now, connection)

    def transfer_ended(self, transfer: int, delivered_bytes: float) -> None:
        """Record that `transfer` is over, of which `delivered_bytes` were delivered."""
        record = self.transfers[transfer]
        record.end_seconds, record.delivered_bytes = self._now, delivered_bytes
        if record.arriving_seconds is None:
            record.arriving_seconds = self._now
        if self._rates.pop(transfer, None) is not None:
            links = self._route(record)
            for link in links:
                del self._users[link][transfer]
            self._note(links)

    def rates_changed(self, transfers: Sequence[int], bytes_per_second: Sequence[float]) -> None:
        """Record that each of `transfers` proceeds at the rate in `bytes_per_second` (payload)."""
        concerned: dict[int, None] = {}
        for transfer, rate in zip(transfers, bytes_per_second, strict=True):
            record = self.transfers[transfer]
            if record.arriving_seconds is None:
                record.arriving_seconds = self._now
            self._rates[transfer] = rate
            for link in self._route(record):
                self._users[link][transfer] = None
                concerned[link] = None
        self._note(concerned)

    def capacity_changed(self, link: int, bits_per_second: float) -> None:
        """Record that `link` carries `bits_per_second` from now on; 0 while it is down."""
        if link not in self.link_capacity:
            assert self.network is not None
            self.link_capacity[link] = [(0.0, self.network.topology.links[link].bits_per_second)]
        points = self.link_capacity[link]
        if points[-1][0] == self._now:
            points.pop()
        points.append((self._now, bits_per_second))

    @property
    def _now(self) -> float:
        assert self.network is not None
        return float(self.network.env.now)

    def _route(self, record: TransferRecord) -> tuple[int, ...]:
        assert self.network is not None
        return self.network.topology.route(record.source, record.target)

    def _note(self, links: Iterable[int]) -> None:
        for link in links:
            use, now = self.link_use[link], self._now
            total = sum(self._rates[transfer] for transfer in self._users[link])
            if use and use[-1][0] == now:
                use.pop()  # rates between two things that happen at one instant hold for no time
            if (use[-1][1] if use else 0.0) != total:
                use.append((now, total))


def write_trace(
    recorder: Recorder,
    path: str | Path,
    hosts: Sequence[int] = (),
    place_of: Callable[[Span], str] = lambda span: "",
) -> None:
    """Write everything as one JSON file, compressed if its name ends in `.gz`; see `output_file`.

    Args:
        recorder: has kept it.
        path: the file.
        hosts: the host of each rank.
        place_of: `file:line` of the program that does it, "" where that is unknown.

    Raises InputError where it cannot be written.
    """
    is_packed = Path(path).suffix == ".gz"
    encode = json.JSONEncoder(separators=(",", ":")).encode
    lines = map(encode, _Events(recorder, hosts, place_of))
    with output_file(path) as file:
        # Neither name nor time: equal runs give equal bytes.
        # Level 9 takes thrice as long as level 6 and saves 3 %.
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if is_packed else nullcontext(file)
        with packed as out:
            out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            separator = ""
            while batch := ",\n".join(islice(lines, _EVENTS_AT_ONCE)):
                out.write(f"{separator}{batch}".encode())
                separator = ",\n"
            out.write(b"\n]}\n")


@contextmanager
def tracing(
    path: str | Path | None, hosts: Sequence[int], warn: Callable[[str], object]
) -> Iterator[Recorder | None]:
    """Context with a recorder whose trace is written at the end, failed or not; None without a path.

    Args:
        path: the file.
        hosts: the host of each rank.
        warn: called with a line that says that the trace was cut short, and where it is.

    Raises InputError where it cannot be written.
    """
    if path is None:
        yield None
        return
    if not Path(path).parent.is_dir():
        raise InputError(f"{path}: cannot be written: there is no folder {Path(path).parent}")
    check_output(path, ".json", ".gz")
    recorder = Recorder()
    try:
        yield recorder
    except BaseException:
        try:
            write_trace(recorder, path, hosts)
        except InputError as problem:
            warn(f"trace: {problem}")
        else:
            warn(f"{path}: what happened until the run was cut short")
        raise
    write_trace(recorder, path, hosts)


class _Row(NamedTuple):
    """A row of a process: its kind, and which of several where things overlap."""

    process: int
    kind: str
    lane: int

    @property
    def thread(self) -> int:
        return _ROWS.index(self.kind) * _MOST_LANES + self.lane + 1


class _Events:
    """The events of a trace file, as plain data."""

    def __init__(
        self,
        recorder: Recorder,
        hosts: Sequence[int],
        place_of: Callable[[Span], str],
    ) -> None:
        self._recorder, self._place_of, self._hosts = recorder, place_of, hosts
        self._network = network = recorder.network
        self._topology = network.topology if network is not None else None
        self._now = network.env.now if network is not None else 0.0
        self._rows: dict[_Row, None] = {}  # those with anything in them
        ranks_of: defaultdict[int, list[int]] = defaultdict(list)
        for rank, host in enumerate(hosts):
            ranks_of[host].append(rank)
        self._rank_alone = {host: ranks[0] for host, ranks in ranks_of.items() if len(ranks) == 1}
        self._free_at: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        bodies = [*self._spans(), *self._messages(), *self._outages(), *self._dead_links()]
        yield from self._names()
        yield from bodies
        yield from self._counters()

    def _spans(self) -> Iterator[dict[str, Any]]:
        spans = [*self._recorder.spans, *self._recorder.unfinished_spans()]
        for span in sorted(spans, key=lambda span: (span.begin_seconds, span.rank)):
            row = self._row(span.rank + 1, span.kind, span.begin_seconds, span.end_seconds)
            arguments: dict[str, Any] = {} if span.num_bytes is None else {"bytes": span.num_bytes}
            if place := self._place_of(span):
                arguments["at"] = place
            yield _slice(row, span.name, span.begin_seconds, span.end_seconds, arguments)

    def _messages(self) -> Iterator[dict[str, Any]]:
        by_begin = sorted(self._recorder.transfers.items(), key=lambda item: (item[1].begin_seconds, item[0]))
        for number, record in by_begin:
            begin, arriving = record.begin_seconds, record.arriving_seconds
            end = record.end_seconds if record.end_seconds is not None else self._now
            names = {"from": self._name(record.source), "to": self._name(record.target)}
            arguments: dict[str, Any] = {**names, "bytes": _whole(record.num_bytes)}
            if record.end_seconds is None:
                arguments["unfinished"] = True
            else:
                arguments["delivered"] = record.delivered_bytes
            source, target = self._process(record.source), self._process(record.target)
            sends = self._row(source, "sends", begin, end)
            yield _slice(sends, f"to {names['to']}", begin, end, arguments)
            if arriving is None:
                continue
            receives = self._row(target, "receives", arriving, end)
            yield _slice(receives, f"from {names['from']}", arriving, end, arguments)
            is_background = isinstance(record.connection, BackgroundConnection)
            arrow = {"name": "background" if is_background else "message", "cat": "message", "id": number}
            yield {**arrow, "ph": "s", "pid": source, "tid": sends.thread, "ts": _micros(begin)}
            ends = {"pid": target, "tid": receives.thread, "ts": _micros(arriving)}
            yield {**arrow, "ph": "f", "bp": "e", **ends}

    def _outages(self) -> Iterator[dict[str, Any]]:
        if self._network is None:
            return
        downtime = self._network.downtime
        for outage in sorted(
            [*downtime.outages, *downtime.under_way()], key=lambda outage: outage.begin_seconds
        ):
            end = outage.end_seconds if outage.end_seconds is not None else self._now
            row = self._row(self._process(outage.host), "down", outage.begin_seconds, end)
            arguments = {"host": self._name(outage.host)}
            yield _slice(row, "host down", outage.begin_seconds, end, arguments)

    def _counters(self) -> Iterator[dict[str, Any]]:
        if self._topology is None:
            return
        recorder = self._recorder
        for index in sorted({*recorder.link_use, *recorder.link_capacity}):
            link = self._topology.links[index]
            name = link.name
            for instant, rate in recorder.link_use.get(index, ()):
                yield _counter(name, instant, rate * 8)
            for instant, rate in recorder.link_capacity.get(index, ()):
                yield _counter(f"{name} capacity", instant, rate)

    def _dead_links(self) -> Iterator[dict[str, Any]]:
        """From when to when links have carried nothing."""
        spans = [
            (begin, end, index)
            for index, points in self._recorder.link_capacity.items()
            for (begin, rate), (end, _) in pairwise([*points, (self._now, 0.0)])
            if rate == 0 and end > begin
        ]
        assert self._topology is not None or not spans
        for begin, end, index in sorted(spans):
            link = self._topology.links[index]  # type: ignore[union-attr]
            row = self._row(_LINKS, "down", begin, end)
            yield _slice(row, f"{link.name} down", begin, end, {})

    def _names(self) -> Iterator[dict[str, Any]]:
        processes = {row.process for row in self._rows} | {rank + 1 for rank in range(len(self._hosts))}
        if self._recorder.link_use or self._recorder.link_capacity:
            processes.add(_LINKS)
        for process in sorted(processes):
            common = {"ph": "M", "pid": process}
            yield {**common, "name": "process_name", "args": {"name": self._title(process)}}
            yield {**common, "name": "process_sort_index", "args": {"sort_index": process}}
        for row in sorted(self._rows, key=lambda row: (row.process, row.thread)):
            common = {"ph": "M", "pid": row.process, "tid": row.thread}
            title = row.kind if not row.lane else f"{row.kind} {row.lane + 1}"
            yield {**common, "name": "thread_name", "args": {"name": title}}
            yield {**common, "name": "thread_sort_index", "args": {"sort_index": row.thread}}

    def _title(self, process: int) -> str:
        if process == _LINKS:
            return "links"
        if process >= _FIRST_HOST:
            return f"host {self._name(process - _FIRST_HOST)}"
        rank = process - 1
        return f"rank {rank} ({self._name(self._hosts[rank])})" if self._hosts else f"rank {rank}"

    def _process(self, host: int) -> int:
        rank = self._rank_alone.get(host)
        return rank + 1 if rank is not None else _FIRST_HOST + host

    def _name(self, host: int) -> str:
        assert self._topology is not None
        return self._topology.hosts[host].name

    def _row(self, process: int, kind: str, begin: float, end: float) -> _Row:
        """The first row of this kind that is free: things of one row must not overlap."""
        free_at = self._free_at[process, kind]
        free = (lane for lane, until in enumerate(free_at) if until <= begin or lane == _MOST_LANES - 1)
        lane = next(free, len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        free_at[lane] = max(free_at[lane], end)
        row = _Row(process, kind, lane)
        self._rows[row] = None
        return row


def _counter(name: str, instant: float, bits_per_second: float) -> dict[str, Any]:
    arguments = {"Mbit/s": round(bits_per_second * 1e-6, 6)}
    return {"ph": "C", "name": name, "pid": _LINKS, "ts": _micros(instant), "args": arguments}


def _slice(row: _Row, name: str, begin: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    start = _micros(begin)
    return {
        "ph": "X",
        "name": name,
        "cat": row.kind,
        "pid": row.process,
        "tid": row.thread,
        "ts": start,
        # Of rounded instants, not rounded itself: what follows at once must not begin before this has ended.
        "dur": round(_micros(end) - start, 3),
        "args": arguments,
    }


def _micros(seconds: float) -> float:
    """Microseconds, to a nanosecond."""
    return round(seconds * 1e6, 3)


def _whole(num_bytes: float) -> float | int:
    """A whole number as one."""
    return int(num_bytes) if num_bytes == int(num_bytes) else num_bytes
