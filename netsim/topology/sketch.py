"""A drawing of a topology: places and wires, laid out in the plane by latency."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from netsim.units import format_bits_per_second, format_count, format_fraction, format_seconds

if TYPE_CHECKING:
    from netsim.topology.graph import Link
    from netsim.topology.topology import FloatArray, Topology

__all__ = ["Line", "Place", "Sketch"]

_MOST_LABELS = 14  # more links than this go into a matrix next to the picture
_MOST_LEAVES = 10  # more hosts that are alike and hang on one place are drawn as one


@dataclass
class Place:
    """A node of the drawing: a router with the hosts behind it, a host, or equal hosts.

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
    """A topology reduced to places and wires.

    Attributes:
        places: nodes of the drawing.
        wires: connections between them, which name places by their index.
    """

    places: list[Place] = field(default_factory=list)
    wires: list[Line] = field(default_factory=list)

    @classmethod
    def of(cls, topology: Topology) -> Sketch:
        """Reduce a topology: hosts join the router of their region, and many alike hosts elsewhere become one place."""
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
        for name, hidden in away.items():
            place = sketch.places[index[name]]
            if place.is_router:
                nic = next(topology.link_between[host, name] for host in hidden)
                count = format_count(len(hidden), "host")
                place.details = f"{count}, {format_bits_per_second(nic.bits_per_second)} each"
            else:
                place.name = f"{name} ... {hidden[-1]}"
                place.details = format_count(len(hidden) + 1, "host")
        for link in topology.links:
            one, other = index.get(link.source), index.get(link.target)
            if one is not None and other is not None and one < other:
                to_host = sketch.places[one].is_router and not sketch.places[other].is_router
                sketch.wires.append(
                    Line(one, other, link, topology.link_between[link.target, link.source], to_host)
                )
        return sketch

    @property
    def is_crowded(self) -> bool:
        """True if there are too many wires to write on each."""
        return len(self.wires) > _MOST_LABELS

    def positions(self) -> FloatArray:
        """Coordinates in a square from -1 to 1, shape (places, 2): distances follow latencies, boxes do not overlap."""
        num = len(self.places)
        if num == 1:
            return np.zeros((1, 2))
        distance = np.full((num, num), np.inf)
        np.fill_diagonal(distance, 0.0)
        latencies = [wire.there.latency_seconds + wire.back.latency_seconds for wire in self.wires]
        # The square root fits 1 ms and 100 ms into one picture.
        least = max([latency for latency in latencies if latency > 0], default=1.0) / 25
        for wire, latency in zip(self.wires, latencies, strict=True):
            distance[wire.one, wire.other] = distance[wire.other, wire.one] = np.sqrt(max(latency, least))
        for middle in range(num):  # Floyd and Warshall
            distance = np.minimum(distance, distance[:, middle, None] + distance[None, middle, :])
        distance[np.isinf(distance)] = distance[np.isfinite(distance)].max() * 2
        angles = 2 * np.pi * np.arange(num) / num
        spots = np.stack([np.cos(angles), np.sin(angles)], axis=1) * distance.max() / 2
        # Stress majorisation (Gansner, Koren and North 2004, equation 7, weights 1 / d^2)
        weights = np.where(distance > 0, distance, 1.0) ** -2.0
        np.fill_diagonal(weights, 0.0)
        sums = weights.sum(axis=1)[:, None]
        for _ in range(500):
            apart = spots[:, None] - spots[None]
            lengths = np.maximum(np.sqrt((apart * apart).sum(axis=2)), 1e-9)
            wanted = spots[None] + apart * (distance / lengths)[..., None]
            spots = (weights[..., None] * wanted).sum(axis=1) / sums
        return _spread(spots, boxed=self.is_crowded)


def _homes(topology: Topology) -> dict[str, str]:
    """Node as which each host and router is drawn."""
    home = {name: name for name in [*topology.routers, *(host.name for host in topology.hosts)]}
    num_links = Counter(link.source for link in topology.links)
    leaves: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    to = {link.source: link for link in topology.links}
    back = {link.target: link for link in topology.links}
    is_small = len(topology.routers) == 1 and len(topology.hosts) <= _MOST_LABELS
    for host in topology.hosts:
        if is_small or num_links[host.name] != 1:
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


def _spread(spots: FloatArray, *, boxed: bool) -> FloatArray:
    """Rotate a layout to lie wide, fit it into the square, and push apart places that are too near."""
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
