"""How collectives that are under way together get from one state to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from netsim.collectives.times.opening import Known, Opening
    from netsim.collectives.times.sandbox import Sandbox
    from netsim.fluid.snapshot import Windows

__all__ = ["GRID_PER_SECOND", "End", "Entries", "State", "Transition", "to_ticks"]

GRID_PER_SECOND = 2.0**30

# Seconds since the state began, and places of collectives with their members that are through then.
End = tuple[float, tuple[tuple[int, int], ...]]


def to_ticks(seconds: float) -> int:
    """A time in steps of the grid of requests, rounded down: no end can come between the two."""
    return math.floor(seconds * GRID_PER_SECOND)


class Entries(NamedTuple):
    """Who enters, as far as that leads from one state to the next; one row of each column is a member.

    Attributes:
        num_told: how many ends of the state before had been told.
        seconds: when, since the state before began; on a quiet network, since the first of them. Never falling.
        ticks: the same in steps of the grid.
        places: of the collective among those under way; new ones are behind all others.
        members: positions in the collective.
        openings: the collectives that begin, in the order of their places.
    """

    num_told: int
    seconds: tuple[float, ...]
    ticks: tuple[int, ...]
    places: tuple[int, ...]
    members: tuple[int, ...]
    openings: tuple[Opening, ...]

    @property
    def lasting(self) -> float:
        """Seconds from the first of them to the last."""
        return self.seconds[-1] - self.seconds[0]

    def key(self) -> Hashable:
        """All that matters of it; times to a step of the grid."""
        openings = tuple([opening[:-1] for opening in self.openings]) if self.openings else ()
        return self.num_told, self.ticks, self.places, self.members, openings


_numbers = count()


@dataclass(eq=False, slots=True)
class State:
    """Collectives under way, from the first of the entries that led to it until others enter; times count from there.

    Attributes:
        known: connections that it knows.
        ends: when members are through, as far as known.
        known_until: no other ends come before, in seconds.
        is_over: whether everybody is through with the last end.
        windows: what it then leaves behind of connections, by group.
        start: how it is after the last of these entries; None: it is found from an earlier one.
        number: names it.
        is_kept: whether what it leads to is worth remembering: it is remembered itself.
    """

    known: Known = frozenset()
    ends: list[End] = field(default_factory=list)
    known_until: float = 0.0
    is_over: bool = False
    windows: Mapping[Hashable, Windows] = field(default_factory=dict)
    start: Sandbox | None = None
    number: int = field(default_factory=_numbers.__next__)
    is_kept: bool = False


class Transition(NamedTuple):
    """Where entries lead: the places of the collectives that were there and still are, and the next state."""

    kept: tuple[int, ...]
    state: State
