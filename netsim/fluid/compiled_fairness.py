"""`netsim.fluid.fairness`, compiled: the `fast` extra. Import this file only where it is wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from netsim.fluid.compiled_rates import ITEM, compiled, pop, push

if TYPE_CHECKING:
    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = ["max_min_rates"]

_SAME = 1.0 - 1e-12  # as in netsim.fluid.fairness


@compiled
def max_min_rates(
    capacity: FloatArray, routes: IntArray, weights: FloatArray, caps: FloatArray
) -> FloatArray:
    """As `netsim.fluid.fairness.max_min_rates`: the tightest link first, transfers at their caps before it."""
    num, hops = routes.shape
    num_links = len(capacity) - 1
    left, load, count = capacity.copy(), np.zeros(num_links), np.zeros(num_links + 1, np.int64)
    for slot in range(num):
        for hop in range(hops):
            link = routes[slot, hop]
            if link < num_links:
                load[link] += weights[slot]
                count[link] += 1
    first = np.zeros(num_links + 2, np.int64)  # where each link's transfers begin in `crossing`
    first[1:] = np.cumsum(count)
    crossing, filled = np.empty(first[num_links], np.int64), first[:num_links].copy()
    levels, size = np.empty(num_links + num, ITEM), 0
    for slot in range(num):
        for hop in range(hops):
            link = routes[slot, hop]
            if link < num_links:
                crossing[filled[link]] = slot
                filled[link] += 1
        if caps[slot] < math.inf:
            push(levels, size, caps[slot] / weights[slot], num_links + slot)
            size += 1
    for link in range(num_links):
        if count[link]:
            push(levels, size, left[link] / load[link], link)
            size += 1
    rates = np.full(num, math.inf)
    while size:
        seen, item = levels[0].key, levels[0].item
        pop(levels, size)
        size -= 1
        if item >= num_links:
            if rates[item - num_links] == math.inf:
                _fix(routes, weights, item - num_links, caps[item - num_links], rates, left, load, count)
            continue
        if count[item] == 0:
            continue
        level = max(left[item], 0.0) / max(load[item], 1e-300)
        if level * _SAME > seen:
            push(levels, size, level, item)
            size += 1
            continue
        for i in range(first[item], first[item + 1]):
            slot = crossing[i]
            if rates[slot] == math.inf:
                _fix(routes, weights, slot, min(level * weights[slot], caps[slot]), rates, left, load, count)
    return rates


@compiled
def _fix(
    routes: IntArray, weights: FloatArray, slot: int, rate: float,
    rates: FloatArray, left: FloatArray, load: FloatArray, count: IntArray,
) -> None:  # fmt: skip
    """Settle the rate of a transfer and take it from its links."""
    rates[slot] = rate
    for link in routes[slot]:
        if link < len(load):
            left[link] -= rate
            load[link] -= weights[slot]
            count[link] -= 1
