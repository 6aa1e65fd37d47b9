"""Who can feel whom: draining transfers that share links, directly or through others.

A change can alter rates only among transfers connected to it by shared links. Joining is exact. Leaving does
not
look for splits each time: a neighbourhood is taken apart anew when as many transfers have left it as remain,
so that looking costs a fixed amount for each transfer that leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from netsim.fairness import IntArray

__all__ = ["Neighbourhood", "Neighbourhoods"]


class Neighbourhood:
    """Slots of transfers that share links, and those links."""

    __slots__ = ("_array", "left", "links", "position")

    def __init__(self) -> None:
        self._array: IntArray = np.zeros(4, dtype=np.int64)
        self.position: dict[int, int] = {}
        self.links: list[int] = []
        self.left = 0

    def __len__(self) -> int:
        return len(self.position)

    @property
    def slots(self) -> IntArray:
        """The member slots, in no particular but a repeatable order."""
        return self._array[: len(self.position)]

    def add(self, slots: Iterable[int]) -> None:
        """Take slots in."""
        for slot in slots:
            place = len(self.position)
            if place == len(self._array):
                self._array = np.concatenate([self._array, np.zeros(place, dtype=np.int64)])
            self._array[place] = slot
            self.position[slot] = place

    def remove(self, slot: int) -> None:
        """Let a slot go; the last one takes its place."""
        last = len(self.position) - 1
        place = self.position.pop(slot)
        if place != last:
            moved = int(self._array[last])
            self._array[place] = moved
            self.position[moved] = place
        self.left += 1


class Neighbourhoods:
    """All neighbourhoods of a network, and which of them have changed since the rates were last found."""

    def __init__(self, num_links: int) -> None:
        self._of_link: list[Neighbourhood | None] = [None] * num_links
        self._links: dict[int, tuple[int, ...]] = {}
        self._changed: dict[Neighbourhood, None] = {}

    def join(self, slot: int, links: tuple[int, ...]) -> None:
        """A transfer starts to use links (at least one)."""
        self._links[slot] = links
        home = self._unite(links)
        home.add((slot,))
        self._changed[home] = None

    def leave(self, slot: int) -> None:
        """A transfer uses its links no longer."""
        home = self._of_link[self._links.pop(slot)[0]]
        assert home is not None
        home.remove(slot)
        self._changed[home] = None
        if home.left >= max(16, len(home)) or not home.position:
            self._take_apart(home)

    def touch(self, link: int) -> None:
        """The capacity of a link has changed."""
        home = self._of_link[link]
        if home is not None:
            self._changed[home] = None

    def touch_slot(self, slot: int) -> None:
        """The cap or weight of a transfer has changed."""
        self.touch(self._links[slot][0])

    def slots_near(self, link: int) -> list[int]:
        """The slots that a change of this link can reach."""
        home = self._of_link[link]
        return list(home.position) if home is not None else []

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def take_changed(self) -> list[Neighbourhood]:
        """The neighbourhoods with members that have changed since the last call."""
        changed = [home for home in self._changed if home.position]
        self._changed.clear()
        return changed

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def _unite(self, links: tuple[int, ...]) -> Neighbourhood:
        """One neighbourhood that holds all these links, the larger taking in the smaller."""
        found = {home: None for link in links if (home := self._of_link[link]) is not None}
        home = max(found, key=len) if found else Neighbourhood()
        for other in found:
            if other is not home:
                home.add(other.position)
                home.left += other.left
                self._own(home, other.links)
                self._changed.pop(other, None)
        self._own(home, [link for link in links if self._of_link[link] is None])
        return home

    def _own(self, home: Neighbourhood, links: list[int]) -> None:
        home.links.extend(links)
        for link in links:
            self._of_link[link] = home

    def _take_apart(self, old: Neighbourhood) -> None:
        """Replace a neighbourhood by the parts that are still connected."""
        for link in old.links:
            self._of_link[link] = None
        self._changed.pop(old, None)
        parts: dict[Neighbourhood, None] = {}
        for slot in old.position:
            links = self._links[slot]
            home = self._unite(links)
            home.add((slot,))
            parts[home] = None
        for part in parts:
            if part.position and self._of_link[part.links[0]] is part:
                self._changed[part] = None
                part.left = 0
