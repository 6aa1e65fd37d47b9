"""The network on the page: bandwidth and latency by places, a drawing, and what links carried."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exogym_core.names import visible
from netsim.files.units import format_bits_per_second, format_seconds
from netsim.tools.picture import Sketch, positions
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Drawing", "draw_network", "link_use", "network_matrix"]

_MAX_PLACES = 24  # a larger matrix is not read by anyone, nor is a larger drawing
_SPANS = 120  # of the run's time, for each of which a link's mean use is told


def network_matrix(topology: Any) -> dict[str, Any] | None:
    """Bandwidth and one-way latency between regions (hosts, where there are none) as rows of texts.

    None without a topology, or where it has more places than a page can show.
    """
    if not isinstance(topology, dict):
        return None
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    places: dict[str, list[int]] = {}
    for host in network.hosts:
        places.setdefault(network.region_of(host.index), []).append(host.index)
    if not 1 < len(places) <= _MAX_PLACES:
        return None
    rows = []
    for source in places.values():
        row = []
        for target in places.values():
            ends = (source[0], target[-1])
            row.append("" if ends[0] == ends[1] else _path_text(network, *ends))
        rows.append(row)
    names = [visible(name, 30) for name in places]
    return {
        "name": visible(network.name, 80),
        "source": visible(network.source, 2000),
        "places": names,
        "rows": list(zip(names, rows, strict=True)),
    }


def _path_text(network: Topology, source: int, target: int) -> str:
    links = list(network.route(source, target))
    rate = min(float(network.bits_per_second[link]) for link in links)
    latency = network.route_latency_seconds(source, target)
    return f"{format_bits_per_second(rate)}\n{format_seconds(latency)}"


class Spot(NamedTuple):
    """A place as drawn: where its middle is, and its lines of text."""

    x: float
    y: float
    lines: Sequence[str]
    is_router: bool


class Half(NamedTuple):
    """One direction of a line between two places: the half at the place that it leaves.

    Attributes:
        link: its name, `from->to`.
        title: what it carries, and how long that takes.
    """

    x1: float
    y1: float
    x2: float
    y2: float
    width: float
    link: str
    title: str


class Drawing(NamedTuple):
    """A network laid out in a box: for the page, and once more for a telephone's."""

    name: str
    width: int
    height: int
    marks: Sequence[Spot]
    halves: Sequence[Half]


_BOXES = {"wide": (960, 420), "narrow": (340, 400)}
_MARGINS = {"wide": (110, 45), "narrow": (60, 40)}


def draw_network(topology: Any) -> list[Drawing]:
    """The drawing for a page, and that for a telephone; none without a topology, or with too many places."""
    if not isinstance(topology, dict):
        return []
    sketch = Sketch.of(Topology.from_mapping(topology, "experiment.yaml: topology"))
    if not 1 < len(sketch.places) <= _MAX_PLACES:
        return []
    spots = positions(sketch)
    fastest = max((rate for wire in sketch.wires for rate in wire.rates), default=1.0)
    drawings = []
    for name, (width, height) in _BOXES.items():
        aside, above = _MARGINS[name]
        at = [
            (
                round(width / 2 + float(x) * (width / 2 - aside), 1),
                round(height / 2 - float(y) * (height / 2 - above), 1),
            )
            for x, y in spots
        ]
        marks = [
            Spot(*spot, [visible(text, 26) for text in (place.name, place.details) if text], place.is_router)
            for place, spot in zip(sketch.places, at, strict=True)
        ]
        halves = []
        for wire in sketch.wires:
            middle = tuple((one + other) / 2 for one, other in zip(at[wire.one], at[wire.other], strict=True))
            for end, link in ((wire.one, wire.there), (wire.other, wire.back)):
                # Thick is fast: 1.5 to 6 pixels over two powers of ten.
                share = max(0.0, 1 + math.log10(link.bits_per_second / fastest) / 2)
                rate, latency = (
                    format_bits_per_second(link.bits_per_second),
                    format_seconds(link.latency_seconds),
                )
                title = f"{visible(link.source, 30)} to {visible(link.target, 30)}: {rate}, {latency}"
                name_of_link = f"{link.source}->{link.target}"
                halves.append(
                    Half(
                        *at[end],
                        round(middle[0], 1),
                        round(middle[1], 1),
                        round(1.5 + 4.5 * share, 1),
                        name_of_link,
                        title,
                    )
                )
        drawings.append(Drawing(name, width, height, marks, halves))
    return drawings


def link_use(
    histories: Sequence[tuple[str, Sequence[Mapping[str, float]]]], topology: Any
) -> list[dict[str, Any]]:
    """What links carried in each run, for the page's slider; empty where nothing is drawn or known.

    Args:
        histories: (name of the run, rows of `virtual_seconds` and of bytes by link from the start).
        topology: of all of them.

    Returns:
        A run each: `name`, `span_seconds`, and `links`: name -> share of its stated capacity in each span.
    """
    if not isinstance(topology, dict):
        return []
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    sketch = Sketch.of(network)
    if not 1 < len(sketch.places) <= _MAX_PLACES:
        return []
    drawn = {f"{link.source}->{link.target}" for wire in sketch.wires for link in (wire.there, wire.back)}
    capacity = {
        name: link.bits_per_second
        for link in network.links
        if (name := f"{link.source}->{link.target}") in drawn
    }
    used = []
    for name, rows in histories:
        links = {link: _shares(rows, link, rate) for link, rate in capacity.items() if _known(rows, link)}
        if links:
            used.append(
                {
                    "name": visible(name, 60),
                    "span_seconds": rows[-1]["virtual_seconds"] / _SPANS,
                    "links": links,
                }
            )
    return used


def _known(rows: Sequence[Mapping[str, float]], link: str) -> bool:
    return len(rows) > 1 and rows[-1]["virtual_seconds"] > 0 and all(link in row for row in rows)


def _shares(rows: Sequence[Mapping[str, float]], link: str, bits_per_second: float) -> list[float]:
    """Mean share of the capacity in each of equal spans; between two rows bytes flow evenly."""
    instants = [row["virtual_seconds"] for row in rows]
    edges = np.linspace(0.0, instants[-1], _SPANS + 1)
    crossed = np.interp(edges, instants, [row[link] for row in rows])
    shares = np.diff(crossed) * 8 / (instants[-1] / _SPANS) / bits_per_second
    return [round(share, 3) for share in shares.tolist()]
