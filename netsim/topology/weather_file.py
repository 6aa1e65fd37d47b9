"""From the `events`, `traces`, `background` and `drift` of a topology file to `netsim.topology.weather`."""

from __future__ import annotations

import csv
import io
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from netsim.files.errors import InputError
from netsim.files.plain_files import input_file
from netsim.files.units import parse_bits_per_second, parse_seconds, shown
from netsim.topology.weather import Background, Drift, HostEvent, LinkEvent, Trace, Weather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from netsim.files.problems import KeyPath
    from netsim.topology.graph import Host, Link
    from netsim.topology.schema import Direction, EventEntry, TopologyFile, TraceEntry

__all__ = ["MAX_TRACE_BYTES", "read_weather"]

MAX_TRACE_BYTES = 10_000_000
_MOST_SECONDS = 1e9
_Entry = TypeVar("_Entry")


def read_weather(
    file: TopologyFile,
    hosts: Sequence[Host],
    links: Sequence[Link],
    folder: Path,
    report: Callable[[KeyPath, str | InputError], None],
) -> Weather:
    """The weather of a file whose hosts and links are known; CSV files are looked for in `folder`.

    Mistakes go to `report`, as key path and message; what has one is left out.
    """
    if not (file.events or file.traces or file.background or file.drift):
        return Weather()
    return _WeatherReader(file, hosts, links, folder, report).weather()


class _WeatherReader:
    def __init__(
        self,
        file: TopologyFile,
        hosts: Sequence[Host],
        links: Sequence[Link],
        folder: Path,
        report: Callable[[KeyPath, str | InputError], None],
    ) -> None:
        self.file = file
        self.folder = folder
        self.report = report
        self.hosts: Mapping[str, int] = {host.name: host.index for host in hosts}
        self.links: Mapping[tuple[str, str], int] = {(link.source, link.target): link.index for link in links}

    def weather(self) -> Weather:
        link_events, host_events = self._events()
        return Weather(link_events, host_events, self._traces(), self._background(), self._drift())

    def _links_of(self, ends: Sequence[str], direction: Direction, path: KeyPath) -> tuple[int, ...] | None:
        one, other = ends
        there, back = self.links.get((one, other)), self.links.get((other, one))
        if there is None or back is None:
            self.report((*path, "link"), f"no link between '{one}' and '{other}': name the two ends of one")
            return None
        return {"both": tuple(sorted((there, back))), "up": (there,), "down": (back,)}[direction]

    def _host(self, name: str, path: KeyPath) -> int | None:
        host = self.hosts.get(name)
        if host is None:
            self.report(path, f"unknown host '{name}': name a host of this topology")
        return host

    def _events(self) -> tuple[tuple[LinkEvent, ...], tuple[HostEvent, ...]]:
        on_links: list[LinkEvent] = []
        on_hosts: list[HostEvent] = []
        for position, entry in enumerate(self.file.events):
            path = ("events", position)
            if entry.host is not None:
                host = self._host(entry.host, (*path, "host"))
                if host is not None:
                    on_hosts.append(HostEvent(entry.at, host, entry.up is not None, entry.lasting))
            elif entry.link is not None:
                links = self._links_of(entry.link, entry.direction, path)
                if links is not None:
                    on_links.append(_link_event(entry, links))
        return _ordered(on_links), _ordered(on_hosts)

    def _traces(self) -> tuple[Trace, ...]:
        traces: list[Trace] = []
        taken: set[tuple[str, int]] = set()
        for position, entry in enumerate(self.file.traces):
            path = ("traces", position)
            links = self._links_of(entry.link, entry.direction, path)
            trace = None if links is None else self._trace(entry, links, path)
            if trace is None:
                continue
            quantities = {(trace.quantity, link) for link in trace.links}
            if not taken.isdisjoint(quantities):
                self.report(path, "a second trace of the same quantity on this link: remove one")
            taken |= quantities
            traces.append(trace)
        return _ordered(traces)

    def _trace(self, entry: TraceEntry, links: tuple[int, ...], path: KeyPath) -> Trace | None:
        is_rate = entry.bandwidth is not None
        path = (*path, "bandwidth" if is_rate else "latency")
        written = entry.bandwidth if is_rate else entry.latency
        column = "bits_per_second" if is_rate else "latency_s"
        try:
            if isinstance(written, str):
                rows = _read_csv(self.folder, written, column)
            else:
                parse = parse_bits_per_second if is_rate else parse_seconds
                rows = [(parse_seconds(time), parse(value)) for time, value in written]
            _check_rows(rows)
        except InputError as error:
            self.report(path, error)
            return None
        times, values = zip(*rows, strict=True)
        return Trace(links, "bits_per_second" if is_rate else "latency_seconds", times, values)

    def _background(self) -> tuple[Background, ...]:
        traffic: list[Background] = []
        for position, entry in enumerate(self.file.background):
            path = ("background", position)
            source = self._host(entry.source, (*path, "from"))
            target = self._host(entry.target, (*path, "to"))
            if source is None or target is None:
                continue
            if source == target:
                self.report(path, f"leads from '{entry.source}' to itself: name two hosts")
            amounts = (entry.rate, entry.num_bytes, entry.every, entry.start, entry.stop)
            traffic.append(Background(source, target, *amounts))
        return _ordered(traffic)

    def _drift(self) -> tuple[Drift, ...]:
        drifts: list[Drift] = []
        taken: set[int] = set()
        for position, entry in enumerate(self.file.drift):
            path = ("drift", position)
            links = self._links_of(entry.link, entry.direction, path)
            if links is None:
                continue
            if not taken.isdisjoint(links):
                self.report(path, "a second drift on this link: remove one")
            taken.update(links)
            levels = None if entry.levels is None else tuple(entry.levels)
            drifts.append(Drift(links, entry.kind, entry.every, entry.sigma, levels, entry.seed))
        return _ordered(drifts)


def _link_event(entry: EventEntry, links: tuple[int, ...]) -> LinkEvent:
    is_up = None if entry.up is None and entry.down is None else entry.up is not None
    return LinkEvent(entry.at, links, is_up, entry.bandwidth, entry.latency, entry.loss, entry.lasting)


def _ordered(entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
    """In order of time where there is one, then in one that the order of the file does not change."""
    return tuple(sorted(entries, key=lambda entry: (getattr(entry, "at_seconds", 0.0), repr(entry))))


def _read_csv(folder: Path, name: str, column: str) -> list[tuple[float, float]]:
    """Rows of a CSV file with the columns start_s and `column`, plain numbers in SI units.

    A topology may have come from somebody else: it reads files below its own folder alone, links followed, and no error
    has any of their content.
    """
    path = folder / name
    try:
        if Path(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"{shown(name)} is not below the folder of this file: put it there, and name it from there"
            )
        with io.TextIOWrapper(input_file(path), encoding="utf-8-sig", newline="") as file:
            text = file.read(MAX_TRACE_BYTES + 1)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise InputError(f"{shown(name)} cannot be read: {reason}") from None
    if len(text) > MAX_TRACE_BYTES:
        raise InputError(f"{shown(name)} is larger than 10 MB: use fewer rows")
    header, *lines = text.splitlines() or [""]
    if [title.strip() for title in header.split(",")] != ["start_s", column]:
        raise InputError(f"{shown(name)} line 1: expected the header 'start_s,{column}'")
    rows = []
    for number, cells in enumerate(csv.reader(lines), start=2):
        try:
            time, value = (float(cell) for cell in cells)
        except ValueError:
            raise InputError(f"{shown(name)} line {number}: expected two numbers") from None
        rows.append((time, value))
    return rows


def _check_rows(rows: Sequence[tuple[float, float]]) -> None:
    if not rows:
        raise InputError("has no rows: give at least one")
    for time, value in rows:
        if not (0 <= time <= _MOST_SECONDS and 0 <= value < math.inf):
            raise InputError(f"expected finite values of at least 0, got {time!r}, {value!r}")
    for (time, _), (later, _) in itertools.pairwise(rows):
        if later <= time:
            raise InputError(f"times must ascend, but {later!r} s follows {time!r} s")
