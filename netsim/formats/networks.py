"""Network files of other tools: SimGrid's platforms, ASTRA-sim's networks, GraphML and GML, tc scripts.

**SimGrid**: one zone with full routing, or a cluster without a backbone. Its links have no ends, only routes that lead
over them. Ours are written as `a->b`, which names both; such files are read back as they were. Of others, routes of one
link lead from host to host, and routes of two links, each one host's own, make a star. Elsewhere each link becomes one
between two routers of its own, over which routes lead as listed: transfers that share it in SimGrid share it here, in
both directions together.

**ASTRA-sim** (analytical backend): dimensions of rings, switches and full meshes.

    topology: [ Ring, Switch ]      # a building block a dimension
    npus_count: [ 4, 2 ]            # their product is the number of NPUs
    bandwidth: [ 100.0, 50.0 ]      # GB/s a link; ASTRA-sim's GB are 2^30 bytes (bw_GBps_to_Bpns in its source)
    latency: [ 500.0, 1000.0 ]      # ns a link

**GraphML and GML**, as the Internet Topology Zoo has them: coordinates and link speeds.

**tc**: a shell script a host, with htb, netem and u32, makes a simulated network real on Linux hosts.

XML is read without definitions: those are how small files become large ones, and read other files.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import networkx as nx
from pydantic import ConfigDict, Field

from netsim.errors import InputError, printable
from netsim.files.schemas import Schema, validate_document
from netsim.formats.builder import (
    Assumed,
    LinkLine,
    TopologyBuilder,
    milliseconds,
    on_one_line,
    rate,
    safe_name,
)
from netsim.topology.protocol import PRESETS
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping
    from xml.etree.ElementTree import Element

    from netsim.files.documents import Document
    from netsim.topology.graph import Host, Link
    from netsim.topology.topology import Topology

__all__ = [
    "address_file",
    "great_circle_metres",
    "parse_xml",
    "read_astrasim",
    "read_graph",
    "read_simgrid",
    "refuse_definitions",
    "shaping_script",
    "write_astrasim",
    "write_simgrid",
]

_SIMGRID = re.compile(
    r'<!DOCTYPE\s+platform\s+SYSTEM\s+"(?:https?://simgrid\.(?:org|gforge\.inria\.fr)/(?:simgrid/)?)?simgrid\.dtd"\s*>'
)


def refuse_definitions(path: str | Path, text: str) -> None:
    """Raise InputError where there is a document type or an entity."""
    upper = text.upper()
    if "<!DOCTYPE" in upper or "<!ENTITY" in upper:
        raise InputError(f"{path}: has a document type definition, which is not read: remove it")


def parse_xml(path: str | Path, text: str) -> ElementTree.Element:
    """The root element. Only the line that names SimGrid's own definition is left out; any other is refused."""
    text = _SIMGRID.sub("", text, count=1)
    refuse_definitions(path, text)
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise InputError(f"{path}: is no XML: {error}") from None


_QUANTITY = re.compile(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")
_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
}
_RATES = {
    prefix + unit: factor * bits
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("Bps", 8), ("bps", 1))
}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12, "m": 60.0, "h": 3600.0}
_MOST_ROUTES = 1_000_000
_MUCH_WIDER = 1000.0  # than the widest link: a joint between links, which limits nothing
_OPPOSITE = {"UP": "DOWN", "DOWN": "UP"}

_Figures = tuple[float, float]  # bits per second, seconds
_Route = tuple[str, str, list[str]]


def write_simgrid(topology: Topology) -> str:
    """A platform of version 4.1 with hosts, a link each direction and a route for each pair of hosts.

    SimGrid's own corrections (`network/bandwidth-factor`, `latency-factor`, `weight-S`, TCP windows) are for its users
    to set; with all off it shares as the protocol `ideal` does. Raises InputError for more than 1,000 hosts.
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


def read_simgrid(path: str | Path, text: str) -> TopologyBuilder:
    """The network of a platform file. Raises InputError for what is no platform, or another kind of one."""
    root = parse_xml(path, text)
    if root.tag != "platform":
        raise InputError(f"{path}: is no SimGrid platform: its root is not <platform>")
    clusters = list(root.iter("cluster"))
    hosts = [_attribute(path, host, "id") for host in root.iter("host")]
    sources = [f"{Path(path).name}: SimGrid platform, version {root.get('version', 'unknown')}."]
    builder = TopologyBuilder(Path(path).stem, sources)
    if clusters and not hosts:
        for number, cluster in enumerate(clusters):
            _add_cluster(path, builder, cluster, number)
        if len(clusters) > 1:
            raise InputError(
                f"{path}: {len(clusters)} clusters and their zones' routes: only one cluster is read"
            )
        return builder
    for zone in (*root.iter("zone"), *root.iter("AS")):
        if zone.get("routing", "Full").lower() not in ("full", "none"):
            raise InputError(
                f"{path}: routing {zone.get('routing')!r}: only zones with full routing are read"
            )
    if next(root.iter("zoneRoute"), next(root.iter("ASroute"), None)) is not None:
        raise InputError(f"{path}: zones with routes between them: only one zone is read")
    figures = _simgrid_links(path, root)
    routes = _simgrid_routes(path, root)
    if not hosts or not routes or clusters:
        raise InputError(f"{path}: expected a zone with full routing (hosts, links, routes), or one cluster")
    if len(set(hosts)) < len(hosts):
        raise InputError(f"{path}: two hosts have one id: give each its own")
    for src, dst, steps in routes:
        for end in {src, dst} - set(hosts):
            raise InputError(f"{path}: a route begins or ends at host {end!r}, which is not there")
        for step in steps:
            if step not in figures:
                raise InputError(f"{path}: a route goes over link {step!r}, which is not there")
    seen = {(src, dst) for src, dst, _ in routes}
    for src, dst in itertools.permutations(hosts, 2):
        if (src, dst) not in seen:
            raise InputError(
                f"{path}: no route from {src!r} to {dst!r}: full routing needs one between every two hosts"
            )
    builder.hosts = list(hosts)
    named = [name.split("->") for name in figures]
    if all(len(ends) == 2 for ends in named):
        builder.routers = sorted({end for ends in named for end in ends} - set(hosts))
        builder.links = _joined({(one, other): figures[f"{one}->{other}"] for one, other in named})
        builder.through = {
            (src, dst): [step.split("->")[1] for step in steps][:-1] for src, dst, steps in routes
        }
        return builder
    _from_routes(path, builder, routes, figures)
    return builder


def _from_routes(
    path: str | Path, builder: TopologyBuilder, routes: list[_Route], figures: dict[str, _Figures]
) -> None:
    """Ends of links by the routes over them."""
    taken: dict[str, str] = {}
    builder.hosts = [safe_name(host, taken) for host in builder.hosts]
    lengths = {len(steps) for _, _, steps in routes}
    own = _star(routes) if lengths == {2} else None
    if lengths == {1}:
        directed = {(taken[src], taken[dst]): figures[step] for src, dst, (step,) in routes}
        builder.are_ends_measured = True
    elif own is not None:
        builder.routers = [safe_name("switch", taken)]
        directed = {(taken[src], builder.routers[0]): figures[step] for src, step in own[0].items()}
        directed |= {(builder.routers[0], taken[dst]): figures[step] for dst, step in own[1].items()}
    else:
        _over_shared_links(builder, routes, figures, taken)
        return
    builder.sources.append("A link that SimGrid shares between both directions is given to each here.")
    builder.links = _joined(directed)


def _star(routes: list[_Route]) -> tuple[dict[str, str], dict[str, str]] | None:
    """Each host's own link out and in, where every route goes over the one of its begin and the other of its end."""
    first, last = dict[str, str](), dict[str, str]()
    for src, dst, (out, into) in routes:
        if first.setdefault(src, out) != out or last.setdefault(dst, into) != into:
            return None
    return (first, last) if len(set(first.values())) == len(first) else None


def _over_shared_links(
    builder: TopologyBuilder, routes: list[_Route], figures: dict[str, _Figures], taken: dict[str, str]
) -> None:
    """Every link between two routers of its own, which all that go over it pass in the same direction."""
    used = list(dict.fromkeys(step for _, _, steps in routes for step in steps))
    ends = {step: (safe_name(f"{step}.in", taken), safe_name(f"{step}.out", taken)) for step in used}
    builder.routers = [router for pair in ends.values() for router in pair]
    for step, (into, out) in ends.items():
        rate, seconds = figures[step]
        builder.links.append(LinkLine(into, out, rate, rate, seconds, comment=f"link {step}"))
    wide = _MUCH_WIDER * max(figures[step][0] for step in used)
    joints: dict[tuple[str, str], None] = {}
    for src, dst, steps in routes:
        through = [router for step in steps for router in ends[step]]
        builder.through[taken[src], taken[dst]] = through
        nodes = [taken[src], *through, taken[dst]]
        for one, other in itertools.pairwise(nodes):
            if (one, other) not in ends.values():
                joints[min(one, other), max(one, other)] = None
    builder.links += [
        LinkLine(one, other, wide, wide, 0.0, comment="a joint, no limit") for one, other in joints
    ]
    builder.sources.append(
        "Its links have no ends: each is one between two routers, shared by all whose routes it is on, and joints "
        "without limit lead from one to the next."
    )


def _joined(directed: dict[tuple[str, str], _Figures]) -> list[LinkLine]:
    """Both directions of each connection in one entry; the latency is the larger one where they differ."""
    joined = []
    for (one, other), (up, seconds) in directed.items():
        back = directed.get((other, one))
        if back is not None and (other, one) < (one, other):
            continue
        down, back_seconds = back if back is not None else (up, seconds)
        comment = "" if seconds == back_seconds else "latency differs by direction: the larger one"
        joined.append(LinkLine(one, other, up, down, max(seconds, back_seconds), comment=comment))
    return joined


def _simgrid_links(path: str | Path, root: Element) -> dict[str, _Figures]:
    """Links by id; one that is split by direction is two, as SimGrid itself names them."""
    found: dict[str, _Figures] = {}
    for link in root.iter("link"):
        name, figures = _attribute(path, link, "id"), _link_figures(path, link)
        found[name] = figures
        if link.get("sharing_policy") == "SPLITDUPLEX":
            found[f"{name}_UP"] = found[f"{name}_DOWN"] = figures
    return found


def _simgrid_routes(path: str | Path, root: Element) -> list[_Route]:
    routes = []
    for route in root.iter("route"):
        src, dst = _attribute(path, route, "src"), _attribute(path, route, "dst")
        steps = []
        for step in route.iter("link_ctn"):
            direction = step.get("direction", "")
            steps.append(_attribute(path, step, "id") + (f"_{direction}" if direction in _OPPOSITE else ""))
        if src == dst:
            continue
        if not steps:
            raise InputError(f"{path}: the route from {src!r} to {dst!r} has no links")
        routes.append((src, dst, steps))
        if route.get("symmetrical", "YES").upper() != "NO":
            routes.append((dst, src, [_turned(step) for step in steps[::-1]]))
    return routes


def _turned(step: str) -> str:
    """The other direction of a link that is split by direction."""
    name, _, direction = step.rpartition("_")
    return f"{name}_{_OPPOSITE[direction]}" if name and direction in _OPPOSITE else step


def _add_cluster(path: str | Path, builder: TopologyBuilder, cluster: Element, number: int) -> None:
    """A star of equal links; a backbone is an extra latency, and its rate is left out, with a remark."""
    radical = _attribute(path, cluster, "radical")
    if cluster.get("topology", "FLAT").upper() != "FLAT":
        raise InputError(f"{path}: a cluster that is a {cluster.get('topology')}: only flat ones are read")
    prefix, suffix = cluster.get("prefix", ""), cluster.get("suffix", "")
    router = f"switch{number}"
    builder.routers.append(router)
    rate, seconds = _link_figures(path, cluster, "bw", "lat")
    backbone = _quantity(path, cluster, "bb_lat", _TIMES) if cluster.get("bb_lat") else 0.0
    if cluster.get("bb_bw"):
        builder.sources.append("The cluster's backbone is taken to be no bottleneck.")
    taken: dict[str, str] = {}
    for part in radical.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit() or int(high or low) - int(low) > 20_000:
            raise InputError(f"{path}: cluster: radical {radical[:40]!r} is no list of numbers such as 0-15")
        for index in range(int(low), int(high or low) + 1):
            host = safe_name(f"{prefix}{index}{suffix}", taken)
            builder.hosts.append(host)
            builder.links.append(LinkLine(host, router, rate, rate, seconds + backbone / 2))


def _link_figures(
    path: str | Path, element: Element, rate_key: str = "bandwidth", time_key: str = "latency"
) -> _Figures:
    seconds = _quantity(path, element, time_key, _TIMES) if element.get(time_key) else 0.0
    return _quantity(path, element, rate_key, {**_RATES, "": 8.0}), seconds


def _quantity(path: str | Path, element: Element, key: str, units: dict[str, float]) -> float:
    text = _attribute(path, element, key)
    match = _QUANTITY.fullmatch(text)
    if match is None or match.group(2) not in units:
        raise InputError(f"{path}: <{element.tag}> {key}={text[:40]!r}: expected a number with its unit")
    return float(match.group(1)) * units[match.group(2)]


def _attribute(path: str | Path, element: Element, key: str) -> str:
    value = element.get(key)
    if not value:
        raise InputError(f"{path}: <{element.tag}> has no {key}")
    return value


_MOST_NPUS = 4096
_GB_BITS = 8 * 2**30


class _AstraSim(Schema):
    """A network file of ASTRA-sim: in each list an entry a dimension."""

    model_config = ConfigDict(extra="ignore")

    topology: Annotated[list[Literal["FullyConnected", "Ring", "Switch"]], Field(min_length=1)]
    npus_count: list[Annotated[int, Field(ge=1)]]
    bandwidth: list[Annotated[float, Field(ge=0)]]
    latency: list[Annotated[float, Field(ge=0)]]


def read_astrasim(document: Document) -> TopologyBuilder:
    """A host for each NPU, a router for each switch. Raises InputError for what the format does not allow."""
    path, keys = document.where, _AstraSim.model_fields.keys()
    if not isinstance(document.data, dict) or not keys <= document.data.keys():
        raise InputError(f"{path}: is no network file of ASTRA-sim: it needs {', '.join(keys)}")
    file = validate_document(_AstraSim, document)
    blocks, counts, rates, latencies = file.topology, file.npus_count, file.bandwidth, file.latency
    if not len(blocks) == len(counts) == len(rates) == len(latencies):
        raise InputError(f"{path}: topology, npus_count, bandwidth and latency need as many entries each")
    if math.prod(counts) > _MOST_NPUS:
        raise InputError(f"{path}: {math.prod(counts):,} NPUs are more than {_MOST_NPUS:,}")
    shape = " x ".join(f"{block}({count})" for block, count in zip(blocks, counts, strict=True))
    builder = TopologyBuilder(Path(path).stem, [f"{Path(path).name}: ASTRA-sim network {shape}."])
    # Positions in the order of NPU numbers: the first dimension counts fastest.
    places = itertools.product(*(range(count) for count in reversed(counts)))
    names = {at[::-1]: f"npu{number}" for number, at in enumerate(places)}
    builder.hosts = list(names.values())
    for dim, (block, count) in enumerate(zip(blocks, counts, strict=True)):
        figures = (rates[dim] * _GB_BITS, latencies[dim] * 1e-9, f"dimension {dim}, {block}")
        groups = sorted({(*at[:dim], 0, *at[dim + 1 :]) for at in names})
        for number, base in enumerate(groups):
            members = [names[(*base[:dim], index, *base[dim + 1 :])] for index in range(count)]
            _connect_dimension(builder, block, members, f"switch{dim}.{number}", figures)
    return builder


def _connect_dimension(
    builder: TopologyBuilder, block: str, members: list[str], switch: str, figures: tuple[float, float, str]
) -> None:
    bits_per_second, seconds, comment = figures
    if len(members) == 1:
        return
    if block == "Switch":
        builder.routers.append(switch)
        pairs = [(member, switch) for member in members]
    elif block == "Ring":
        around = zip(members, members[1:] + members[:1], strict=True)
        pairs = sorted({(min(pair), max(pair)) for pair in around}, key=lambda pair: members.index(pair[0]))
    else:
        pairs = list(itertools.combinations(members, 2))
    for one, other in pairs:
        builder.links.append(LinkLine(one, other, bits_per_second, bits_per_second, seconds, comment=comment))


def write_astrasim(topology: Topology) -> str:
    """The network file of a topology of one dimension: a switch, a full mesh or a ring of equal links.

    Raises InputError for others, of which the format can say nothing.
    """
    num = len(topology.hosts)
    figures = {(link.bits_per_second, link.latency_seconds) for link in topology.links}
    ends = {(link.source, link.target) for link in topology.links}
    neighbours = [{target for source, target in ends if source == host.name} for host in topology.hosts]
    degrees = {len(near) for near in neighbours}
    shapes = {
        "Switch": len(topology.routers) == 1 and all(near == set(topology.routers) for near in neighbours),
        "FullyConnected": not topology.routers and degrees == {num - 1},
        "Ring": not topology.routers and degrees == {2},
    }
    block = next((shape for shape, fits in shapes.items() if fits and len(figures) == 1 and num > 1), None)
    if block is None:
        raise InputError(
            f"{topology.name}: ASTRA-sim's network files know a switch, a full mesh or a ring of equal links only: "
            "export as simgrid, or give each region a topology of its own"
        )
    ((bits_per_second, seconds),) = figures
    gigabytes = float(f"{bits_per_second / _GB_BITS:.8g}")  # as many digits as topology files keep
    return (
        f"topology: [ {block} ]\nnpus_count: [ {num} ]\n"
        f"bandwidth: [ {gigabytes!r} ]  # GB/s, 2^30 bytes\nlatency: [ {seconds * 1e9!r} ]  # ns\n"
    )


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

    Of a graph in pieces the largest is taken. Raises InputError for what is no graph, and for edges without speed or
    latency where nothing is assumed.
    """
    name = Path(path).stem
    try:
        if Path(path).suffix.lower() == ".gml":
            graph = _parsed_gml(text)
        else:
            refuse_definitions(path, text)
            graph = nx.parse_graphml(text)
    except InputError:
        raise
    except Exception as error:
        line = printable(f"{type(error).__name__}: {error}")
        raise InputError(f"{path}: is no graph that can be read: {line}") from None
    plain: Any = nx.Graph()
    for source, target, facts in graph.edges(data=True):
        if source != target:
            known = plain.get_edge_data(source, target, {"edges": []})["edges"]
            plain.add_edge(source, target, edges=[*known, facts])
    if not plain:
        raise InputError(f"{path}: has no links")
    pieces = sorted(nx.connected_components(plain), key=len, reverse=True)
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
    for source, target, facts in plain.edges(data=True):
        if source in label:
            builder.links.append(_graph_link(label, graph.nodes, source, target, facts["edges"], assumed))
    builder.sources.append(
        "Latencies marked as estimated are great-circle distances at 200,000 km/s; cables are longer."
    )
    return builder


def _parsed_gml(text: str) -> Any:
    """The Topology Zoo's files have parallel edges without saying so, which the format asks for."""
    try:
        return nx.parse_gml(text.splitlines(), label="id")
    except nx.NetworkXError as error:
        if "is duplicated" not in str(error):
            raise
    return nx.parse_gml(
        re.sub(r"graph\s*\[", "graph [ multigraph 1 ", text, count=1).splitlines(), label="id"
    )


def _graph_link(
    label: Mapping[Any, str],
    nodes: Any,
    source: Any,
    target: Any,
    edges: list[dict[str, Any]],
    assumed: Assumed,
) -> LinkLine:
    notes = []
    speeds = [speed for edge in edges if (speed := _speed(edge)) is not None]
    speed = sum(speeds) or assumed.bits_per_second
    ends = f"{label[source]} to {label[target]}"
    if speed is None:
        raise InputError(f"{ends}: no LinkSpeedRaw, nor a label with a rate: assume a rate with --bandwidth")
    if not speeds:
        notes.append(f"rate assumed: {rate(speed)}")
    elif len(edges) > 1:
        notes.append(f"{len(edges)} parallel links together")
    labels = {
        str(edge["LinkLabel"])
        for edge in edges
        if not _is_positive(edge.get("LinkSpeedRaw")) and _speed(edge)
    }
    if labels:
        notes.append(f"rate by its label {' and '.join(sorted(labels))}")
    here, there = _coordinates(nodes[source]), _coordinates(nodes[target])
    if here is not None and there is not None:
        latency = great_circle_metres(here, there) / _FIBRE_METRES_PER_SECOND
        notes.append("latency estimated from coordinates")
    elif assumed.latency_seconds is not None:
        latency = assumed.latency_seconds
        notes.append(f"latency assumed: {milliseconds(latency)}")
    else:
        raise InputError(f"{ends}: no coordinates: assume a latency with --latency")
    return LinkLine(label[source], label[target], speed, speed, latency, comment="; ".join(notes))


def _speed(edge: Mapping[str, Any]) -> float | None:
    """Bits per second: as the file has them, or by a label that leaves no doubt, such as 'OC-192c' or '2.5 Gbps'.

    >>> _speed({"LinkLabel": "OC-192c"}), _speed({"LinkLabel": "2.5 Gbps"}), _speed({"LinkLabel": "10-20Gbps"})
    (9953280000.0, 2500000000.0, None)
    """
    if _is_positive(edge.get("LinkSpeedRaw")):
        return float(edge["LinkSpeedRaw"])
    match = _LABEL.fullmatch(str(edge.get("LinkLabel", "")).strip())
    if match is None:
        return None
    carrier, transport, number, prefix = match.groups()
    if number is None:
        return 51.84e6 * (float(carrier) if carrier else 3 * float(transport))
    return float(number) * _LABEL_PREFIXES[prefix.upper()]


def _is_positive(value: object) -> bool:
    try:
        return 0 < float(value) < math.inf  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _coordinates(facts: Mapping[str, Any]) -> tuple[float, float] | None:
    try:
        return float(facts["Latitude"]), float(facts["Longitude"])
    except (KeyError, TypeError, ValueError):
        return None


_MOST_PEERS = 4000  # class numbers are hexadecimal, four digits


def address_file(topology: Topology) -> str:
    """`addresses.sh`, which every script reads: one variable a host, to be filled in."""
    lines = [
        f"# The addresses of the hosts of {on_one_line(topology.name)}: fill in what they really are.",
        *(f"address_{host.index}=192.0.2.{host.index + 1}  # {host.name}" for host in topology.hosts[:250]),
        *(f"address_{host.index}=  # {host.name}" for host in topology.hosts[250:]),
    ]
    return "\n".join(lines) + "\n"


def shaping_script(topology: Topology, host: int) -> str:
    """Script that shapes one host's traffic: its own link, and rate, one-way latency and loss to each peer.

    What routes of several hosts share behind their own lines (a WAN link between regions) is not shared here: each pair
    gets its rate. Latency is one way, so both ends run their script.

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
        lines += _to_peer(topology, host, peer, f"{number:x}", line / len(others))
    return "\n".join(lines) + "\n"


def _to_peer(topology: Topology, host: int, peer: Host, handle: str, share: float) -> list[str]:
    """A class for each peer: at least its share of the host's own link, at most the route's rate."""
    links = [topology.links[link] for link in topology.route(host, peer.index)]
    rate = min(_wire_rate(link) for link in links)
    seconds = topology.route_latency_seconds(host, peer.index)
    loss = 1 - math.prod(1 - link.loss for link in links if not link.measured_streams)
    lost = f" loss {loss * 100:.6g}%" if loss else ""
    add = 'tc {} add dev "$device"'.format
    # netem holds what is on its way: twice the bandwidth-delay product, in full frames.
    limit = max(1000, math.ceil(2 * rate * seconds / 8 / 1514))
    return [
        f"# to {peer.name}",
        f"{add('class')} parent 1:2 classid 1:{handle} htb rate {_bits(min(share, rate))} ceil {_bits(rate)}",
        f"{add('qdisc')} parent 1:{handle} handle {handle}: netem delay {seconds * 1e6:.0f}us{lost} limit {limit}",
        f"{add('filter')} parent 1: protocol ip u32 match ip dst"
        f' "$address_{peer.index}"/32 flowid 1:{handle}',
    ]


def _wire_rate(link: Link) -> float:
    """Bits per second in frames: of a measured link those that carry its goodput."""
    share = PRESETS["linux-tcp"].payload_share if link.measured_streams else 1.0
    return link.bits_per_second / share


def _bits(bits_per_second: float) -> str:
    return f"{max(bits_per_second, 8):.0f}bit"
