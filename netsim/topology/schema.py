"""The topology file as pydantic models: its keys, their types, and which keys exclude each other.

Mistakes that concern several entries (names that exist, reachability) are found in `netsim.topology.file`.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from netsim.errors import InputError
from netsim.files.schemas import Schema
from netsim.topology.values import Duration, Ends, Loss, Name, Packets, Price, ProtocolSpec, Rate, Text
from netsim.topology.weather import Entries

__all__ = [
    "MAX_EVENTS",
    "MAX_HOSTS",
    "HostEntry",
    "LinkEntry",
    "RegionEntry",
    "RouteEntry",
    "TopologyFile",
]

MAX_HOSTS = 20_000
MAX_EVENTS = 10_000  # of each kind


class MeasuredEntry(Schema):
    """Measurement of a rate, end to end: the goodput of so many streams together."""

    streams: Annotated[int, Field(ge=1, le=100_000)]


class _Pipe(Schema):
    """Keys common to links and regions' network cards: rates each way, latency, loss, queue."""

    up: Rate | None = None
    down: Rate | None = None
    latency: Duration | None = None
    rtt: Duration | None = None
    loss: Loss = 0.0
    queue: Packets | None = None
    measured: MeasuredEntry | None = None

    @property
    def measured_streams(self) -> int | None:
        """Streams whose goodput the rates are; None where they are nominal."""
        return None if self.measured is None else self.measured.streams

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
    """A host; `region` makes it part of a region without connecting it there."""

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
    """A whole topology file.

    Attributes:
        name: of the network; None: the file's name.
        source: origin of the figures.
        hosts: by name; a list of names is short for hosts without keys.
        routers: names of nodes that only forward.
        links: connections of hosts, routers and regions.
        regions: by name, hosts behind a router of that name.
        wan: connections between regions.
        routes: routes that differ from the one of least latency.
        protocol: name of a preset, or a mapping of its changes; None: `linux-tcp`.
        events: changes of links and hosts at an instant.
        traces: rates and latencies over time.
        background: traffic of others.
        drift: random change of rates.
    """

    # Instead of the docstring.
    model_config = ConfigDict(json_schema_extra={"description": "A whole topology file."})

    name: Text | None = None
    source: Text = ""
    hosts: Annotated[dict[Name, HostEntry], BeforeValidator(_named_entries)] = Field(default_factory=dict)
    routers: list[Name] = Field(default_factory=list)
    links: list[LinkEntry] = Field(default_factory=list)
    regions: dict[Name, RegionEntry] = Field(default_factory=dict)
    wan: list[LinkEntry] = Field(default_factory=list)
    routes: list[RouteEntry] = Field(default_factory=list)
    protocol: ProtocolSpec = None
    events: Annotated[list[Any], Entries("events")] = Field(default_factory=list, max_length=MAX_EVENTS)
    traces: Annotated[list[Any], Entries("traces")] = Field(default_factory=list, max_length=MAX_EVENTS)
    background: Annotated[list[Any], Entries("background")] = Field(
        default_factory=list, max_length=MAX_EVENTS
    )
    drift: Annotated[list[Any], Entries("drift")] = Field(default_factory=list, max_length=MAX_EVENTS)
