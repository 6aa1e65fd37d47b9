"""An exchange through an object store: each member uploads its part once, and downloads those of all others.

Copies of parts, in the store and in relays, are members too: rank j's in place k is member (1 + k) n + j, and each
message has one sender and one receiver, as in every schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.schedules.direct import every_pair
from netsim.collectives.schedules.schedule import ListedPhase, Schedule, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Ranks

__all__ = ["STORE", "store_exchange"]

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
    steps = [_step(src, dst, part_bytes) for src, dst in pairs]
    layout = np.array([0, part_bytes], np.int64)
    phases = (ListedPhase(steps),) if part_bytes else ()
    copies = num * num_places
    return Schedule(op, STORE, num + copies, part_bytes, phases, layout, num_copies=copies)


def _step(src: Ranks, dst: Ranks, num_bytes: int) -> Step:
    return Step(src, dst, np.zeros_like(src), np.full_like(src, num_bytes))
