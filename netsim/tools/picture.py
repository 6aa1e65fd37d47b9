"""A topology as a picture: places laid out by latency, links with what they carry and how long they take."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from netsim.files.units import format_bits_per_second, format_fraction, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

    from netsim.topology.graph import Link
    from netsim.topology.topology import FloatArray, Topology

__all__ = ["HOST", "INK", "PLACE", "Line", "Place", "Sketch", "draw_matrix", "draw_sketch", "positions"]

_MOST_LABELS = 14  # more links than this are told by a matrix beside the picture
_MOST_LEAVES = 10  # more hosts that are alike and hang on one place are drawn as one
_BOX_WIDTH, _LINE_HEIGHT = 0.32, 0.055  # of a label; the picture is two wide and two high
_BESIDE = 0.1  # farther from an upright line, since labels are wide
_ALONG = (0.5, 0.4, 0.6, 0.32, 0.68, 0.25, 0.75)  # where on its link a label may stand
INK, _PAPER = "#222222", "#ffffff"
PLACE, HOST = "#cfe3f2", "#fbe3c0"


@dataclass
class Place:
    """What is drawn as one: a router with the hosts behind it, a host, or hosts that are alike.

    Attributes:
        name: as shown.
        details: a line below it.
        is_router: whether others can go through.
    """

    name: str
    details: str = ""
    is_router: bool = False


@dataclass(frozen=True)
class Line:
    """Both directions between two places; `there` leads from the first to the second.

    Attributes:
        leads_to_host: whether the second is a host and the first is none.
    """

    one: int
    other: int
    there: Link
    back: Link
    leads_to_host: bool = False

    @property
    def rates(self) -> tuple[float, float]:
        """Bits per second from the first place to the second, and back."""
        return self.there.bits_per_second, self.back.bits_per_second

    @property
    def label(self) -> str:
        """Bandwidth and one-way latency; both bandwidths where they differ."""
        there, back = (format_bits_per_second(link.bits_per_second) for link in (self.there, self.back))
        rate = there
        if there != back:
            up, down = (
                ("up", "down")
                if self.leads_to_host
                else (f"to {self.back.target}", f"to {self.there.target}")
            )
            rate = f"{back} {up}\n{there} {down}"
        lost = f", {format_fraction(self.there.loss)} lost" if self.there.loss else ""
        return f"{rate}\n{format_seconds(self.there.latency_seconds)}{lost}"


@dataclass
class Sketch:
    """A topology boiled down to places and wires."""

    places: list[Place] = field(default_factory=list)
    wires: list[Line] = field(default_factory=list)

    @classmethod
    def of(cls, topology: Topology) -> Sketch:
        """Hosts behind the router of their region vanish into it; many alike ones elsewhere become one."""
        sketch = cls()
        home = _homes(topology)
        index: dict[str, int] = {}
        for name in [*topology.routers, *(host.name for host in topology.hosts)]:
            if home[name] == name:
                index[name] = len(sketch.places)
                sketch.places.append(Place(name, is_router=name in set(topology.routers)))
        away = defaultdict(list)
        for host in topology.hosts:
            if home[host.name] != host.name:
                away[home[host.name]].append(host.name)
        by_ends = {(link.source, link.target): link for link in topology.links}
        for name, hidden in away.items():
            place = sketch.places[index[name]]
            if place.is_router:
                nic = next(by_ends[host, name] for host in hidden)
                count = f"{len(hidden)} host{'s' if len(hidden) > 1 else ''}"
                place.details = f"{count}, {format_bits_per_second(nic.bits_per_second)} each"
            else:
                place.name = f"{name} ... {hidden[-1]}"
                place.details = f"{len(hidden) + 1} hosts"
        for link in topology.links:
            one, other = index.get(link.source), index.get(link.target)
            if one is not None and other is not None and one < other:
                to_host = sketch.places[one].is_router and not sketch.places[other].is_router
                sketch.wires.append(Line(one, other, link, by_ends[link.target, link.source], to_host))
        return sketch

    @property
    def is_crowded(self) -> bool:
        """Whether there are too many wires to write on each."""
        return len(self.wires) > _MOST_LABELS


def _homes(topology: Topology) -> dict[str, str]:
    """For each host and router the one that it is drawn as."""
    home = {name: name for name in [*topology.routers, *(host.name for host in topology.hosts)]}
    ways = Counter(link.source for link in topology.links)
    leaves: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    to = {link.source: link for link in topology.links}
    back = {link.target: link for link in topology.links}
    is_small = len(topology.routers) == 1 and len(topology.hosts) <= _MOST_LABELS
    for host in topology.hosts:
        if is_small or ways[host.name] != 1:
            continue
        up, down = to[host.name], back[host.name]
        if up.target == host.region:
            home[host.name] = up.target
        else:
            rates = (up.bits_per_second, down.bits_per_second, up.latency_seconds, up.loss, down.loss)
            leaves[up.target, host.region, host.device, rates].append(host.name)
    if sum(map(len, leaves.values())) > _MOST_LEAVES:
        home.update({name: names[0] for names in leaves.values() for name in names})
    return home


def positions(sketch: Sketch) -> FloatArray:
    """Where places stand, in a square from -1 to 1: near ones near, none on top of another."""
    num = len(sketch.places)
    if num == 1:
        return np.zeros((1, 2))
    distance = np.full((num, num), np.inf)
    np.fill_diagonal(distance, 0.0)
    latencies = [wire.there.latency_seconds + wire.back.latency_seconds for wire in sketch.wires]
    # The root brings what is 1 ms and what is 100 ms away into one picture.
    least = max([latency for latency in latencies if latency > 0], default=1.0) / 25
    for wire, latency in zip(sketch.wires, latencies, strict=True):
        distance[wire.one, wire.other] = distance[wire.other, wire.one] = np.sqrt(max(latency, least))
    for middle in range(num):  # Floyd and Warshall
        distance = np.minimum(distance, distance[:, middle, None] + distance[None, middle, :])
    distance[np.isinf(distance)] = distance[np.isfinite(distance)].max() * 2
    angles = 2 * np.pi * np.arange(num) / num
    spots = np.stack([np.cos(angles), np.sin(angles)], axis=1) * distance.max() / 2
    for _ in range(500):  # stress majorisation (Gansner, Koren and North 2004, equation 7, weights 1 / d^2)
        apart = spots[:, None] - spots[None]
        lengths = np.maximum(np.linalg.norm(apart, axis=2), 1e-9)
        weights = np.where(distance > 0, distance, 1.0) ** -2.0
        np.fill_diagonal(weights, 0.0)
        wanted = spots[None] + apart * (distance / lengths)[..., None]
        spots = (weights[..., None] * wanted).sum(axis=1) / weights.sum(axis=1)[:, None]
    return _spread(spots, boxed=sketch.is_crowded)


def _spread(spots: FloatArray, *, boxed: bool) -> FloatArray:
    """Turn a layout to lie wide, fit it into the square, and push apart what is too near."""
    spots = spots - spots.mean(axis=0)
    _, axes = np.linalg.eigh(spots.T @ spots)
    spots = spots @ axes[:, ::-1]
    spots = spots / np.maximum(np.abs(spots).max(axis=0), 1e-9)
    if len(spots) == 2:
        return np.array([[-0.7, 0.0], [0.7, 0.0]])
    room = min(0.75, 2.2 / np.sqrt(len(spots)))
    # Boxes are wide: less room is needed above each other, unless wires are written on.
    scale = np.array([1.0, 1.6 if boxed else 1.3])
    for _ in range(300):
        apart = (spots[:, None] - spots[None]) * scale
        lengths = np.linalg.norm(apart, axis=2) + np.eye(len(spots))
        push = np.maximum(room - lengths, 0.0) / lengths
        np.fill_diagonal(push, 0.0)
        spots = spots + 0.25 * (apart * push[..., None]).sum(axis=1) / scale
    most = np.maximum(np.abs(spots).max(axis=0), 1e-9)
    fitted: FloatArray = spots / most * np.minimum(most, 1.0)
    return fitted


def draw_sketch(axes: Axes, sketch: Sketch, colours: ScalarMappable) -> None:
    """Draw places and wires; what wires carry is written on them unless there are too many.

    Args:
        axes: where; it is taken over as a whole.
        sketch: what.
        colours: of wires, by bits per second.
    """
    spots = positions(sketch)
    axes.set_axis_off()
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.2, 1.2)
    fastest = max((rate for wire in sketch.wires for rate in wire.rates), default=1.0)
    taken = [(float(x), float(y), 2.3) for x, y in spots]
    for wire in sorted(sketch.wires, key=lambda wire: max(wire.rates)):
        # Each direction is the half at the place that it leaves: a line that is slow one way shows both.
        middle = (spots[wire.one] + spots[wire.other]) / 2
        for end, bits_per_second in zip((wire.one, wire.other), wire.rates, strict=True):
            width = 1.0 + 3.5 * max(0.0, 1 + np.log10(bits_per_second / fastest) / 2)
            half = np.stack([spots[end], middle])
            shade = _shade(colours, bits_per_second)
            axes.plot(*half.T, color=shade, linewidth=width, zorder=1, alpha=0.9, solid_capstyle="butt")
    if not sketch.is_crowded:
        for wire in sketch.wires:
            num_lines = wire.label.count("\n") + 1
            # Beside a line it would be anybody's in a star: there it stands on its line.
            is_beside = not wire.leads_to_host
            x, y = _free_spot(spots[wire.one], spots[wire.other], num_lines, taken, is_beside=is_beside)
            axes.text(
                x, y, wire.label, fontsize=7.5, ha="center", va="center", color=INK, zorder=3, linespacing=1.1,
                bbox={"boxstyle": "round,pad=0.18", "facecolor": _PAPER, "edgecolor": "none", "alpha": 0.9},
            )  # fmt: skip
    for place, (x, y) in zip(sketch.places, spots, strict=True):
        text = f"{place.name}\n{place.details}" if place.details else place.name
        if sketch.is_crowded:
            text = text.replace(", ", "\n")  # narrower
        axes.text(
            x, y, text, fontsize=7.0 if sketch.is_crowded else 8.5, ha="center", va="center", color=INK, zorder=4,
            bbox={
                "boxstyle": "round,pad=0.4",
                "facecolor": PLACE if place.is_router else HOST,
                "edgecolor": INK,
                "linewidth": 0.8,
            },
        )  # fmt: skip


def _free_spot(
    one: FloatArray,
    other: FloatArray,
    num_lines: float,
    taken: list[tuple[float, float, float]],
    *,
    is_beside: bool,
) -> tuple[float, float]:
    """A spot on the way that covers least of what is there already (x, y, lines); it is taken from now on."""

    def covered(x: float, y: float) -> float:
        total = 0.0
        for at_x, at_y, lines in taken:
            wide = _BOX_WIDTH - abs(x - at_x)
            high = _LINE_HEIGHT * (num_lines + lines) / 2 - abs(y - at_y)
            total += max(wide, 0.0) * max(high, 0.0)
        return total

    # Beside the line, which stays visible, above it where it is level.
    length = max(float(np.hypot(*(other - one))), 1e-9)
    aside = np.array([-(other - one)[1], (other - one)[0]]) / length
    aside *= np.where(aside[1] < 0, -1, 1) * (
        0.05 + _BESIDE * abs(aside[0]) + _LINE_HEIGHT * (num_lines - 1) / 2
    )
    spots = [
        tuple((one + (other - one) * along + side * aside).tolist())
        for side in ((1, -1) if is_beside else (0,))
        for along in _ALONG
    ]
    best = min(spots, key=lambda spot: round(covered(*spot), 6))
    taken.append((best[0], best[1], num_lines))
    return best


def draw_matrix(axes: Axes, sketch: Sketch, colours: ScalarMappable) -> None:
    """Bandwidth above the diagonal, one-way latency below, by place; empty where there is no direct wire."""
    ends = sorted({end for wire in sketch.wires for end in (wire.one, wire.other)})
    row = {end: position for position, end in enumerate(ends)}
    names = [sketch.places[end].name for end in ends]
    size = len(ends)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)
    for wire in sketch.wires:
        low, high = sorted((row[wire.one], row[wire.other]))
        shade = _shade(colours, wire.there.bits_per_second)
        axes.fill_between([high - 0.5, high + 0.5], low - 0.5, low + 0.5, color=shade, linewidth=0)
        _write(
            axes, high, low, _short(format_bits_per_second(wire.there.bits_per_second)), _ink_on(shade), size
        )
        _write(axes, low, high, _short(format_seconds(wire.there.latency_seconds)), INK, size)
    axes.plot([-0.5, size - 0.5], [-0.5, size - 0.5], color="#bbbbbb", linewidth=0.8)
    axes.set_xticks(range(size), names, rotation=45, ha="left", fontsize=7.5)
    axes.set_yticks(range(size), names, fontsize=7.5)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("above the diagonal: bandwidth; below: one-way latency", fontsize=8)


def _write(axes: Axes, x: float, y: float, text: str, ink: str, size: int) -> None:
    font = float(np.clip(80 / size, 4.0, 7.5))
    axes.text(x, y, text, fontsize=font, ha="center", va="center", color=ink, linespacing=0.95)


def _short(quantity: str) -> str:
    return quantity.replace(" ", "\n", 1)


def _shade(colours: ScalarMappable, bits_per_second: float) -> tuple[float, ...]:
    return tuple(colours.to_rgba(np.array([bits_per_second]))[0].tolist())


def _ink_on(shade: Sequence[float]) -> str:
    return INK if 0.3 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2] > 0.5 else _PAPER
