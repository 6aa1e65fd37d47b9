"""Topology files: their keys and types, the reader with all names checked, and the writer, exact or for readers."""

from __future__ import annotations

import copy
import difflib
import itertools
from collections import Counter, defaultdict
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from netsim.errors import InputError, unknown_name
from netsim.files.documents import ConfigError, Document, KeyPath
from netsim.files.schemas import Schema, validate_document
from netsim.topology.availability import Availability, availability_events
from netsim.topology.graph import Host, Link, Storage, natural_key
from netsim.topology.protocol import Protocol
from netsim.topology.values import (
    Duration,
    Ends,
    Loss,
    Mtu,
    Name,
    Packets,
    Price,
    ProtocolSpec,
    Rate,
    RequestPrice,
    Text,
)
from netsim.topology.weather import HostEvent, Weather, read_weather
from netsim.units import format_bits_per_second, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from netsim.topology.topology import Topology

    Formats = Mapping[str, Callable[[float], str]]

__all__ = [
    "MAX_HOSTS",
    "MAX_ROUTES",
    "HostEntry",
    "LinkEntry",
    "RegionEntry",
    "RouteEntry",
    "StoreEntry",
    "TopologyFile",
    "TopologyReader",
    "likely_names",
    "plain_form",
]

MAX_HOSTS = 20_000


_Streams = Annotated[int, Field(ge=1, le=100_000)]


class _EachWay(Schema):
    """A value for both directions, under a key of its own, or one each: `up` and `down`."""

    _both_key: ClassVar[str]
    _example: ClassVar[str]

    if TYPE_CHECKING:
        up: Any
        down: Any

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        both_ways = getattr(self, self._both_key)
        if both_ways is not None and (self.up is not None or self.down is not None):
            raise InputError(f"give either {self._both_key} (each way) or up and down, not both")
        if both_ways is None and (self.up is None or self.down is None):
            raise InputError(
                f"give {self._both_key} (each way), or both up and down, such as {self._example}"
            )
        return self

    @classmethod
    def of(cls, up: Any, down: Any, **others: Any) -> Self:
        """Entry with the values of both directions."""
        ways = {cls._both_key: up} if up == down else {"up": up, "down": down}
        return cls.model_construct(**ways, **others)

    def value(self, is_up: bool) -> Any:
        """Value of one direction."""
        both_ways = getattr(self, self._both_key)
        if both_ways is not None:
            return both_ways
        return self.up if is_up else self.down


class MeasuredEntry(_EachWay):
    """Measurement of a rate, end to end: the goodput of this number of streams together."""

    _both_key = "streams"
    _example = "1"

    streams: _Streams | None = None
    up: _Streams | None = None
    down: _Streams | None = None


class StreamEntry(_EachWay):
    """Rate of a single stream; `100 Mbit/s` alone is short for `{rate: 100 Mbit/s}`."""

    _both_key = "rate"
    _example = "'100 Mbit/s'"

    rate: Rate | None = None
    up: Rate | None = None
    down: Rate | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return value if isinstance(value, dict) else {"rate": value}

    @model_serializer(mode="wrap")
    def _shorten(self, write: SerializerFunctionWrapHandler) -> Any:
        form = write(self)
        return form if self.rate is None else form["rate"]


class _Pipe(_EachWay):
    """Keys common to links and regions' network cards: rates each way and of a stream, latency, loss, queue, MTU."""

    _example = "'100 Mbit/s'"

    up: Rate | None = None
    down: Rate | None = None
    latency: Duration | None = None
    rtt: Duration | None = None
    loss: Loss = 0.0
    queue: Packets | None = None
    mtu: Mtu | None = None
    measured: MeasuredEntry | None = None
    stream: StreamEntry | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.latency is not None and self.rtt is not None:
            raise InputError("give either latency (one way) or rtt (twice that), not both")
        if self.measured is not None and self.stream is not None:
            for is_up in (True, False):
                number, one, rate = (each.value(is_up) for each in (self.measured, self.stream, self))
                if number * one < rate:
                    streams = f"{format_count(number, 'stream')} of {format_bits_per_second(one)}"
                    had = f"cannot have had the measured {format_bits_per_second(rate)}"
                    raise InputError(f"{streams} {had}: correct stream, measured or the rate")
        return self

    def link(self, index: int, source: str, target: str, *, is_up: bool) -> Link:
        """One direction; `up` leads from the first name in `between`, or from a region's host to its router."""
        seconds = self.rtt / 2 if self.rtt is not None else self.latency or 0.0
        streams = None if self.measured is None else self.measured.value(is_up)
        egress = self.egress if isinstance(self, LinkEntry) else 0.0
        stream = None if self.stream is None else self.stream.value(is_up)
        figures = self.loss, self.queue, egress, streams, self.mtu, stream
        return Link(index, source, target, self.value(is_up), seconds, *figures)

    @classmethod
    def form(cls, link: Link, back: Link, formats: Formats | None = None, **others: Any) -> dict[str, Any]:
        """Keys of an entry with the figures of both directions, defaults left out.

        Args:
            link, back: the directions.
            formats: writers of quantities, by unit.
            others: values of other keys.
        """
        counts = link.measured_streams, back.measured_streams
        ones = link.stream_bits_per_second, back.stream_bits_per_second
        entry = cls.of(
            link.bits_per_second,
            back.bits_per_second,
            latency=link.latency_seconds,
            loss=link.loss,
            queue=link.queue_packets,
            mtu=link.mtu_bytes,
            measured=MeasuredEntry.of(*counts) if counts[0] else None,
            stream=StreamEntry.of(*ones) if any(ones) else None,
            **others,
        )
        form = entry.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=formats)
        return {cls._both_key: form.pop(cls._both_key), **form} if cls._both_key in form else form


class LinkEntry(_Pipe):
    """A connection of two hosts or routers; `up` is from the first name in `between` to the second."""

    _both_key = "bandwidth"

    between: Ends
    bandwidth: Rate | None = None
    egress: Price = 0.0


class RegionEntry(_Pipe):
    """Hosts REGION.0, REGION.1, ... behind a router REGION; `nic` (or `up`, `down`) is each host's own link."""

    _both_key = "nic"

    hosts: Annotated[int, Field(ge=1, le=MAX_HOSTS)]
    nic: Rate | None = None
    device: Name | None = None
    devices: Annotated[int, Field(ge=1)] | None = None


class StoreEntry(Schema):
    """An object store; its links give its rates."""

    latency: Duration = 0.0
    put: RequestPrice = 0.0
    get: RequestPrice = 0.0
    egress: Price = 0.0

    def store(self) -> Storage:
        """The store of these figures."""
        return Storage(self.latency, self.put, self.get, self.egress)


class HostEntry(Schema):
    """A host; `region` makes it part of a region without connecting it there; with `store` it runs no workers."""

    device: Name | None = None
    devices: Annotated[int, Field(ge=1)] | None = None
    region: Name | None = None
    store: StoreEntry | None = None

    @model_validator(mode="after")
    def _computes_or_stores(self) -> Self:
        if self.store is not None and (self.device is not None or self.devices is not None):
            raise InputError("a store computes nothing: leave out device and devices")
        return self


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


class _Parts(Schema):
    """Keys of a topology file besides its weather's."""

    name: Text | None = None
    source: Text = ""
    hosts: Annotated[dict[Name, HostEntry], BeforeValidator(_named_entries)] = Field(default_factory=dict)
    routers: list[Name] = Field(default_factory=list)
    links: list[LinkEntry] = Field(default_factory=list)
    regions: dict[Name, RegionEntry] = Field(default_factory=dict)
    wan: list[LinkEntry] = Field(default_factory=list)
    routes: list[RouteEntry] = Field(default_factory=list)
    protocol: ProtocolSpec = None
    availability: list[Availability] = Field(default_factory=list)


class TopologyFile(Weather, _Parts):
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
        availability: joins and leaves of hosts; crashes of `events` in the resolved form.
        events: changes of links and hosts at an instant.
        traces: rates and latencies over time.
        background: traffic of others.
        drift: random change of rates.
    """

    # Instead of the docstring.
    model_config = ConfigDict(json_schema_extra={"description": "A whole topology file."})


MAX_ROUTES = 250_000  # explicit ones, host to host
_MANY_NAMES = 40  # more are not listed in an error, only the likeliest
_MANY_PROBLEMS = 20


class TopologyReader:
    """Checks and builds the parts of a topology in order; each check relies on those before.

    Args:
        document: a topology file.

    Attributes:
        paths: host or router -> where the file names it.
        hosts: name -> region, device, devices, store.
    """

    def __init__(self, document: Document) -> None:
        if document.data is None:
            raise document.error((), "is empty: expected a topology with hosts or regions, and links")
        self.document = document
        self.file = validate_document(TopologyFile, document)
        self.problems: list[ConfigError] = []
        self.paths: dict[str, KeyPath] = {}
        self.hosts: dict[str, tuple[str | None, str | None, int | None, Storage | None]] = {}

    def read(self, make: type[Topology], name: str, folder: Path) -> Topology:
        """Check the document, and return its topology.

        Args:
            make: class of the topology.
            name: of the topology, if the file gives none.
            folder: of the files that the document names.

        Raises:
            InputError: lists every mistake by line and key.
        """
        self._name_nodes()
        pipes = self._pipes()
        if self.problems:
            raise self.document.errors(self.problems)
        names = sorted(self.paths, key=natural_key)
        machines = (node for node in names if node in self.hosts)
        rank = {node: number for number, node in enumerate(names)}
        directions: dict[tuple[int, int], tuple[str, str, _Pipe, bool]] = {}
        for (one, other), (pipe, _) in pipes.items():
            directions[rank[one], rank[other]] = one, other, pipe, True
            directions[rank[other], rank[one]] = other, one, pipe, False
        net = make(
            name=self.file.name or name,
            source=self.file.source,
            hosts=tuple(Host(host, index, *self.hosts[host]) for index, host in enumerate(machines)),
            routers=tuple(node for node in names if node not in self.hosts),
            links=tuple(
                pipe.link(index, source, target, is_up=is_up)
                for index, (_, (source, target, pipe, is_up)) in enumerate(sorted(directions.items()))
            ),
            regions=tuple(sorted({region for region, *_ in self.hosts.values() if region}, key=natural_key)),
            protocol=self.file.protocol,
        )
        self._check_reachable(net)
        routes = self._routes(net) if self.file.routes else {}
        try:
            Protocol.parse(self.file.protocol)
        except InputError as error:
            self._problem(("protocol",), type(error)(str(error).removeprefix("protocol: ")))
        weather = read_weather(self.file, net, folder, self._problem)
        if self.file.availability:
            absences = availability_events(self.file.availability, net, folder, self._problem)
            weather = weather.with_events(absences)
        if weather.events:
            events = [event for event in weather.events if isinstance(event, HostEvent)]
            gone = {event.host for event in events if event.crash and not event.at and event.for_ is None}
            gone -= {event.host for event in events if event.up}
            if gone.issuperset(host.name for host in net.rank_hosts):
                key = "availability" if self.file.availability else "events"
                self._problem(
                    (key,), "no host is ever there: all crash at 0 s and none returns; let one return"
                )
        if self.problems:
            raise self.document.errors(self.problems)
        return replace(net, explicit_routes=routes, weather=weather)

    def _problem(self, path: KeyPath, message: str | InputError) -> None:
        self.problems.append(ConfigError(path, str(message), isinstance(message, TypeError)))

    def _name_nodes(self) -> None:
        for name, entry in self.file.hosts.items():
            if self._is_new(name, ("hosts", name)):
                store = None if entry.store is None else entry.store.store()
                self.hosts[name] = (entry.region, entry.device, entry.devices, store)
        for position, name in enumerate(self.file.routers):
            self._is_new(name, ("routers", position))
        for region, area in self.file.regions.items():
            path = ("regions", region)
            if len(self.hosts) + area.hosts > MAX_HOSTS:
                raise self.document.error((*path, "hosts"), f"expected at most {MAX_HOSTS:,} hosts in all")
            self._is_new(region, path)
            for number in range(area.hosts):
                if self._is_new(f"{region}.{number}", path):
                    self.hosts[f"{region}.{number}"] = (region, area.device, area.devices, None)
        if all(store is not None for *_, store in self.hosts.values()):
            kind = "hosts but stores" if self.hosts else "hosts"
            raise self.document.error((), f"has no {kind}: add 'hosts' or 'regions'")
        if len(self.hosts) > MAX_HOSTS:
            raise self.document.error(("hosts",), f"expected at most {MAX_HOSTS:,} hosts in all")

    def _is_new(self, name: str, path: KeyPath) -> bool:
        first = self.paths.setdefault(name, path)
        if first is path:
            return True
        line = self.document.line_of(first)
        place = f"in '{first[0]}'" if line is None else f"in '{first[0]}' on line {line}"
        self._problem(path, f"duplicate name '{name}' (first {place}): rename one")
        return False

    def _pipes(self) -> dict[tuple[str, str], tuple[_Pipe, KeyPath]]:
        """Connections by their ends: the entry with their figures, and its place."""
        pipes: dict[tuple[str, str], tuple[_Pipe, KeyPath]] = {}
        for region, area in self.file.regions.items():
            for number in range(area.hosts):
                pipes[f"{region}.{number}", region] = area, ("regions", region)
        for key, entries, what, known in (
            ("links", self.file.links, "host or router", self.paths.keys()),
            ("wan", self.file.wan, "region", self.file.regions.keys()),
        ):
            for position, entry in enumerate(entries):
                path, (one, other) = (key, position, "between"), entry.between
                misplaced = [end for end in (one, other) if end not in known and end in self.paths]
                for end in misplaced:
                    kind = "host" if end in self.hosts else "router"
                    self._problem(path, f"{end} is a {kind}: put this link under links:")
                if misplaced or not self._are_known(what, {path: (one, other)}, known):
                    continue
                first = pipes.get((one, other)) or pipes.get((other, one))
                if one == other:
                    self._problem(path, f"links '{one}' to itself: name two different ends")
                elif first is not None:
                    line = self.document.line_of(first[1])
                    place = "already" if line is None else f"on line {line}"
                    self._problem(path, f"'{one}' and '{other}' are linked {place}: make it one link")
                else:
                    pipes[one, other] = entry, (key, position)
        return pipes

    def _are_known(self, what: str, given: Mapping[KeyPath, Sequence[str]], known: Collection[str]) -> bool:
        """Check that all names (with their key paths) exist; add a problem for each that does not."""
        unknown = [(path, name) for path, names in given.items() for name in names if name not in known]
        for path, name in unknown:
            if len(self.problems) < _MANY_PROBLEMS:
                self._problem(path, unknown_name(what, name, likely_names(name, known)))
            else:  # looking for what was meant takes long among many names
                self._problem(path, f"unknown {what} '{name}'")
        return not unknown

    def _check_reachable(self, net: Topology) -> None:
        first, targets = net.hosts[0].name, defaultdict[str, set[str]](set)
        for link in net.links:
            targets[link.source].add(link.target)
        reached, new = set[str](), {first}
        while new:
            reached |= new
            new = {target for source in new for target in targets[source]} - reached
        cut_off: dict[KeyPath, str] = {}  # one line for all hosts of a region
        for host in net.hosts:
            if host.name not in reached:
                cut_off.setdefault(self.paths[host.name], host.name)
        for path, name in cut_off.items():
            self._problem(path, f"host '{name}' cannot reach '{first}': add a link between them")

    def _routes(self, net: Topology) -> dict[tuple[int, int], tuple[int, ...]]:
        """Every explicit route, host to host; an entry that names a host overrides one that names its region."""
        groups: defaultdict[str, list[Host]] = defaultdict(list)
        for host in net.hosts:
            groups[host.name].append(host)
            if host.region in self.file.regions:
                groups[host.region].append(host)
        found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # -> hosts named, links
        for position, entry in enumerate(self.file.routes):
            path = ("routes", position)
            ends: dict[KeyPath, list[str]] = {
                (*path, "from"): [entry.source],
                (*path, "to"): [entry.target],
            }
            stops: dict[KeyPath, list[str]] = {(*path, "through"): entry.through}
            if not self._are_known("host or region", ends, groups.keys()):
                continue
            if not self._are_known("host or router", stops, self.paths.keys()):
                continue
            sources, targets = groups[entry.source], groups[entry.target]
            if len(found) + len(sources) * len(targets) > MAX_ROUTES:
                raise self.document.error(
                    path, f"expected at most {MAX_ROUTES:,} routes between hosts in all"
                )
            for source, target in itertools.product(sources, targets):
                num_named = (entry.source == source.name) + (entry.target == target.name)
                num_before, _ = found.get((source.index, target.index), (-1, ()))
                if num_before == num_named:
                    self._problem(path, f"a second route from '{source.name}' to '{target.name}': remove one")
                    break
                if num_before < num_named:
                    links = self._walk(net, [source.name, *entry.through, target.name], path)
                    if links is None:
                        break
                    found[source.index, target.index] = num_named, links
        return {ends: found[ends][1] for ends in sorted(found)}

    def _walk(self, net: Topology, stops: Sequence[str], path: KeyPath) -> tuple[int, ...] | None:
        """Links from stop to stop; None after a problem."""
        repeated = [stop for position, stop in enumerate(stops) if stop in stops[:position]]
        if repeated:
            self._problem(path, f"visits '{repeated[0]}' twice: name each stop between two ends once")
            return None
        links = []
        for ends in itertools.pairwise(stops):
            if ends not in net.link_between:
                one, other = ends
                self._problem(
                    path, f"no link between '{one}' and '{other}': add one, or name the stops between"
                )
                return None
            links.append(net.link_between[ends].index)
        return tuple(links)


def likely_names(name: str, known: Collection[str]) -> Collection[str]:
    """Names to list in an error about `name`: all known ones, or the likeliest of many."""
    if len(known) <= _MANY_NAMES:
        return known
    return difflib.get_close_matches(name, known, n=8) or sorted(known, key=natural_key)[:8]


def plain_form(topology: Topology) -> dict[str, Any]:
    """The topology as a mapping that `Topology.from_mapping` reads back to an equal one; empty keys left out."""
    index = topology.link_between
    regions = _uniform_regions(topology)
    inside = {host.name for host in topology.hosts if host.region in regions}
    form: dict[str, Any] = {
        "name": topology.name,
        "source": topology.source,
        "hosts": {host.name: _host_form(host) for host in topology.hosts if host.name not in inside},
        "routers": [name for name in topology.routers if name not in regions],
        "links": [
            {
                "between": [link.source, link.target],
                **LinkEntry.form(link, index[link.target, link.source], egress=link.dollars_per_byte),
            }
            for link in topology.links
            if link.index < index[link.target, link.source].index
            and inside.isdisjoint((link.source, link.target))
        ],
        "regions": regions,
        "routes": [
            {
                "from": topology.hosts[source].name,
                "to": topology.hosts[target].name,
                **({"through": [topology.links[link].target for link in links[:-1]]} if links[1:] else {}),
            }
            for (source, target), links in topology.explicit_routes.items()
        ],
        "protocol": copy.deepcopy(topology.protocol),
        **topology.weather.model_dump(mode="json", by_alias=True, exclude_defaults=True),
    }
    return {key: value for key, value in form.items() if value}


def _uniform_regions(topology: Topology) -> dict[str, Any]:
    """Regions that the key `regions` can express: hosts REGION.0 ... all alike, behind a router REGION."""
    num_links = Counter(link.source for link in topology.links)
    members: dict[str, list[Host]] = {}
    for host in topology.hosts:
        if host.region is not None and host.region in topology.routers:
            members.setdefault(host.region, []).append(host)
    regions = {}
    for region, hosts in members.items():
        kinds = set()
        for number, host in enumerate(hosts):
            link = topology.link_between.get((host.name, region))
            if host.name != f"{region}.{number}" or link is None or num_links[host.name] != 1:
                break
            back = topology.link_between[region, host.name]
            kinds.add((link.figures, back.figures, host.device, host.devices))
        else:
            if link is not None and len(kinds) == 1:
                card = RegionEntry.form(link, back, device=host.device, devices=host.devices)
                regions[region] = {"hosts": len(hosts), **card}
    return regions


def _host_form(host: Host) -> dict[str, Any]:
    store = None
    if host.store is not None:
        store = StoreEntry.model_construct(
            **dict(zip(StoreEntry.model_fields, astuple(host.store), strict=True))
        )
    entry = HostEntry.model_construct(
        region=host.region, device=host.device, devices=host.devices, store=store
    )
    return entry.model_dump(mode="json", exclude_defaults=True)
