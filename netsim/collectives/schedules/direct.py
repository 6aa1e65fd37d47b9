"""Direct algorithms: every message goes from the owner of its bytes to their destination, all at once.

Also what needs no bytes (dissemination barrier), what is one message (sendrecv), and the exchange through an object
store, where each member uploads its part once and downloads those of all others. Its copies of parts, in the store and
in relays, are members too: rank j's in place k is member (1 + k) n + j, and each message has one sender and one
receiver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.schedule import ListedPhase, Schedule, Step, step_of
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Bytes, Phase, Problem, Ranks

__all__ = [
    "STORE",
    "all_gather_direct",
    "all_reduce_direct",
    "all_to_all_direct",
    "barrier_dissemination",
    "broadcast_direct",
    "every_pair",
    "gather_direct",
    "reduce_direct",
    "reduce_scatter_direct",
    "scatter_direct",
    "sendrecv_direct",
    "store_exchange",
]


# Each takes some hundred bytes to list.
_MOST_MESSAGES = 5_000_000


def every_pair(num: int) -> tuple[Bytes, Bytes]:
    """Source and target of n (n - 1) messages, each member's in the order rank + 1, rank + 2, ..."""
    if (messages := num * (num - 1)) > _MOST_MESSAGES:
        raise InputError(
            f"direct messages among {num:,} ranks: {messages:,} at once, at most {_MOST_MESSAGES:,} are listed; "
            "choose another algorithm, or fewer ranks"
        )
    src = np.repeat(np.arange(num, dtype=np.int64), num - 1)
    dst = (src + np.tile(np.arange(1, num, dtype=np.int64), num)) % num
    return src, dst


def _parts(bounds: Bytes, part: Bytes) -> tuple[Bytes, Bytes]:
    return bounds[part], bounds[part + 1] - bounds[part]


def all_to_all_direct(p: Problem) -> tuple[Phase, ...]:
    """Every member sends each other its part; the layout has n * n parts (from i to j: i * n + j)."""
    src, dst = every_pair(p.num_ranks)
    return (ListedPhase([Step(src, dst, *_parts(p.layout, src * p.num_ranks + dst))]),)


def all_gather_direct(p: Problem) -> tuple[Phase, ...]:
    """Every member sends its part to every other."""
    src, dst = every_pair(p.num_ranks)
    return (ListedPhase([Step(p.ranks[src], p.ranks[dst], *_parts(p.layout, src))]),)


def reduce_scatter_direct(p: Problem) -> tuple[Phase, ...]:
    """Every member sends each other the part that it is to reduce."""
    src, dst = every_pair(p.num_ranks)
    step = Step(p.ranks[src], p.ranks[dst], *_parts(p.layout, dst))
    return (ListedPhase([step], reduce=True),)


def all_reduce_direct(p: Problem) -> tuple[Phase, ...]:
    """Every member receives its part from each other, reduces it, and sends each the result: two latencies.

    Each member sends 2 (n - 1) / n of the bytes, as in a ring, but over all routes between members at once.
    """
    return reduce_scatter_direct(p.chunks) + all_gather_direct(p.chunks)


def _others(p: Problem) -> Ranks:
    return (p.root + np.arange(1, p.num_ranks, dtype=np.int64)) % p.num_ranks


def gather_direct(p: Problem) -> tuple[Phase, ...]:
    """Every member sends its part to the root."""
    src = _others(p)
    return (ListedPhase([Step(src, np.full_like(src, p.root), *_parts(p.layout, src))]),)


def scatter_direct(p: Problem) -> tuple[Phase, ...]:
    """The root sends every member its part."""
    dst = _others(p)
    return (ListedPhase([Step(np.full_like(dst, p.root), dst, *_parts(p.layout, dst))]),)


def broadcast_direct(p: Problem) -> tuple[Phase, ...]:
    """The root sends the whole tensor to every member at once."""
    return (ListedPhase([step_of([(p.root, dst, 0, p.num_bytes) for dst in _others(p).tolist()])]),)


def reduce_direct(p: Problem) -> tuple[Phase, ...]:
    """Every member sends the whole tensor to the root at once."""
    rows = [(src, p.root, 0, p.num_bytes) for src in _others(p).tolist()]
    return (ListedPhase([step_of(rows)], reduce=True),)


def barrier_dissemination(p: Problem) -> tuple[Phase, ...]:
    """Round d = 1, 2, 4, ...: an empty message to rank + d, one from rank - d (Hensgen et al. 1988)."""
    none = np.zeros(p.num_ranks, np.int64)
    rounds = range((p.num_ranks - 1).bit_length())
    steps = [Step(p.ranks, (p.ranks + (1 << power)) % p.num_ranks, none, none) for power in rounds]
    return (ListedPhase(steps),)


def sendrecv_direct(p: Problem) -> tuple[Phase, ...]:
    """Send a message from member 0 to member 1."""
    return (ListedPhase([step_of([(0, 1, 0, p.num_bytes)])]),)


STORE = "store"
"""Name of the algorithm in results."""


def store_exchange(op: str, part_bytes: int, places: Sequence[int], num_places: int) -> Schedule:
    """Make the schedule of an exchange among `len(places)` ranks.

    A download from a relay leaves when the relay has its copy; a relay gets those that a rank downloads from it.

    Args:
        op: the collective in whose place it is.
        part_bytes: that each rank uploads.
        places: where each rank downloads: 0 is the store, others are relays.
        num_places: the store and its relays.
    """
    num = len(places)
    owner, rank = every_pair(num)
    place = np.array(places, np.int64)[rank]
    copy = num * (1 + place) + owner
    relayed = np.unique(copy[place > 0])
    own, direct = np.arange(num, dtype=np.int64), place == 0
    first = (np.append(relayed % num + num, copy[direct]), np.append(relayed, rank[direct]))
    pairs = [(own, own + num), first, (copy[~direct], rank[~direct])]
    steps = [Step(src, dst, np.zeros_like(src), np.full_like(src, part_bytes)) for src, dst in pairs]
    layout = np.array([0, part_bytes], np.int64)
    phases = (ListedPhase(steps),) if part_bytes else ()
    copies = num * num_places
    return Schedule(op, STORE, num + copies, part_bytes, phases, layout, num_copies=copies)
