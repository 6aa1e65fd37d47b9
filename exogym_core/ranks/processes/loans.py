"""Who still reads which part of the memory that processes share; kept by the process of the simulation."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.ranks.processes.arena import Block, Store

__all__ = ["Loans"]


class Loans:
    """Counts the readers of blocks; those without any go back to who has handed them out.

    Region 0 of the store is the simulation's own, region `i + 1` that of process `i`.

    Args:
        store: where the blocks are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_readers: dict[int, int] = {}  # by offset
        self._due: defaultdict[int, list[Block]] = defaultdict(list)

    def lend(self, blocks: Sequence[Block]) -> None:
        """One more reads each of these."""
        for block in blocks:
            self._num_readers[block.offset] = self._num_readers.get(block.offset, 0) + 1

    def give_back(self, blocks: Sequence[Block]) -> None:
        """One has read each of these."""
        for block in blocks:
            left = self._num_readers[block.offset] - 1
            if left:
                self._num_readers[block.offset] = left
                continue
            del self._num_readers[block.offset]
            owner = self._store.owner(block)
            if owner:
                self._due[owner - 1].append(block)
            else:
                self._store.free([block])

    def due_to(self, index: int) -> list[Block]:
        """What process `index` has back and has not been told of."""
        return self._due.pop(index, [])
