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
from typing import TYPE_CHECKING

from netsim.fluid.fairness import fill

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

__all__ = ["Shares"]

_ROUNDING = 1e-12  # relative
_SAME = 1.0 - _ROUNDING  # as in netsim.fluid.fairness
_BELOW = 1.0 - 1e-9  # times a level is safely below it
_FULL = 1e-9  # of its capacity is left on a link that counts as full, at most
_OVERFULL = 1.0 + 1e-11  # times its capacity is more than rounding

# More than so many that begin or change at once are most of all there are.
_MANY = 128


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
        self.crossing: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._full: set[int] = set()  # links that may limit somebody
        self._spare = self._capacity.copy()  # at least so much of each link is free
        # By link, while it is filled: what is left of it, for which weights, and how many transfers (else none).
        self._left, self._loads = self._capacity.copy(), [0.0] * len(self._capacity)
        self._counts = [0] * len(self._capacity)
        self._fresh: dict[int, None] = {}  # transfers that began or may get more or less by themselves
        self._noted: dict[int, None] = {}  # full links on which there is more or less to share
        self._resized: dict[int, None] = {}  # of these, links of another capacity
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
        if len(self._fresh) > _MANY:
            changed = self._settled_all()
        else:
            changed = self._settled_near() if self._fresh or self._noted else {}
        self._fresh.clear()
        self._noted.clear()
        self._resized.clear()
        self._least = math.inf
        return changed

    def _settled_all(self) -> dict[int, float]:
        """Settle all, without looking for what changes can reach."""
        shared = {link: list(slots) for link, slots in self.crossing.items() if slots}
        for link, slots in shared.items():
            self._share(link, self._capacity[link], slots)
        return self._taken(self._filled(dict.fromkeys(self._links), shared), shared)

    def _settled_near(self) -> dict[int, float]:
        """Settle those that the changes can reach."""
        least = self._least
        for link in self._resized:
            if self.crossing[link]:
                least = min(least, self._level_when_full(link))
        least = min(least, self._least_of_fresh()) * _BELOW
        while True:
            opened, shared = self._gathered(least)
            rates = self._filled(opened, shared)
            overfull = self._overfull(rates, shared)
            if not overfull:
                return self._taken(rates, shared)
            self._full |= overfull

    def _share(self, link: int, left: float, slots: list[int]) -> None:
        """Let so much of a link be shared by these."""
        self._left[link], self._counts[link] = left, len(slots)
        self._loads[link] = sum([self._weight[slot] for slot in slots])

    def _filled(self, opened: dict[int, None], shared: dict[int, list[int]]) -> dict[int, float]:
        """The rates of those that are opened, who share these links."""
        rates = dict.fromkeys(sorted(opened), -1.0)
        links, num_links = sorted(shared), len(self._capacity)  # whichever of them was met first
        sides = (self._left, self._loads, self._counts, shared, self._links, self._weight, self._cap)
        fill(links, list(rates), num_links, *sides, rates)
        return rates

    def _taken(self, rates: dict[int, float], shared: Iterable[int]) -> dict[int, float]:
        """Have transfers drain at these rates, for which these links were shared."""
        for link in shared:
            self._spare[link] = self._left[link]
            if self._spare[link] > _FULL * self._capacity[link]:
                self._full.discard(link)
            else:
                self._full.add(link)
        had = self.rate
        changed = {
            slot: rate for slot, rate in rates.items() if abs(rate - had[slot]) > _ROUNDING * had[slot]
        }
        had.update(changed)
        for slots in (changed, self._fresh):  # what others have, and so their level, is as it was
            for slot in slots:
                self._level[slot] = had[slot] / self._weight[slot]
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

    def _gathered(self, least: float) -> tuple[dict[int, None], dict[int, list[int]]]:
        """What must be settled anew: from `least` up, and connected to a change by full links.

        Returns the transfers, and those of each of these links, which they share.
        """
        links, levels, rates, full = self._links, self._level, self.rate, self._full
        opened = dict.fromkeys(self._fresh)
        met = dict.fromkeys(self._noted)
        for slot in opened:
            met.update(dict.fromkeys([link for link in links[slot] if link in full]))
        pending = list(met)
        shared: dict[int, list[int]] = {}
        for link in pending:  # which grows
            left, crossing = self._capacity[link], self.crossing[link]
            slots = shared[link] = [slot for slot in crossing if levels[slot] >= least]
            if len(slots) < len(crossing):
                for slot in crossing:
                    if levels[slot] < least:
                        left -= rates[slot]
            for slot in [slot for slot in slots if slot not in opened]:
                opened[slot] = None
                for other in links[slot]:
                    if other in full and other not in met:
                        met[other] = None
                        pending.append(other)
            self._share(link, left, slots)
        return opened, shared

    def _overfull(self, rates: dict[int, float], shared: Collection[int]) -> set[int]:
        """The links that were left aside and would carry too much at these rates."""
        found: set[int] = set()
        had, links = self.rate, self._links
        for slot, rate in rates.items():
            more = rate - had[slot]
            if more <= 0.0:
                continue
            for link in links[slot]:
                if link in shared or link in found:
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
