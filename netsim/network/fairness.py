"""Weighted max-min fairness that follows changes: the rate of every claim on a set of links.

Progressive filling raises all levels (rate / weight) together; a claim stops at its cap or where a link of its
route is full (D. Bertsekas and R. Gallager, Data Networks, 2nd ed., section 6.5.2). Rates below the level at which
a change first matters therefore stay as they are. From there up, a change reaches only the claims that share a full
link with the changed one, and those that share a full link with them. Only these are filled again.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from netsim.network.heap import Heap, HeapItem

ROUNDING: Final = 1e-12  # relative; rates that differ by less are equal
BELOW: Final = 1.0 - 1e-9  # times a level lies safely below it
FULL: Final = 1e-9  # of its capacity is free on a full link, at most
OVERFULL: Final = 1.0 + 1e-11


@final
class SharedLink(HeapItem):
    """Capacity in bytes per second, and the claims on it in the order in which they joined.

    While links are filled, `key` is the level at which this one is full.
    """

    def __init__(self, index: int, capacity: float) -> None:
        super().__init__(index)
        self.capacity = capacity
        self.claims: list[Claim] = []
        self.is_full = False  # it may limit claims
        self.spare = capacity  # lower bound of the free rate
        self.has_changed = False
        # While it is filled: rate and weights that remain to be shared.
        self.left = 0.0
        self.load = 0.0
        self.visit = 0  # last round of filling that met it
        # What new claims want of it, and its level with them; infinity until it is found.
        self.new_load = 0.0
        self.new_caps = 0.0
        self.new_level = inf
        self.new_visit = 0


@final
class AckLink:
    """A link, as acknowledgements cross it.

    Attributes:
        shared: what they leave to data.
        claims: those whose acknowledgements cross it, in the order in which they joined.
        is_stale: the rate of one has changed.
    """

    def __init__(self, shared: SharedLink) -> None:
        self.shared = shared
        self.claims: list[Claim] = []
        self.is_stale = False


@final
class Claim:
    """Demand of one transfer on the links of its route; `rate` is what it gets."""

    def __init__(self, links: tuple[SharedLink, ...], weight: float) -> None:
        # Settling visits claims by the thousand: what it reads lies together, and so do a tuple's items.
        self.level = inf  # rate / weight; infinity until the rate is found
        self.rate = 0.0
        self.weight = weight
        self.visit = 0
        self.next_rate = 0.0
        self.links = links
        self.cap = inf
        self.is_new = False
        self.owner: object = None
        self.number = 0  # grows with each claim that joins
        self.ack_links: tuple[AckLink, ...] = ()


@final
class FairShares:
    """Rates of all claims on a list of links; `settle` brings them up to date after changes.

    Args:
        capacities: bytes per second of each link.
    """

    def __init__(self, capacities: list[float]) -> None:
        self.links = [SharedLink(index, capacities[index]) for index in range(len(capacities))]
        self._num_joined = 0
        self._new: list[Claim] = []
        self._changed: list[SharedLink] = []
        self._resized: list[SharedLink] = []
        self._least = inf  # level below which nothing changes
        self._visit = 0

    def join(self, claim: Claim, cap: float) -> None:
        """Add a claim that may have `cap` bytes per second at most."""
        claim.cap = cap
        claim.rate = 0.0
        claim.level = inf
        claim.is_new = True
        claim.number = self._num_joined
        self._num_joined += 1
        self._new.append(claim)
        for link in claim.links:
            link.claims.append(claim)

    def leave(self, claim: Claim) -> None:
        """Remove a claim from its links."""
        if claim.is_new:
            claim.is_new = False
            self._new.remove(claim)
            self._least = min(self._least, claim.rate / claim.weight)
        else:
            self._least = min(self._least, claim.level)
        for link in claim.links:
            link.claims.pop(place_of(claim, link.claims))
            if not link.claims:
                link.is_full = False
                link.spare = link.capacity
            elif link.is_full:
                self._note(link)

    def change(self, claim: Claim, weight: float, cap: float) -> None:
        """Give a claim another weight or cap."""
        level = claim.rate / claim.weight
        is_at_cap = claim.rate >= claim.cap * (1.0 - ROUNDING)
        is_limited_elsewhere = weight == claim.weight and not is_at_cap and cap > claim.rate
        claim.weight = weight
        claim.cap = cap
        if not claim.is_new and not is_limited_elsewhere:
            self._least = min(self._least, level)
            claim.level = inf
            claim.is_new = True
            self._new.append(claim)

    def resize(self, link: SharedLink, capacity: float) -> None:
        """Give a link another capacity, in bytes per second."""
        link.spare += min(capacity - link.capacity, 0.0)
        link.capacity = capacity
        if link.is_full:
            highest = -1.0
            for claim in link.claims:
                if not claim.is_new and claim.level > highest:
                    highest = claim.level
            if highest >= 0.0:
                self._least = min(self._least, highest)
        elif link.spare >= 0.0:
            return
        link.is_full = True
        self._note(link)
        self._resized.append(link)

    @property
    def is_settled(self) -> bool:
        return not self._new and not self._changed

    def settle(self) -> list[Claim]:
        """Find rates after changes.

        Returns:
            The claims whose `next_rate` differs from `rate`; the caller assigns it.
        """
        changed: list[Claim] = []
        if self._new and not self._changed:
            self._serve_undisturbed(changed)
        if self._new or self._changed:
            self._settle_affected(changed)
        self._least = inf
        return changed

    def _note(self, link: SharedLink) -> None:
        if not link.has_changed:
            link.has_changed = True
            self._changed.append(link)

    def _serve_undisturbed(self, changed: list[Claim]) -> None:
        """Give new claims that share no link the rate of their narrowest link."""
        others: list[Claim] = []
        for claim in self._new:
            is_alone = True
            level = inf
            tightest: SharedLink | None = None
            for link in claim.links:
                if len(link.claims) > 1:
                    is_alone = False
                    break
                if link.capacity / claim.weight < level:
                    level = link.capacity / claim.weight
                    tightest = link
            if not is_alone:
                others.append(claim)
                continue
            rate = min(level * claim.weight, claim.cap) if level <= cap_level(claim) else claim.cap
            for link in claim.links:
                link.spare = link.capacity - rate
                link.is_full = link is tightest and link.spare <= FULL * link.capacity
            self._least = min(self._least, level)
            self._take(claim, rate, changed)
            claim.is_new = False
        self._new = others

    def _settle_affected(self, changed: list[Claim]) -> None:
        least = self._least
        for link in self._resized:
            if link.claims:
                least = min(least, level_when_full(link))
        self._resized.clear()
        least = min(least, self._least_of_new()) * BELOW
        while True:
            self._visit += 1
            links: list[SharedLink] = []
            claims: list[Claim] = []
            self._gather(links, claims, least)
            self._fill(links, claims)
            if not self._mark_overfull(claims):
                break
        for link in links:
            link.spare = link.left
            link.is_full = link.left <= FULL * link.capacity
        for link in self._changed:
            link.has_changed = False
        for claim in claims:
            self._take(claim, claim.next_rate, changed)
        for claim in self._new:
            claim.is_new = False
        self._new.clear()
        self._changed.clear()

    def _take(self, claim: Claim, rate: float, changed: list[Claim]) -> None:
        """Keep a rate that differs by rounding only, so that transfers which end together still do."""
        if abs(rate - claim.rate) > ROUNDING * claim.rate:
            claim.next_rate = rate
            claim.level = rate / claim.weight
            changed.append(claim)
        else:
            claim.level = claim.rate / claim.weight

    def _least_of_new(self) -> float:
        """Lowest level at which new claims fill a link; the first such link of each route counts as full then."""
        self._visit += 1
        visit = self._visit
        for claim in self._new:
            for link in claim.links:
                if link.new_visit != visit:
                    link.new_visit = visit
                    link.new_load = 0.0
                    link.new_caps = 0.0
                    link.new_level = inf
                link.new_load += claim.weight
                link.new_caps += claim.cap
        least = inf
        for claim in self._new:
            lowest = inf
            tightest: SharedLink | None = None
            for link in claim.links:
                if link.spare >= min(lowest * link.new_load, link.new_caps):
                    continue  # it is full later, if at all
                if link.new_level == inf:
                    link.new_level = level_when_full(link)
                    least = min(least, link.new_level)
                if link.new_level < lowest:
                    lowest = link.new_level
                    tightest = link
            if tightest is not None:
                tightest.is_full = True
        return least

    def _gather(self, links: list[SharedLink], claims: list[Claim], least: float) -> None:
        """Collect the links to fill, with what is left of them, and the claims that share them."""
        visit = self._visit
        for link in self._changed:
            link.visit = visit
            links.append(link)
        for claim in self._new:
            self._open(claim, links, claims)
        i = 0
        while i < len(links):
            link = links[i]
            i += 1
            left = link.capacity
            load = 0.0
            for claim in link.claims:
                if claim.level < least:
                    left -= claim.rate
                else:
                    load += claim.weight
                    if claim.visit != visit:
                        self._open(claim, links, claims)
            link.left = left
            link.load = load

    def _open(self, claim: Claim, links: list[SharedLink], claims: list[Claim]) -> None:
        claim.visit = self._visit
        claim.next_rate = -1.0
        claims.append(claim)
        for link in claim.links:
            if link.is_full and link.visit != self._visit:
                link.visit = self._visit
                links.append(link)

    def _fill(self, links: list[SharedLink], claims: list[Claim]) -> None:
        """Progressive filling, the tightest link first; levels of the others only rise, so stale ones are put back."""
        visit = self._visit
        heap = Heap()
        for link in links:
            link.detach()
            if link.load > 0.0:
                heap.move(link, max(link.left, 0.0) / link.load)
        capped = [claim for claim in claims if claim.cap < inf]
        if len(capped) > 1:
            capped.sort(key=cap_level)
        num_capped = 0
        num_open = len(claims)
        while num_open:
            while num_capped < len(capped) and capped[num_capped].next_rate >= 0.0:
                num_capped += 1
            cap = cap_level(capped[num_capped]) if num_capped < len(capped) else inf
            tightest = heap.first
            if isinstance(tightest, SharedLink) and tightest.key <= cap:
                link = tightest
                level = max(link.left, 0.0) / max(link.load, 1e-300)
                if link.load > 0.0 and level * (1.0 - ROUNDING) > link.key:
                    heap.move(link, level)
                    continue
                heap.move(link, inf)
                for claim in link.claims:
                    if claim.visit == visit and claim.next_rate < 0.0:
                        fix(claim, min(level * claim.weight, claim.cap), visit)
                        num_open -= 1
            else:
                claim = capped[num_capped]
                fix(claim, claim.cap, visit)
                num_open -= 1

    def _mark_overfull(self, claims: list[Claim]) -> bool:
        """Count links that were left aside and would carry too much as full; returns whether there are any."""
        found = False
        for claim in claims:
            more = claim.next_rate - claim.rate
            if more <= 0.0:
                continue
            for link in claim.links:
                if link.is_full or link.visit == self._visit:
                    continue
                link.spare -= more
                if link.spare < 0.0:
                    used = 0.0
                    most = 0.0
                    for other in link.claims:
                        rate = other.next_rate if other.visit == self._visit else other.rate
                        used += rate
                        most += max(rate, other.rate)
                    link.spare = link.capacity - most
                    if used > link.capacity * OVERFULL:
                        link.is_full = True
                        found = True
        return found


def place_of(claim: Claim, claims: list[Claim]) -> int:
    """Position of a claim among those of a link, by bisection."""
    low = 0
    high = len(claims) - 1
    while low < high:
        middle = (low + high) >> 1
        if claims[middle].number < claim.number:
            low = middle + 1
        else:
            high = middle
    return low


def fix(claim: Claim, rate: float, visit: int) -> None:
    """Assign the rate of a claim while its links are filled."""
    claim.next_rate = rate
    for link in claim.links:
        if link.visit == visit:
            link.left -= rate
            link.load -= claim.weight


def level_when_full(link: SharedLink) -> float:
    """Level at which a link is full if new claims take all they may and the others what they have."""
    level = 0.0
    while True:  # Newton's method from below on a concave function: it never overshoots
        left = link.capacity
        load = 0.0
        for claim in link.claims:
            rate = claim.cap if claim.is_new else claim.rate
            if rate < level * claim.weight:
                left -= rate
            else:
                load += claim.weight
        if load == 0.0:
            return inf
        following = left / load
        if following <= level / BELOW:
            return level
        level = following


def cap_level(claim: Claim) -> float:
    return claim.cap / claim.weight
