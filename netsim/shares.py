"""Max-min fair rates that follow changes, at a cost that grows with what a change touches.

Max-min fairness fills all links from level zero up; a transfer's rate is its weight times the level, until a
link on its route is full or its cap is reached (`netsim.fairness`). So what lies below the level at which a
change first matters stays as it is: below the level of a transfer that ends, and below what one that begins can
get at least. From there up a change reaches those that share a full link with it, and those who share one with
them; links that are not full carry nothing on. Only these are settled anew, as if no other link existed; should
one of those be overfull then, it counts as full and all is settled once more.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from netsim.fairness import max_min_rates

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Shares"]

_SAME = 1.0 - 1e-12  # as in netsim.fairness
_BELOW = 1.0 - 1e-9  # times a level is safely below it
_FULL = 1e-9  # of its capacity is left on a link that counts as full, at most
_OVERFULL = 1.0 + 1e-11  # times its capacity is more than rounding

# So many changes at once are settled by arrays, and everything with them.
_MANY = 100


class Shares:
    """Who gets how much of each link.

    Args:
        capacity: rate of each link.

    Attributes:
        rate: of each transfer (slot), as last settled.
        crossing: by link, the transfers on it.
    """

    def __init__(self, capacity: Iterable[float]) -> None:
        self._capacity = list(capacity)
        self.rate: dict[int, float] = {}
        self._links: dict[int, tuple[int, ...]] = {}
        self._weight: dict[int, float] = {}
        self._cap: dict[int, float] = {}
        self._level: dict[int, float] = {}  # rate / weight; infinity until it is settled
        self.crossing: list[dict[int, None]] = [{} for _ in self._capacity]
        self._full: set[int] = set()  # links that may limit somebody
        self._spare = self._capacity.copy()  # at least so much of each link is free
        self._fresh: dict[int, None] = {}  # transfers that began or may get more or less by themselves
        self._noted: dict[int, None] = {}  # full links on which there is more or less to share
        self._resized: dict[int, None] = {}  # of these, links of another capacity
        self._ended = 0
        self._least = math.inf  # the level below which nothing changes

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
        """Find the rates of all that has changed since the last call. Returns those that are others now."""
        if not self._fresh and not self._noted:
            rates: dict[int, float] = {}
        elif len(self._fresh) + self._ended > _MANY:
            rates = self._settled_at_once()
        else:
            rates = self._settled_near_changes()
        self._fresh.clear()
        self._noted.clear()
        self._resized.clear()
        self._ended = 0
        self._least = math.inf
        # What changes by no more than rounding keeps its rate, so that whatever ends together goes on to do so.
        changed = {}
        for slot, rate in rates.items():
            old = self.rate[slot]
            if abs(rate - old) > 1e-12 * old:
                changed[slot] = self.rate[slot] = rate
            self._level[slot] = self.rate[slot] / self._weight[slot]
        return changed

    def _settled_at_once(self) -> dict[int, float]:
        """The rates of all transfers, by arrays."""
        slots = list(self._links)
        num_links = len(self._capacity)
        routes = np.full((len(slots), max(map(len, self._links.values()))), num_links)
        for row, links in zip(routes, self._links.values(), strict=True):
            row[: len(links)] = links
        capacity = np.array([*self._capacity, math.inf])
        weights, caps = np.array(list(self._weight.values())), np.array(list(self._cap.values()))
        rates = max_min_rates(capacity, routes, weights, caps)
        used = np.bincount(routes.ravel(), np.repeat(rates, routes.shape[1]), num_links + 1)
        spare = (capacity - used)[:-1]
        self._spare = spare.tolist()
        self._full = set(np.flatnonzero(spare <= _FULL * capacity[:-1]).tolist())
        return dict(zip(slots, rates.tolist(), strict=True))

    def _settled_near_changes(self) -> dict[int, float]:
        """The rates of those that the changes can reach."""
        least = self._least
        for link in self._resized:
            if self.crossing[link]:
                least = min(least, self._level_when_full(link))
        least = min(least, self._least_of_fresh()) * _BELOW
        while True:
            opened, shares = self._gathered(least)
            rates = self._filled(opened, shares, least)
            overfull = self._overfull(rates, shares)
            if not overfull:
                break
            self._full |= overfull
        for link, (left, _, _) in shares.items():
            self._spare[link] = left
            if left > _FULL * self._capacity[link]:
                self._full.discard(link)
        return rates

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

        Returns the transfers, and for each of these links what is left for them, their weights and number.
        """
        opened = dict.fromkeys(self._fresh)
        met = dict.fromkeys(self._noted)
        for slot in opened:
            met.update(dict.fromkeys([link for link in self._links[slot] if link in self._full]))
        pending = list(met)
        shares: dict[int, list[float]] = {}
        for link in pending:  # which grows
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
