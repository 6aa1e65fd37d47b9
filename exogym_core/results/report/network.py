"""The network on the page: bandwidth and latency by places, a drawing, and what links carried in a traced run."""

from __future__ import annotations

import gzip
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from netsim.files.units import format_bits_per_second, format_seconds
from netsim.tools.picture import Sketch, positions
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Drawing", "draw_network", "link_use", "network_matrix"]

_MAX_PLACES = 24  # a larger matrix is not read by anyone, nor is a larger drawing
_MOST_TRACED_BYTES = 400_000_000  # of text in a trace
_MOST_PACKED_BYTES = 12_000_000
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


def link_use(trace: Path, topology: Any) -> Mapping[str, Any] | None:
    """What each link carried, as a trace tells it: `span_seconds`, and `links`: name -> share of its capacity by span.

    None where there is no trace, or it is too large to be read for a page, or is no trace.
    """
    if not isinstance(topology, dict) or not trace.is_file() or trace.stat().st_size > _MOST_PACKED_BYTES:
        return None
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    capacity = {f"{link.source}->{link.target}": link.bits_per_second for link in network.links}
    changes: dict[str, list[tuple[float, float]]] = {}
    end, read = 0.0, 0
    try:
        with gzip.open(trace, "rt", encoding="utf-8") as lines:
            for line in lines:  # an event each
                read += len(line)
                if read > _MOST_TRACED_BYTES:
                    return None
                if '"ts":' not in line:
                    continue
                event = json.loads(line.strip().rstrip(",").removesuffix("]}").rstrip())
                end = max(end, (event["ts"] + event.get("dur", 0.0)) / 1e6)
                if event["ph"] == "C" and event["name"] in capacity:
                    changes.setdefault(event["name"], []).append(
                        (event["ts"] / 1e6, event["args"]["Mbit/s"] * 1e6)
                    )
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    if not changes or end <= 0:
        return None
    used = {name: _shares(points, end, capacity[name]) for name, points in changes.items()}
    return {"span_seconds": end / _SPANS, "links": used}


def _shares(points: Sequence[tuple[float, float]], end: float, capacity: float) -> list[float]:
    """Mean share of the capacity in each of equal spans."""
    length = end / _SPANS
    sums = [0.0] * _SPANS
    for (begin, rate), (until, _) in zip(points, [*points[1:], (end, 0.0)], strict=True):
        first, last = int(begin / length), min(int(until / length), _SPANS - 1)
        for span in range(first, last + 1):
            inside = min(until, (span + 1) * length) - max(begin, span * length)
            sums[span] += max(inside, 0.0) * rate
    return [round(bits / length / capacity, 3) for bits in sums]
