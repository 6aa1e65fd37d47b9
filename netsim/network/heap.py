"""A pairing heap whose items can move: transfers and timers by instant, links by the level at which they are full.

Items point to each other, each to those that come after it (M. Fredman, R. Sedgewick, D. Sleator and R. Tarjan, The
pairing heap, 1986). Joining takes one comparison, leaving a logarithmic number of them on average.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import final


class HeapItem:
    """Item of a heap: the least key comes first, of equal keys the least number.

    Attributes:
        below: first of the items directly below it.
        following: next item below the same one.
        before: the one that points to it, by `below` or `following`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = inf
        self.below: HeapItem | None = None
        self.following: HeapItem | None = None
        self.before: HeapItem | None = None

    def detach(self) -> None:
        """Belong to no heap."""
        self.key = inf
        self.below = self.following = self.before = None


@final
class Heap:
    """A heap; an item with the key infinity is not in it.

    Attributes:
        first: the item that comes first.
    """

    def __init__(self) -> None:
        self.first: HeapItem | None = None

    def least(self) -> float:
        """The least key; infinity if the heap is empty."""
        first = self.first
        return inf if first is None else first.key

    def move(self, item: HeapItem, key: float) -> None:
        """Give an item another key; it joins or leaves the heap accordingly."""
        if item.key < inf:
            self._remove(item, key < item.key)
        item.key = key
        if key < inf:
            first = self.first
            self.first = item if first is None else united(first, item)

    def items(self) -> list[HeapItem]:
        """All items, in no order."""
        found: list[HeapItem] = [] if self.first is None else [self.first]
        for item in found:
            found += [other for other in (item.below, item.following) if other is not None]
        return found

    def _remove(self, item: HeapItem, with_all: bool) -> None:
        """Take an item out, with or without all below it."""
        left: HeapItem | None = None
        if not with_all and item.below is not None:
            left = united_siblings(item.below)
            item.below = None
        before = item.before
        if before is None:
            self.first = left
            return
        following = item.following
        if before.below is item:
            before.below = following
        else:
            before.following = following
        if following is not None:
            following.before = before
            item.following = None
        item.before = None
        first = self.first
        if left is not None and first is not None:
            self.first = united(first, left)


def united(one: HeapItem, other: HeapItem) -> HeapItem:
    """Put the later of two items below the other, which is returned."""
    if other.key < one.key or (other.key == one.key and other.number < one.number):
        one, other = other, one
    below = one.below
    if below is not None:
        below.before = other
        other.following = below
    other.before = one
    one.below = other
    return one


def united_siblings(first: HeapItem) -> HeapItem:
    """Unite siblings two by two, and then the pairs, the last one first."""
    pairs: HeapItem | None = None
    left: HeapItem | None = first
    while left is not None:
        pair = left
        other = pair.following
        left = None
        pair.before = pair.following = None
        if other is not None:
            left = other.following
            other.before = other.following = None
            pair = united(pair, other)
        pair.following = pairs
        pairs = pair
    assert pairs is not None
    whole = pairs
    pairs = whole.following
    whole.following = None
    while pairs is not None:
        pair = pairs
        pairs = pair.following
        pair.following = None
        whole = united(whole, pair)
    return whole
