"""Links and routes as they are at present, for those who reckon without events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.fluid.fairness import FloatArray

__all__ = ["Wires"]


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
