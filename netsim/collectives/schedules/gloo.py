"""Messages of torch.distributed's gloo backend, by operation.

Read from gloo's sources (allreduce.cc, allgather.cc, broadcast.cc, reduce.cc) and checked against
measurements. The rendezvous before each message belongs to the protocol, not to the schedule. Operations
that are not here (gather, scatter, all_to_all, barrier, sendrecv) gloo runs as the direct algorithms do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.ring import RingPhase
from netsim.collectives.schedules.schedule import ListedPhase, Step, boundaries, step_of

if TYPE_CHECKING:
    from netsim.collectives.schedules.schedule import Bytes, Phase

__all__ = ["all_gather_gloo", "all_reduce_gloo", "broadcast_gloo", "reduce_gloo", "reduce_scatter_gloo"]

SEGMENT_BYTES = 1 << 20
IN_FLIGHT = 2


def _segments(num: int, num_bytes: int, element_bytes: int) -> Bytes:
    """Boundaries of a multiple of n segments, at least two a rank, none above 1 MiB before rounding up."""
    count = max(-(-num_bytes // SEGMENT_BYTES), 2 * num)
    count = -(-count // num) * num
    return boundaries(num_bytes, count, element_bytes)


def _ring(
    num: int, bounds: Bytes, *, reduce: bool, direction: int = -1, num_steps: int | None = None
) -> RingPhase:
    """Around the ring in pieces, as many a rank as there are bounds for, some of them in flight."""
    return RingPhase(
        np.arange(num, dtype=np.int64),
        bounds,
        shift=int(reduce),
        reduce=reduce,
        direction=direction,
        pieces=(len(bounds) - 1) // num,
        window=IN_FLIGHT,
        num_steps=num_steps,
        skip_empty=True,
    )


def all_reduce_gloo(num: int, num_bytes: int, element_bytes: int) -> tuple[Phase, ...]:
    """Ring to rank - 1 in segments, two in flight: reduce-scatter, then (both awaited) all-gather."""
    bounds = _segments(num, num_bytes, element_bytes)
    return _ring(num, bounds, reduce=True), _ring(num, bounds, reduce=False)


def reduce_scatter_gloo(num: int, num_bytes: int, element_bytes: int) -> tuple[Phase, ...]:
    """An all-reduce of a copy, of which each rank keeps its part: twice the bytes needed."""
    return all_reduce_gloo(num, num_bytes, element_bytes)


def all_gather_gloo(num: int, bounds: Bytes, element_bytes: int) -> tuple[Phase, ...]:
    """Ring to rank + 1, each rank's part in two halves of any size, two in flight."""
    halves = [bounds[:1]]
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        halves.append(low + boundaries(high - low, 2, element_bytes)[1:])
    return (_ring(num, np.concatenate(halves), reduce=False, direction=1),)


def broadcast_gloo(num: int, num_bytes: int, root: int) -> tuple[Phase, ...]:
    """Binomial tree of whole tensors in which a rank that has the tensor sends to all its children at once.

    Virtual rank v sends to v + 2^j for every 2^j above its highest bit. A child has one bit more than its
    parent, so the number of bits is the step.
    """
    steps: list[list[tuple[int, int, int, int]]] = [[] for _ in range(max(num - 1, 0).bit_length())]
    for virtual in range(num):
        for power in range(virtual.bit_length(), max(num - 1, 0).bit_length()):
            child = virtual + (1 << power)
            if child < num:
                row = ((virtual + root) % num, (child + root) % num, 0, num_bytes)
                steps[virtual.bit_count()].append(row)
    return (ListedPhase([step_of(rows) for rows in steps]),)


def reduce_gloo(num: int, num_bytes: int, element_bytes: int, root: int) -> tuple[Phase, ...]:
    """Ring reduce-scatter, two in flight, then every rank sends its chunk to the root at once.

    With k > 2 segments a rank, the ring goes on for n k - 2 messages, of which the last k - 2 are of no use.
    """
    if num == 1:
        return ()
    segment = min(-(-num_bytes // (2 * num)), SEGMENT_BYTES)
    segment = max(-(-segment // element_bytes), 1) * element_bytes
    pieces = max(-(-num_bytes // (segment * num)), 2)
    bounds = np.minimum(np.arange(num * pieces + 1, dtype=np.int64) * segment, num_bytes)
    src = (root + np.arange(1, num, dtype=np.int64)) % num
    low, high = bounds[src * pieces], bounds[(src + 1) * pieces]
    kept = high > low
    final = Step(src[kept], np.full(int(kept.sum()), root, np.int64), low[kept], (high - low)[kept])
    return _ring(num, bounds, reduce=True, num_steps=num * pieces - 2), ListedPhase([final])
