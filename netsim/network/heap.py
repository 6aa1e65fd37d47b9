"""A binary heap whose items can move: transfers and timers by instant, links by the level at which they are full.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import Generic, TypeVar, final


class HeapItem:
    """Item of a heap: the least key comes first, of equal keys the least number.

    Attributes:
        place: position in the heap; -1 outside.
    """

    def __init__(self, number: int) -> None:
        self.key = inf
        self.number = number
        self.place = -1


ItemT = TypeVar("ItemT", bound=HeapItem)


@final
class Heap(Generic[ItemT]):
    """A binary heap; an item with the key infinity is not in it."""

    def __init__(self) -> None:
        self.items: list[ItemT] = []

    def least(self) -> float:
        """The least key; infinity if the heap is empty."""
        return self.items[0].key if self.items else inf

    def move(self, item: ItemT, key: float) -> None:
        """Give an item another key; it joins or leaves the heap accordingly."""
        heap = self.items
        before = item.key
        item.key = key
        i = item.place
        if i < 0:
            if key < inf:
                item.place = len(heap)
                heap.append(item)
                self._sift_up(len(heap) - 1)
        elif key == inf:
            item.place = -1
            last = heap.pop()
            if last is not item:
                heap[i] = last
                last.place = i
                self._sift_up(i)
                self._sift_down(last.place)
        elif key < before:
            self._sift_up(i)
        else:
            self._sift_down(i)

    def _sift_up(self, i: int) -> None:
        heap = self.items
        item = heap[i]
        while i > 0:
            above = heap[(i - 1) >> 1]
            if above.key < item.key or (above.key == item.key and above.number < item.number):
                break
            heap[i] = above
            above.place = i
            i = (i - 1) >> 1
        heap[i] = item
        item.place = i

    def _sift_down(self, i: int) -> None:
        heap = self.items
        item = heap[i]
        while 2 * i + 1 < len(heap):
            child = 2 * i + 1
            below = heap[child]
            if child + 1 < len(heap):
                other = heap[child + 1]
                if other.key < below.key or (other.key == below.key and other.number < below.number):
                    child += 1
                    below = other
            if below.key > item.key or (below.key == item.key and below.number > item.number):
                break
            heap[i] = below
            below.place = i
            i = child
        heap[i] = item
        item.place = i
