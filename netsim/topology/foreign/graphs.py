"""Graphs with coordinates and link speeds: GraphML and GML, as the Internet Topology Zoo has them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from netsim.files.errors import InputError
from netsim.files.problems import printable
from netsim.topology.foreign.draft import Assumed, Draft, DraftLink, milliseconds, rate, safe_name
from netsim.topology.foreign.xml import refuse_definitions

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["great_circle_metres", "read_graph"]

_EARTH_METRES = 6_371_000.0
# Light in fibre: two thirds of c. Cables are longer than great circles, which is left out and said.
_FIBRE_METRES_PER_SECOND = 2e8

_PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
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


def read_graph(path: str | Path, text: str, assumed: Assumed) -> Draft:
    """Every node a host, every edge a link; latencies from coordinates are marked as estimated.

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
        told = printable(f"{type(error).__name__}: {error}")
        raise InputError(f"{path}: is no graph that can be read: {told}") from None
    plain: Any = nx.Graph()
    for source, target, facts in graph.edges(data=True):
        if source != target:
            known = plain.get_edge_data(source, target, {"edges": []})["edges"]
            plain.add_edge(source, target, edges=[*known, facts])
    if not plain:
        raise InputError(f"{path}: has no links")
    pieces = sorted(nx.connected_components(plain), key=len, reverse=True)
    sources = [f"{name}: {Path(path).name}, a graph of {graph.number_of_nodes()} nodes."]
    if len(pieces) > 1 or len(pieces[0]) < graph.number_of_nodes():
        sources.append(f"Of its pieces the largest, of {len(pieces[0])} nodes.")
    taken: dict[str, str] = {}
    label = {
        node: safe_name(f"{graph.nodes[node].get('label', node)}", taken)
        if _is_single(graph, node)
        else safe_name(f"{graph.nodes[node].get('label', node)}-{node}", taken)
        for node in graph.nodes
        if node in pieces[0]
    }
    draft = Draft(name, sources, hosts=list(label.values()))
    for source, target, facts in plain.edges(data=True):
        if source in label:
            draft.links.append(_link(label, graph.nodes, source, target, facts["edges"], assumed))
    draft.sources.append(
        "Latencies marked as estimated are great-circle distances at 200,000 km/s; cables are longer."
    )
    return draft


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


def _is_single(graph: Any, node: Any) -> bool:
    """Whether no other node has its label."""
    own = graph.nodes[node].get("label", node)
    return [facts.get("label", other) for other, facts in graph.nodes(data=True)].count(own) == 1


def _link(
    label: Mapping[Any, str],
    nodes: Any,
    source: Any,
    target: Any,
    edges: list[dict[str, Any]],
    assumed: Assumed,
) -> DraftLink:
    notes = []
    speeds = [speed for edge in edges if (speed := _speed(edge)) is not None]
    speed = sum(speeds) or assumed.bits_per_second
    ends = f"{label[source]} to {label[target]}"
    if speed is None:
        raise InputError(f"{ends}: no LinkSpeedRaw, nor a label that tells: assume a rate with --bandwidth")
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
    points = [_coordinates(nodes[node]) for node in (source, target)]
    if points[0] is not None and points[1] is not None:
        latency = great_circle_metres(points[0], points[1]) / _FIBRE_METRES_PER_SECOND
        notes.append("latency estimated from coordinates")
    elif assumed.latency_seconds is not None:
        latency = assumed.latency_seconds
        notes.append(f"latency assumed: {milliseconds(latency)}")
    else:
        raise InputError(f"{ends}: no coordinates: assume a latency with --latency")
    return DraftLink(label[source], label[target], speed, speed, latency, comment="; ".join(notes))


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
    return float(number) * _PREFIXES[prefix.upper()]


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
