"""Rings: every member passes pieces on to its neighbour, and no link carries more than it must.

Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009): an
all-reduce is a reduce-scatter followed by an all-gather, 2 (n - 1) steps of S / n bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.schedule import Phase, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from netsim.collectives.schedules.schedule import Bytes, Problem, Ranks

__all__ = ["RingPhase", "all_gather_ring", "all_reduce_ring", "reduce_scatter_ring"]


class RingPhase(Phase):
    """Pieces travel around a ring of `ranks`; step i of member p concerns piece i % pieces of one chunk.

    The chunk is (p + shift - direction * (i // pieces)) mod n for the member at position p, so a member
    passes on what it received `pieces` steps ago. Steps are computed, never stored: two numbers describe a
    ring of any size.

    With `loops`, each takes an equal share of every chunk's pieces through all its rounds before the next begins.
    """

    def __init__(
        self,
        ranks: Ranks,
        bounds: Bytes,
        *,
        shift: int,
        reduce: bool,
        direction: int = 1,
        pieces: int = 1,
        window: int = 1,
        num_steps: int | None = None,
        skip_empty: bool = False,
        loops: int = 1,
        num_rounds: int | None = None,
        num_reducing: int | None = None,
    ) -> None:
        """`bounds` are the boundaries of all pieces, chunk by chunk: shape (n * pieces + 1,).

        A loop has `num_rounds` rounds (None: n - 1), in the first `num_reducing` of which (None: all) `reduce` holds.
        """
        num = len(ranks)
        rounds = num - 1 if num_rounds is None else num_rounds
        self.ranks = ranks
        self.shift = shift
        self.reduce = reduce
        self.direction = direction
        self.pieces = pieces
        self.window = window
        self.num_steps = self._all_steps = rounds * pieces if num_steps is None else num_steps
        sizes = np.diff(bounds)
        gaps = int((sizes == 0).sum()) if skip_empty else 0
        self.num_gaps = gaps * -(-rounds // max(num - 1, 1))
        self._loops, self._num_reducing = loops, num_reducing
        # Of a single loop as many as `num_steps` takes.
        self._loop_rounds = rounds if loops > 1 else max(rounds, num)
        self._next = np.roll(ranks, -direction)
        # Twice around, part by part: what all positions send in a step is then a slice.
        self._sizes_twice = np.tile(sizes.reshape(num, pieces).T, 2)
        self._offsets_twice = np.tile(bounds[:-1].reshape(num, pieces).T, 2)

    def _place(self, index: int) -> tuple[int, int]:
        """Round of a step within its loop, and which piece of a chunk each member sends."""
        width = self.pieces // self._loops
        loop, rest = divmod(index, self._loop_rounds * width)
        number, piece = divmod(rest, width)
        return number, (loop * width + piece) % self.pieces

    def gate(self, index: int) -> int:
        """With `loops`, one begins when the last round of the one before has come whole, in all slices of a channel."""
        if self._loops == 1 or index < self.window or self._place(index)[0]:
            return super().gate(index)
        place = index % self.window
        return index - place - self.num_channels + place % self.num_channels + 1

    def reduces(self, index: int) -> bool:
        """Return whether receivers add what comes in step `index`."""
        return self.reduce and (self._num_reducing is None or self._place(index)[0] < self._num_reducing)

    def _slice(self, twice: Bytes, index: int) -> Bytes:
        """Values of each position in step `index`, shape (n,)."""
        number, piece = self._place(index)
        num = len(self.ranks)
        first = (self.shift - self.direction * number) % num
        return twice[piece, first : first + num]

    def num_bytes(self, index: int) -> Bytes:
        """The bytes of each message of step `index`."""
        num_bytes = self._slice(self._sizes_twice, index)
        return num_bytes[num_bytes > 0] if self.num_gaps else num_bytes

    def step(self, index: int) -> Step:
        """Messages from every member to its neighbour."""
        offset, num_bytes = self._slice(self._offsets_twice, index), self._slice(self._sizes_twice, index)
        if not self.num_gaps:
            return Step(self.ranks, self._next, offset, num_bytes)
        kept = num_bytes > 0
        return Step(self.ranks[kept], self._next[kept], offset[kept], num_bytes[kept])

    def pair_bytes(self, num_ranks: int) -> Iterator[tuple[Ranks, Ranks, Bytes]]:
        """Each member and its neighbour, from sums over the runs of chunks that it passes on."""
        if self._loops > 1 and self.num_steps != self._all_steps:
            yield from super().pair_bytes(num_ranks)
            return
        num = len(self.ranks)
        rounds, rest = divmod(self.num_steps, self.pieces)
        by_chunk = self._sizes_twice[:, :num].T
        # Sums over `rounds` successive chunks, beginning anywhere on the circle.
        running = np.concatenate(([0], np.cumsum(np.tile(by_chunk.sum(axis=1), rounds // num + 2))))
        first = (np.arange(num) + self.shift - (rounds - 1 if self.direction > 0 else 0)) % num
        sent = running[first + rounds] - running[first]
        if rest:
            sent = sent + by_chunk[(np.arange(num) + self.shift - self.direction * rounds) % num, :rest].sum(
                axis=1
            )
        yield self.ranks, self._next, sent

    def fixed_pairs(self) -> tuple[Ranks, Ranks]:
        """Each member and its neighbour."""
        return self.ranks, self._next


def reduce_scatter_ring(p: Problem) -> tuple[Phase, ...]:
    """Ring reduce-scatter: n - 1 steps, after which the member at position p holds the sum of chunk p."""
    return (RingPhase(p.ranks, p.layout, shift=-1, reduce=True),)


def all_gather_ring(p: Problem) -> tuple[Phase, ...]:
    """Ring all-gather: n - 1 steps; the member at position p starts with chunk p."""
    return (RingPhase(p.ranks, p.layout, shift=0, reduce=False),)


def all_reduce_ring(p: Problem) -> tuple[Phase, ...]:
    """Ring all-reduce: reduce-scatter, then all-gather; each member sends 2 (n - 1) / n of the bytes."""
    return reduce_scatter_ring(p.chunks) + all_gather_ring(p.chunks)
