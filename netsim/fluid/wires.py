"""Links and routes as they are at present, for those who reckon without events."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = ["Wires", "padded"]


@dataclass(frozen=True)
class Wires:
    """Links and routes as they are at present.

    Attributes:
        route: link indices from one host to another.
        latency_seconds: of each link.
        bytes_per_second: payload each link carries.
        software_seconds: added to the latency of each message between hosts.
    """

    route: Callable[[int, int], Sequence[int]]
    latency_seconds: FloatArray
    bytes_per_second: FloatArray
    software_seconds: float = 0.0


def padded(routes: Sequence[Sequence[int]], num_links: int) -> IntArray:
    """Links of each route, filled up with `num_links`; shape (routes, longest + 1)."""
    table = np.full((len(routes), max(map(len, routes), default=0) + 1), num_links, np.int64)
    row = np.repeat(np.arange(len(routes)), [len(route) for route in routes])
    column = np.fromiter(chain.from_iterable(range(len(route)) for route in routes), np.int64, len(row))
    table[row, column] = np.fromiter(chain.from_iterable(routes), np.int64, len(row))
    return table
