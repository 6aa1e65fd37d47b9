"""Network files of other tools: GraphML and GML read, SimGrid's platforms and tc scripts written.

**GraphML and GML**, as the Internet Topology Zoo has them: coordinates and link speeds; directed graphs keep the rate
of each direction. Latency, loss and rate of an edge are read under their usual names, with the unit in the value
(`latency "10 ms"`) or in the name (`delay_ms 10`). Attributes that are not read are listed in the topology's source.

**SimGrid**: one zone with full routing, each link named `a->b`.

**tc**: a shell script a host, with htb, netem and u32, makes a simulated network real on Linux hosts.

XML is read without definitions: those are how small files become large ones, and read other files.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

import networkx as nx

from netsim.errors import InputError, locate_errors
from netsim.formats.builder import (
    Assumed,
    LinkLine,
    TopologyBuilder,
    milliseconds,
    on_one_line,
    safe_name,
)
from netsim.topology.protocol import PRESETS
from netsim.units import format_count, parse_bits_per_second, parse_fraction, parse_seconds, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from netsim.topology.graph import Link
    from netsim.topology.topology import Topology

__all__ = [
    "address_file",
    "great_circle_metres",
    "read_graph",
    "shaping_script",
    "write_simgrid",
]


_MOST_ROUTES = 1_000_000


def write_simgrid(topology: Topology) -> str:
    """Write a platform of version 4.1: hosts, a link for each direction, and a route for each pair of hosts.

    SimGrid's corrections (`network/bandwidth-factor`, `latency-factor`, `weight-S`, TCP windows) are left to its users;
    without them it shares links as the protocol `ideal` does. Raises InputError for more than 1,000 hosts.
    """
    num = len(topology.hosts)
    if num * (num - 1) > _MOST_ROUTES:
        raise InputError(f"{topology.name}: {num} hosts have too many routes to write out: 1,000 at the most")
    lines = [
        "<?xml version='1.0'?>",
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        '<platform version="4.1">',
        f'  <zone id={quoteattr(topology.name)} routing="Full">',
    ]
    lines += [f'    <host id={quoteattr(host.name)} speed="1Gf"/>' for host in topology.hosts]
    for link in topology.links:
        lines.append(
            f'    <link id={quoteattr(link.name)} bandwidth="{link.bits_per_second / 8!r}Bps"'
            f' latency="{link.latency_seconds!r}s"/>'
        )
    for src, dst in itertools.permutations(topology.hosts, 2):
        route = (topology.links[link].name for link in topology.route(src.index, dst.index))
        steps = "".join(f"<link_ctn id={quoteattr(name)}/>" for name in route)
        ends = f"src={quoteattr(src.name)} dst={quoteattr(dst.name)}"
        lines.append(f'    <route {ends} symmetrical="NO">{steps}</route>')
    return "\n".join([*lines, "  </zone>", "</platform>", ""])


_EARTH_METRES = 6_371_000.0
# Light in fibre: two thirds of c. Cables are longer than great circles, which is left out and said.
_FIBRE_METRES_PER_SECOND = 2e8

_LABEL_PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# SONET's and SDH's levels (of 51.84 and 155.52 Mbit/s), Ethernet's, and plain rates.
_LABEL = re.compile(
    r"OC-?(\d+)c?|STM-?(\d+)c?|(\d+(?:\.\d+)?)\s*([KMGT])(?:bps|b/s|bit/s|bits/s|b|E|igE)?", re.IGNORECASE
)


def great_circle_metres(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Distance on the globe between two (latitude, longitude) in degrees (haversine formula).

    >>> round(great_circle_metres((40.7, -74.0), (51.5, -0.1)) / 1e3)
    5573
    """
    (lat1, lon1), (lat2, lon2) = (tuple(map(math.radians, point)) for point in (one, other))
    half = (
        math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    )
    return 2 * _EARTH_METRES * math.asin(min(math.sqrt(half), 1.0))


def read_graph(path: str | Path, text: str, assumed: Assumed) -> TopologyBuilder:
    """Read a graph: every node a host, every edge a link; latencies from coordinates are marked as estimated.

    In a directed graph an edge is one direction; parallel edges of a direction add up. Of a graph in pieces the largest
    is taken. Raises InputError for what is no graph, and for edges without rate or latency where nothing is assumed.
    """
    name = Path(path).stem
    try:
        if not text.lstrip().startswith("<"):
            graph = _parse_gml(text)
        else:
            if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
                raise InputError(f"{path}: has a document type definition, which is not read: remove it")
            if len(re.findall(r"<graph[\s>]", text)) > 1:
                raise InputError(f"{path}: has several graphs: keep one of them")
            graph = nx.parse_graphml(text)
    except InputError:
        raise
    except Exception as error:
        line = printable(f"{type(error).__name__}: {error}")
        raise InputError(f"{path}: is no graph that can be read: {line}") from None
    connections: dict[tuple[Any, Any], tuple[list[_Edge], list[_Edge]]] = {}
    not_read = set[str]()
    num_loops = 0
    for kind, entries in (("node", graph.nodes.values()), ("edge", graph.edges.values())):
        for facts in entries:
            facts.update({**graph.graph.get(f"{kind}_default", {}), **facts})
    for source, target, facts in graph.edges(data=True):
        num_loops += source == target
        if source != target:
            is_back = (target, source) in connections
            both = connections.setdefault((target, source) if is_back else (source, target), ([], []))
            with locate_errors(f"{path}: {printable(source)} to {printable(target)}"):
                edge = _read_edge(facts)
            not_read |= edge.not_read.keys()
            for direction in (0, 1) if not graph.is_directed() else (int(is_back),):
                both[direction].append(edge)
    if not connections:
        raise InputError(f"{path}: has no links")
    pieces = sorted(nx.connected_components(nx.Graph(list(connections))), key=len, reverse=True)
    sources = [f"{name}: {Path(path).name}, a graph of {format_count(graph.number_of_nodes(), 'node')}."]
    if len(pieces) > 1 or len(pieces[0]) < graph.number_of_nodes():
        sources.append(f"Of its pieces the largest, of {format_count(len(pieces[0]), 'node')}.")
    taken: dict[str, str] = {}
    texts = {node: facts.get("label", node) for node, facts in graph.nodes(data=True)}
    uses = Counter(texts.values())
    label = {
        node: safe_name(f"{text}" if uses[text] == 1 else f"{text}-{node}", taken)
        for node, text in texts.items()
        if node in pieces[0]
    }
    builder = TopologyBuilder(name, sources, hosts=list(label.values()))
    for (source, target), both in connections.items():
        if source in label:
            builder.links.append(_graph_link(path, label, graph.nodes, (source, target), both, assumed))
    builder.sources.append(
        "Latencies marked as estimated are great-circle distances at 200,000 km/s; cables are longer."
    )
    of_nodes = {
        key
        for facts in graph.nodes.values()
        for key in facts
        if key != "label" and (key.lower() not in _COORDINATES or _coordinates(facts) is None)
    }
    of_graph = graph.graph.keys() - {"node_default", "edge_default"}
    for whose, names in (("edges'", not_read), ("nodes'", of_nodes), ("the graph's", of_graph)):
        builder.not_read += [f"{whose} {', '.join(sorted(names))}"] if names else []
    builder.not_read += [f"{format_count(num_loops, 'edge')} of a node with itself"] if num_loops else []
    telling = sorted(key for key in not_read | of_nodes | of_graph if _QUANTITIES.search(key))
    if telling:
        builder.remarks.append(
            f"{', '.join(telling)}: not read (a name or suffix that is not known, not one figure from 0 up with its"
            " unit in value or name, or another attribute has the figure): give them as '10 ms' or latency_ms, or"
            " write their figures into the topology by hand"
        )
    return builder


_COORDINATES = {"lat", "latitude", "lon", "lng", "long", "longitude"}
_QUANTITIES = re.compile(r"latency|delay|rtt|loss|bandwidth|capacity|rate|speed|throughput", re.IGNORECASE)
_NAMES = re.compile(
    r"(?:link|edge|mean|avg)?[ _-]?(?:(?P<rtt>rtt|round[ _-]?trip(?:[ _-]?time)?)|(?P<latency>latency|delay)"
    r"|(?P<loss>(?P<is_share>packet[ _-]?loss)|loss(?:[ _-]?rate)?)"
    r"|(?P<rate>LinkSpeedRaw|bandwidth|bw|capacity|speed|throughput|(?:data|bit)?[ _-]?rate))"
    r"(?:[ _(\[-]+(?P<unit>[a-z/_%\u00b5\u03bc]+)[)\]]*|(?P<glued>[a-z]{2,}))?",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?) ?([a-z/%\u00b5\u03bc]*)", re.IGNORECASE)
_TIMES = re.compile(r"(nano|micro|milli|[num\u00b5\u03bc]?)s(?:ec(?:onds?)?)?", re.IGNORECASE)
_TIME_UNITS = {"": "s", "m": "ms", "milli": "ms", "n": "ns", "nano": "ns"}  # any other is us
_RATES = re.compile(r"((?:[kmgt]i?)?)(?:bps|bits?(?:[/_]?s(?:ec)?)?)", re.IGNORECASE)
_PERCENT = {"%", "percent", "pct"}
_BYTES = re.compile(r"B(?!it)")  # a letter that may stand for bytes


@dataclass
class _Edge:
    """Figures of an edge in SI units, None where it has none.

    Attributes:
        label: text that the rate was read from, where that is a label.
        not_read: attributes that were not read.
    """

    bits_per_second: float | None = None
    latency_seconds: float | None = None
    loss: float | None = None
    label: str = ""
    not_read: dict[str, Any] = field(default_factory=dict)


def _read_edge(facts: Mapping[str, Any]) -> _Edge:
    """Read each figure from the first attribute that has it; a rate from its label where no attribute has it."""
    edge = _Edge(not_read=dict(facts))

    def read(names: Iterable[str], kind: str, value: float) -> bool:
        is_first = getattr(edge, kind) is None
        if is_first:
            setattr(edge, kind, value)
        if value == getattr(edge, kind):
            for name in names:
                edge.not_read.pop(name, None)
        return is_first

    for key in sorted(facts, key=lambda key: (key != "LinkSpeedRaw", key)):
        if (found := _quantity(key, str(facts[key]).strip())) is not None:
            read([key], *found)
    for names in (("LinkLabel",), ("LinkSpeed", "LinkSpeedUnits")):
        text = "".join(str(facts.get(name, "")) for name in names).strip()
        if (rated := _label_rate(text)) and read(names, "bits_per_second", rated):
            edge.label = text
    return edge


def _quantity(name: str, text: str) -> tuple[str, float] | None:
    """Field of an edge that an attribute gives and its value; None where it is not known, or has no unit.

    Units in name and value must agree, and nothing else may follow the name.

    >>> _quantity("delay_ms", "10"), _quantity("Bandwidth", "1.5 Gbps"), _quantity("latency", "10")
    (('latency_seconds', 0.01), ('bits_per_second', 1500000000.0), None)
    >>> _quantity("bandwidth_down", "1 Gbps"), _quantity("latency_jitter", "5 ms"), _quantity("delay_ms", "1 s")
    (None, None, None)
    """
    named, figure = _NAMES.fullmatch(name), _FIGURE.fullmatch(text)
    if named is None:
        return None
    is_raw = name == "LinkSpeedRaw"
    suffix = "" if is_raw else named["unit"] or named["glued"] or ""
    values = set[float | None]()
    if named["rate"] and not suffix and (labelled := _label_rate(text)):
        values = {labelled}
    elif figure is not None:
        units = {suffix, figure[2]} - {""} or {"bit/s" if is_raw else ""}
        values = {_in_unit(named, figure[1], unit) for unit in units}
    if len(values) != 1 or (value := values.pop()) is None or (named["rate"] and not value):
        return None
    return "bits_per_second" if named["rate"] else "loss" if named["loss"] else "latency_seconds", value


def _in_unit(named: re.Match[str], number: str, unit: str) -> float | None:
    """A figure of an attribute of this name in SI units; None where that is no unit of such figures."""
    if named["rate"] and not _BYTES.search(unit) and (rated := _RATES.fullmatch(unit)):
        prefix = {"k": "k"}.get(rated[1].lower(), rated[1].capitalize())
        return parse_bits_per_second(f"{number} {prefix}bit/s")
    if named["loss"] and unit.lower() in _PERCENT:
        return parse_fraction(f"{number} %")
    if named["is_share"] and not unit:  # as Shadow documents it
        return parse_fraction(f"{Decimal(number) * 100} %")
    if (named["latency"] or named["rtt"]) and (timed := _TIMES.fullmatch(unit)):
        seconds = parse_seconds(f"{number} {_TIME_UNITS.get(timed[1].lower(), 'us')}")
        return seconds / 2 if named["rtt"] else seconds
    return None


def _parse_gml(text: str) -> Any:
    """Parse GML; parallel edges need no `multigraph 1`, which files of the Topology Zoo leave out."""
    try:
        return nx.parse_gml(text.splitlines(), label="id")
    except nx.NetworkXError as error:
        if "is duplicated" not in str(error):
            raise
    return nx.parse_gml(
        re.sub(r"graph\s*\[", "graph [ multigraph 1 ", text, count=1).splitlines(), label="id"
    )


def _graph_link(
    path: str | Path,
    label: Mapping[Any, str],
    nodes: Any,
    ends: tuple[Any, Any],
    both: tuple[list[_Edge], list[_Edge]],
    assumed: Assumed,
) -> LinkLine:
    """A connection, from its edges there and back."""
    notes = []
    one, other = (label[end] for end in ends)
    edges = [*both[0], *both[1]]
    unread = dict(
        sorted(pair for edge in edges for pair in edge.not_read.items() if _QUANTITIES.search(pair[0]))
    )
    given = ", ".join(f"{printable(name)} {shown(value)}" for name, value in unread.items())
    hint = f" ({given}: not read, for want of one figure with its unit in value or name)" if given else ""

    def note_one_sided(field: str, noun: str) -> None:
        if sum(any(getattr(edge, field) is not None for edge in each) for each in both) == 1:
            notes.append(f"{noun} of one direction, assumed for the other")

    note_one_sided("bits_per_second", "rate")
    up, down = (sum(edge.bits_per_second or 0.0 for edge in each) or None for each in both)
    if up is None and down is None:
        missing = "no rate with a unit, LinkSpeedRaw or label with a rate"
        up = down = assumed.rate(f"{path}: {one} to {other}: {missing}{hint}: assume a rate", notes)
    elif up is None or down is None:
        up = down = up or down
    elif (num := max(map(len, both))) > 1:
        some = ", some without a rate" if any(edge.bits_per_second is None for edge in edges) else ""
        notes.append(f"{num} parallel links together{some}")
    if labels := {edge.label for edge in edges if edge.label}:
        notes.append(f"rate by its label {' and '.join(sorted(labels))}")
    here, there = (_coordinates(nodes[end]) for end in ends)
    latencies = [edge.latency_seconds for edge in edges if edge.latency_seconds is not None]
    note_one_sided("latency_seconds", "latency")
    if latencies:
        latency = sum(latencies) / len(latencies)
        if min(latencies) < max(latencies):
            notes.append(
                f"mean of latencies from {milliseconds(min(latencies))} to {milliseconds(max(latencies))}"
            )
    elif here is not None and there is not None:
        latency = great_circle_metres(here, there) / _FIBRE_METRES_PER_SECOND
        notes.append("latency estimated from coordinates")
    else:
        missing = "no latency with a unit, nor coordinates"
        latency = assumed.latency(f"{path}: {one} to {other}: {missing}{hint}: assume a latency", notes)
    losses = {edge.loss for edge in edges if edge.loss is not None}
    if len(losses) > 1:
        notes.append("loss: the largest, for both directions")
    else:
        note_one_sided("loss", "loss")
    assert up is not None
    assert down is not None
    return LinkLine.between(one, other, (up, down), latency, "; ".join(notes), max(losses, default=0.0))


def _label_rate(text: str) -> float | None:
    """Bits per second by a label that leaves no doubt; none where a B may stand for bytes.

    >>> _label_rate("OC-192c"), _label_rate("2.5 Gbps"), _label_rate("10-20Gbps"), _label_rate("1 GB/s")
    (9953280000.0, 2500000000.0, None, None)
    """
    match = _LABEL.fullmatch(text)
    if match is None or _BYTES.search(text):
        return None
    carrier, transport, number, prefix = match.groups()
    if number is None:
        return 51.84e6 * (float(carrier) if carrier else 3 * float(transport))
    return float(number) * _LABEL_PREFIXES[prefix.upper()]


def _coordinates(facts: Mapping[str, Any]) -> tuple[float, float] | None:
    """Latitude and longitude of a node; None if it has none.

    >>> _coordinates({"lat": 50.1, "lon": "8.7"}), _coordinates({"Latitude": 50.1})
    ((50.1, 8.7), None)
    """
    given = [(key.lower()[:3] != "lat", value) for key, value in facts.items() if key.lower() in _COORDINATES]
    try:
        found = {is_longitude: float(value) for is_longitude, value in given}
    except (TypeError, ValueError):
        return None
    if len(given) != 2 or len(found) != 2 or not (abs(found[False]) <= 90 and abs(found[True]) <= 360):
        return None
    return found[False], found[True]


_MOST_PEERS = 4000  # class numbers are hexadecimal, four digits


def address_file(topology: Topology) -> str:
    """Write `addresses.sh`, which every script reads: a variable for each host's address, to be filled in."""
    lines = [
        f"# The addresses of the hosts of {on_one_line(topology.name)}: fill in what they really are.",
        *(f"address_{host.index}=192.0.2.{host.index + 1}  # {host.name}" for host in topology.hosts[:250]),
        *(f"address_{host.index}=  # {host.name}" for host in topology.hosts[250:]),
    ]
    return "\n".join(lines) + "\n"


def shaping_script(topology: Topology, host: int) -> str:
    """Write the script that shapes one host's traffic: its own link, and rate, one-way latency and loss to each peer.

    Links that routes of several hosts share (a WAN link between regions) are not shared here: each pair gets the full
    rate. Latency is one-way, so both ends run their script.

    Raises InputError for more than 4,000 peers.
    """
    if len(topology.hosts) > _MOST_PEERS:
        raise InputError(f"{topology.name}: tc scripts are for up to {_MOST_PEERS} hosts")
    own = topology.hosts[host]
    others = [peer for peer in topology.hosts if peer.index != host and topology.route(host, peer.index)]
    first = {topology.route(host, peer.index)[0] for peer in others}
    line = sum(_wire_rate(topology.links[link]) for link in first)
    lines = [
        "#!/bin/sh",
        f"# What leaves {own.name} in the network {on_one_line(topology.name)}.",
        f"# As root: sh {own.name}.sh DEVICE; needs addresses.sh next to it. Undo: tc qdisc del dev DEVICE root",
        "set -eu",
        "device=${1:?usage: sh SCRIPT DEVICE}",
        '. "$(dirname "$0")/addresses.sh"',
        'tc qdisc replace dev "$device" root handle 1: htb default 1',
        'tc class add dev "$device" parent 1: classid 1:1 htb rate 100gbit  # all else',
        f'tc class add dev "$device" parent 1: classid 1:2 htb rate {_bits(line)}',
    ]
    for number, peer in enumerate(others, 16):
        # A class with at least its share of the host's own link, and at most the route's rate.
        links = [topology.links[link] for link in topology.route(host, peer.index)]
        rate = min(map(_wire_rate, links))
        least = _bits(min(line / len(others), rate))
        seconds = topology.route_latency_seconds(host, peer.index)
        loss = 1 - math.prod(1 - link.loss for link in links if not link.measured_streams)
        lost = f" loss {loss * 100:.6g}%" if loss else ""
        # netem queues packets in flight: twice the bandwidth-delay product, in full frames.
        frame = PRESETS["linux-tcp"].over(links).mtu_bytes + 14  # Ethernet's header
        limit = max(1000, math.ceil(2 * rate * seconds / 8 / frame))
        handle, add = f"{number:x}", 'tc {} add dev "$device"'.format
        lines += [
            f"# to {peer.name}",
            f"{add('class')} parent 1:2 classid 1:{handle} htb rate {least} ceil {_bits(rate)}",
            f"{add('qdisc')} parent 1:{handle} handle {handle}: netem delay {seconds * 1e6:.0f}us{lost} limit {limit}",
            f"{add('filter')} parent 1: protocol ip u32 match ip dst"
            f' "$address_{peer.index}"/32 flowid 1:{handle}',
        ]
    return "\n".join(lines) + "\n"


def _wire_rate(link: Link) -> float:
    """Bits per second on the wire; of a measured link those that carry its goodput."""
    share = PRESETS["linux-tcp"].over([link]).payload_share if link.measured_streams else 1.0
    return link.bits_per_second / share


def _bits(bits_per_second: float) -> str:
    return f"{max(bits_per_second, 8):.0f}bit"
