"""Weather: what changes on a network while a simulation runs, as plain data; `Topology.weather` holds it.

A kind of entry is one dataclass and a field of `Weather`. From the keys in the annotations of its fields follow the
JSON Schema of its entries in topology files, their reader and their writer.

Links are named by their indices in the topology, one direction each, hosts by theirs. All lists are in the order
in which they apply, whatever order the file had.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_origin, get_type_hints

import pydantic

from netsim.errors import InputError
from netsim.files.plain_files import read_text
from netsim.files.schemas import Schema
from netsim.topology.values import (
    Bytes,
    Direction,
    Duration,
    Ends,
    Interval,
    Loss,
    Name,
    Rate,
    RateOrZero,
    Series,
    Share,
    written,
)
from netsim.units import format_seconds, parse_bits_per_second, parse_seconds, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from netsim.files.documents import KeyPath
    from netsim.topology.file import TopologyFile
    from netsim.topology.graph import Host
    from netsim.topology.topology import Topology

__all__ = [
    "MAX_TRACE_BYTES",
    "Background",
    "Drift",
    "Entries",
    "Entry",
    "HostEvent",
    "LinkEvent",
    "Trace",
    "Weather",
    "check",
    "random_crashes",
    "read_weather",
    "write_weather",
]

MAX_TRACE_BYTES = 10_000_000
_MOST_SECONDS = 1e9
_MOST_NAMED = 3  # entries in a line
_UP_FOR_GOOD = "a link or host that comes up stays up: remove '{}'"


# --- keys of entries, in annotations of the fields of records --------------------------------------------------


class _Key:
    """A key of an entry, with the value of one field."""

    def __init__(self, name: str, type_: Any) -> None:
        self.name, self._type = name, type_

    def schema(self, default: Any) -> dict[str, Any]:
        """pydantic's fields by key; `default` is the record's, MISSING where there is none."""
        if default is MISSING:
            return {self.name: (self._type, ...)}
        return {self.name: (self._type | None if default is None else self._type, default)}

    def read(self, entry: Any, field_name: str, net: Topology, folder: Path) -> dict[str, Any]:
        """Values of the record's fields from an entry of a file; raises InputError."""
        value = getattr(entry, self.name)
        return {field_name: tuple(value) if isinstance(value, list) else value}

    def wrong_key(self, entry: Any) -> tuple[str, ...]:
        """Key of the entry at which `read` fails; () for the entry as a whole."""
        return (self.name,)

    def write(self, record: Any, field_name: str, net: Topology) -> dict[str, Any]:
        """Values of the entry's keys; those that are None are left out of the file."""
        return {self.name: written(self._type, getattr(record, field_name))}


class _Host(_Key):
    """A host's name; in the record its index."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Name)

    def read(self, entry: Any, field_name: str, net: Topology, folder: Path) -> dict[str, Any]:
        return {field_name: net.host_index(getattr(entry, self.name))}

    def write(self, record: Any, field_name: str, net: Topology) -> dict[str, Any]:
        return {self.name: net.hosts[getattr(record, field_name)].name}


class _Links(_Key):
    """Two neighbours as `link`, and a `direction` between them; in the record the indices of one link or both."""

    def schema(self, default: Any) -> dict[str, Any]:
        return {"link": (Ends, ...), "direction": (Direction, "both")}

    def read(self, entry: Any, field_name: str, net: Topology, folder: Path) -> dict[str, Any]:
        one, other = entry.link
        if (one, other) not in net.link_between:
            raise InputError(f"no link between '{one}' and '{other}': name the two ends of one")
        there, back = net.link_between[one, other].index, net.link_between[other, one].index
        links = {"both": tuple(sorted((there, back))), "up": (there,), "down": (back,)}
        return {field_name: links[entry.direction]}

    def write(self, record: Any, field_name: str, net: Topology) -> dict[str, Any]:
        link = net.links[record.links[0]]
        return {
            "link": [link.source, link.target],
            "direction": "up" if len(record.links) == 1 else None,
        }


class _Flags(_Key):
    """`NAME: true` for False and `up: true` for True."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}, up", Literal[True])
        self._off = name

    def schema(self, default: Any) -> dict[str, Any]:
        return dict.fromkeys((self._off, "up"), (Literal[True] | None, None))

    def read(self, entry: Any, field_name: str, net: Topology, folder: Path) -> dict[str, Any]:
        is_off, is_up = getattr(entry, self._off), entry.up
        if is_off and is_up:
            raise InputError(f"give exactly one of {self._off} and up")
        return {field_name: is_up is not None if is_off or is_up else None}

    def wrong_key(self, entry: Any) -> tuple[str, ...]:
        return ()

    def write(self, record: Any, field_name: str, net: Topology) -> dict[str, Any]:
        is_up = getattr(record, field_name)
        return {} if is_up is None else {"up" if is_up else self._off: True}


class _Rows(_Key):
    """`bandwidth` or `latency` over time, as rows or as a CSV file; in the record quantity, times and values."""

    _COLUMNS: ClassVar = {
        "bandwidth": ("bits_per_second", "bits_per_second", parse_bits_per_second, Rate),
        "latency": ("latency_seconds", "latency_s", parse_seconds, Duration),
    }

    def schema(self, default: Any) -> dict[str, Any]:
        return dict.fromkeys(self._COLUMNS, (Series, None))

    def read(self, entry: Any, field_name: str, net: Topology, folder: Path) -> dict[str, Any]:
        given = self.wrong_key(entry)
        if not given:
            raise InputError("give either bandwidth or latency: a CSV file, or a list of [time, value]")
        content = getattr(entry, given[0])
        quantity, column, parse, _ = self._COLUMNS[given[0]]
        if isinstance(content, str):
            rows = _read_csv(folder, content, column)
        else:
            rows = [(parse_seconds(time), parse(value)) for time, value in content]
        _check_rows(rows)
        times, values = zip(*rows, strict=True)
        return {"quantity": quantity, "times_seconds": times, "values": values}

    def wrong_key(self, entry: Any) -> tuple[str, ...]:
        given = tuple(key for key in self._COLUMNS if getattr(entry, key) is not None)
        return given if len(given) == 1 else ()

    def write(self, record: Any, field_name: str, net: Topology) -> dict[str, Any]:
        key, type_ = next(
            (key, type_) for key, (name, *_, type_) in self._COLUMNS.items() if name == record.quantity
        )
        rows = zip(record.times_seconds, record.values, strict=True)
        return {key: [[written(Duration, time), written(type_, value)] for time, value in rows]}


_Levels = Annotated[list[Share], pydantic.Field(min_length=2, max_length=100)]


# --- kinds of entries ---------------------------------------------------------------------------------------


class _Record:
    """An entry of the weather.

    Attributes:
        subject: key that distinguishes entries of one list, as it is written.
        single: entries of which a link has one at most, for errors; "" where it may have several.
    """

    subject: ClassVar[str] = ""
    single: ClassVar[str] = ""

    def _problem(self, word: Callable[[str], str], hosts: Sequence[Host]) -> str:
        """Return what is wrong with values together, "" if nothing is; `word` names a field."""
        return ""


@dataclass(frozen=True, slots=True)
class LinkEvent(_Record):
    """Links go down or come up, or get another rate, latency or loss, at one instant.

    Attributes:
        at_seconds: virtual time of the event.
        links: link indices it holds for.
        is_up: False goes down, True comes up, None where the event is about something else.
        bits_per_second, latency_seconds, loss: the new value; None where the event is about something else.
        for_seconds: duration, after which the previous value returns; None for good.
    """

    subject: ClassVar[str] = "link: [A, B]"

    at_seconds: Annotated[float, _Key("at", Duration)]
    links: Annotated[tuple[int, ...], _Links("link", Ends)]
    is_up: Annotated[bool | None, _Flags("down")] = None
    bits_per_second: Annotated[float | None, _Key("bandwidth", RateOrZero)] = None
    latency_seconds: Annotated[float | None, _Key("latency", Duration)] = None
    loss: Annotated[float | None, _Key("loss", Loss)] = None
    for_seconds: Annotated[float | None, _Key("for", Interval)] = None

    def _problem(self, word: Callable[[str], str], hosts: Sequence[Host]) -> str:
        settings = {
            name: getattr(self, name) for name in ("is_up", "bits_per_second", "latency_seconds", "loss")
        }
        if sum(value is not None for value in settings.values()) != 1:
            *names, last = map(word, settings)
            return f"give exactly one of {', '.join(names)} or {last}"
        return _UP_FOR_GOOD.format(word("for_seconds")) if self.is_up and self.for_seconds is not None else ""


@dataclass(frozen=True, slots=True)
class HostEvent(_Record):
    """A host crashes or returns at one instant.

    Attributes:
        at_seconds: virtual time of the event.
        host: index of the host.
        is_up: False crashes, True returns.
        for_seconds: duration of a crash; None for good.
    """

    subject: ClassVar[str] = "host: NAME"

    at_seconds: Annotated[float, _Key("at", Duration)]
    host: Annotated[int, _Host("host")]
    is_up: Annotated[bool, _Flags("crash")]
    for_seconds: Annotated[float | None, _Key("for", Interval)] = None

    def _problem(self, word: Callable[[str], str], hosts: Sequence[Host]) -> str:
        if self.is_up is None:
            return "give exactly one of crash or up"
        return _UP_FOR_GOOD.format(word("for_seconds")) if self.is_up and self.for_seconds is not None else ""


@dataclass(frozen=True, slots=True)
class Trace(_Record):
    """A link's bandwidth or latency over time: a CSV file, or a list of [time, value] rows.

    Attributes:
        links: link indices it holds for.
        quantity: quantity of `values`.
        times_seconds: ascending instants at which a new value begins; before the first, the file's value holds.
        values: bits per second (0: nothing moves) or seconds.
    """

    single: ClassVar[str] = "trace of the same quantity"

    links: Annotated[tuple[int, ...], _Links("link", Ends)]
    quantity: Annotated[Literal["bits_per_second", "latency_seconds"], _Rows("", Series)]
    times_seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Background(_Record):
    """Traffic of others from one host to another: a steady rate, or some bytes every so often.

    Attributes:
        source, target: host indices.
        bits_per_second: steady rate, or the fair share where that is less.
        num_bytes, every_seconds: size of a transfer, and time from one start to the next.
        start_seconds, stop_seconds: when it begins and ends; None: never.
    """

    source: Annotated[int, _Host("from")]
    target: Annotated[int, _Host("to")]
    bits_per_second: Annotated[float | None, _Key("rate", Rate)] = None
    num_bytes: Annotated[int | None, _Key("bytes", Bytes)] = None
    every_seconds: Annotated[float | None, _Key("every", Interval)] = None
    start_seconds: Annotated[float, _Key("start", Duration)] = 0.0
    stop_seconds: Annotated[float | None, _Key("stop", Duration)] = None

    def _problem(self, word: Callable[[str], str], hosts: Sequence[Host]) -> str:
        rate, size, every = map(word, ("bits_per_second", "num_bytes", "every_seconds"))
        if self.source == self.target:
            return f"leads from '{hosts[self.source].name}' to itself: name two hosts"
        if (self.num_bytes is None) != (self.every_seconds is None):
            return f"{size} and {every} belong together: so many bytes, every so often"
        if (self.bits_per_second is None) == (self.num_bytes is None):
            return f"give either {rate}, or {size} and {every}"
        if self.stop_seconds is not None and self.stop_seconds <= self.start_seconds:
            return f"{word('stop_seconds')} must be later than {word('start_seconds')}"
        return ""


@dataclass(frozen=True, slots=True)
class Drift(_Record):
    """Random change of a link's bandwidth, drawn from a seed, around what the link has.

    Attributes:
        links: link indices; each draws its own factors, by which its rate is multiplied.
        kind: lognormal draws a factor exp(sigma x - sigma^2 / 2), x standard normal, of mean 1, at every interval;
            regime stays at one of `levels` for an exponential time of mean `every_seconds`, then takes another.
        every_seconds, sigma, levels, seed: as the kind needs them.
    """

    single: ClassVar[str] = "drift"

    links: Annotated[tuple[int, ...], _Links("link", Ends)]
    kind: Annotated[Literal["lognormal", "regime"], _Key("kind", Literal["lognormal", "regime"])]
    every_seconds: Annotated[float, _Key("every", Interval)]
    sigma: Annotated[float | None, _Key("sigma", Annotated[float, pydantic.Field(gt=0, le=5)])] = None
    levels: Annotated[tuple[float, ...] | None, _Key("levels", _Levels)] = None
    seed: Annotated[int, _Key("seed", Annotated[int, pydantic.Field(ge=0)])] = 0

    def _problem(self, word: Callable[[str], str], hosts: Sequence[Host]) -> str:
        if not self.every_seconds > 0:
            return f"{word('every_seconds')} must be above zero"
        if self.kind == "lognormal" and (self.sigma is None or self.levels is not None):
            return "kind lognormal takes sigma (of the bandwidth's logarithm) and no levels"
        if self.kind == "regime" and (self.levels is None or self.sigma is not None):
            return "kind regime takes levels such as [100 %, 30 %] and no sigma"
        return ""


@dataclass(frozen=True, slots=True)
class Weather:
    """Changes of a network while it runs; false where there are none.

    Attributes:
        link_events: links that go down, come up or change at an instant.
        host_events: crashes and returns of hosts.
        traces: rates and latencies over time.
        background: traffic of others.
        drift: random change of rates.
    """

    # Key of the topology file -> kind of its entries.
    link_events: tuple[LinkEvent, ...] = field(default=(), metadata={"events": LinkEvent})
    host_events: tuple[HostEvent, ...] = field(default=(), metadata={"events": HostEvent})
    traces: tuple[Trace, ...] = field(default=(), metadata={"traces": Trace})
    background: tuple[Background, ...] = field(default=(), metadata={"background": Background})
    drift: tuple[Drift, ...] = field(default=(), metadata={"drift": Drift})

    def with_seed(self, seed: int) -> Weather:
        """Return the same weather with other draws: `seed` is added to the seed of each drift."""
        drift = tuple(replace(each, seed=each.seed + seed) for each in self.drift)
        return replace(self, drift=drift) if seed and drift else self

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def after(self, seconds: float, topology: Topology) -> str | None:
        """Entries that begin at `seconds` of virtual time or later, in a line; None where there are none.

        A simulation that ends then has met none of them. `topology` names hosts and links.
        """
        entries: list[Entry] = [entry for each in fields(self) for entry in getattr(self, each.name)]
        late = sorted(
            (_begin(entry), _named(entry, topology)) for entry in entries if _begin(entry) >= seconds
        )
        lines = [f"{name} at {format_seconds(begin)}" for begin, name in late[:_MOST_NAMED]]
        return ", ".join(lines + [f"{len(late) - len(lines)} more"] * (len(late) > len(lines))) or None


def random_crashes(
    hosts: Sequence[int], mean_seconds: float, repair_seconds: float, until_seconds: float, seed: int
) -> list[HostEvent]:
    """Draw crashes of each host, with exponential times between them.

    A host's draws depend on (seed, place among `hosts`) alone, and it cannot crash while it is being repaired.

    Args:
        hosts: indices of hosts that crash.
        mean_seconds: mean time from a return to the next crash.
        repair_seconds: time from a crash to the return.
        until_seconds: virtual time from which no crash begins.
        seed: of the draws.

    Returns:
        The crashes, in the order of time, then host.

    >>> [round(event.at_seconds) for event in random_crashes([0], 100.0, 10.0, 300.0, seed=1)]
    [107, 148]
    """
    import numpy as np

    events = []
    for place, host in enumerate(hosts):
        generator = np.random.default_rng([seed, place])
        at = float(generator.exponential(mean_seconds))
        while at < until_seconds:
            events.append(HostEvent(at, host, False, repair_seconds))
            at += repair_seconds + float(generator.exponential(mean_seconds))
    return sorted(events, key=lambda event: (event.at_seconds, event.host))


Entry = LinkEvent | HostEvent | Trace | Background | Drift


def _begin(entry: Entry) -> float:
    """Virtual time before which an entry changes nothing."""
    match entry:
        case LinkEvent() | HostEvent():
            return entry.at_seconds
        case Trace():
            return entry.times_seconds[0]
        case Background():
            return entry.start_seconds
    return 0.0


def _named(entry: Entry, topology: Topology) -> str:
    """Kind and subject of an entry."""
    match entry:
        case HostEvent():
            return f"{'return' if entry.is_up else 'crash'} of host {topology.hosts[entry.host].name}"
        case Background():
            return f"traffic from {topology.hosts[entry.source].name} to {topology.hosts[entry.target].name}"
    link = topology.links[entry.links[0]]
    return f"{'trace' if isinstance(entry, Trace) else 'event'} of link {link.source}-{link.target}"


def check(entry: Entry, hosts: Sequence[Host], num_links: int) -> None:
    """Refuse an entry that a topology file could not hold; raises InputError."""
    links = getattr(entry, "links", ())
    named = [getattr(entry, name) for name in ("host", "source", "target") if hasattr(entry, name)]
    if wrong := [link for link in links if not 0 <= link < num_links]:
        problem = f"there is no link {wrong[0]}"
    elif wrong := [host for host in named if not 0 <= host < len(hosts)]:
        problem = f"there is no host {wrong[0]}"
    elif not 0 <= getattr(entry, "at_seconds", 0.0) < math.inf:
        problem = "at_seconds must be finite and not negative"
    else:
        problem = entry._problem(str, hosts)
    if problem:
        raise InputError(f"{entry}: {problem}")


# --- the file -----------------------------------------------------------------------------------------------


class _EntryKind(NamedTuple):
    """A kind of entry: its class, the list of `Weather` that it goes to, and its fields with keys."""

    record: type[Any]
    goes_to: str
    keyed: tuple[tuple[Field[Any], _Key], ...]

    @property
    def schema(self) -> dict[str, Any]:
        parts = (key.schema(each.default) for each, key in self.keyed)
        return {name: value for part in parts for name, value in part.items()}

    def word(self, field_name: str) -> str:
        """Name of a field in a file."""
        return next(key.name for each, key in self.keyed if each.name == field_name)


@cache
def _kinds() -> dict[str, list[_EntryKind]]:
    """Kinds of entries by key of the topology file."""
    kinds: dict[str, list[_EntryKind]] = {}
    for each in fields(Weather):
        for name, record in each.metadata.items():
            hints = get_type_hints(record, include_extras=True)
            annotated = [part for part in fields(record) if get_origin(hints[part.name]) is Annotated]
            keyed = tuple((part, hints[part.name].__metadata__[0]) for part in annotated)
            kinds.setdefault(name, []).append(_EntryKind(record, each.name, keyed))
    return kinds


class Entries:
    """Metadata of a key of a topology file: its list holds weather entries of this key's kinds."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        kinds = _kinds()[self._key]
        schemas = [kind.schema for kind in kinds]
        keys = {name: value for schema in schemas for name, value in schema.items()}
        for name, (type_, default) in keys.items():
            if default is ... and any(name not in schema for schema in schemas):
                keys[name] = (type_ | None, None)
        text = " ".join((kind.record.__doc__ or "").partition("\n")[0] for kind in kinds)
        title = f"{self._key.removesuffix('s').title()}Entry"
        model: Any = pydantic.create_model(title, __base__=Schema, __doc__=text, **keys)
        return handler(list[model])


def read_weather(
    file: TopologyFile, net: Topology, folder: Path, report: Callable[[KeyPath, str | InputError], None]
) -> Weather:
    """Read the weather of a file for the network `net`; CSV files are looked for in `folder`.

    Mistakes go to `report`, as key path and message; entries with one are left out.
    """
    lists: dict[str, list[Any]] = {}
    for key, kinds in _kinds().items():
        taken: set[tuple[object, ...]] = set()
        for position, entry in enumerate(getattr(file, key)):
            path = (key, position)
            kind = _kind_of(entry, kinds, lambda message, path=path: report(path, message))  # type: ignore[misc]
            record = None if kind is None else _read_entry(kind, entry, net, folder, path, report)
            if kind is None or record is None:
                continue
            if kind.record.single:
                claims = {(getattr(record, "quantity", ""), link) for link in record.links}
                if not taken.isdisjoint(claims):
                    report(path, f"a second {kind.record.single} on this link: remove one")
                taken |= claims
            lists.setdefault(kind.goes_to, []).append(record)
    return Weather(**{name: _ordered(records) for name, records in lists.items()})


def _kind_of(entry: Any, kinds: Sequence[_EntryKind], report: Callable[[str], None]) -> _EntryKind | None:
    """Kind of an entry, by its subject; None after a report."""
    if len(kinds) == 1:
        return kinds[0]
    subjects = {kind.record.subject.partition(":")[0]: kind for kind in kinds}
    given = [kind for name, kind in subjects.items() if getattr(entry, name) is not None]
    if len(given) != 1:
        report(f"give either {' or '.join(kind.record.subject for kind in kinds)}")
        return None
    others = {name for kind in kinds for name, (_, default) in kind.schema.items() if default is None}
    foreign = sorted(name for name in others - given[0].schema.keys() if getattr(entry, name) is not None)
    if foreign:
        subject = given[0].record.subject.partition(":")[0]
        report(f"{foreign[0]} does not belong to an event with '{subject}': remove it")
        return None
    return given[0]


def _read_entry(
    kind: _EntryKind,
    entry: Any,
    net: Topology,
    folder: Path,
    path: KeyPath,
    report: Callable[[KeyPath, str | InputError], None],
) -> Any:
    """Record of an entry; None after reports."""
    values: dict[str, Any] = {}
    is_refused = False
    for each, key in kind.keyed:
        try:
            values |= key.read(entry, each.name, net, folder)
        except InputError as error:
            report((*path, *key.wrong_key(entry)), error)
            is_refused = True
    if is_refused:
        return None
    record = kind.record(**values)
    problem = record._problem(kind.word, net.hosts)
    if problem:
        report(path, problem)
    return None if problem else record


def write_weather(net: Topology) -> dict[str, list[dict[str, Any]]]:
    """Entries of a topology file by key, as `read_weather` reads them back."""
    return {
        name: [
            {
                key: value
                for each, part in kind.keyed
                for key, value in part.write(record, each.name, net).items()
                if value is not None
            }
            for kind in kinds
            for record in getattr(net.weather, kind.goes_to)
        ]
        for name, kinds in _kinds().items()
    }


def _ordered(records: Iterable[Any]) -> tuple[Any, ...]:
    """Sort by time where there is one, then in an order that does not depend on the file's."""
    return tuple(sorted(records, key=lambda record: (getattr(record, "at_seconds", 0.0), repr(record))))


def _read_csv(folder: Path, name: str, column: str) -> list[tuple[float, float]]:
    """Rows of a CSV file with the columns start_s and `column`, plain numbers in SI units.

    A topology may come from a stranger: it reads files below its own folder alone, links followed, and no error
    has any of their content.
    """
    path = folder / name
    real = os.path.realpath(path)
    if Path(name).is_absolute() or not Path(real).is_relative_to(os.path.realpath(folder)):
        raise InputError(
            f"{shown(name)} is not below the folder of this file: put it there, and name it from there"
        )
    text = read_text(path, MAX_TRACE_BYTES, "use fewer rows", shown(name))
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
