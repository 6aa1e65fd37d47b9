"""The network on the page: bandwidth and latency by place, a drawing, the use of links, the weather during the run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exogym_core.names import visible
from exogym_core.results.reading import WALL_CLOCK
from netsim import Topology
from netsim.topology.sketch import Sketch
from netsim.units import format_bits_per_second, format_seconds
from netsim.weather.faults import simulate_weather

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from exogym_core.results.reading import Results
    from netsim.weather.faults import WeatherHistory


__all__ = [
    "Drawing",
    "NetworkSection",
    "Strip",
    "WeatherStrips",
    "draw_weather",
    "low_spans",
    "mean_rates",
    "strip_columns",
    "weather_of",
]

_MAX_PLACES = 24  # of a matrix or drawing that people can read
_SPANS = 120  # of the run's time, each with a link's mean use


def _network(topology: Any) -> Topology | None:
    """The network of a resolved experiment; None where it has none."""
    return (
        Topology.from_mapping(topology, "experiment.yaml: topology") if isinstance(topology, dict) else None
    )


def _matrix(network: Topology) -> dict[str, Any] | None:
    """Bandwidth and one-way latency between regions (hosts, where there are none) as rows of texts.

    None where it has more places than a page can show.
    """
    places: dict[str, list[int]] = {}
    for host in network.hosts:
        places.setdefault(network.region_of(host.index), []).append(host.index)
    if not 1 < len(places) <= _MAX_PLACES:
        return None

    def path(source: int, target: int) -> str:
        if source == target:
            return ""
        rate = min(float(network.bits_per_second[link]) for link in network.route(source, target))
        latency = network.route_latency_seconds(source, target)
        return f"{format_bits_per_second(rate)}\n{format_seconds(latency)}"

    rows = [[path(source[0], target[-1]) for target in places.values()] for source in places.values()]
    names = [visible(name, 30) for name in places]
    return {
        "name": visible(network.name, 80),
        "source": visible(network.source, 2000),
        "places": names,
        "rows": list(zip(names, rows, strict=True)),
    }


class Spot(NamedTuple):
    """A place as drawn: its middle, and its lines of text."""

    x: float
    y: float
    lines: Sequence[str]
    is_router: bool


class Half(NamedTuple):
    """A direction of a line between two places, drawn as the half at the place that it leaves.

    Attributes:
        link: its name, `from->to`.
        title: its ends, bandwidth and latency.
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
_MARGINS = {"wide": (110, 45), "narrow": (60, 44)}


def _drawings(sketch: Sketch) -> list[Drawing]:
    """The drawing for a page, and that for a telephone."""
    spots = sketch.positions()
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
        marks = []
        for place, spot in zip(sketch.places, at, strict=True):
            details = place.details.split(", ") if name == "narrow" else [place.details]
            texts = [visible(text, 26) for text in (place.name, *details) if text]
            marks.append(Spot(*spot, texts, place.is_router))
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
                x, y, width_of_line = (round(each, 1) for each in (*middle, 1.5 + 4.5 * share))
                halves.append(Half(*at[end], x, y, width_of_line, f"{link.source}->{link.target}", title))
        drawings.append(Drawing(name, width, height, marks, halves))
    return drawings


class NetworkSection(NamedTuple):
    """Section of a page on a network.

    Attributes:
        matrix: bandwidths and latencies between its places; None: it has too many, or there is no network.
        drawings: one for a page, and one for a telephone.
        use: of links in each run, for the page's slider: `name`, `span_seconds`, and `links`: name -> share of its
            stated capacity in each span.
    """

    matrix: Mapping[str, Any] | None = None
    drawings: Sequence[Drawing] = ()
    use: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(
        cls, topology: Any, histories: Sequence[tuple[str, Sequence[Mapping[str, float]]]] = ()
    ) -> NetworkSection:
        """Section on the topology of a resolved experiment; a drawing has as many places as a page can show.

        Args:
            topology: plain data; without one the section is empty.
            histories: (name of the run, rows of `virtual_seconds` and of bytes by link from the start).
        """
        network = _network(topology)
        if network is None:
            return cls()
        matrix, sketch = _matrix(network), Sketch.of(network)
        if not 1 < len(sketch.places) <= _MAX_PLACES:
            return cls(matrix)
        return cls(matrix, _drawings(sketch), _link_use(sketch, histories))


def _link_use(
    sketch: Sketch, histories: Sequence[tuple[str, Sequence[Mapping[str, float]]]]
) -> list[dict[str, Any]]:
    """Mean use of links in the runs that have measurements."""
    links_drawn = [link for wire in sketch.wires for link in (wire.there, wire.back)]
    links_drawn.sort(key=attrgetter("index"))
    capacity = {f"{link.source}->{link.target}": link.bits_per_second for link in links_drawn}
    used = []
    for name, rows in histories:
        instants = [row["virtual_seconds"] for row in rows]
        if len(rows) < 2 or instants[-1] <= 0:
            continue
        links = {
            link: [
                round(8 * rate / bits_per_second, 3)
                for _, rate in mean_rates(instants, [row[link] for row in rows], _SPANS)
            ]
            for link, bits_per_second in capacity.items()
            if all(link in row for row in rows)
        }
        # A file edited by hand may have seconds so small that shares are beyond a float.
        if links and all(math.isfinite(share) for shares in links.values() for share in shares):
            used.append({"name": visible(name, 60), "span_seconds": instants[-1] / _SPANS, "links": links})
    return used


def mean_rates(
    instants: Sequence[float], counts: Sequence[float], num_spans: int
) -> list[tuple[float, float]]:
    """Mean rates of a counter as (end of a span, units a second in it), in equal spans up to the last instant.

    Between two instants it grows evenly.
    """
    edges = np.linspace(0.0, instants[-1], num_spans + 1)
    reached = np.interp(edges, instants, counts)
    reached[0] = counts[0]
    with np.errstate(all="ignore"):
        rates = np.diff(reached) / (instants[-1] / num_spans)
    return list(zip(edges[1:].tolist(), rates.tolist(), strict=True))


_MOST_STRIPS = 16
_COLOURS = ("#5c0011", "#D55E00", "#E69F00", "#dcebf5")  # from nothing to all that is stated
_COLUMNS = 600  # of a strip; an outage that is shorter than one still shows


class Strip(NamedTuple):
    """Capacity of a link or host from each instant on, as a share of the topology's."""

    name: str
    points: Sequence[tuple[float, float]]


class WeatherStrips(NamedTuple):
    """Strips of the links and hosts that change, up to an instant."""

    strips: Sequence[Strip]
    until_seconds: float


def weather_of(results: Results) -> WeatherStrips:
    """Weather while the longest strategy ran; no strips where there is no virtual time."""
    seconds = max((result.virtual_seconds or 0.0 for result in results.strategies), default=0.0)
    # Real ranks have a network of their own.
    network = _network(results.settings.get("topology")) if seconds and results.clock != WALL_CLOCK else None
    if network is None:
        return WeatherStrips((), 0.0)
    seed = results.settings.get("network_seed")
    weather = network.weather.with_seed(results.seeds[0] if seed is None else seed)
    history = simulate_weather(replace(network, weather=weather), seconds)
    return WeatherStrips(_strips(network, history), history.until_seconds)


def low_spans(weather: WeatherStrips) -> list[tuple[float, float, float]]:
    """Spans of time in which a link or host had less than its capacity: begin, end, and the least share of any."""
    columns = [strip_columns(strip.points, weather.until_seconds) for strip in weather.strips]
    shares = [round(min(each), 1) for each in zip(*columns, strict=True)]
    width = weather.until_seconds / max(1, len(shares))
    spans = [(share, list(group)) for share, group in groupby(range(len(shares)), key=shares.__getitem__)]
    return [(span[0] * width, (span[-1] + 1) * width, share) for share, span in spans if share < 1]


def draw_weather(axes: Axes, weather: WeatherStrips) -> bool:
    """A strip for each link and host that changes; False where nothing does, or there is no time."""
    strips = weather.strips
    if not strips:
        return False
    from matplotlib.colors import LinearSegmentedColormap

    shown = strips[:_MOST_STRIPS]
    image = [strip_columns(strip.points, weather.until_seconds) for strip in shown]
    drawn = axes.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, weather.until_seconds, len(shown) - 0.5, -0.5),
        cmap=LinearSegmentedColormap.from_list("down to full", _COLOURS),
        vmin=0.0,
        vmax=1.0,
    )
    axes.set_yticks(range(len(shown)), [strip.name for strip in shown], fontsize=8)
    axes.grid(visible=False)
    more = f" (and {len(strips) - len(shown)} more)" if len(strips) > len(shown) else ""
    axes.set_title(f"What the network did{more}")
    axes.set_xlabel("virtual time, s")
    assert axes.figure is not None
    bar = axes.figure.colorbar(drawn, ax=axes, location="bottom", shrink=0.5, aspect=30)
    bar.set_label("of the stated bandwidth (0: down)", fontsize=9)
    bar.set_ticks([0.0, 0.5, 1.0], labels=["0 %", "50 %", "100 %"])
    return True


def _strips(network: Topology, history: WeatherHistory) -> list[Strip]:
    """Hosts that crash, then links; both directions of a link in one strip where they do the same."""
    strips = []
    crashed: set[str] = set()
    for host in sorted({outage.host for outage in history.outages}):
        points = [(0.0, 1.0)]
        for outage in history.outages:
            if outage.host == host:
                end = outage.end_seconds
                points += [(outage.begin_seconds, 0.0), *([(end, 1.0)] if end is not None else [])]
        name = network.hosts[host].name
        crashed.add(name)
        strips.append(Strip(f"host {visible(name, 20)}", sorted(points)))
    shown: set[tuple[str, str]] = set()
    by_ends = {(network.links[index].source, network.links[index].target): index for index in history.links}
    for index, changes in history.links.items():
        link = network.links[index]
        ends = (link.source, link.target)
        if ends in shown or (
            crashed & set(ends) and all(rate in (0.0, link.bits_per_second) for _, rate in changes)
        ):
            continue  # that a host's links are down while it is needs no line of its own
        back = by_ends.get(ends[::-1])
        both = back is not None and history.links[back] == changes
        shown |= {ends, ends[::-1]} if both else {ends}
        arrow = "\N{LEFT RIGHT ARROW}" if both else "\N{RIGHTWARDS ARROW}"
        rate = format_bits_per_second(link.bits_per_second)
        points = [(instant, value / link.bits_per_second) for instant, value in changes]
        strips.append(Strip(f"{visible(ends[0], 14)} {arrow} {visible(ends[1], 14)}\n{rate}", points))
    return strips


def strip_columns(points: Sequence[tuple[float, float]], until: float) -> list[float]:
    """The least that held within each of `_COLUMNS` equal spans of time."""
    columns = np.full(_COLUMNS, np.inf)
    ends = [instant for instant, _ in points[1:]] + [until]
    for (begin, share), end in zip(points, ends, strict=True):
        first = min(int(begin / until * _COLUMNS), _COLUMNS - 1)
        last = max(math.ceil(end / until * _COLUMNS), first + 1)
        columns[first:last] = np.minimum(columns[first:last], share)
    return np.where(np.isinf(columns), 1.0, columns).tolist()  # type: ignore[no-any-return]
