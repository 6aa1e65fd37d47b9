"""What the links carry at present, and how transfers share it: payload after headers and acknowledgements."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import numpy as np

from netsim.fairness import max_min_rates

if TYPE_CHECKING:
    from netsim.fairness import FloatArray, IntArray
    from netsim.paths import Path
    from netsim.protocol import Protocol

__all__ = ["Capacity", "can_compile"]

# Routes times hops that were solved for before the compiled solver is worth loading: about a second's work.
_WORTH_COMPILING = 3_000_000


def can_compile() -> bool:
    """Whether the `fast` extra is installed."""
    return importlib.util.find_spec("numba") is not None


class Capacity:
    """Capacities of all links.

    Args:
        bits_per_second: of each link, as a topology states them.
        protocol: what of it is payload, and what acknowledgements take.

    Attributes:
        dead: links that carry nothing at present.
    """

    def __init__(self, bits_per_second: FloatArray, protocol: Protocol) -> None:
        self._payload_share = protocol.payload_share
        self._ack_share = protocol.ack_share
        self._stated = np.append(np.asarray(bits_per_second, dtype=np.float64) / 8, math.inf)
        self._nominal = self._stated.copy()  # what it carried last, if it carries nothing
        self.dead: set[int] = set()
        self._up = np.ones(len(self._stated), dtype=np.bool_)
        self._payload: FloatArray = self._stated * self._payload_share
        self._solve = max_min_rates
        self._solved = 0

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

    def rates(self, links: IntArray, back: IntArray, weights: FloatArray, caps: FloatArray) -> FloatArray:
        """Payload bytes per second of transfers that share links among themselves and with no others.

        Args:
            links, back: of each transfer the links it crosses, and those its acknowledgements do, as
                `max_min_rates` takes them.
            weights, caps: as `max_min_rates` takes them.
        """
        if len(links) == 1:
            alone: FloatArray = np.minimum(self._payload[links].min(axis=1), caps)
            return alone
        self._choose_solver(links.size)
        rates = self._solve(self._payload, links, weights, caps)
        if not self._ack_share:
            return rates
        # How much acknowledgements take depends on the rates, and the other way about. The second pass is
        # within 0.1 % of where further ones would lead, since acknowledgements take 2.3 % at most.
        acks = self._acknowledgements(back, rates)
        if not acks[links].any():
            return rates
        return self._solve(np.maximum(self._payload - acks, 0.0), links, weights, caps)

    def _choose_solver(self, size: int) -> None:
        before = self._solved
        self._solved += size
        if before < _WORTH_COMPILING <= self._solved and can_compile():
            from netsim import compiled

            self._solve = compiled.max_min_rates

    def _acknowledgements(self, back: IntArray, rates: FloatArray) -> FloatArray:
        """What acknowledgements take from each link, in payload that could cross it instead."""
        share = self._ack_share * self._payload_share
        taken = np.zeros(len(self._payload))
        np.add.at(taken, back, (rates * share)[:, None])
        taken[-1] = 0.0
        return taken

    def _refresh(self, link: int) -> None:
        self._payload[link] = self._stated[link] * self._payload_share if self._up[link] else 0.0
        if self._payload[link]:
            self.dead.discard(link)
        else:
            self.dead.add(link)
