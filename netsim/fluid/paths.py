"""Routes as the network uses them: numbered, with their links in one padded array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from netsim.fluid.fairness import IntArray
    from netsim.topology.topology import Topology

__all__ = ["Path", "PathTable"]


@dataclass(slots=True)
class Path:
    """The way from one host to another.

    Attributes:
        index: its row in `PathTable.links`.
        source, target: host indices.
        links: link indices in order; none within a host.
        back: links of the way back, which carry acknowledgements.
        latency_seconds: of the way there.
        round_trip_seconds: there and back.
        loss: share of packets lost on the way there.
        weight: share of a transfer on it relative to others.
    """

    index: int
    source: int
    target: int
    links: tuple[int, ...]
    back: tuple[int, ...]
    latency_seconds: float
    round_trip_seconds: float
    loss: float
    weight: float


class PathTable:
    """The paths that have been used so far, found when first asked for; a network and its forks share one table.

    Args:
        topology: where they run.
        loss: share of packets lost on the way there.
        weight: share of a transfer by the round trip in seconds of its path.

    Attributes:
        paths: by their index.
        links, back: link indices of each path, filled up with the number of links; shape (at least paths,
            longest).
    """

    def __init__(self, topology: Topology, weight: Callable[[float], float]) -> None:
        self._topology = topology
        self._weight = weight
        self._by_hosts: dict[tuple[int, int], Path] = {}
        self.num_links = len(topology.links)
        self.latency_seconds = np.array(topology.latency_seconds, dtype=np.float64)
        self.loss = np.array(topology.loss, dtype=np.float64)
        self.paths: list[Path] = []
        self.links: IntArray = np.full((64, 4), self.num_links, dtype=np.int64)
        self.back: IntArray = self.links.copy()

    def between(self, source: int, target: int) -> Path:
        """The path from one host to another (indices)."""
        path = self._by_hosts.get((source, target))
        return path if path is not None else self._find(source, target)

    def numbered(
        self, hosts: Sequence[int], pairs: Iterable[tuple[int, int, float]]
    ) -> list[tuple[int, float]]:
        """The path of each pair of positions among `hosts` by its index, and what stands behind the pair."""
        known, found = self._by_hosts, []
        for src, dst, value in pairs:
            path = known.get((hosts[src], hosts[dst]))
            found.append(((path if path is not None else self._find(hosts[src], hosts[dst])).index, value))
        return found

    def set_latency(self, link: int, seconds: float) -> list[Path]:
        """Give one link another latency; routes stay as they are. Returns the paths that it changes."""
        self.latency_seconds[link] = seconds
        return self._measured(link)

    def set_loss(self, link: int, share: float) -> list[Path]:
        """Have one link lose another share of packets. Returns the paths that it changes."""
        self.loss[link] = share
        return self._measured(link)

    def _measured(self, link: int) -> list[Path]:
        changed = [path for path in self.paths if link in path.links or link in path.back]
        for path in changed:
            self._measure(path)
        return changed

    def _find(self, source: int, target: int) -> Path:
        links = tuple(self._topology.route(source, target))
        back = tuple(self._topology.route(target, source))
        path = Path(len(self.paths), source, target, links, back, 0.0, 0.0, 0.0, 1.0)
        self._measure(path)
        self.links = self._with_row(self.links, path.index, links)
        self.back = self._with_row(self.back, path.index, back)
        self.paths.append(path)
        self._by_hosts[source, target] = path
        return path

    def _measure(self, path: Path) -> None:
        path.latency_seconds = sum(self.latency_seconds[list(path.links)].tolist())
        path.round_trip_seconds = path.latency_seconds + sum(self.latency_seconds[list(path.back)].tolist())
        path.weight = self._weight(path.round_trip_seconds)
        path.loss = 1.0 - float(np.prod(1.0 - self.loss[list(path.links)]))

    def _with_row(self, table: IntArray, row: int, links: tuple[int, ...]) -> IntArray:
        rows, columns = table.shape
        if row >= rows or len(links) > columns:
            larger = np.full((max(rows, 2 * row), max(columns, len(links))), self.num_links, dtype=np.int64)
            larger[:rows, :columns] = table
            table = larger
        table[row, : len(links)] = links
        return table
