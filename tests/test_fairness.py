"""Weighted max-min fairness against its definition, in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netsim.fluid.fairness import fill

Problem = tuple[list[float], list[list[int]], list[float], list[float]]
"""Capacities, and of each transfer its links, weight and cap."""

RATES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0, 1e9, 0.125])
WEIGHTS = st.sampled_from([1.0, 1.0, 2.0, 0.25, 7.0])
CAPS = st.sampled_from([math.inf, math.inf, 0.0, 0.5, 4.0])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_links = draw(st.integers(1, 6))
    capacity = [draw(RATES) for _ in range(num_links)]
    one_route = st.lists(st.integers(0, num_links - 1), min_size=1, max_size=4, unique=True)
    listed = draw(st.lists(one_route, min_size=1, max_size=8))
    return capacity, listed, [draw(WEIGHTS) for _ in listed], [draw(CAPS) for _ in listed]


def filled(problem: Problem) -> tuple[dict[int, float], list[float]]:
    """The rates of a problem, and what is left of its links."""
    capacity, routes, weights, caps = problem
    num_links, rates = len(capacity), dict.fromkeys(range(len(routes)), -1.0)
    crossing = [[each for each in rates if link in routes[each]] for link in range(num_links)]
    loads = [sum(weights[each] for each in those) for those in crossing]
    left, counts = capacity.copy(), [len(those) for those in crossing]
    fill(
        range(num_links),
        range(len(routes)),
        num_links,
        left,
        loads,
        counts,
        crossing,
        routes,
        weights,
        caps,
        rates,
    )
    return rates, left


def filled_by_hand(problem: Problem) -> list[Fraction]:
    """Progressive filling, one stop at a time, in fractions."""
    capacity, ways, weights, caps = problem
    weight = [Fraction(value) for value in weights]
    left = [Fraction(value) for value in capacity]
    rates: dict[int, Fraction] = {}
    while len(rates) < len(ways):
        growing = [i for i in range(len(ways)) if i not in rates]
        stops = [(Fraction(caps[i]) / weight[i], [i]) for i in growing if caps[i] < math.inf]
        for link in range(len(left)):
            on_it = [i for i in growing if link in ways[i]]
            if on_it:
                stops.append((left[link] / sum(weight[i] for i in on_it), on_it))
        level, stopped = min(stops, key=lambda stop: stop[0])
        for i in stopped:
            rates[i] = level * weight[i]
            for link in ways[i]:
                left[link] -= rates[i]
    return [rates[i] for i in range(len(ways))]


@given(problems())
def test_rates_are_those_of_progressive_filling(problem: Problem) -> None:
    expected = [float(rate) for rate in filled_by_hand(problem)]
    np.testing.assert_allclose([*filled(problem)[0].values()], expected, rtol=1e-12, atol=0)


def test_what_shares_no_link_gets_its_cap() -> None:
    """As where only transfers at their caps are settled anew: links that are not to be filled limit nobody."""
    rates = {7: -1.0}
    fill([], [7], 3, [0.0] * 3, [0.0] * 3, [0] * 3, {}, {7: [2]}, {7: 2.0}, {7: 3.0}, rates)
    assert rates == {7: 3.0}


def test_scaling_capacities_by_a_power_of_two_scales_rates_exactly() -> None:
    routes, caps = [[0, 1], [1, 2], [0, 2], [0], [2]], [math.inf] * 5
    capacity = [3.0, 7.0, 1.1]
    once, _ = filled((capacity, routes, [1.0] * 5, caps))
    larger, _ = filled(([each * 2.0**40 for each in capacity], routes, [1.0] * 5, caps))
    assert larger == {each: rate * 2.0**40 for each, rate in once.items()}
