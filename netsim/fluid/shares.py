"""Max-min fair rates that follow changes, at a cost that grows with what a change touches.

Max-min fairness fills all links from level zero up; a transfer's rate is its weight times the level, until a
link on its route is full or its cap is reached (`netsim.fluid.fairness`). So what lies below the level at which a
change first matters stays as it is: below the level of a transfer that ends, and below what one that begins can
get at least. From there up a change reaches those that share a full link with it, and those who share one with
them; links that are not full carry nothing on. Only these are settled anew, as if no other link existed; should
one of those be overfull then, it counts as full and all is settled once more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from netsim.fluid.fairness import max_min_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from netsim.fluid.fairness import FloatArray, IntArray

__all__ = ["Shares"]

_ROUNDING = 1e-12  # relative
_SAME = 1.0 - _ROUNDING  # as in netsim.fluid.fairness
_BELOW = 1.0 - 1e-9  # times a level is safely below it
_FULL = 1e-9  # of its capacity is left on a link that counts as full, at most
_OVERFULL = 1.0 + 1e-11  # times its capacity is more than rounding

# More than so many are settled by arrays faster than one by one.
_MANY = 128


class Shares:
    """Who gets how much of each link.

    Args:
        capacity: rate of each link.
        solve: does what `max_min_rates` does, for many transfers at once.

    Attributes:
        rate: of each transfer (slot), as last settled.
        crossing: by link, the transfers on it.
    """

    def __init__(self, capacity: Iterable[float], solve: Callable[..., FloatArray] = max_min_rates) -> None:
        self._capacity = list(capacity)
        self._solve = solve
        self.rate: dict[int, float] = {}
        self._links: dict[int, tuple[int, ...]] = {}
        self._weight: dict[int, float] = {}
        self._cap: dict[int, float] = {}
        self._level: dict[int, float] = {}  # rate / weight; infinity until it is settled
        self.crossing: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._full: set[int] = set()  # links that may limit somebody
        self._spare = self._capacity.copy()  # at least so much of each link is free
        self._fresh: dict[int, None] = {}  # transfers that began or may get more or less by themselves
        self._noted: dict[int, None] = {}  # full links on which there is more or less to share
        self._resized: dict[int, None] = {}  # of these, links of another capacity
        self._ended = 0
        self._least = math.inf  # the level below which nothing changes
        self._routes: IntArray = np.zeros((0, 0), np.int64)  # by slot: its links, filled up with their number

    def __contains__(self, slot: int) -> bool:
        return slot in self._links

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    # -- changes ---------------------------------------------------------------------------------------------

    def join(self, slot: int, links: tuple[int, ...], weight: float, cap: float) -> None:
        """A transfer starts to use links (at least one, each once)."""
        self._links[slot] = links
        self._weight[slot], self._cap[slot] = weight, cap
        self.rate[slot], self._level[slot] = 0.0, math.inf
        self._fresh[slot] = None
        for link in links:
            self.crossing[link][slot] = None
        rows, columns = self._routes.shape
        if slot >= rows or len(links) > columns:
            larger = np.full((max(rows, 2 * slot + 2), max(columns, len(links))), len(self._capacity))
            larger[:rows, :columns] = self._routes
            self._routes = larger
        self._routes[slot] = len(self._capacity)
        self._routes[slot, : len(links)] = links

    def leave(self, slot: int) -> None:
        """A transfer uses its links no longer."""
        level = self._level.pop(slot)
        if slot in self._fresh:
            level = self.rate[slot] / self._weight[slot]
            del self._fresh[slot]
        self._least = min(self._least, level)
        self._ended += 1
        for link in self._links.pop(slot):
            del self.crossing[link][slot]
            if link in self._full:
                self._noted[link] = None
        del self.rate[slot], self._weight[slot], self._cap[slot]

    def change(self, slot: int, weight: float, cap: float) -> None:
        """A transfer has another weight or cap."""
        level = self.rate[slot] / self._weight[slot]
        same_weight = weight == self._weight[slot]
        is_at_cap = self.rate[slot] >= self._cap[slot] * _SAME
        self._weight[slot], self._cap[slot] = weight, cap
        if slot in self._fresh or (same_weight and not is_at_cap and cap > self.rate[slot]):
            return  # other things limit it
        self._least = min(self._least, level)
        self._level[slot] = math.inf
        self._fresh[slot] = None

    def resize(self, link: int, capacity: float) -> None:
        """A link has another capacity."""
        self._spare[link] += min(capacity - self._capacity[link], 0.0)
        self._capacity[link] = capacity
        if link in self._full:
            self._least = min([self._least, *self._levels_on(link)])
        elif self._spare[link] >= 0.0:
            return
        self._full.add(link)
        self._noted[link] = self._resized[link] = None

    def _levels_on(self, link: int) -> list[float]:
        """The highest level on a link, at which it is full if it is."""
        settled = [self._level[slot] for slot in self.crossing[link] if slot not in self._fresh]
        return [max(settled)] if settled else []

    # -- settling --------------------------------------------------------------------------------------------

    def settle(self) -> dict[int, float]:
        """Find rates anew after the changes since the last call. Returns those that are others now.

        What changes by no more than rounding keeps its rate, so that whatever ends together goes on to do so.
        """
        if not self._fresh and not self._noted:
            changed: dict[int, float] = {}
        elif len(self._fresh) + self._ended > _MANY:
            changed = self._settled_by_arrays(0.0)
        else:
            changed = self._settled_near_changes()
        self._fresh.clear()
        self._noted.clear()
        self._resized.clear()
        self._ended = 0
        self._least = math.inf
        return changed

    def _settled_by_arrays(self, least: float) -> dict[int, float]:
        """Settle all transfers from a level up that nothing changes below."""
        num = len(self._links)
        slots = np.fromiter(self._links, np.int64, num)
        level, rate, weight, cap = (
            np.fromiter(values.values(), np.float64, num)
            for values in (self._level, self.rate, self._weight, self._cap)
        )
        capacity = np.array([*self._capacity, math.inf])
        routes, opened = self._routes[slots], level >= least
        taken = self._used(routes[~opened], rate[~opened])
        left = np.maximum(capacity - taken, 0.0)
        rates = self._solve(left, routes[opened], weight[opened], cap[opened])
        spare = (capacity - taken - self._used(routes[opened], rates))[:-1]
        self._spare = spare.tolist()
        self._full = set(np.flatnonzero(spare <= _FULL * capacity[:-1]).tolist())
        slots, before, weight = slots[opened], rate[opened], weight[opened]
        told = np.abs(rates - before) > _ROUNDING * before
        changed = dict(zip(slots[told].tolist(), rates[told].tolist(), strict=True))
        self.rate.update(changed)
        self._level.update(
            zip(slots.tolist(), (np.where(told, rates, before) / weight).tolist(), strict=True)
        )
        return changed

    def _used(self, routes: IntArray, rates: FloatArray) -> FloatArray:
        """What rates on routes take from each link, and from the one that stands for no link."""
        num, hops = len(self._capacity) + 1, routes.shape[1]
        return np.asarray(np.bincount(routes.ravel(), np.repeat(rates, hops), num), np.float64)

    def _settled_near_changes(self) -> dict[int, float]:
        """Settle those that the changes can reach."""
        least = self._least
        for link in self._resized:
            if self.crossing[link]:
                least = min(least, self._level_when_full(link))
        least = min(least, self._least_of_fresh()) * _BELOW
        while True:
            opened, shares = self._gathered(least)
            if len(opened) > _MANY:
                return self._settled_by_arrays(least)
            rates = self._filled(opened, shares, least)
            overfull = self._overfull(rates, shares)
            if not overfull:
                break
            self._full |= overfull
        for link, (left, _, _) in shares.items():
            self._spare[link] = left
            if left > _FULL * self._capacity[link]:
                self._full.discard(link)
        changed = {}
        for slot, rate in rates.items():
            old = self.rate[slot]
            if abs(rate - old) > _ROUNDING * old:
                changed[slot] = self.rate[slot] = rate
            self._level[slot] = self.rate[slot] / self._weight[slot]
        return changed

    def _least_of_fresh(self) -> float:
        """The level at which the fresh fill a link at the earliest.

        The link that does so first on the route of each counts as full from now on.
        """
        wanted: dict[int, tuple[float, float]] = {}  # by link: weights and caps of the fresh
        for slot in self._fresh:
            for link in self._links[slot]:
                weights, caps = wanted.get(link, (0.0, 0.0))
                wanted[link] = (weights + self._weight[slot], caps + self._cap[slot])
        levels: dict[int, float] = {}
        for slot in self._fresh:
            lowest, tightest = math.inf, None
            for link in self._links[slot]:
                weights, caps = wanted[link]
                if self._spare[link] >= min(lowest * weights, caps):
                    continue  # it is full later, if at all
                if link not in levels:
                    levels[link] = self._level_when_full(link)
                if levels[link] < lowest:
                    lowest, tightest = levels[link], link
            if tightest is not None:
                self._full.add(tightest)
        return min(levels.values(), default=math.inf)

    def _level_when_full(self, link: int) -> float:
        """The level at which a link is full if the fresh take all they may, and the others what they have."""
        level = 0.0
        while True:  # Newton's method from below: what is concave is never overshot
            left, load = self._capacity[link], 0.0
            for slot in self.crossing[link]:
                rate = self._cap[slot] if slot in self._fresh else self.rate[slot]
                if rate < level * self._weight[slot]:
                    left -= rate
                else:
                    load += self._weight[slot]
            if load == 0.0:
                return math.inf
            following = left / load
            if following <= level / _BELOW:
                return level
            level = following

    def _gathered(self, least: float) -> tuple[dict[int, None], dict[int, list[float]]]:
        """What must be settled anew: from `least` up, and connected to a change by full links.

        Returns the transfers, and for each of these links what is left for them, their weights and number; some
        of them, if they are many.
        """
        opened = dict.fromkeys(self._fresh)
        met = dict.fromkeys(self._noted)
        for slot in opened:
            met.update(dict.fromkeys([link for link in self._links[slot] if link in self._full]))
        pending = list(met)
        shares: dict[int, list[float]] = {}
        for link in pending:  # which grows
            if len(opened) > _MANY:
                break
            left, load, count = self._capacity[link], 0.0, 0
            for slot in self.crossing[link]:
                if self._level[slot] < least:
                    left -= self.rate[slot]
                    continue
                load += self._weight[slot]
                count += 1
                if slot not in opened:
                    opened[slot] = None
                    for other in self._links[slot]:
                        if other in self._full and other not in met:
                            met[other] = None
                            pending.append(other)
            shares[link] = [left, load, count]
        return opened, shares

    def _filled(
        self, opened: dict[int, None], shares: dict[int, list[float]], least: float
    ) -> dict[int, float]:
        """Fill links, the tightest first; levels of the others only rise, so stale ones are put back."""
        rates: dict[int, float] = {}
        num_links = len(self._capacity)
        levels = [(max(left, 0.0) / load, link) for link, (left, load, count) in shares.items() if count]
        levels += [
            (self._cap[slot] / self._weight[slot], num_links + slot)
            for slot in opened
            if self._cap[slot] < math.inf
        ]
        heapify(levels)
        while len(rates) < len(opened):
            seen, item = heappop(levels)
            if item >= num_links:
                slots = [item - num_links]
                level = seen
            else:
                left, load, count = shares[item]
                if not count:
                    continue
                level = max(left, 0.0) / max(load, 1e-300)
                if level * _SAME > seen:
                    heappush(levels, (level, item))
                    continue
                slots = [slot for slot in self.crossing[item] if self._level[slot] >= least]
            for slot in slots:
                if slot in rates:
                    continue
                weight = self._weight[slot]
                rates[slot] = rate = min(level * weight, self._cap[slot])
                for link in self._links[slot]:
                    if link in shares:
                        share = shares[link]
                        share[0] -= rate
                        share[1] -= weight
                        share[2] -= 1
        return rates

    def _overfull(self, rates: dict[int, float], shares: dict[int, list[float]]) -> set[int]:
        """The links that were left aside and would carry too much at these rates."""
        found = set()
        for slot, rate in rates.items():
            more = rate - self.rate[slot]
            if more <= 0.0:
                continue
            for link in self._links[slot]:
                if link in shares:
                    continue
                self._spare[link] -= more
                if self._spare[link] < 0.0:
                    used = [rates.get(other, self.rate[other]) for other in self.crossing[link]]
                    if sum(used) > self._capacity[link] * _OVERFULL:
                        found.add(link)
                    # Not less than what is free before, in case that another round follows.
                    most = [max(rates.get(other, 0.0), self.rate[other]) for other in self.crossing[link]]
                    self._spare[link] = self._capacity[link] - sum(most)
        return found
