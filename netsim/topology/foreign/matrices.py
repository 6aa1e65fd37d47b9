"""Tables of round trips, throughput and loss between places: a plain one, and layouts of public data sets.

Plain, as CSV with one row a pair (JSON: a list of objects with the same keys); quantities have their units:

    from,to,rtt,throughput,loss
    us,eu,80 ms,1.2 Gbit/s,0 %

Plain, as a square: the first cell says what the cells are:

    rtt ms,us,eu
    us,0,80
    eu,80,0

CloudPing: `[{"region": ..., "averages": [{"regionTo": ..., "average": ms}]}]`, or `{"data": {from: {to: ms}}}`.
WonderNetwork: CSV with source, destination, timestamp, min, avg, max, mdev (ms), and its list of servers (id, name).
Skyplane: CSV with src_region, dst_region, src_tier, dst_tier, and throughput_sent, throughput_recieved (bit/s), or
avg_rtt (ms) in its table of latencies; ways of which an end is not of the premium tier are left out.
"""

from __future__ import annotations

import csv
import math
import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError
from netsim.files.problems import printable
from netsim.files.units import parse_bits_per_second, parse_fraction, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from netsim.topology.foreign.pairs import Pairs

__all__ = ["read_csv", "read_json"]

_FROM = ("from", "src", "source", "src_region", "from_region")
_TO = ("to", "dst", "target", "destination", "dst_region", "to_region")
_SQUARE = re.compile(r"(rtt|latency|throughput|bandwidth|loss)\s*\(?([A-Za-z/%]+)\)?", re.IGNORECASE)
_MOST_ROWS = 2_000_000


def _scaled(factor: float) -> Callable[[str], float]:
    return lambda text: float(text) * factor


# Column -> (what it is, how it is read). The first that a row has, of each kind, counts.
_COLUMNS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "rtt": ("rtt_seconds", parse_seconds),
    "rtt_ms": ("rtt_seconds", _scaled(1e-3)),
    "latency": ("rtt_seconds", lambda text: 2 * parse_seconds(text)),
    "latency_ms": ("rtt_seconds", _scaled(2e-3)),
    "avg": ("rtt_seconds", _scaled(1e-3)),
    "avg_rtt": ("rtt_seconds", _scaled(1e-3)),
    "throughput": ("bits_per_second", parse_bits_per_second),
    "bandwidth": ("bits_per_second", parse_bits_per_second),
    "throughput_mbit_s": ("bits_per_second", _scaled(1e6)),
    "throughput_gbit_s": ("bits_per_second", _scaled(1e9)),
    "throughput_recieved": ("bits_per_second", float),
    "throughput_received": ("bits_per_second", float),
    "throughput_sent": ("bits_per_second", float),
    "loss": ("loss", parse_fraction),
}


def read_csv(path: str | Path, text: str, pairs: Pairs, servers: dict[str, str]) -> None:
    """Rows or a square. A list of servers (id, name) is remembered in `servers` for the rows of other files.

    Raises InputError that names line and column.
    """
    try:
        rows = [row for row in csv.reader(StringIO(text), strict=True) if row]
    except csv.Error as error:
        raise InputError(f"{path}: is no CSV file: {error}") from None
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{path}: has more than {_MOST_ROWS:,} rows: give a smaller extract")
    header = [cell.strip() for cell in rows[0]] if rows else []
    lowered = [cell.lower() for cell in header]
    square = _SQUARE.fullmatch(header[0]) if header else None
    if {"id", "name"} <= set(lowered) and not set(lowered) & set(_TO):
        named = (dict(zip(lowered, row, strict=False)) for row in rows[1:])
        servers.update({row["id"].strip(): row["name"].strip() for row in named if "name" in row})
        return
    if square is not None:
        _read_square(path, square, rows, pairs)
    else:
        objects = [
            (number, dict(zip(lowered, (cell.strip() for cell in row), strict=False)))
            for number, row in enumerate(rows[1:], 2)
        ]
        _read_rows(path, lowered, objects, pairs, servers)
    pairs.sources.append(f"{Path(path).name}: table of {len(rows) - 1} rows.")


def _read_square(path: str | Path, square: re.Match[str], rows: list[list[str]], pairs: Pairs) -> None:
    what, unit = square.group(1).lower(), square.group(2)
    kind, read = _COLUMNS[what]
    names = [cell.strip() for cell in rows[0][1:]]
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names) + 1:
            raise InputError(f"{path}:{number}: expected {len(names) + 1} cells, got {len(row)}")
        for target, cell in zip(names, row[1:], strict=True):
            source, text = row[0].strip(), cell.strip()
            if source == target or text in ("", "-", "0", "nan"):
                continue
            value = _value(f"{path}:{number}: column {target}", read, f"{text} {unit}")
            note = f"{what} {text} {unit} ({Path(path).name}:{number})"
            pairs.add(source, target, **{kind: value}, note=note)


def _read_rows(
    path: str | Path,
    columns: Sequence[str],
    rows: Sequence[tuple[int, Mapping[str, str]]],
    pairs: Pairs,
    servers: Mapping[str, str],
) -> None:
    source_key = next((name for name in _FROM if name in columns), None)
    target_key = next((name for name in _TO if name in columns), None)
    known = [name for name in _COLUMNS if name in columns]
    if source_key is None or target_key is None or not known:
        raise InputError(
            f"{path}: no table of ways: name columns from, to and some of rtt, throughput, loss"
            " (or a first cell such as 'rtt ms' for a square)"
        )
    for number, row in rows:
        if any(row.get(tier, "").upper() not in ("PREMIUM", "") for tier in ("src_tier", "dst_tier")):
            continue
        source, target = row.get(source_key, ""), row.get(target_key, "")
        source, target = servers.get(source, source), servers.get(target, target)
        if not source or not target:
            raise InputError(f"{path}:{number}: no {source_key if not source else target_key}")
        found: dict[str, float] = {}
        figures: list[str] = []
        for name in known:
            kind, read = _COLUMNS[name]
            if kind not in found and row.get(name, "") not in ("", "nan"):
                found[kind] = _value(f"{path}:{number}: column {name}", read, row[name])
                figures.append(f"{name} {row[name]}")
        if source != target and found:  # skyplane's tables have rows of what could not be measured
            note = f"{', '.join(figures)} ({Path(path).name}:{number})"
            pairs.add(source, target, **found, note=note)


def read_json(path: str | Path, data: Any, pairs: Pairs) -> None:
    """CloudPing's layouts, the plain list of objects, or `{"rtt_ms": {from: {to: value}}, ...}`.

    Raises InputError that names the entry.
    """
    before = len(pairs.ways)
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        if "averages" in data[0]:
            for entry in data:
                for way in entry.get("averages", []):
                    _add(
                        path,
                        pairs,
                        str(entry.get("region")),
                        str(way.get("regionTo")),
                        "rtt_ms",
                        way.get("average"),
                    )
        else:
            rows = [
                (number, {str(key).lower(): str(value) for key, value in row.items()})
                for number, row in enumerate(data, 1)
            ]
            _read_rows(path, sorted({key for _, row in rows for key in row}), rows, pairs, {})
    elif isinstance(data, dict):
        tables = {"rtt_ms": data["data"]} if isinstance(data.get("data"), dict) else data
        for name, table in tables.items():
            if name not in _COLUMNS or not isinstance(table, dict):
                continue
            for source, ways in table.items():
                if not isinstance(ways, dict):
                    raise InputError(f"{path}: {name}.{source}: expected a mapping from places to values")
                for target, value in ways.items():
                    _add(path, pairs, str(source), str(target), name, value)
    if len(pairs.ways) == before:
        raise InputError(f"{path}: no table of ways was found: see 'netsim import --help' for the layouts")
    pairs.sources.append(f"{Path(path).name}: {len(pairs.ways) - before} ways.")


def _add(path: str | Path, pairs: Pairs, source: str, target: str, column: str, value: Any) -> None:
    if source == target or value is None:
        return
    kind, read = _COLUMNS[column]
    number = _value(f"{path}: {printable(source)} to {printable(target)}", read, str(value))
    note = f"{column} {value} ({Path(path).name})"
    pairs.add(source, target, **{kind: number}, note=note)


def _value(where: str, read: Callable[[str], float], text: str) -> float:
    try:
        value = read(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: {text[:40]!r} is no number from 0 up")
    return value
