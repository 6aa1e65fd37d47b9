"""Measurements from any number of files: tables, iperf3's and ping's output, and the network that they make.

Plain tables, as CSV with one row a pair (JSON: a list of objects with the same keys); quantities have their units:

    from,to,rtt,throughput,streams,loss
    us,eu,80 ms,1.2 Gbit/s,1,0 %

Throughput is goodput, of one stream where no column `streams` says how many were measured together. As a square, the
first cell says what the cells are:

    rtt ms,us,eu
    us,0,80
    eu,80,0

CloudPing: `[{"region": ..., "averages": [{"regionTo": ..., "average": ms}]}]`, or `{"data": {from: {to: ms}}}`.
WonderNetwork: CSV with source, destination, timestamp, min, avg, max, mdev (ms), and its list of servers (id, name).
Skyplane: CSV with src_region, dst_region, src_tier, dst_tier, and throughput_sent, throughput_recieved (bit/s) with
iperf3_connections, or avg_rtt (ms) in its table of latencies; rows with an end that is not of the premium tier are left
out.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from difflib import get_close_matches
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netsim.errors import InputError, locate_errors, unknown_name, unknown_names
from netsim.formats.builder import (
    Assumed,
    LinkLine,
    TopologyBuilder,
    milliseconds,
    rate,
    region_entry,
    safe_name,
)
from netsim.units import (
    format_bytes,
    format_count,
    format_fraction,
    parse_bits_per_second,
    parse_fraction,
    parse_seconds,
    printable,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "GOODPUT_SHARE",
    "FailedMeasurementError",
    "OneWay",
    "Pairs",
    "ends_by_name",
    "is_iperf3",
    "is_ping",
    "parse_json",
    "read_csv",
    "read_iperf3",
    "read_json",
    "read_ping",
    "remarks_on_lines",
]

_NIC = 10e9  # bits per second of a host's own link, where none is given
_TO_ROUTER_SECONDS = 50e-6  # from a host to its place's router
GOODPUT_SHARE = 1448 / 1514
"""Payload of a full TCP segment by its bytes on the wire (Ethernet frame), as `linux-tcp` counts them."""


@dataclass
class OneWay:
    """Measurements from one place to another; None if not measured.

    Attributes:
        bits_per_second: goodput.
        rtt_seconds: round trip.
        loss: share of packets.
        streams: number of streams of the goodput.
        notes: how it was measured.
    """

    bits_per_second: float | None = None
    rtt_seconds: float | None = None
    loss: float | None = None
    streams: int = 1
    notes: list[str] = field(default_factory=list)


class Pairs:
    """Measurements by (from, to); `num_read` counts them."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], OneWay] = {}
        self.sources: list[str] = []
        self.not_read: list[str] = []
        self.num_read = 0
        self._num_to_itself = 0

    def add(
        self,
        source: str,
        target: str,
        *,
        bits_per_second: float | None = None,
        rtt_seconds: float | None = None,
        loss: float | None = None,
        streams: float = 1,
        note: str = "",
    ) -> None:
        """Add a measurement; the largest rate, the smallest round trip and the largest loss of several count."""
        self.num_read += 1
        if source == target:
            self._num_to_itself += 1
            return
        route = self.routes.setdefault((source, target), OneWay())
        if bits_per_second is not None and bits_per_second > (route.bits_per_second or 0.0):
            route.bits_per_second, route.streams = bits_per_second, int(streams)
        if rtt_seconds is not None:
            least = math.inf if route.rtt_seconds is None else route.rtt_seconds
            route.rtt_seconds = min(rtt_seconds, least)
        if loss is not None:
            route.loss = max(loss, route.loss or 0.0)
        if note and note not in route.notes:
            route.notes.append(note)

    def read(
        self, path: str | Path, ends: tuple[str, str], column: str, text: str, line: str, where: str
    ) -> None:
        """Add one figure of a file; errors name its `line` and `where` it stands there."""
        figure: dict[str, Any] = {_COLUMNS[column][0]: _value(f"{path}{line}: {where}", column, text)}
        self.add(*ends, **figure, note=f"{column} {text} ({Path(path).name}{line})")

    def keep(self, places: Sequence[str]) -> None:
        """Keep only measurements between `places`; raises UnknownNameError for a place without any."""
        known = {place for pair in self.routes for place in pair}
        for place in places:
            if place not in known:
                raise unknown_name("place in the measurements", place, known)
        self.routes = {pair: route for pair, route in self.routes.items() if set(pair) <= set(places)}

    def builder(self, name: str, assumed: Assumed) -> TopologyBuilder:
        """Start a topology: a region for each place, and a link for each pair with the figures of both directions.

        Raises InputError for a missing figure for which nothing is assumed.
        """
        taken: dict[str, str] = {}
        pairs = list(dict.fromkeys(tuple(sorted(pair)) for pair in self.routes))
        if not pairs:
            raise InputError(
                f"{name}: no route between two places was found: give measurements of at least one"
            )
        builder = TopologyBuilder(name, list(self.sources), protocol="linux-tcp", are_ends_measured=True)
        for one, other in pairs:
            builder.links.append(self._link(one, other, assumed, taken))
        fastest = max(
            link.bits_per_second / (GOODPUT_SHARE if link.measured_streams else 1.0)
            for line in builder.links
            for link in (line.there, line.back)
        )
        nic, hosts = max(assumed.nic_bits_per_second or _NIC, fastest), assumed.hosts or 1
        lines: dict[str, tuple[int, float, float]] = {}
        for place in dict.fromkeys(place for pair in sorted(pairs) for place in pair):
            up, down = assumed.nics.get(place, (nic, nic))
            lines[place] = assumed.hosts_of.get(place, hosts), up, down
            builder.regions[safe_name(place, taken)] = region_entry(*lines[place], _TO_ROUTER_SECONDS)
        given = {*assumed.nics, *assumed.hosts_of} - lines.keys()
        if given:
            raise unknown_names("place of --nic and --hosts", sorted(given), lines)
        rates = {ends: route.bits_per_second for ends, route in self.routes.items() if route.bits_per_second}
        wire = {ends: goodput / GOODPUT_SHARE for ends, goodput in rates.items()}
        builder.remarks += remarks_on_lines(wire, lines, GOODPUT_SHARE)
        builder.not_read += self.not_read
        if self._num_to_itself:
            builder.not_read.append(
                f"{format_count(self._num_to_itself, 'measurement')} of a place to itself"
            )
        others = " where regions say no other" if assumed.nics or assumed.hosts_of else ""
        builder.sources.append(
            f"Assumed: {format_count(hosts, 'host')} a place, network cards of {rate(nic)}{others},"
            f" {milliseconds(_TO_ROUTER_SECONDS)} to the place's router. Rates that were measured are goodput, as many"
            " streams as `measured` says together."
        )
        return builder

    def _link(self, one: str, other: str, assumed: Assumed, taken: dict[str, str]) -> LinkLine:
        hint = f" (not read: {'; '.join(self.not_read)})" if self.not_read else ""
        there = self.routes.get((one, other), OneWay())
        back = self.routes.get((other, one), OneWay())
        trips = [route.rtt_seconds for route in (there, back) if route.rtt_seconds is not None]
        notes = [f"{one} to {other}: {note}" for note in there.notes]
        notes += [f"{other} to {one}: {note}" for note in back.notes]
        measured = [
            route if route.bits_per_second else other for route, other in ((there, back), (back, there))
        ]
        rates = [route.bits_per_second for route in measured if route.bits_per_second]
        streams: Sequence[int | None] = [route.streams for route in measured] if rates else (None, None)
        if not rates:
            rates = [
                assumed.rate(f"{one} to {other}: no throughput was measured{hint}: assume one", notes)
            ] * 2
        elif measured[0] is measured[1]:
            notes.append("rate measured in one direction, assumed in the other")
        if trips:
            latency = min(trips) / 2
            # The route from each host to its place's router is part of what was measured.
            latency = max(latency - 2 * _TO_ROUTER_SECONDS, 0.0)
        else:
            latency = assumed.latency(
                f"{one} to {other}: no round trip was measured{hint}: assume a latency", notes
            )
        losses = {route.loss for route in (there, back) if route.loss is not None}
        if len(losses) > 1:
            notes.append("loss: the larger, for both directions")
        elif losses and None in (there.loss, back.loss):
            notes.append("loss measured in one direction, assumed in the other")
        ends = safe_name(one, taken), safe_name(other, taken)
        return LinkLine.between(*ends, rates, latency, "; ".join(notes), max(losses, default=0.0), streams)


_ALIKE = 1.1  # the largest of a place's rates by its least
_MOST_REMARKS = 4


def remarks_on_lines(
    rates: Mapping[tuple[str, str], float], lines: Mapping[str, tuple[int, float, float]], payload: float
) -> list[str]:
    """Remarks on places whose rates to all others, or from all others, are alike, while their hosts' lines are wider.

    A link for each pair lets such a place send to all others at once, at the rate measured to each. If every sender to
    a place sends at one rate to all places, the senders' own lines were the limit, not the place's.

    Args:
        rates: (from, to) -> bit/s on the wire, where it was measured.
        lines: place -> (hosts, bit/s up and bit/s down of each host's own link), of all places.
        payload: share of a byte on the wire that is goodput, in which rates are given.

    >>> rates = {("home", "a"): 40e6, ("home", "b"): 39e6, ("a", "b"): 1e9, ("b", "a"): 2e9, ("a", "home"): 3e8}
    >>> (line,) = remarks_on_lines(rates, dict.fromkeys(("home", "a", "b"), (1, 1e10, 1e10)), 1.0)
    >>> line.partition(":")[0]
    "home's rates to all others are alike (39 to 40 Mbit/s)"
    """
    alike: list[dict[str, dict[str, float]]] = []  # by direction, then place: rates by the other place
    for end in (0, 1):
        routes = defaultdict[str, dict[str, float]](dict)
        for ends, each in rates.items():
            routes[ends[end]][ends[1 - end]] = each
        alike.append(
            {
                place: some
                for place, some in routes.items()
                if len(some) > 1 and max(some.values()) <= _ALIKE * min(some.values())
            }
        )
    remarks = []
    for place, (hosts, *own) in lines.items():
        reasons = []
        for end, reason in enumerate((f"{place}'s rates to all others", f"all others' rates to {place}")):
            some, others = alike[end].get(place), alike[1 - end]
            if some is None or (len(others) < len(lines) and some.keys() <= others.keys()):
                continue
            if own[end] * hosts > max(some.values()) * _ALIKE:
                own[end] = max(some.values())
                least, most = (_digits(each * payload) for each in (min(some.values()), own[end]))
                both = f"{least.removesuffix(most[most.index(' ') :])} to {most}"
                reasons.append(f"{reason} are alike ({most if least == most else both})")
        if reasons:
            line = ":".join(dict.fromkeys(_digits(each).replace(" ", "") for each in own))
            alone = f" --hosts {shlex.quote(f'{place}=1')}" if hosts > 1 else ""
            remarks.append(
                f"{', and '.join(reasons)}: probably its own line, which it would have here to each of them at once;"
                f" measure two at once, or give --nic {shlex.quote(f'{place}={line}')}{alone} (bytes on the wire)"
            )
    if len(remarks) > _MOST_REMARKS:
        text = f"{len(remarks) - _MOST_REMARKS:,} more places are limited in the same way"
        remarks[_MOST_REMARKS:] = [text]
    return remarks


def _digits(bits_per_second: float) -> str:
    return rate(float(f"{bits_per_second:.3g}"))


_FROM = ("from", "src", "source", "src_region", "from_region")
_TO = ("to", "dst", "target", "destination", "dst_region", "to_region")
_SQUARE = re.compile(r"(rtt|latency|throughput|bandwidth|loss)\s*\(?([A-Za-z/%]+)\)?", re.IGNORECASE)
_TIERS = ("src_tier", "dst_tier")
_NO_FIGURE = {"", "-", "nan"}
_MOST_ROWS = 2_000_000
_MISSPELT = 0.8  # likeness of a name to a column's, from which on it is taken for a slip


def _scaler(factor: float) -> Callable[[str], float]:
    return lambda text: float(text) * factor


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text[:9]):
        raise InputError(f"expected a whole number of streams from 1 up, got {shown(text)}")
    return int(text)


# Column -> (what it is, how it is read). The first that a row has, of each kind, counts.
_COLUMNS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "rtt": ("rtt_seconds", parse_seconds),
    "rtt_ms": ("rtt_seconds", _scaler(1e-3)),
    "latency": ("rtt_seconds", lambda text: 2 * parse_seconds(text)),
    "latency_ms": ("rtt_seconds", _scaler(2e-3)),
    "avg": ("rtt_seconds", _scaler(1e-3)),
    "avg_rtt": ("rtt_seconds", _scaler(1e-3)),
    "throughput": ("bits_per_second", parse_bits_per_second),
    "bandwidth": ("bits_per_second", parse_bits_per_second),
    "throughput_mbit_s": ("bits_per_second", _scaler(1e6)),
    "throughput_gbit_s": ("bits_per_second", _scaler(1e9)),
    "throughput_recieved": ("bits_per_second", float),
    "throughput_received": ("bits_per_second", float),
    "throughput_sent": ("bits_per_second", float),
    "loss": ("loss", parse_fraction),
    "streams": ("streams", _count),
    "iperf3_connections": ("streams", _count),
}


def read_csv(path: str | Path, text: str, pairs: Pairs, servers: dict[str, str]) -> None:
    """Read rows or a square. A list of servers (id, name) is kept in `servers` for the rows of other files.

    Raises InputError that names line and column.
    """
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    try:
        reader = csv.reader(StringIO(text), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        raise InputError(f"{path}: is no CSV file: {error}") from None
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{path}: has more than {_MOST_ROWS:,} rows: give a smaller extract")
    header = rows[0][1] if rows else []
    lowered = [cell.lower() for cell in header]
    if twice := [name for name, num in Counter(lowered).items() if name and num > 1]:
        raise InputError(f"{path}:1: column {twice[0]!r} is there twice: keep one of them")

    def whole_rows() -> Iterator[tuple[int, list[str]]]:
        for number, row in rows[1:]:
            if len(row) != len(header):
                raise InputError(
                    f"{path}:{number}: expected {format_count(len(header), 'cell')}, got {len(row)}"
                )
            yield number, row

    square = _SQUARE.fullmatch(header[0]) if header else None
    objects = ((number, dict(zip(lowered, row, strict=True))) for number, row in whole_rows())
    if {"id", "name"} <= set(lowered) and not set(lowered) & set(_TO):
        servers.update({row["id"]: row["name"] for _, row in objects})
        return
    if square is not None:
        what, unit = square[1].lower(), square[2]
        for number, (source, *cells) in whole_rows():
            for target, cell in zip(header[1:], cells, strict=True):
                if cell.lower() not in _NO_FIGURE and (source != target or cell != "0"):
                    where = f"column {target}"
                    pairs.read(path, (source, target), what, f"{cell} {unit}", f":{number}", where)
    else:
        _read_rows(path, lowered, objects, pairs, servers)
    pairs.sources.append(f"{Path(path).name}: table of {format_count(len(rows) - 1, 'row')}.")


def _read_rows(
    path: str | Path,
    columns: Sequence[str],
    rows: Iterable[tuple[int, Mapping[str, str]]],
    pairs: Pairs,
    servers: Mapping[str, str],
) -> None:
    source_key = next((name for name in _FROM if name in columns), None)
    target_key = next((name for name in _TO if name in columns), None)
    known = [name for name in _COLUMNS if name in columns]
    figures_known = [name for name in known if _COLUMNS[name][0] != "streams"]
    others = [name for name in columns if name not in (*known, source_key, target_key, *_TIERS)]
    if source_key is None or target_key is None or not figures_known:
        raise InputError(
            f"{path}: no table of routes: name columns from, to and some of rtt, throughput, loss"
            " (or a first cell such as 'rtt ms' for a square)"
        )
    for name in others:
        if name not in (*_FROM, *_TO) and get_close_matches(name, [*_COLUMNS, *_FROM, *_TO], 1, _MISSPELT):
            with locate_errors(f"{path}:1"):
                raise unknown_name("column", name, [*_COLUMNS, *_FROM, *_TO])
    used = set[str]()
    num_left_out = 0
    for number, row in rows:
        if any(row.get(tier, "").upper() not in ("PREMIUM", "") for tier in _TIERS):
            num_left_out += 1
            continue
        source, target = row.get(source_key, ""), row.get(target_key, "")
        source, target = servers.get(source, source), servers.get(target, target)
        if not source or not target:
            raise InputError(f"{path}:{number}: no {source_key if not source else target_key}")
        found: dict[str, float] = {}
        figures: list[str] = []
        for name in known:
            kind = _COLUMNS[name][0]
            if kind not in found and row.get(name, "").lower() not in _NO_FIGURE:
                used.add(name)
                found[kind] = _value(f"{path}:{number}: column {name}", name, row[name])
                figures.append(f"{name} {row[name]}")
        if found.keys() - {"streams"}:  # skyplane's tables have rows of what could not be measured
            note = f"{', '.join(figures)} ({Path(path).name}:{number})"
            pairs.add(source, target, **found, note=note)
    if num_left_out:
        pairs.not_read.append(
            f"{Path(path).name}: {format_count(num_left_out, 'row')} of other tiers than premium"
        )
    if named := [
        name for name in columns if name and (name in others or (name in known and name not in used))
    ]:
        pairs.not_read.append(f"{Path(path).name}: columns {', '.join(map(printable, named))}")


def read_json(path: str | Path, data: Any, pairs: Pairs) -> None:
    """CloudPing's layouts, the plain list of objects, or `{"rtt_ms": {from: {to: value}}, ...}`.

    Raises InputError that names the entry.
    """
    before, cells = pairs.num_read, list[tuple[Any, Any, str, Any]]()
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        if "averages" in data[0]:
            for number, entry in enumerate(data, 1):
                routes = entry.get("averages", [])
                if not isinstance(routes, list) or not all(isinstance(route, dict) for route in routes):
                    raise InputError(f"{path}:{number}: averages: expected a list of objects")
                for route in routes:
                    cells.append((entry.get("region"), route.get("regionTo"), "rtt_ms", route.get("average")))
        else:
            rows = [(number, _lowered(f"{path}:{number}", row)) for number, row in enumerate(data, 1)]
            _read_rows(path, sorted({key for _, row in rows for key in row}), rows, pairs, {})
    elif isinstance(data, dict):
        is_cloudping = isinstance(data.get("data"), dict)
        tables = {
            "rtt_ms" if is_cloudping and name == "data" else name: table for name, table in data.items()
        }
        for name, table in tables.items():
            if name not in _COLUMNS or not isinstance(table, dict):
                pairs.not_read.append(f"{Path(path).name}: {printable(name)}")
                continue
            for source, routes in table.items():
                if not isinstance(routes, dict):
                    raise InputError(f"{path}: {name}.{source}: expected a mapping from places to values")
                cells += [(source, target, name, value) for target, value in routes.items()]
    for source, target, name, value in cells:
        if value is not None:
            where = f"{printable(source)} to {printable(target)}"
            if not all(isinstance(place, str) and place for place in (source, target)):
                raise InputError(f"{path}: {where}: expected names of places")
            pairs.read(path, (source, target), name, str(value), "", where)
    if pairs.num_read == before:
        raise InputError(f"{path}: no table of routes was found: see 'netsim import --help' for the layouts")
    pairs.sources.append(f"{Path(path).name}: {format_count(pairs.num_read - before, 'measurement')}.")


def _lowered(where: str, row: Mapping[Any, Any]) -> dict[str, str]:
    """A row of a table in JSON, as one in CSV has it."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        name = str(key).lower()
        if name in cells or not isinstance(value, str | int | float | None):
            problem = "is there twice" if name in cells else f"expected text or a number, got {shown(value)}"
            raise InputError(f"{where}: {printable(key)}: {problem}")
        cells[name] = "" if value is None else str(value)
    return cells


def _value(where: str, column: str, text: str) -> float:
    """Read a cell of a column; `where` begins the line of an error."""
    kind, read = _COLUMNS[column]
    try:
        value = read(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: expected a number from 0 up, got {shown(text)}")
    if kind != "loss" and not value:
        raise InputError(
            f"{where}: expected more than zero, got {shown(text)}: leave the cell empty if it is not known"
        )
    if kind == "loss" and value == 1:
        raise InputError(f"{where}: expected a loss below 100 %: leave the pair out")
    return value


# Of all languages of ping: figures, units and signs are the same, words are not. Solaris has the unit before.
_MS = "(?:ms|\u043c\u0441)"
_FIGURE = r"(\d+(?:[.,]\d*)?)"
_STATISTICS = re.compile(rf"(?:(\(ms\))[^\n=]*)?= ?{_FIGURE}/{_FIGURE}/[\d.,/]+(?(1)| ?{_MS})")  # least, mean
_WINDOWS = re.compile(rf"= ?(\d+) ?{_MS}\D+= ?\d+ ?{_MS}\D+= ?(\d+) ?{_MS}")  # least, most, mean
_LOST = re.compile(r"(\d+(?:[.,]\d*)?) ?%")
_ENOUGH_PINGS = 100  # fewer say nothing about a link's loss: one lost of ten may be one of ten thousand
_BETWEEN = re.compile(r"^PING6\(.*?\) (\S+) --> (\S+)", re.MULTILINE)  # macOS
_PINGED = re.compile(
    r"^P(?:ING|inging) ([^\s(]+)|^.*\bping\b.*?\s(\S*[.:]\w\S*?):?(?:\s|$)", re.MULTILINE | re.IGNORECASE
)


class FailedMeasurementError(InputError):
    """The file reports that its measurement failed."""


def ends_by_name(path: str | Path) -> tuple[str, str] | None:
    """Places in a file name such as FROM--TO.json; None for other names.

    >>> ends_by_name("runs/us-east--eu.json"), ends_by_name("run1.json")
    (('us-east', 'eu'), None)
    """
    one, mark, other = Path(path).name.rsplit(".", 1)[0].partition("--")
    return (one, other) if mark and one and other else None


_AT_THE_LIMIT = 0.95


def is_iperf3(data: object) -> bool:
    """Return whether JSON is a run of iperf3."""
    return isinstance(data, dict) and "start" in data and ("end" in data or "error" in data)


def read_iperf3(path: str | Path, data: dict[str, Any], pairs: Pairs) -> None:
    """Read a run of a client or a server: goodput as the receiver counted it, and the least round trip.

    A run with `--bidir` gives both directions. Raises InputError for a run that failed, was UDP, or lacks these.
    """
    if data.get("error"):
        raise FailedMeasurementError(f"{path}: iperf3 failed: {printable(data['error'])}")
    try:
        start, end = data["start"], data["end"]
        test, connected = start["test_start"], start["connected"]
        if test.get("protocol", "TCP") != "TCP":
            raise InputError(
                f"{path}: a run with {printable(test['protocol'])}: measure with TCP, as training does"
            )
        streams = int(test.get("num_streams", len(start["connected"])))
        limits = [test.get("target_bitrate") or start.get("target_bitrate"), test.get("fqrate")]
        limit = min((float(each) for each in limits if each), default=0.0) * streams
        window = float(start.get("sock_bufsize") or 0.0)
        local, remote = connected[0]["local_host"], connected[0]["remote_host"]
        directions = [_direction_of(end, "")]
        if "sum_received_bidir_reverse" in end:
            directions.append(_direction_of(end, "_bidir_reverse"))
        when = start.get("timestamp", {}).get("time", "")
        trips = [
            float(sender[key])
            for stream in end.get("streams", [])
            for sender in [stream.get("sender", {})]
            for key in ("min_rtt", "mean_rtt")
            if sender.get(key)
        ]
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else printable(error)
        raise InputError(f"{path}: is no finished TCP run of iperf3 -J: {missing}") from None
    fastest = max(received for received, _ in directions)
    if not min(received for received, _ in directions):
        raise FailedMeasurementError(f"{path}: nothing arrived in this run of iperf3")
    for figure in (streams, *trips, *(received for received, _ in directions)):
        if not 0 < figure < math.inf:
            raise InputError(
                f"{path}: a run of iperf3 with {figure:g} as a rate, round trip or number of streams"
            )
    # Of a buffer between half and all is a window; without a round trip any may have been too small.
    windows = 8 * window * streams / (min(trips) * 1e-6) if trips else math.inf
    for option, is_held, most in (
        ("-b", limit and fastest >= _AT_THE_LIMIT * limit, rate(limit)),
        ("-w", window and (not trips or fastest >= windows / 2), f"windows of {format_bytes(window)}"),
    ):
        if is_held:
            raise InputError(
                f"{path}: the run was held at {most} (iperf3 {option}), which says nothing of the link: "
                f"measure without {option}"
            )
    ends = ends_by_name(path) or (_address(local), _address(remote))
    is_server = "accepted_connection" in start
    # A file's name says from where the client ran; addresses are those of the host that wrote the file.
    if bool(test.get("reverse")) != (is_server and ends_by_name(path) is None):
        ends = ends[::-1]
    for (one, other), (received, retransmits) in zip((ends, ends[::-1]), directions, strict=False):
        lost = f", {retransmits} retransmits" if retransmits is not None else ""
        pairs.add(
            one,
            other,
            bits_per_second=received,
            rtt_seconds=min(trips) * 1e-6 if trips else None,
            streams=streams,
            note=f"iperf3 with {streams} stream{'s' if streams > 1 else ''}{lost}",
        )
    pairs.sources.append(f"{Path(path).name}: iperf3{f', {when}' if when else ''}.")


def _direction_of(end: dict[str, Any], suffix: str) -> tuple[float, int | None]:
    """Goodput at the receiver, and retransmitted segments; a server's file may have only the sender's goodput."""
    received = float(end[f"sum_received{suffix}"]["bits_per_second"])
    sent = end.get(f"sum_sent{suffix}", {})
    return received or float(sent.get("bits_per_second", 0.0)), sent.get("retransmits")


def _address(host: object) -> str:
    """Strip the prefix that an IPv6 socket reports for an IPv4 address."""
    return str(host).removeprefix("::ffff:")


def is_ping(text: str) -> bool:
    """Return whether text is the output of ping on Linux, BusyBox, macOS or Windows, in any language."""
    has_figures = _STATISTICS.search(text) or _WINDOWS.search(text)
    return bool(has_figures or ((_PINGED.search(text) or _BETWEEN.search(text)) and _LOST.search(text)))


def read_ping(path: str | Path, text: str, pairs: Pairs) -> None:
    """Read the least round trip and, of at least 100 pings, the loss, half of it each way.

    The source is `here`, unless the file is called FROM--TO.txt or names it, as macOS's ping6 does.

    Raises InputError if no reply arrived, or the target is unknown.
    """
    statistics, windows = list(_STATISTICS.finditer(text)), list(_WINDOWS.finditer(text))
    lost = _LOST.findall(text)
    if max(len(statistics) + len(windows), len(lost)) > 1:
        raise InputError(f"{path}: has several pings: give each a file")
    if not statistics and not windows:
        if lost and float(lost[0].replace(",", ".")) == 100:
            raise FailedMeasurementError(f"{path}: nothing came back of this ping")
        raise InputError(
            f"{path}: no summary of round trips in ms ends this ping: let it end, in English (LC_ALL=C)"
        )
    (trips,) = statistics or windows
    least, mean = (float(each.replace(",", ".")) for each in trips.groups()[-2:])
    between, pinged = _BETWEEN.search(text), _PINGED.search(text)
    if (named := ends_by_name(path)) is not None:
        one, other = named
    elif between is not None:
        one, other = between.groups()
    elif pinged is not None:
        one, other = "here", pinged[1] or pinged[2]
    else:
        raise InputError(f"{path}: it does not say what was pinged: call the file FROM--TO.txt")
    loss, remark = _loss(path, text)
    short = ", whole milliseconds: below 1 ms taken for 0" if windows and not least else ""
    note = f"ping, {mean:g} ms in the mean{short}{remark}"
    pairs.add(one, other, rtt_seconds=least * 1e-3, loss=loss, note=note)
    if loss is not None and one != other:
        pairs.add(other, one, loss=loss)
    pairs.sources.append(f"{Path(path).name}: ping.")


def _loss(path: str | Path, text: str) -> tuple[float | None, str]:
    """Share of packets lost each way if both lose alike, None of too few pings, and a remark.

    Raises InputError if the share does not follow from the numbers next to it.
    """
    lost = _LOST.search(text)
    if lost is None:
        return None, ""
    share = float(lost[1].replace(",", ".")) / 100
    # Windows has the numbers in the line before.
    line = " ".join(text[: lost.start()].splitlines()[-2:])
    numbers = [int(each) for each in re.findall(r"(?<![\d.:/])\d+(?![\d.:/])", line)]
    pairs = [(sent, back) for sent, back in pairwise(numbers) if sent >= back and sent]
    fitting = [sent for sent, back in pairs if abs(1 - back / sent - share) < _ROUNDED]
    if not fitting:
        raise InputError(f"{path}: {lost[0]} lost does not follow from the numbers of pings beside it")
    num = fitting[-1]
    if not 0 < share < 1:
        return (None if share else 0.0), ""
    remark = f", {round(share * num):,} of {num:,} pings lost"
    if num < _ENOUGH_PINGS:
        return None, f"{remark}: too few for a loss, which takes {_ENOUGH_PINGS}"
    each_way = 1 - math.sqrt(1 - share)
    return each_way, f"{remark}, there or back: {format_fraction(each_way)} each way"


_ROUNDED = 0.011  # of a share in whole per cent


def parse_json(path: str | Path, text: str) -> list[Any]:
    """Parse one JSON document, or several in a row as an iperf3 server writes them; raises InputError with the place.

    The events of `iperf3 --json-stream` become the run that they describe. Early versions write both directions of
    `--bidir` under one name: the second becomes `sum_sent_bidir_reverse`, its later name.
    """

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            name = f"{key}_bidir_reverse" if key in found and key.startswith("sum") else key
            if name in found:
                raise InputError(f"{path}: {printable(key)!r} is there twice in one object: keep one of them")
            found[name] = value
        return found

    decoder = json.JSONDecoder(object_pairs_hook=read_object)
    try:
        return [decoder.decode(text)]
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        line = f"{path}: is no JSON: {error}"
    documents, at = [], 0
    try:
        while text[at:].strip():
            at += len(text[at:]) - len(text[at:].lstrip())
            document, at = decoder.raw_decode(text, at)
            documents.append(document)
    except InputError:
        raise
    except (ValueError, RecursionError):
        raise InputError(line) from None
    if all(isinstance(document, dict) and "event" in document for document in documents):
        return [{document["event"]: document.get("data") for document in documents}]
    return documents
