"""Who gets how much of each link: weighted max-min fairness with caps, by progressive filling.

All transfers' rates grow together, each in proportion to its weight, until something stops them: a link on
the route is full, or the transfer's own cap is reached. What is stopped keeps its rate, the others grow on.
The result is the one allocation in which nobody can get more without taking it from somebody who has less
(per weight): D. Bertsekas and R. Gallager, Data Networks, 2nd ed., section 6.5.2.

`fill` is where this is done, from dictionaries. Arrays of all transfers filled in rounds are up to 1.4 times as fast
where thousands are in flight, and no faster elsewhere; the same lines compiled lose what they gain on the way there.
What changes make of rates is settled in `shares.py`, which hands it the links that a change can reach. The compiled
event loop has both in records of its own (`compiled_rates.py`): whole runs take 8 to 36 times as long without.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

__all__ = ["FloatArray", "IntArray", "fill"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Levels closer than this (relative) are one level: what differs by rounding only is settled in one round.
_SAME = 1.0 - 1e-12


def fill(
    links: Sequence[int],
    transfers: Sequence[int],
    num_links: int,
    left: MutableSequence[float],
    loads: MutableSequence[float],
    counts: MutableSequence[int],
    crossing: Any,
    hops: Any,
    weights: Any,
    caps: Any,
    rates: Any,
) -> None:
    """Give transfers that share links the rates of weighted max-min fairness.

    Links are filled the tightest first; as the levels of the others only rise then, one that was seen too low is put
    back. A cap is a link of one transfer.

    Args:
        links: to be filled, by number. What stands behind goes by these numbers and those of transfers, in mappings
            or sequences.
        transfers: that share them, by number.
        num_links: more than the number of any link.
        left: rate of each link that is to be shared, by number; afterwards, what is left of it.
        loads: weights of the transfers that share it, likewise; afterwards, of none.
        counts: how many they are, likewise; of other links, which limit nobody, none.
        crossing: which they are, by link.
        hops: the links that each transfer crosses.
        weights: share of each transfer relative to the others, above zero.
        caps: largest rate of each transfer, infinity for none.
        rates: of each transfer, -1 before; afterwards in the unit of `left`.

    >>> rates, routes = dict.fromkeys(range(3), -1.0), [[0], [0, 1], [1]]
    >>> caps = [math.inf, math.inf, 1.0]
    >>> fill([0, 1], range(3), 2, [10.0, 4.0], [2.0] * 2, [2] * 2, [[0, 1], [1, 2]], routes, [1.0] * 3, caps, rates)
    >>> rates
    {0: 7.0, 1: 3.0, 2: 1.0}
    """
    levels = [(max(left[link], 0.0) / loads[link], link) for link in links if counts[link]]
    levels += [(caps[each] / weights[each], num_links + each) for each in transfers if caps[each] < math.inf]
    heapify(levels)
    num_open = len(transfers)
    while num_open:
        level, item = heappop(levels)
        those = crossing[item] if item < num_links else [item - num_links]
        if item < num_links:
            if counts[item] == 0:
                continue
            seen, level = level, max(left[item], 0.0) / max(loads[item], 1e-300)
            if level * _SAME > seen:
                heappush(levels, (level, item))
                continue
        for each in those:
            if rates[each] >= 0.0:
                continue
            weight = weights[each]
            rate = level * weight
            if rate > caps[each]:
                rate = caps[each]
            rates[each] = rate
            num_open -= 1
            for link in hops[each]:
                if counts[link]:
                    left[link] -= rate
                    loads[link] -= weight
                    counts[link] -= 1
