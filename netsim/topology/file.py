"""Topology files: their keys and types, the reader with all names checked, and the writer, exact or for readers."""

from __future__ import annotations

import copy
import difflib
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from netsim.errors import InputError, unknown_name
from netsim.files.documents import ConfigError, Document, KeyPath
from netsim.files.schemas import Schema, validate_document
from netsim.topology.graph import Host, Link, ShortestRoutes, natural_key
from netsim.topology.protocol import Protocol
from netsim.topology.values import (
    Duration,
    Ends,
    Loss,
    Name,
    Packets,
    Price,
    ProtocolSpec,
    Rate,
    Text,
    written,
)
from netsim.topology.weather import Entries, Places, read_weather, write_weather

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from netsim.topology.topology import Topology
    from netsim.topology.weather import Weather

__all__ = [
    "MAX_EVENTS",
    "MAX_HOSTS",
    "MAX_ROUTES",
    "HostEntry",
    "LinkEntry",
    "Parts",
    "RegionEntry",
    "RouteEntry",
    "TopologyFile",
    "likely_names",
    "plain_form",
    "quality",
    "rates",
    "read_parts",
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


MAX_ROUTES = 250_000  # explicit ones, host to host
_MANY_NAMES = 40  # more are not listed in an error, only the likeliest
_MANY_PROBLEMS = 20


@dataclass(frozen=True)
class Parts:
    """Parts of a topology in canonical order: natural name order of hosts, routers, regions and links."""

    file: TopologyFile
    hosts: tuple[Host, ...]
    routers: tuple[str, ...]
    regions: tuple[str, ...]
    links: tuple[Link, ...]
    routes: Mapping[tuple[int, int], tuple[int, ...]]  # explicit ones: host indices -> link indices
    weather: Weather


@dataclass(frozen=True)
class _ReadPipe:
    """Two links, one each way, as one entry of the file has them."""

    source: str
    target: str
    up: float
    down: float
    quality: tuple[float, float, int | None]  # latency in seconds, loss, packets that the queue holds
    dollars_per_byte: float = 0.0
    measured_streams: int | None = None


@dataclass
class _Nodes:
    """Named hosts and routers, and where in the file each was named."""

    # -> region, device, devices
    hosts: dict[str, tuple[str | None, str | None, int | None]] = field(default_factory=dict)
    routers: dict[str, None] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)


def read_parts(document: Document, folder: Path) -> Parts:
    """Check a document and put its parts in order; files it names are looked for in `folder`.

    Raises InputError with every mistake by line and key.
    """
    return _Builder(document).parts(folder)


class _Builder:
    """Checks and builds the parts of a topology, each check relying on those before."""

    def __init__(self, document: Document) -> None:
        if document.data is None:
            raise document.error((), "is empty: expected a topology with hosts or regions, and links")
        self.document = document
        self.file = validate_document(TopologyFile, document)
        self.problems: list[ConfigError] = []

    def parts(self, folder: Path) -> Parts:
        nodes = self._nodes()
        pipes = self._pipes(nodes)
        self._raise_problems()
        names = sorted(nodes.paths, key=natural_key)
        rank = {name: position for position, name in enumerate(names)}
        links = _links(pipes, rank)
        hosts = tuple(
            Host(name, index, *nodes.hosts[name])
            for index, name in enumerate(name for name in names if name in nodes.hosts)
        )
        graph = ShortestRoutes(
            len(names), [(rank[link.source], rank[link.target], link.latency_seconds) for link in links]
        )
        self._check_reachable(graph, hosts, nodes, rank)
        routes = self._routes(graph, hosts, nodes, rank)
        self._check_protocol()
        weather = read_weather(self.file, Places(hosts, links, folder), self._problem)
        self._raise_problems()
        regions = {host.region for host in hosts if host.region is not None}
        return Parts(
            self.file,
            hosts,
            tuple(name for name in names if name in nodes.routers),
            tuple(sorted(regions, key=natural_key)),
            links,
            routes,
            weather,
        )

    def _problem(self, path: KeyPath, message: str | InputError) -> None:
        self.problems.append(ConfigError(path, str(message), isinstance(message, TypeError)))

    def _raise_problems(self) -> None:
        if self.problems:
            raise self.document.errors(self.problems)

    def _nodes(self) -> _Nodes:
        nodes = _Nodes()
        for name, entry in self.file.hosts.items():
            if self._is_new(nodes, name, ("hosts", name)):
                nodes.hosts[name] = (entry.region, entry.device, entry.devices)
        for position, name in enumerate(self.file.routers):
            if self._is_new(nodes, name, ("routers", position)):
                nodes.routers[name] = None
        for region, area in self.file.regions.items():
            path = ("regions", region)
            if len(nodes.hosts) + area.hosts > MAX_HOSTS:
                raise self.document.error((*path, "hosts"), f"expected at most {MAX_HOSTS:,} hosts in all")
            if self._is_new(nodes, region, path):
                nodes.routers[region] = None
            for number in range(area.hosts):
                name = f"{region}.{number}"
                if self._is_new(nodes, name, path):
                    nodes.hosts[name] = (region, area.device, area.devices)
        if not nodes.hosts:
            raise self.document.error((), "has no hosts: add 'hosts' or 'regions'")
        if len(nodes.hosts) > MAX_HOSTS:
            raise self.document.error(("hosts",), f"expected at most {MAX_HOSTS:,} hosts in all")
        return nodes

    def _is_new(self, nodes: _Nodes, name: str, path: KeyPath) -> bool:
        first = nodes.paths.setdefault(name, path)
        if first is path:
            return True
        line = self.document.line_of(first)
        place = f"in '{first[0]}'" if line is None else f"in '{first[0]}' on line {line}"
        self._problem(path, f"duplicate name '{name}' (first {place}): rename one")
        return False

    def _pipes(self, nodes: _Nodes) -> list[_ReadPipe]:
        pipes: list[_ReadPipe] = []
        seen: dict[tuple[str, str], KeyPath] = {}
        for region, area in self.file.regions.items():
            for number in range(area.hosts):
                card = (*area.rates, area.quality, 0.0, area.measured_streams)
                pipes.append(_ReadPipe(f"{region}.{number}", region, *card))
                seen[f"{region}.{number}", region] = ("regions", region)
        for key, entries, known, what in (
            ("links", self.file.links, nodes.paths.keys(), "host or router"),
            ("wan", self.file.wan, self.file.regions.keys(), "region"),
        ):
            for position, entry in enumerate(entries):
                pipe = self._pipe(entry, (key, position), known, what, seen, nodes)
                if pipe is not None:
                    pipes.append(pipe)
        return pipes

    def _pipe(
        self,
        entry: LinkEntry,
        path: KeyPath,
        known: Collection[str],
        what: str,
        seen: dict[tuple[str, str], KeyPath],
        nodes: _Nodes,
    ) -> _ReadPipe | None:
        one, other = entry.between
        ends_path = (*path, "between")
        aside = [end for end in (one, other) if what == "region" and end not in known and end in nodes.paths]
        for end in aside:
            kind = "host" if end in nodes.hosts else "router"
            self._problem(ends_path, f"{end} is a {kind}: put this link under links:")
        if aside:
            return None
        if not self._are_known(what, {ends_path: (one, other)}, known):
            return None
        if one == other:
            self._problem(ends_path, f"links '{one}' to itself: name two different ends")
            return None
        first = seen.get((one, other)) or seen.get((other, one))
        if first is not None:
            line = self.document.line_of(first)
            place = "already" if line is None else f"on line {line}"
            self._problem(ends_path, f"'{one}' and '{other}' are linked {place}: make it one link")
            return None
        seen[one, other] = path
        return _ReadPipe(one, other, *entry.rates, entry.quality, entry.egress, entry.measured_streams)

    def _are_known(self, what: str, given: Mapping[KeyPath, Sequence[str]], known: Collection[str]) -> bool:
        """Check that all names (with their key paths) exist; add a problem for each that does not."""
        unknown = [(path, name) for path, names in given.items() for name in names if name not in known]
        for path, name in unknown:
            if len(self.problems) < _MANY_PROBLEMS:
                self._problem(path, unknown_name(what, name, likely_names(name, known)))
            else:  # looking for what was meant takes long among many names
                self._problem(path, f"unknown {what} '{name}'")
        return not unknown

    def _check_reachable(
        self, graph: ShortestRoutes, hosts: tuple[Host, ...], nodes: _Nodes, rank: Mapping[str, int]
    ) -> None:
        first = hosts[0].name
        reached = graph.reachable(rank[first])
        seen: set[KeyPath] = set()  # one line for all hosts of a region
        for host in hosts:
            path = nodes.paths[host.name]
            if not reached[rank[host.name]] and path not in seen:
                seen.add(path)
                self._problem(path, f"host '{host.name}' cannot reach '{first}': add a link between them")

    def _check_protocol(self) -> None:
        try:
            Protocol.parse(self.file.protocol)
        except InputError as error:
            self._problem(("protocol",), type(error)(str(error).removeprefix("protocol: ")))

    def _routes(
        self, graph: ShortestRoutes, hosts: tuple[Host, ...], nodes: _Nodes, rank: Mapping[str, int]
    ) -> dict[tuple[int, int], tuple[int, ...]]:
        """Every explicit route, host to host. One that names a host goes before one that names its region."""
        groups: dict[str, list[Host]] = {}
        for host in hosts:
            groups.setdefault(host.name, []).append(host)
            if host.region in self.file.regions:
                groups.setdefault(host.region, []).append(host)
        found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # -> hosts named, links
        for position, entry in enumerate(self.file.routes):
            path = ("routes", position)
            ends: dict[KeyPath, Sequence[str]] = {
                (*path, "from"): (entry.source,),
                (*path, "to"): (entry.target,),
            }
            stops: dict[KeyPath, Sequence[str]] = {(*path, "through"): entry.through}
            if not self._are_known("host or region", ends, groups):
                continue
            if not self._are_known("host or router", stops, nodes.paths.keys()):
                continue
            sources, targets = groups[entry.source], groups[entry.target]
            if len(found) + len(sources) * len(targets) > MAX_ROUTES:
                raise self.document.error(
                    path, f"expected at most {MAX_ROUTES:,} routes between hosts in all"
                )
            rival = self._add_routes(graph, entry, sources, targets, rank, found, path)
            if rival is not None:
                message = f"a second route from '{rival[0]}' to '{rival[1]}': remove one"
                self._problem(path, message)
        return {ends: found[ends][1] for ends in sorted(found)}

    def _add_routes(
        self,
        graph: ShortestRoutes,
        entry: RouteEntry,
        sources: Sequence[Host],
        targets: Sequence[Host],
        rank: Mapping[str, int],
        found: dict[tuple[int, int], tuple[int, tuple[int, ...]]],
        path: KeyPath,
    ) -> tuple[str, str] | None:
        """Add one entry's routes to `found`; returns the ends of one that is there already."""
        weight = (entry.source == sources[0].name) + (entry.target == targets[0].name)
        for source, target in itertools.product(sources, targets):
            known = found.get((source.index, target.index))
            if known is not None and known[0] == weight:
                return source.name, target.name
            if known is not None and known[0] > weight:
                continue
            links = self._walk(graph, [source.name, *entry.through, target.name], rank, path)
            if links is None:
                return None
            found[source.index, target.index] = (weight, links)
        return None

    def _walk(
        self, graph: ShortestRoutes, stops: Sequence[str], rank: Mapping[str, int], path: KeyPath
    ) -> tuple[int, ...] | None:
        if len(set(stops)) < len(stops):
            self._problem(
                path, f"visits '{_repeated(stops)}' twice: name the way between two ends, each stop once"
            )
            return None
        links = []
        for here, there in itertools.pairwise(stops):
            link = graph.link(rank[here], rank[there])
            if link is None:
                self._problem(
                    path, f"no link between '{here}' and '{there}': add one, or name the stops between"
                )
                return None
            links.append(link)
        return tuple(links)


def _repeated(names: Sequence[str]) -> str:
    return next(name for position, name in enumerate(names) if name in names[:position])


def _links(pipes: Iterable[_ReadPipe], rank: Mapping[str, int]) -> tuple[Link, ...]:
    ways: list[tuple[int, int, Any]] = []
    for pipe in pipes:
        one, other = rank[pipe.source], rank[pipe.target]
        both_ways = (*pipe.quality, pipe.dollars_per_byte, pipe.measured_streams)
        ways.append((one, other, (pipe.source, pipe.target, pipe.up, *both_ways)))
        ways.append((other, one, (pipe.target, pipe.source, pipe.down, *both_ways)))
    ways.sort()  # no two have the same ends
    return tuple(Link(index, *values) for index, (_, _, values) in enumerate(ways))


def likely_names(name: str, known: Collection[str]) -> Collection[str]:
    """Known names that an error about `name` lists: all, or of many the likeliest."""
    if len(known) <= _MANY_NAMES:
        return known
    return difflib.get_close_matches(name, known, n=8) or sorted(known, key=natural_key)[:8]


def rates(both: str, up: float, down: float, write: Callable[[Any, float], Any] = written) -> dict[str, Any]:
    """Rates of a link: one under the key `both` where they are equal, else `up` and `down`; `write` writes one."""
    if up == down:
        return {both: write(Rate, up)}
    return {"up": write(Rate, up), "down": write(Rate, down)}


def quality(
    latency_seconds: float,
    loss: float = 0.0,
    queue_packets: int | None = None,
    measured_streams: int | None = None,
    write: Callable[[Any, float], Any] = written,
) -> dict[str, Any]:
    """Latency, loss, queue and measurement of a link, as keys of a file; without those it leaves out."""
    return {
        "latency": write(Duration, latency_seconds),
        **_given(
            loss=write(Loss, loss) if loss else None,
            queue=queue_packets,
            measured={"streams": measured_streams} if measured_streams else None,
        ),
    }


def plain_form(topology: Topology) -> dict[str, Any]:
    """The topology as a mapping that `Topology.from_mapping` reads back to an equal one; empty keys left out."""
    regions = _uniform_regions(topology)
    inside = {host.name for host in topology.hosts if host.region in regions}
    form: dict[str, Any] = {
        "name": topology.name,
        "source": topology.source,
        "hosts": {host.name: _host(host) for host in topology.hosts if host.name not in inside},
        "routers": [name for name in topology.routers if name not in regions],
        "links": [
            _pipe(link, topology.links[back])
            for link, back in _pairs(topology.links)
            if link.source not in inside and link.target not in inside
        ],
        "regions": regions,
        "routes": [_route(topology, ends, links) for ends, links in topology.explicit_routes.items()],
        "protocol": copy.deepcopy(topology.protocol),
        **write_weather(topology.weather, Places(topology.hosts, topology.links)),
    }
    return {key: value for key, value in form.items() if value}


def _host(host: Host) -> dict[str, Any]:
    return _given(region=host.region, device=host.device, devices=host.devices)


def _pairs(links: Sequence[Link]) -> list[tuple[Link, int]]:
    """Each connection once: its first link in canonical order, and the index of the reverse one."""
    index = {(link.source, link.target): link.index for link in links}
    ways = [(link, index[link.target, link.source]) for link in links]
    return [(link, back) for link, back in ways if link.index < back]


def _pipe(link: Link, back: Link) -> dict[str, Any]:
    return {
        "between": [link.source, link.target],
        **rates("bandwidth", link.bits_per_second, back.bits_per_second),
        **_quality(link),
        **_given(egress=written(Price, link.dollars_per_byte or None)),
    }


def _quality(link: Link) -> dict[str, Any]:
    return quality(link.latency_seconds, link.loss, link.queue_packets, link.measured_streams)


def _uniform_regions(topology: Topology) -> dict[str, Any]:
    """Regions that the key `regions` can express: hosts REGION.0 ... all alike, behind a router REGION."""
    outgoing: dict[str, list[Link]] = {}
    for link in topology.links:
        outgoing.setdefault(link.source, []).append(link)
    index = {(link.source, link.target): link for link in topology.links}
    members: dict[str, list[Host]] = {}
    for host in topology.hosts:
        if host.region is not None and host.region in topology.routers:
            members.setdefault(host.region, []).append(host)
    regions = {}
    for region, hosts in members.items():
        entries = []
        for number, host in enumerate(hosts):
            links = outgoing[host.name]
            if host.name == f"{region}.{number}" and [link.target for link in links] == [region]:
                back = index[region, host.name]
                card = rates("nic", links[0].bits_per_second, back.bits_per_second)
                machine = _given(device=host.device, devices=host.devices)
                entries.append({"hosts": len(hosts), **card, **_quality(links[0]), **machine})
        if len(entries) == len(hosts) and all(entry == entries[0] for entry in entries):
            regions[region] = entries[0]
    return regions


def _route(topology: Topology, ends: tuple[int, int], links: Sequence[int]) -> dict[str, Any]:
    source, target = (topology.hosts[end].name for end in ends)
    through = [topology.links[link].target for link in links[:-1]]
    return {"from": source, "to": target, **({"through": through} if through else {})}


def _given(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}
