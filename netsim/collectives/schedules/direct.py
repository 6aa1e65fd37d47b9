"""Direct algorithms: every message goes from the owner of its bytes to their destination, all at once.

Also what needs no bytes (dissemination barrier) and what is one message (sendrecv).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.schedule import ListedPhase, Step, step_of

if TYPE_CHECKING:
    from netsim.collectives.schedules.schedule import Bytes, Phase

__all__ = [
    "all_gather_direct",
    "all_reduce_direct",
    "all_to_all_direct",
    "barrier_dissemination",
    "broadcast_direct",
    "gather_direct",
    "reduce_direct",
    "reduce_scatter_direct",
    "scatter_direct",
    "sendrecv_direct",
]


def _everyone(num: int) -> tuple[Bytes, Bytes]:
    """Source and target of n (n - 1) messages, each member's in the order rank + 1, rank + 2, ..."""
    src = np.repeat(np.arange(num, dtype=np.int64), num - 1)
    dst = (src + np.tile(np.arange(1, num, dtype=np.int64), num)) % num
    return src, dst


def _parts(bounds: Bytes, part: Bytes) -> tuple[Bytes, Bytes]:
    return bounds[part], bounds[part + 1] - bounds[part]


def all_to_all_direct(num: int, bounds: Bytes) -> tuple[Phase, ...]:
    """Every member sends each other its part; `bounds` has n * n parts (from i to j: i * n + j)."""
    src, dst = _everyone(num)
    return (ListedPhase([Step(src, dst, *_parts(bounds, src * num + dst))]),)


def all_gather_direct(num: int, bounds: Bytes) -> tuple[Phase, ...]:
    """Every member sends its part to every other."""
    src, dst = _everyone(num)
    return (ListedPhase([Step(src, dst, *_parts(bounds, src))]),)


def reduce_scatter_direct(num: int, bounds: Bytes) -> tuple[Phase, ...]:
    """Every member sends each other the part that it is to reduce."""
    src, dst = _everyone(num)
    return (ListedPhase([Step(src, dst, *_parts(bounds, dst))], reduce=True),)


def all_reduce_direct(num: int, bounds: Bytes) -> tuple[Phase, ...]:
    """Every member receives its part from each other, reduces it, and sends each the result: two latencies.

    Each member sends 2 (n - 1) / n of the bytes, as in a ring, but over all routes between members at once.
    """
    return reduce_scatter_direct(num, bounds) + all_gather_direct(num, bounds)


def _others(num: int, root: int) -> Bytes:
    return (root + np.arange(1, num, dtype=np.int64)) % num


def gather_direct(num: int, bounds: Bytes, root: int) -> tuple[Phase, ...]:
    """Every member sends its part to the root."""
    src = _others(num, root)
    return (ListedPhase([Step(src, np.full_like(src, root), *_parts(bounds, src))]),)


def scatter_direct(num: int, bounds: Bytes, root: int) -> tuple[Phase, ...]:
    """The root sends every member its part."""
    dst = _others(num, root)
    return (ListedPhase([Step(np.full_like(dst, root), dst, *_parts(bounds, dst))]),)


def broadcast_direct(num: int, num_bytes: int, root: int) -> tuple[Phase, ...]:
    """The root sends the whole tensor to every member at once."""
    return (ListedPhase([step_of([(root, dst, 0, num_bytes) for dst in _others(num, root).tolist()])]),)


def reduce_direct(num: int, num_bytes: int, root: int) -> tuple[Phase, ...]:
    """Every member sends the whole tensor to the root at once."""
    rows = [(src, root, 0, num_bytes) for src in _others(num, root).tolist()]
    return (ListedPhase([step_of(rows)], reduce=True),)


def barrier_dissemination(num: int) -> tuple[Phase, ...]:
    """Round d = 1, 2, 4, ...: an empty message to rank + d, one from rank - d (Hensgen et al. 1988)."""
    src = np.arange(num, dtype=np.int64)
    none = np.zeros(num, np.int64)
    rounds = range(max(num - 1, 0).bit_length())
    return (ListedPhase([Step(src, (src + (1 << power)) % num, none, none) for power in rounds]),)


def sendrecv_direct(num_bytes: int) -> tuple[Phase, ...]:
    """Send a message from member 0 to member 1."""
    return (ListedPhase([step_of([(0, 1, 0, num_bytes)])]),)
