"""The topology file as pydantic models: what keys there are, of which types, and what belongs together.

What concerns several entries at once (names that exist, reachability) is checked in `topology_file`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from netsim.files.documents import Schema
from netsim.files.errors import InputError
from netsim.files.units import (
    parse_bits_per_second,
    parse_bytes,
    parse_dollars_per_byte,
    parse_fraction,
    parse_seconds,
    shown,
)

__all__ = [
    "MAX_EVENTS",
    "MAX_HOSTS",
    "BackgroundEntry",
    "DriftEntry",
    "EventEntry",
    "HostEntry",
    "LinkEntry",
    "RegionEntry",
    "RouteEntry",
    "TopologyFile",
    "TraceEntry",
]

MAX_HOSTS = 20_000
MAX_EVENTS = 10_000  # of each kind
_LEAST_RATE, _MOST_RATE = 1e-3, 1e21  # bits per second; beyond these, durations lose all digits
_LONGEST_SECONDS = 1e6
_NAME = re.compile(r"\w[\w.:@+-]{0,99}")


def _name(value: object) -> object:
    """Whole numbers are accepted as names, as YAML gives them for unquoted ones."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise InputError(f"expected a name, got {shown(value)}: quote it if it is meant as text")
    if not _NAME.fullmatch(value):
        rule = "up to 100 letters, digits and . _ - : @ +, a letter, digit or _ first"
        raise InputError(f"expected a name ({rule}), got {shown(value)}")
    return value


def _text(value: object) -> object:
    if isinstance(value, str) and not value.isprintable() and not value.replace("\n", " ").isprintable():
        raise InputError(f"expected text without control characters, got {shown(value)}")
    return value


def _any_rate(value: object) -> float:
    rate = parse_bits_per_second(value)
    if rate > _MOST_RATE or 0 < rate < _LEAST_RATE:
        raise InputError(f"expected a rate from 0.001 bit/s to 1e21 bit/s, got {shown(value)}")
    return rate


def _rate(value: object) -> float:
    rate = _any_rate(value)
    if rate == 0:
        raise InputError(f"expected a rate above zero, got {shown(value)}: leave out the link instead")
    return rate


def _duration(value: object) -> float:
    seconds = parse_seconds(value)
    if seconds > _LONGEST_SECONDS:
        raise InputError(f"expected a time of at most 1e6 s, got {shown(value)}")
    return seconds


def _interval(value: object) -> float:
    seconds = _duration(value)
    if seconds < 1e-6:
        raise InputError(f"expected a time of at least 1 us, got {shown(value)}")
    return seconds


def _loss(value: object) -> float:
    loss = parse_fraction(value)
    if loss >= 1:
        raise InputError(f"expected a loss below 100 %, got {shown(value)}: leave out the link instead")
    return loss


def _packets(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"expected a whole number of packets, at least 1, got {shown(value)}")
    return value


def _series(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    rows = value if isinstance(value, list) else []
    if not rows or any(not isinstance(row, list) or len(row) != 2 for row in rows):
        raise InputError(f"expected a CSV file, or a list of [time, value] rows, got {shown(value)}")
    return rows


def _protocol(value: object) -> object:
    """A preset's name, or a mapping for `netsim.topology.protocol` to judge."""
    if value is None or (isinstance(value, str) and value.isprintable()):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise InputError(f"expected a preset such as 'linux-tcp', or a mapping, got {shown(value)}")


def _quantity(example: str, pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example], "pattern": rf"^[0-9.eE+-]+ ?{pattern}$"})


_RATE_SCHEMA = _quantity("100 Mbit/s", "([kMGT]i?)?(bit/s|bps)")
_TIME_SCHEMA = _quantity("30 ms", "(ns|us|ms|s|min|h)")
Name: TypeAlias = Annotated[str, BeforeValidator(_name)]
Text: TypeAlias = Annotated[str, BeforeValidator(_text), Field(max_length=2000)]
Rate: TypeAlias = Annotated[float, BeforeValidator(_rate), _RATE_SCHEMA]
RateOrZero: TypeAlias = Annotated[float, BeforeValidator(_any_rate), _RATE_SCHEMA]
Duration: TypeAlias = Annotated[float, BeforeValidator(_duration), _TIME_SCHEMA]
Interval: TypeAlias = Annotated[float, BeforeValidator(_interval), _TIME_SCHEMA]
Loss: TypeAlias = Annotated[float, BeforeValidator(_loss), _quantity("0.01 %", "%")]
Share: TypeAlias = Annotated[float, BeforeValidator(parse_fraction), _quantity("50 %", "%")]
Price: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_dollars_per_byte),
    WithJsonSchema(
        {"type": "string", "examples": ["0.02 $/GB"], "pattern": r"^[0-9.eE+-]+ ?\$/([kMGT]i?)?B$"}
    ),
]
Bytes: TypeAlias = Annotated[int, BeforeValidator(parse_bytes), _quantity("4 MiB", "([kMGT]i?)?B")]
Packets: TypeAlias = Annotated[int, BeforeValidator(_packets), Field(json_schema_extra={"minimum": 1})]
Ends: TypeAlias = Annotated[list[Name], Field(min_length=2, max_length=2)]
Series: TypeAlias = Annotated[Any, BeforeValidator(_series)]
Direction: TypeAlias = Literal["both", "up", "down"]


class _Pipe(Schema):
    """What links and regions' network cards have in common: rates each way, latency, loss, queue."""

    up: Rate | None = None
    down: Rate | None = None
    latency: Duration | None = None
    rtt: Duration | None = None
    loss: Loss = 0.0
    queue: Packets | None = None

    @property
    def quality(self) -> tuple[float, float, int | None]:
        """One-way latency in seconds, 0 where none is given; loss; packets that the queue holds."""
        seconds = self.rtt / 2 if self.rtt is not None else self.latency or 0.0
        return seconds, self.loss, self.queue

    def _rates(self, both_ways: float | None) -> tuple[float, float]:
        return (self.up or 0.0, self.down or 0.0) if both_ways is None else (both_ways, both_ways)

    def _check(self, both_ways: float | None, key: str) -> None:
        if self.latency is not None and self.rtt is not None:
            raise InputError("give either latency (one way) or rtt (twice that), not both")
        if both_ways is not None and (self.up is not None or self.down is not None):
            raise InputError(f"give either {key} (each way) or up and down, not both")
        if both_ways is None and (self.up is None or self.down is None):
            raise InputError(f"give {key} (each way), or both up and down, such as '100 Mbit/s'")


class LinkEntry(_Pipe):
    """A connection of two hosts or routers; `up` is from the first name in `between` to the second."""

    between: Ends
    bandwidth: Rate | None = None
    egress: Price = 0.0

    @model_validator(mode="after")
    def _complete(self) -> LinkEntry:
        self._check(self.bandwidth, "bandwidth")
        return self

    @property
    def rates(self) -> tuple[float, float]:
        """Bits per second from the first name in `between` to the second, and back."""
        return self._rates(self.bandwidth)


class RegionEntry(_Pipe):
    """Hosts REGION.0, REGION.1, ... behind a router REGION; `nic` (or `up`, `down`) is each host's own link."""

    hosts: Annotated[int, Field(ge=1, le=MAX_HOSTS)]
    nic: Rate | None = None
    device: Name | None = None
    devices: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> RegionEntry:
        self._check(self.nic, "nic")
        return self

    @property
    def rates(self) -> tuple[float, float]:
        """Bits per second from each host to the region's router, and back."""
        return self._rates(self.nic)


class HostEntry(Schema):
    """One host; `region` makes it count as part of a region without connecting it there."""

    device: Name | None = None
    devices: Annotated[int, Field(ge=1)] | None = None
    region: Name | None = None


class RouteEntry(Schema):
    """A route of one direction, by the hosts and routers it leads through, its ends left out.

    An end that is a region stands for each of its hosts.
    """

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    through: list[Name] = Field(default_factory=list)


class EventEntry(Schema):
    """What happens at one instant to a link (both ways unless `direction`) or to a host."""

    at: Duration
    link: Ends | None = None
    host: Name | None = None
    direction: Direction = "both"
    down: Literal[True] | None = None
    up: Literal[True] | None = None
    crash: Literal[True] | None = None
    bandwidth: RateOrZero | None = None
    latency: Duration | None = None
    loss: Loss | None = None
    lasting: Interval | None = Field(default=None, alias="for")

    @model_validator(mode="after")
    def _complete(self) -> EventEntry:
        if (self.link is None) == (self.host is None):
            raise InputError("give either link: [A, B] or host: NAME")
        pipe = [self.down, self.bandwidth, self.latency, self.loss]
        machine = [self.crash]
        own, foreign = (pipe, machine) if self.link is not None else (machine, pipe)
        if any(value is not None for value in foreign):
            raise InputError("crash belongs to a host; down, bandwidth, latency and loss belong to a link")
        if sum(value is not None for value in (*own, self.up)) != 1:
            wanted = "down, up, bandwidth, latency or loss" if self.link is not None else "crash or up"
            raise InputError(f"give exactly one of {wanted}")
        if self.up and self.lasting is not None:
            raise InputError("what comes up stays up: remove 'for'")
        return self


class TraceEntry(Schema):
    """A link's bandwidth or latency over time: a CSV file, or a list of [time, value] rows."""

    link: Ends
    direction: Direction = "both"
    bandwidth: Series = None
    latency: Series = None

    @model_validator(mode="after")
    def _complete(self) -> TraceEntry:
        if (self.bandwidth is None) == (self.latency is None):
            raise InputError("give either bandwidth or latency: a CSV file, or a list of [time, value]")
        return self


class BackgroundEntry(Schema):
    """Traffic of others from one host to another: a steady rate, or some bytes every so often."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    rate: Rate | None = None
    num_bytes: Bytes | None = Field(default=None, alias="bytes")
    every: Interval | None = None
    start: Duration = 0.0
    stop: Duration | None = None

    @model_validator(mode="after")
    def _complete(self) -> BackgroundEntry:
        if (self.num_bytes is None) != (self.every is None):
            raise InputError("bytes and every belong together: so many bytes, every so often")
        if (self.rate is None) == (self.num_bytes is None):
            raise InputError("give either rate, or bytes and every")
        if self.stop is not None and self.stop <= self.start:
            raise InputError("stop must be later than start")
        return self


class DriftEntry(Schema):
    """Random change of a link's bandwidth, drawn from a seed, around what the link has."""

    link: Ends
    direction: Direction = "both"
    kind: Literal["lognormal", "regime"]
    every: Interval
    sigma: Annotated[float, Field(gt=0, le=5)] | None = None
    levels: Annotated[list[Share], Field(min_length=2, max_length=100)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _complete(self) -> DriftEntry:
        if self.kind == "lognormal" and (self.sigma is None or self.levels is not None):
            raise InputError("kind lognormal takes sigma (of the bandwidth's logarithm) and no levels")
        if self.kind == "regime" and (self.levels is None or self.sigma is not None):
            raise InputError("kind regime takes levels such as [100 %, 30 %] and no sigma")
        return self


def _named_entries(value: object) -> object:
    """`[a, b]` is short for `{a: {}, b: {}}`, and `a:` alone for `a: {}`."""
    if isinstance(value, list):
        names = [str(name) for name in value if isinstance(name, str | int) and not isinstance(name, bool)]
        if len(names) != len(value):
            raise InputError("expected host names, or a mapping from host names to their keys")
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise InputError(f"duplicate host '{repeated[0]}': remove one")
        return {name: {} for name in names}
    if isinstance(value, dict):
        return {key: {} if entry is None else entry for key, entry in value.items()}
    return value


class TopologyFile(Schema):
    """A whole topology file."""

    name: Text | None = None
    source: Text = ""
    hosts: Annotated[dict[Name, HostEntry], BeforeValidator(_named_entries)] = Field(default_factory=dict)
    routers: list[Name] = Field(default_factory=list)
    links: list[LinkEntry] = Field(default_factory=list)
    regions: dict[Name, RegionEntry] = Field(default_factory=dict)
    wan: list[LinkEntry] = Field(default_factory=list)
    routes: list[RouteEntry] = Field(default_factory=list)
    protocol: Annotated[Any, BeforeValidator(_protocol)] = None
    events: list[EventEntry] = Field(default_factory=list, max_length=MAX_EVENTS)
    traces: list[TraceEntry] = Field(default_factory=list, max_length=MAX_EVENTS)
    background: list[BackgroundEntry] = Field(default_factory=list, max_length=MAX_EVENTS)
    drift: list[DriftEntry] = Field(default_factory=list, max_length=MAX_EVENTS)
