"""Rates that follow changes, against progressive filling from scratch after each of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from test_fairness import filled

from netsim.fluid.shares import Shares

if TYPE_CHECKING:
    import pytest

NUM_LINKS = 6
RATES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0, 0.125, 1e6])
WEIGHTS = st.sampled_from([1.0, 1.0, 2.0, 0.25])
CAPS = st.sampled_from([math.inf, math.inf, 0.0, 0.5, 0.5, 4.0])
ROUTES = st.lists(st.integers(0, NUM_LINKS - 1), min_size=1, max_size=4, unique=True).map(tuple)


class Changes(RuleBasedStateMachine):
    """Transfers come and go, caps, weights and capacities change, some of it in one instant."""

    @initialize(
        capacity=st.lists(RATES, min_size=NUM_LINKS, max_size=NUM_LINKS),
        flows=st.lists(st.tuples(ROUTES, WEIGHTS, CAPS), min_size=8, max_size=8),
    )
    def begin(self, capacity: list[float], flows: list[tuple[tuple[int, ...], float, float]]) -> None:
        self.capacity = capacity
        self.shares = Shares(capacity)
        self.flows: dict[int, tuple[tuple[int, ...], float, float]] = {}
        self.free = list(range(30, -1, -1))
        for flow in flows:
            self.join(*flow)
        self.settle()

    @precondition(lambda self: self.free)
    @rule(links=ROUTES, weight=WEIGHTS, cap=CAPS)
    def join(self, links: tuple[int, ...], weight: float, cap: float) -> None:
        slot = self.free.pop()
        self.flows[slot] = (links, weight, cap)
        self.shares.join(slot, links, weight, cap)

    @precondition(lambda self: self.flows)
    @rule(data=st.data(), at_once=st.booleans())
    def leave(self, data: st.DataObject, at_once: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.flows)))
        del self.flows[slot]
        self.free.append(slot)
        self.shares.leave(slot)
        if at_once:
            self.settle()

    @precondition(lambda self: self.flows)
    @rule(data=st.data(), weight=WEIGHTS, cap=CAPS)
    def change(self, data: st.DataObject, weight: float, cap: float) -> None:
        slot = data.draw(st.sampled_from(sorted(self.flows)))
        self.flows[slot] = (self.flows[slot][0], weight, cap)
        self.shares.change(slot, weight, cap)

    @rule(link=st.integers(0, NUM_LINKS - 1), capacity=RATES)
    def resize(self, link: int, capacity: float) -> None:
        self.capacity[link] = capacity
        self.shares.resize(link, capacity)

    @rule()
    def settle(self) -> None:
        before = self.shares.rate.copy()
        changed = self.shares.settle()
        assert self.shares.rate == before | changed
        assert sorted(self.shares) == sorted(self.flows)
        links, weights, caps = zip(*self.flows.values(), strict=True) if self.flows else ((), (), ())
        expected, _ = filled((self.capacity, links, weights, caps))
        rates = [self.shares.rate[slot] for slot in self.flows]
        np.testing.assert_allclose(rates, [*expected.values()], rtol=1e-9, atol=1e-12)

    def teardown(self) -> None:
        if hasattr(self, "shares"):
            self.settle()


TestChanges = Changes.TestCase


def test_rates_after_a_transfer_ends_and_a_link_changes() -> None:
    shares = Shares([10.0, 4.0, 1.0])
    for slot, links in enumerate([(0,), (0, 1), (1,), (1, 2)]):
        shares.join(slot, links, 1.0, math.inf)
    assert shares.settle() == {0: 8.5, 1: 1.5, 2: 1.5, 3: 1.0}
    shares.leave(3)
    assert shares.settle() == {0: 8.0, 1: 2.0, 2: 2.0}
    shares.resize(1, 2.0)
    assert shares.settle() == {0: 9.0, 1: 1.0, 2: 1.0}


def test_a_change_is_felt_no_further_than_full_links_carry_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 pairs of transfers that meet on a wide link, one that ends is felt by its neighbour only."""
    shares = Shares([1e6, *[10.0] * 100])
    for slot in range(200):
        shares.join(slot, (0, 1 + slot // 2), 1.0, math.inf)
    shares.settle()
    settled: list[int] = []
    right = Shares._filled

    def note(self: Shares, *problem: Any) -> dict[int, float]:
        rates = right(self, *problem)
        settled.extend(rates)
        return rates

    monkeypatch.setattr(Shares, "_filled", note)
    shares.leave(7)
    assert shares.settle() == {6: 10.0}
    assert settled == [6]
