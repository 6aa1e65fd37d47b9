"""Messages of torch.distributed's gloo backend, by operation.

Read from gloo's sources (allreduce.cc, allgather.cc, broadcast.cc, reduce.cc) and checked against
measurements. The rendezvous before each message belongs to the protocol, not to the schedule. Operations
that are not here (gather, scatter, all_to_all, barrier, sendrecv) gloo runs as the direct algorithms do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.ring import RingPhase
from netsim.collectives.schedules.schedule import ListedPhase, Step, boundaries, step_of

if TYPE_CHECKING:
    from netsim.collectives.schedules.schedule import Bytes, Phase, Problem

__all__ = ["all_gather_gloo", "all_reduce_gloo", "broadcast_gloo", "reduce_gloo"]

SEGMENT_BYTES = 1 << 20
IN_FLIGHT = 2


def _segments(p: Problem) -> Bytes:
    """Boundaries of a multiple of n segments, at least two a rank, none above 1 MiB before rounding up."""
    count = max(-(-p.num_bytes // SEGMENT_BYTES), 2 * p.num_ranks)
    count = -(-count // p.num_ranks) * p.num_ranks
    return boundaries(p.num_bytes, count, p.element_bytes)


def _ring(
    p: Problem, bounds: Bytes, *, reduce: bool, direction: int = -1, num_steps: int | None = None
) -> RingPhase:
    """Around the ring in pieces, as many a rank as there are bounds for, some of them in flight."""
    return RingPhase(
        p.ranks,
        bounds,
        shift=int(reduce),
        reduce=reduce,
        direction=direction,
        pieces=(len(bounds) - 1) // p.num_ranks,
        window=IN_FLIGHT,
        num_steps=num_steps,
        skip_empty=True,
    )


def all_reduce_gloo(p: Problem) -> tuple[Phase, ...]:
    """Ring to rank - 1 in segments, two in flight: reduce-scatter, then (both awaited) all-gather.

    A reduce-scatter is an all-reduce of a copy, of which each rank keeps its part: twice the bytes needed.
    """
    bounds = _segments(p)
    return _ring(p, bounds, reduce=True), _ring(p, bounds, reduce=False)


def all_gather_gloo(p: Problem) -> tuple[Phase, ...]:
    """Ring to rank + 1, each rank's part in two halves of any size, two in flight."""
    halves = [p.layout[:1]]
    for low, high in pairwise(p.layout.tolist()):
        halves.append(low + boundaries(high - low, 2, p.element_bytes)[1:])
    return (_ring(p, np.concatenate(halves), reduce=False, direction=1),)


def broadcast_gloo(p: Problem) -> tuple[Phase, ...]:
    """Binomial tree of whole tensors in which a rank that has the tensor sends to all its children at once.

    Virtual rank v sends to v + 2^j for every 2^j above its highest bit. A child has one bit more than its
    parent, so the number of bits is the step.
    """
    num, num_rounds = p.num_ranks, (p.num_ranks - 1).bit_length()
    steps: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_rounds)]
    for virtual in range(num):
        for power in range(virtual.bit_length(), num_rounds):
            child = virtual + (1 << power)
            if child < num:
                row = ((virtual + p.root) % num, (child + p.root) % num, 0, p.num_bytes)
                steps[virtual.bit_count()].append(row)
    return (ListedPhase([step_of(rows) for rows in steps]),)


def reduce_gloo(p: Problem) -> tuple[Phase, ...]:
    """Ring reduce-scatter, two in flight, then every rank sends its chunk to the root at once.

    With k > 2 segments a rank, the ring continues for n k - 2 messages, of which the last k - 2 are of no use.
    """
    num = p.num_ranks
    if num == 1:
        return ()
    segment = min(-(-p.num_bytes // (2 * num)), SEGMENT_BYTES)
    segment = max(-(-segment // p.element_bytes), 1) * p.element_bytes
    pieces = max(-(-p.num_bytes // (segment * num)), 2)
    bounds = np.minimum(np.arange(num * pieces + 1, dtype=np.int64) * segment, p.num_bytes)
    src = (p.root + np.arange(1, num, dtype=np.int64)) % num
    low, high = bounds[src * pieces], bounds[(src + 1) * pieces]
    kept = high > low
    final = Step(src[kept], np.full(int(kept.sum()), p.root, np.int64), low[kept], (high - low)[kept])
    return _ring(p, bounds, reduce=True, num_steps=num * pieces - 2), ListedPhase([final])
