"""What a collective that begins adds to the state of those under way."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from netsim.collectives.schedules.schedule import Schedule

__all__ = ["Known", "Opening", "unknown"]

# Groups with pairs of hosts whose connections are known; no pairs: all of the group's.
Known = frozenset[tuple[Hashable, tuple[int, int] | None]]


class Opening(NamedTuple):
    """A collective that begins.

    Attributes:
        conditions: what its links are like.
        windows: its group's connections, as far as they are not known yet and differ from new ones.
        pairs: of hosts, between which it sends; None: too many to say. They follow from the rest.
    """

    schedule: Schedule
    hosts: tuple[int, ...]
    group: Hashable
    conditions: Hashable
    windows: Hashable
    pairs: tuple[tuple[int, int], ...] | None


def unknown(
    known: Known, group: Hashable, pairs: tuple[tuple[int, int], ...] | None
) -> list[tuple[int, int]] | None:
    """Those of the pairs that are not known of a group; None: all the group may have."""
    if not known:
        return None if pairs is None else list(pairs)
    if (group, None) in known:
        return []
    return None if pairs is None else [pair for pair in pairs if (group, pair) not in known]
