"""What the links carry at present."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from netsim.fluid.fairness import FloatArray
    from netsim.fluid.paths import Path
    from netsim.topology.protocol import Protocol

__all__ = ["Capacity"]


class Capacity:
    """Capacities of all links.

    Args:
        bits_per_second: of each link, as a topology states them.
        protocol: what of it is payload, and what acknowledgements take.

    Attributes:
        dead: links that carry nothing at present.
        ack_share: of a rate, what its acknowledgements take on the way back, in payload that could cross instead.
    """

    def __init__(self, bits_per_second: FloatArray, protocol: Protocol) -> None:
        self._payload_share = protocol.payload_share
        self.ack_share = protocol.ack_share * protocol.payload_share
        self._stated = np.append(np.asarray(bits_per_second, dtype=np.float64) / 8, math.inf)
        self._nominal = self._stated.copy()  # what it carried last, if it carries nothing
        self.dead: set[int] = set()
        self._up = np.ones(len(self._stated), dtype=np.bool_)
        self._payload: FloatArray = self._stated * self._payload_share

    @property
    def payload_bytes_per_second(self) -> FloatArray:
        """Of each link, with one last entry of infinity that stands for no link; shape (links + 1,)."""
        return self._payload

    def set(self, link: int, bits_per_second: float) -> None:
        """Let a link carry another rate."""
        self._stated[link] = bits_per_second / 8
        if bits_per_second:
            self._nominal[link] = bits_per_second / 8
        self._refresh(link)

    def bits_per_second(self, link: int) -> float:
        """What a link carries at present."""
        return float(self._stated[link]) * 8 if self._up[link] else 0.0

    def is_dead(self, link: int) -> bool:
        """Whether a link carries nothing at present."""
        return link in self.dead

    def set_up(self, link: int, up: bool) -> None:
        """Let a link carry nothing, or what was last set."""
        self._up[link] = up
        self._refresh(link)

    def narrowest(self, path: Path) -> tuple[float, int]:
        """What the narrowest link of a path (the first of several) carries when nothing is broken, and which it is.

        Returns payload in bytes per second, and the link's index.
        """
        link = min(path.links, key=self._nominal.__getitem__)
        return float(self._nominal[link]) * self._payload_share, link

    def _refresh(self, link: int) -> None:
        self._payload[link] = self._stated[link] * self._payload_share if self._up[link] else 0.0
        if self._payload[link]:
            self.dead.discard(link)
        else:
            self.dead.add(link)
