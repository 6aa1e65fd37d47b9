"""Weighted max-min fairness that follows changes, against progressive filling from scratch in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from netsim.network.fairness import Claim, FairShares

NUM_LINKS = 6
CAPACITIES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0, 0.125, 1e6])
WEIGHTS = st.sampled_from([1.0, 1.0, 2.0, 0.25, 7.0])
CAPS = st.sampled_from([math.inf, math.inf, 0.0, 0.5, 0.5, 4.0])
ROUTES = st.lists(st.integers(0, NUM_LINKS - 1), min_size=1, max_size=4, unique=True)


def joined(shares: FairShares, route: list[int], weight: float = 1.0, cap: float = math.inf) -> Claim:
    claim = Claim(tuple(shares.links[link] for link in route), weight)
    shares.join(claim, cap)
    return claim


def settle(shares: FairShares) -> list[Claim]:
    """Bring rates up to date; returns the claims whose rate has changed."""
    changed = shares.settle()
    for claim in changed:
        claim.rate = claim.next_rate
    return changed


def filled(capacities: list[float], claims: list[Claim]) -> list[float]:
    """Progressive filling, one stop at a time, in fractions."""
    left = [Fraction(capacity) for capacity in capacities]
    weights = [Fraction(claim.weight) for claim in claims]
    routes = [[link.number for link in claim.links] for claim in claims]
    rates: dict[int, Fraction] = {}
    while len(rates) < len(claims):
        growing = [i for i in range(len(claims)) if i not in rates]
        stops = [(Fraction(claims[i].cap) / weights[i], [i]) for i in growing if claims[i].cap < math.inf]
        for link in range(len(left)):
            users = [i for i in growing if link in routes[i]]
            if users:
                stops.append((left[link] / sum(weights[i] for i in users), users))
        level, stopped = min(stops, key=lambda stop: stop[0])
        for i in stopped:
            rates[i] = level * weights[i]
            for link in routes[i]:
                left[link] -= rates[i]
    return [float(rates[i]) for i in range(len(claims))]


class Changes(RuleBasedStateMachine):
    """Claims come and go; caps, weights and capacities change; some of it in one instant."""

    @initialize(
        capacities=st.lists(CAPACITIES, min_size=NUM_LINKS, max_size=NUM_LINKS),
        flows=st.lists(st.tuples(ROUTES, WEIGHTS, CAPS), min_size=8, max_size=8),
    )
    def begin(self, capacities: list[float], flows: list[tuple[list[int], float, float]]) -> None:
        self.capacities = capacities
        self.shares = FairShares(capacities)
        self.claims: list[Claim] = []
        for flow in flows:
            self.join(*flow)
        self.settle()

    @precondition(lambda self: len(self.claims) < 20)
    @rule(route=ROUTES, weight=WEIGHTS, cap=CAPS)
    def join(self, route: list[int], weight: float, cap: float) -> None:
        self.claims.append(joined(self.shares, route, weight, cap))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), at_once=st.booleans())
    def leave(self, data: st.DataObject, at_once: bool) -> None:
        claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        self.shares.leave(claim)
        if at_once:
            self.settle()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), at_once=st.booleans())
    def follow_another(self, data: st.DataObject, at_once: bool) -> None:
        """The next message of a connection: its claim leaves and joins again in one instant."""
        claim = data.draw(st.sampled_from(self.claims))
        self.shares.leave(claim)
        self.shares.join(claim, claim.cap)
        if at_once:
            self.settle()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), weight=WEIGHTS, cap=CAPS)
    def change(self, data: st.DataObject, weight: float, cap: float) -> None:
        self.shares.change(data.draw(st.sampled_from(self.claims)), weight, cap)

    @rule(link=st.integers(0, NUM_LINKS - 1), capacity=CAPACITIES)
    def resize(self, link: int, capacity: float) -> None:
        self.capacities[link] = capacity
        self.shares.resize(self.shares.links[link], capacity)

    @rule()
    def settle(self) -> None:
        changed = settle(self.shares)
        assert len(set(changed)) == len(changed)
        assert set(changed) <= set(self.claims)
        assert self.shares.is_settled
        expected = filled(self.capacities, self.claims)
        assert [claim.rate for claim in self.claims] == pytest.approx(expected, rel=1e-9, abs=1e-12)

    def teardown(self) -> None:
        if hasattr(self, "shares"):
            self.settle()


TestChanges = Changes.TestCase


def test_a_change_reaches_no_further_than_full_links_carry_it() -> None:
    """Of 100 pairs of claims that meet on a wide link, only the neighbor of one that leaves is filled again."""
    shares = FairShares([1e6, *[10.0] * 100])
    claims = [joined(shares, [0, 1 + number // 2]) for number in range(200)]
    settle(shares)
    before = [claim.visit for claim in claims]
    shares.leave(claims[7])
    assert settle(shares) == [claims[6]]
    assert claims[6].rate == 10.0
    assert [i for i in range(200) if claims[i].visit != before[i]] == [6]


def test_rates_that_stay_the_same_are_not_reported() -> None:
    """Transfers that end together still do, however often others come and go."""
    shares = FairShares([9.0, 5.0])
    claims = [joined(shares, [0]) for _ in range(3)]
    settle(shares)
    other = joined(shares, [1])
    assert settle(shares) == [other]
    shares.leave(other)
    assert settle(shares) == []
    assert [claim.rate for claim in claims] == [3.0] * 3
