"""What one who watches a network is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable

    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = ["NetworkObserver"]


class NetworkObserver(Protocol):
    """What one who watches a network is told, at `network.env.now`. Looking changes nothing."""

    def transfer_started(
        self, transfer: int, source: int, target: int, num_bytes: float, connection: Hashable
    ) -> None:
        """`send` was called."""

    def transfer_ended(self, transfer: int, delivered_bytes: float) -> None:
        """All of a transfer's bytes are there, or it was aborted with only so many there."""

    def rates_changed(self, transfers: IntArray, bytes_per_second: FloatArray) -> None:
        """From now on these transfers (ids) drain at these rates."""

    def capacity_changed(self, link: int, bits_per_second: float) -> None:
        """From now on a link (index) carries so much; 0 while it is down."""
