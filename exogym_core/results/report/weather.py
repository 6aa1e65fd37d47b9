"""What the network did meanwhile: outages, crashes and bandwidth over time, as strips."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from exogym_core.names import visible
from exogym_core.results.report.results import WALL_CLOCK
from netsim.files.units import format_bits_per_second
from netsim.topology.topology import Topology
from netsim.weather.history import simulate_weather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from exogym_core.results.report.results import Results
    from netsim.weather.history import WeatherHistory

__all__ = ["Strip", "WeatherStrips", "draw_weather", "least_shares", "weather_of"]

_MOST_STRIPS = 16
_COLOURS = ("#5c0011", "#D55E00", "#E69F00", "#dcebf5")  # from nothing to all that is stated
_COLUMNS = 600  # of a strip; an outage that is shorter than one still shows


class Strip(NamedTuple):
    """One link, or one host: what it can do, 0 to 1 of what the topology says, from each instant on."""

    name: str
    points: Sequence[tuple[float, float]]


class WeatherStrips(NamedTuple):
    """Strips of what changes, up to an instant; without any where nothing does."""

    strips: Sequence[Strip]
    until_seconds: float


def weather_of(results: Results) -> WeatherStrips:
    """What the network did while the longest strategy ran; no strips where there is no time."""
    topology = results.settings.get("topology")
    seconds = max((result.virtual_seconds or 0.0 for result in results.strategies), default=0.0)
    if (
        not isinstance(topology, dict) or not seconds or results.clock == WALL_CLOCK
    ):  # that of real ranks is another
        return WeatherStrips((), 0.0)
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    seed = results.settings.get("network_seed")
    weather = network.weather.with_seed(results.seeds[0] if seed is None else seed)
    history = simulate_weather(replace(network, weather=weather), seconds)
    return WeatherStrips(_strips(network, history), history.until_seconds)


def least_shares(weather: WeatherStrips) -> list[float]:
    """Of all strips together, the least in each of equal spans of time."""
    columns = [_columns(strip.points, weather.until_seconds) for strip in weather.strips]
    return [min(shares) for shares in zip(*columns, strict=True)]


def draw_weather(axes: Axes, weather: WeatherStrips) -> bool:
    """A strip for each link and host that changes; False where nothing does, or there is no time."""
    strips = weather.strips
    if not strips:
        return False
    from matplotlib.colors import LinearSegmentedColormap

    shown = strips[:_MOST_STRIPS]
    image = [_columns(strip.points, weather.until_seconds) for strip in shown]
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
    told: set[tuple[str, str]] = set()
    for index, changes in history.links.items():
        link = network.links[index]
        ends = (link.source, link.target)
        if ends in told or (
            crashed & set(ends) and all(rate in (0.0, link.bits_per_second) for _, rate in changes)
        ):
            continue  # that a host's links are down while it is needs no line of its own
        back = next((other for other in history.links if _is_reverse(network, other, ends)), None)
        both = back is not None and history.links[back] == changes
        told |= {ends, ends[::-1]} if both else {ends}
        arrow = "\N{LEFT RIGHT ARROW}" if both else "\N{RIGHTWARDS ARROW}"
        rate = format_bits_per_second(link.bits_per_second)
        points = [(instant, value / link.bits_per_second) for instant, value in changes]
        strips.append(Strip(f"{visible(ends[0], 14)} {arrow} {visible(ends[1], 14)}\n{rate}", points))
    return strips


def _is_reverse(network: Topology, index: int, ends: tuple[str, str]) -> bool:
    link = network.links[index]
    return (link.target, link.source) == ends


def _columns(points: Sequence[tuple[float, float]], until: float) -> list[float]:
    """The least that held within each of `_COLUMNS` equal spans of time."""
    columns = [1.0] * _COLUMNS
    ends = [instant for instant, _ in points[1:]] + [until]
    spans = zip(points, ends, strict=True)
    least: dict[int, float] = {}
    for (begin, share), end in spans:
        first = min(int(begin / until * _COLUMNS), _COLUMNS - 1)
        last = min(int(end / until * _COLUMNS), _COLUMNS - 1)
        for column in range(first, last + 1):
            # The span that ends at a column's very beginning is not in it.
            if column == last and column > first and end <= column * until / _COLUMNS:
                continue
            least[column] = min(least.get(column, share), share)
    for column, share in least.items():
        columns[column] = share
    return columns
