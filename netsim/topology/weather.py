"""Weather: what changes on a network while a simulation runs; `Topology.weather` holds it.

A kind of weather is one model and a field of `Weather`: the model is the schema of its entries in topology files, their
reader, their writer and their check, in Python too. What an entry does to a network is a method of
`netsim.weather.faults.Faults`.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from netsim.errors import InputError, UnknownNameError
from netsim.files.documents import key_text
from netsim.files.plain_files import read_text
from netsim.files.schemas import Schema, problems_of
from netsim.topology.values import (
    RATE,
    TIME,
    Bytes,
    Direction,
    Duration,
    Interval,
    Loss,
    Name,
    Quantity,
    Rate,
    RateOrZero,
    Series,
    Share,
)
from netsim.units import format_seconds, shown

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelType

    from netsim.files.documents import KeyPath
    from netsim.topology.topology import Topology
else:
    _ModelType = type(Schema)

__all__ = [
    "MAX_TRACE_BYTES",
    "Background",
    "Drift",
    "Entry",
    "HostEvent",
    "LinkEvent",
    "OfLink",
    "Trace",
    "Weather",
    "check_number_drawn",
    "random_crashes",
    "read_csv_lines",
    "read_weather",
]

MAX_TRACE_BYTES = 10_000_000
_MOST_SECONDS = 1e9
_MOST_DRAWN = 100_000  # events
_MOST_NAMED = 3  # entries in a line
_UP_FOR_GOOD = "a link or host that comes up stays up: remove 'for'"


class _Called(_ModelType):
    """Type of models that are called in Python as their entries are written in files.

    A key that is a word of Python's ends with an underscore (`for_`, `from_`), numbers are in SI units, and what a file
    may not hold is an InputError.
    """

    def __call__(self: Any, *values: object, **named: Any) -> Any:
        if values:
            keys = (field.alias or name for name, field in self.model_fields.items())
            raise InputError(f"{self.__name__}: give values by name: {', '.join(keys)}")
        plain = {name.removesuffix("_"): value for name, value in named.items()}
        try:
            return self.model_validate(plain, context={"units": "SI"})
        except pydantic.ValidationError as error:
            problem = problems_of(error, plain)[0]
            kind = UnknownNameError if problem.is_unknown_name else InputError
            raise kind(f"{key_text((self.__name__, *problem.path))}: {problem.message}") from None


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_Tuple = BeforeValidator(_as_tuple)
_Many = Field(max_length=10_000)  # entries of a list in a file
_Ends = Annotated[tuple[Name, ...], Field(min_length=2, max_length=2), _Tuple]
_Levels = Annotated[tuple[Share, ...], Field(min_length=2, max_length=100), _Tuple]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a trace, whose values are quantities; the name of a CSV file stays."""

    of: Quantity

    def read(self, rows: Any, info: pydantic.ValidationInfo) -> Any:
        if not isinstance(rows, list):
            return rows
        return _check_rows([(TIME.read(time, info), self.of.read(value, info)) for time, value in rows])

    def write(self, rows: Any, info: pydantic.SerializationInfo) -> Any:
        if not isinstance(rows, list | tuple):
            return rows
        return [[TIME.write(time, info), self.of.write(value, info)] for time, value in rows]


_Rates: TypeAlias = Annotated[Series, AfterValidator(_Rows(RATE).read), PlainSerializer(_Rows(RATE).write)]
_Latencies: TypeAlias = Annotated[
    Series, AfterValidator(_Rows(TIME).read), PlainSerializer(_Rows(TIME).write)
]


# --- kinds of entries ---------------------------------------------------------------------------------------


def _describe_in_a_line(schema: dict[str, Any]) -> None:
    schema["description"] = schema["description"].partition("\n")[0]


class Entry(Schema, metaclass=_Called):
    """An entry of the weather."""

    model_config = pydantic.ConfigDict(json_schema_extra=_describe_in_a_line)

    _is_traffic: ClassVar[bool] = False  # sends bytes over links, which it leaves as they are
    _hosts: ClassVar[tuple[str, ...]] = ()  # fields with names of hosts

    if TYPE_CHECKING:

        def __init__(self, **named: Any) -> None: ...

    def instants(self) -> Iterator[float]:
        """Virtual times of its scheduled changes, in order."""
        yield from ()

    @property
    def is_endless(self) -> bool:
        """Whether its changes go on for ever."""
        return True

    def with_seed(self, seed: int) -> Self:
        """The same entry, with `seed` added to that of its draws, if it draws."""
        return self

    def problems(self, topology: Topology) -> Iterator[tuple[str, InputError]]:
        """Names of hosts and links that a topology lacks: the key, and what is wrong."""
        for field in self._hosts:
            try:
                topology.host_index(getattr(self, field))
            except InputError as error:
                yield field.removesuffix("_"), error


class OfLink(Entry):
    """An entry about one link; `direction: up` is from the first of its ends to the second."""

    link: _Ends
    direction: Direction = "both"

    _single: ClassVar[str] = ""  # entries of which a link has one at most

    def links(self, topology: Topology) -> tuple[int, ...]:
        """Indices of its links in `topology`, one a direction; raises InputError if there are none."""
        one, other = self.link
        if (one, other) not in topology.link_between:
            raise InputError(f"no link between '{one}' and '{other}': name the two ends of one")
        up, down = topology.link_between[one, other].index, topology.link_between[other, one].index
        return {"both": (min(up, down), max(up, down)), "up": (up,), "down": (down,)}[self.direction]

    def problems(self, topology: Topology) -> Iterator[tuple[str, InputError]]:
        """The link, if a topology lacks it."""
        try:
            self.links(topology)
        except InputError as error:
            yield "link", error

    def claims(self, topology: Topology) -> set[tuple[object, ...]]:
        """Links of `topology` and quantities that only one such entry may have."""
        key = self.key if isinstance(self, Trace) else ""
        return {(link, key) for link in self.links(topology)} if self._single else set()

    def __str__(self) -> str:
        return f"{'trace' if isinstance(self, Trace) else 'event'} of link {'-'.join(self.link)}"


class LinkEvent(OfLink):
    """Links go down or come up, or get another rate, latency or loss, at one instant.

    Attributes:
        at: virtual time of the event, in seconds.
        link, direction: the link's ends; both directions, `up` from the first to the second, or `down`.
        up, down, bandwidth, latency, loss: exactly one: the link comes up or goes down, or its new bits per second,
            seconds or share of packets.
        for_: seconds, after which the previous value returns; None for good.
        is_endless: False: an event is over.
    """

    at: Duration
    up: Literal[True] | None = None
    down: Literal[True] | None = None
    bandwidth: RateOrZero | None = None
    latency: Duration | None = None
    loss: Loss | None = None
    for_: Interval | None = Field(None, alias="for")

    is_endless: ClassVar = False

    @pydantic.model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        values = (self.up, self.down, self.bandwidth, self.latency, self.loss)
        if sum(value is not None for value in values) != 1:
            raise InputError("give exactly one of down, up, bandwidth, latency or loss")
        if self.up and self.for_ is not None:
            raise InputError(_UP_FOR_GOOD)
        return self

    def instants(self) -> Iterator[float]:
        """Its begin, and its end if it has one."""
        yield self.at
        if self.for_ is not None:
            yield self.at + self.for_


class HostEvent(Entry):
    """A host crashes or returns at one instant, or its processes pause.

    A crash loses work and what is in flight. A pause (SIGSTOP) loses nothing: processes neither compute nor send nor
    take in what arrives, their connections live on, and all of it continues when the pause is over.

    Attributes:
        at: virtual time of the event, in seconds.
        host: name of the host.
        up, crash, pause: exactly one.
        for_: seconds from a crash to the return, None for good; or of a pause.
        is_endless: False: an event is over.
    """

    at: Duration
    host: Name
    up: Literal[True] | None = None
    crash: Literal[True] | None = None
    pause: Literal[True] | None = None
    for_: Duration | None = Field(None, alias="for")

    is_endless: ClassVar = False
    _hosts: ClassVar = ("host",)

    @pydantic.model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if sum(value is not None for value in (self.up, self.crash, self.pause)) != 1:
            raise InputError("give exactly one of crash, pause or up")
        if self.up and self.for_ is not None:
            raise InputError(_UP_FOR_GOOD)
        if self.pause and self.for_ is None:
            raise InputError("a pause ends: add 'for'; a host that stays away crashes")
        if self.crash and self.for_ == 0:
            raise InputError("a crash takes time: give 'for' at least 1 us")
        return self

    def instants(self) -> Iterator[float]:
        """Its begin, and its end if it has one."""
        yield self.at
        if self.for_ is not None:
            yield self.at + self.for_

    def __str__(self) -> str:
        kind = "return" if self.up else "crash" if self.crash else "pause"
        return f"{kind} of host {self.host}"


class Trace(OfLink):
    """A link's bandwidth or latency over time: a CSV file, or a list of [time, value] rows.

    Attributes:
        link, direction: as of a LinkEvent.
        bandwidth, latency: exactly one: (instant, bits per second or seconds from then on), ascending in time; before
            the first, the link's own value holds. The name of a CSV file is read with the topology file that has it.
        is_endless: False: rows come to an end.
    """

    bandwidth: _Rates = None
    latency: _Latencies = None

    is_endless: ClassVar = False
    _single: ClassVar = "trace of the same quantity"
    _columns: ClassVar = {"bandwidth": "bits_per_second", "latency": "latency_s"}  # of a CSV file

    @pydantic.model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if (self.bandwidth is None) == (self.latency is None):
            raise InputError("give either bandwidth or latency: a CSV file, or a list of [time, value]")
        return self

    @property
    def key(self) -> Literal["bandwidth", "latency"]:
        """Quantity of the trace."""
        return "latency" if self.bandwidth is None else "bandwidth"

    @property
    def rows(self) -> Sequence[tuple[float, float]]:
        """Instants and values from then on."""
        rows: Any = getattr(self, self.key)
        if isinstance(rows, str):
            raise InputError(
                f"Trace.{self.key}: only topology files name CSV files: give rows, not {shown(rows)}"
            )
        return tuple(rows)

    def read_csv(self, folder: Path) -> Trace:
        """The same trace with the rows of the CSV file in `folder` that it names, if it does."""
        name = getattr(self, self.key)
        if not isinstance(name, str):
            return self
        rows = _check_rows(_read_csv(folder, name, self._columns[self.key]))
        return self.model_copy(update={self.key: rows})

    def instants(self) -> Iterator[float]:
        """Instants of its rows."""
        return (time for time, _ in self.rows)


class Background(Entry):
    """Traffic of others from one host to another: a steady rate, or some bytes every so often.

    Attributes:
        from_, to: names of hosts.
        rate: steady bits per second, or the fair share where that is less.
        bytes, every: size of a transfer, and seconds from one start to the next.
        start, stop: seconds at which it begins and ends; None: never.
    """

    from_: Name = Field(alias="from")
    to: Name
    rate: Rate | None = None
    bytes: Bytes | None = None
    every: Interval | None = None
    start: Duration = 0.0
    stop: Duration | None = None

    _is_traffic: ClassVar = True
    _hosts: ClassVar = ("from_", "to")

    @pydantic.model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.from_ == self.to:
            raise InputError(f"leads from '{self.to}' to itself: name two hosts")
        if (self.bytes is None) != (self.every is None):
            raise InputError(
                "give bytes and every together: the size of a transfer, and the time between two"
            )
        if (self.rate is None) == (self.bytes is None):
            raise InputError("give either rate, or bytes and every")
        if self.stop is not None and self.stop <= self.start:
            raise InputError("stop must be later than start")
        return self

    def instants(self) -> Iterator[float]:
        """Its begin, and its end if it has one."""
        yield self.start
        if self.stop is not None:
            yield self.stop

    @property
    def is_endless(self) -> bool:
        """Whether it has no `stop`."""
        return self.stop is None

    def __str__(self) -> str:
        return f"traffic from {self.from_} to {self.to}"


class Drift(OfLink):
    """Random change of a link's bandwidth, drawn from a seed, around what the link has.

    Attributes:
        link, direction: as of a LinkEvent; each direction draws its own factors, by which its rate is multiplied.
        kind: lognormal draws a factor exp(sigma x - sigma^2 / 2), x standard normal, of mean 1, at every interval;
            regime stays at one of `levels` for an exponential time of mean `every`, then takes another.
        every, sigma, levels, seed: as the kind needs them; `every` in seconds.
    """

    kind: Literal["lognormal", "regime"]
    every: Interval
    sigma: Annotated[float, Field(gt=0, le=5)] | None = None
    levels: _Levels | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    _single: ClassVar = "drift"

    @pydantic.model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "lognormal" and (self.sigma is None or self.levels is not None):
            raise InputError("kind lognormal takes sigma (of the bandwidth's logarithm) and no levels")
        if self.kind == "regime" and (self.levels is None or self.sigma is not None):
            raise InputError("kind regime takes levels such as [100 %, 30 %] and no sigma")
        return self

    def with_seed(self, seed: int) -> Self:
        """The same drift with other draws."""
        return self.model_copy(update={"seed": self.seed + seed})


def _subject(value: object) -> str | None:
    """Whether an event is one of a link or of a host; None if it is neither or both."""
    if isinstance(value, Entry):
        value = value.model_fields_set
    given = [key for key in ("link", "host") if isinstance(value, Iterable) and key in value]
    return f"literal[{given[0]}]" if len(given) == 1 else None  # a name of a type in an error's path


_Event = Annotated[
    Annotated[LinkEvent, pydantic.Tag("literal[link]")] | Annotated[HostEvent, pydantic.Tag("literal[host]")],
    pydantic.Discriminator(
        _subject,
        custom_error_type="subject",
        custom_error_message="give either link: [A, B] or host: NAME",
    ),
]


class Weather(Schema, metaclass=_Called):
    """Changes of a network while it runs; false where there are none.

    Attributes:
        events: changes of links and hosts at an instant.
        traces: rates and latencies over time.
        background: traffic of others.
        drift: random change of rates.
    """

    events: Annotated[tuple[_Event, ...], _Many, _Tuple] = ()
    traces: Annotated[tuple[Trace, ...], _Many, _Tuple] = ()
    background: Annotated[tuple[Background, ...], _Many, _Tuple] = ()
    drift: Annotated[tuple[Drift, ...], _Many, _Tuple] = ()

    if TYPE_CHECKING:

        def __init__(self, **named: Any) -> None: ...

    def entries(self) -> Iterator[Entry]:
        """All entries, in the order in which those of one instant apply."""
        for key in Weather.model_fields:
            yield from getattr(self, key)

    def with_events(self, events: Iterable[LinkEvent | HostEvent]) -> Weather:
        """The same weather with more events, however many."""
        return self.model_copy(update={"events": _sort((*self.events, *events))})

    def with_seed(self, seed: int) -> Weather:
        """The same weather with other draws: `seed` is added to that of each entry that draws."""
        kinds = {key: getattr(self, key) for key in Weather.model_fields if getattr(self, key)}
        changed = {key: tuple(entry.with_seed(seed) for entry in kind) for key, kind in kinds.items()}
        return self.model_copy(update=changed) if seed and changed else self

    def without_traffic(self) -> Weather:
        """The entries that change links and hosts."""
        kinds = {key: getattr(self, key) for key in Weather.model_fields}
        changing = {key: tuple(each for each in kind if not each._is_traffic) for key, kind in kinds.items()}
        return self.model_copy(update=changing)

    @property
    def is_endless(self) -> bool:
        """Whether an entry's changes go on for ever."""
        return any(entry.is_endless for entry in self.entries())

    def __bool__(self) -> bool:
        return any(getattr(self, key) for key in Weather.model_fields)

    def after(self, seconds: float) -> str | None:
        """Entries that begin at `seconds` of virtual time or later, in a line; None where there are none.

        A simulation that ends then is not affected by them.
        """
        begun = [(next(entry.instants(), 0.0), str(entry)) for entry in self.entries()]
        late = sorted(each for each in begun if each[0] >= seconds)
        lines = [f"{name} at {format_seconds(begin)}" for begin, name in late[:_MOST_NAMED]]
        return ", ".join(lines + [f"{len(late) - len(lines)} more"] * (len(late) > len(lines))) or None


def check_number_drawn(num_hosts: int, apart_seconds: float, until_seconds: float) -> None:
    """Refuse to draw more than 100,000 events of hosts, `apart_seconds` apart in the mean."""
    number = num_hosts * until_seconds / apart_seconds
    if number > _MOST_DRAWN:
        raise InputError(
            f"about {number:,.0f} absences would be drawn, {_MOST_DRAWN:,} at most: give longer times between them, "
            "or a shorter until"
        )


def random_crashes(
    hosts: Sequence[str], mean_seconds: float, repair_seconds: float, until_seconds: float, seed: int
) -> list[HostEvent]:
    """Draw crashes of each host, with exponential times between them.

    A host's draws depend on (seed, place among `hosts`) alone, and it cannot crash while it is being repaired.

    Args:
        hosts: names of hosts that crash.
        mean_seconds: mean time from a return to the next crash.
        repair_seconds: time from a crash to the return.
        until_seconds: virtual time from which no crash begins.
        seed: of the draws.

    Returns:
        The crashes, in the order of time, then host.

    Raises:
        InputError: more than 100,000 would be drawn in the mean.

    >>> [round(event.at) for event in random_crashes(["a"], 100.0, 10.0, 300.0, seed=1)]
    [107, 148]
    """
    import numpy as np

    check_number_drawn(len(hosts), mean_seconds + repair_seconds, until_seconds)
    events = []
    for place, host in enumerate(hosts):
        generator = np.random.default_rng([seed, place])
        at = float(generator.exponential(mean_seconds))
        while at < until_seconds:
            events.append(HostEvent(at=at, host=host, crash=True, for_=repair_seconds))
            at += repair_seconds + float(generator.exponential(mean_seconds))
    return sorted(events, key=lambda event: event.at)


# --- the file -----------------------------------------------------------------------------------------------


def read_weather(
    file: Weather, net: Topology, folder: Path, report: Callable[[KeyPath, str | InputError], None]
) -> Weather:
    """The weather of a file for the network `net`, in the order in which it applies.

    CSV files are looked for in `folder`. Mistakes go to `report`, as key path and message.
    """
    found: dict[str, Any] = {}
    for key in Weather.model_fields:
        entries: list[Entry] = []
        taken: set[tuple[object, ...]] = set()
        for position, entry in enumerate(getattr(file, key)):
            problems = list(entry.problems(net))
            for at, error in problems:
                report((key, position, at), error)
            if isinstance(entry, OfLink) and not problems:
                claims = entry.claims(net)
                if not taken.isdisjoint(claims):
                    report((key, position), f"a second {entry._single} on this link: remove one")
                taken |= claims
            if isinstance(entry, Trace):
                try:
                    entry = entry.read_csv(folder)
                except InputError as error:
                    report((key, position, entry.key), error)
            entries.append(entry)
        if entries:
            found[key] = _sort(entries)
    return Weather.model_construct(**found)


def _sort(entries: Iterable[Any]) -> tuple[Any, ...]:
    """Sort by kind, then by time if any, then in an order that does not depend on the file's."""

    def order(entry: Entry) -> tuple[bool, float, str]:
        at = entry.at if isinstance(entry, LinkEvent | HostEvent) else 0.0
        return isinstance(entry, HostEvent), at, repr(entry)

    return tuple(sorted(entries, key=order))


def read_csv_lines(folder: Path, name: str, header: list[str]) -> list[str]:
    """Lines of a CSV file below its header.

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
    first, *lines = text.splitlines() or [""]
    if [title.strip() for title in first.split(",")] != header:
        raise InputError(f"{shown(name)} line 1: expected the header '{','.join(header)}'")
    return lines


def _read_csv(folder: Path, name: str, column: str) -> list[tuple[float, float]]:
    """Rows of a CSV file with the columns start_s and `column`, plain numbers in SI units."""
    rows = []
    for number, cells in enumerate(csv.reader(read_csv_lines(folder, name, ["start_s", column])), start=2):
        try:
            time, value = (float(cell) for cell in cells)
        except ValueError:
            raise InputError(f"{shown(name)} line {number}: expected two numbers") from None
        rows.append((time, value))
    return rows


def _check_rows(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Rows of a trace; raises InputError for what they may not hold."""
    if not rows:
        raise InputError("has no rows: give at least one")
    for time, value in rows:
        if not (0 <= time <= _MOST_SECONDS and 0 <= value < float("inf")):
            raise InputError(f"expected finite values of at least 0, got {time!r}, {value!r}")
    for (time, _), (later, _) in itertools.pairwise(rows):
        if later <= time:
            raise InputError(f"times must ascend, but {later!r} s follows {time!r} s")
    return tuple(rows)
