"""What a network leaves to others to reckon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Elsewhere"]


class Elsewhere(Protocol):
    """What belongs to a network and is reckoned without it, as long as nothing else comes in its way."""

    def before_change(self, links: Iterable[int] | None) -> None:
        """Something is about to start, end by force or change on these links (None: on any)."""

    def come_back(self) -> None:
        """Be on the network from now on."""

    def host_bytes(self) -> Iterator[tuple[int, int, float]]:
        """Source host, target host and payload bytes that have come through by now."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing."""
