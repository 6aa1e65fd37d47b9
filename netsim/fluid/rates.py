"""What transfers get of the links at present, acknowledgements included."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from netsim.fluid.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Iterator

    from netsim.fluid.capacity import Capacity
    from netsim.fluid.paths import Path

__all__ = ["Rates"]

# Of a link, what acknowledgements leave to data however fast they come: those of 1 Gbit/s one way would fill 10 Mbit/s
# the other way, and what is sent there would stand still. Real ones are thinned out, or slow the others down.
_NOT_FOR_ACKS = 0.5


class Rates:
    """Payload bytes per second of the transfers that drain, by slot.

    How much acknowledgements take depends on the rates, and the other way about. So transfers share the links
    as if there were none first, and then what acknowledgements of such rates leave. That is within 0.1 % of
    where further passes would lead, since acknowledgements take 2.3 % at most.

    Args:
        capacity: of the links.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        payload = capacity.payload_bytes_per_second[:-1].tolist()
        self._ack_share = capacity.ack_share
        self._gross = Shares(payload)
        self._net = Shares(payload) if self._ack_share else self._gross
        self._back: dict[int, tuple[int, ...]] = {}
        self._acking: defaultdict[int, dict[int, None]] = defaultdict(dict)  # by link: whose cross it
        self._stale: dict[int, None] = {}  # links on which there are other acknowledgements

    def __contains__(self, slot: int) -> bool:
        return slot in self._gross

    def __iter__(self) -> Iterator[int]:
        return iter(self._gross)

    def join(self, slot: int, path: Path, cap: float) -> None:
        """A transfer starts to drain along a path with links."""
        self._gross.join(slot, path.links, path.weight, cap)
        if self._ack_share:
            self._net.join(slot, path.links, path.weight, cap)
            self._back[slot] = path.back
            for link in path.back:
                self._acking[link][slot] = None

    def leave(self, slot: int) -> None:
        """A transfer drains no longer."""
        self._gross.leave(slot)
        if self._ack_share:
            self._net.leave(slot)
            for link in self._back.pop(slot):
                del self._acking[link][slot]
                self._stale[link] = None

    def change(self, slot: int, weight: float, cap: float) -> None:
        """A transfer has another weight or cap."""
        self._gross.change(slot, weight, cap)
        if self._ack_share:
            self._net.change(slot, weight, cap)

    def resize(self, link: int) -> None:
        """A link has another capacity."""
        self._gross.resize(link, float(self._capacity.payload_bytes_per_second[link]))
        self._stale[link] = None

    def on(self, link: int) -> list[int]:
        """The transfers that need a link, their acknowledgements included."""
        return [*self._gross.crossing[link], *self._acking[link]]

    def settle(self) -> dict[int, float]:
        """Find rates anew after changes. Returns those that are others now."""
        changed = self._gross.settle()
        if not self._ack_share:
            return changed
        for slot in changed:
            self._stale.update(dict.fromkeys(self._back[slot]))
        for link in self._stale:
            taken = self._ack_share * sum([self._gross.rate[slot] for slot in self._acking[link]])
            payload = float(self._capacity.payload_bytes_per_second[link])
            self._net.resize(link, max(payload - taken, payload * _NOT_FOR_ACKS))
        self._stale.clear()
        return self._net.settle()
