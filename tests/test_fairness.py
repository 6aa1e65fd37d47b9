"""Weighted max-min fairness against its definition, in exact arithmetic and as a compiled twin."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.fluid.fairness import FloatArray, IntArray, max_min_rates

Problem = tuple[FloatArray, IntArray, FloatArray, FloatArray]

RATES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0, 1e9, 0.125])
WEIGHTS = st.sampled_from([1.0, 1.0, 2.0, 0.25, 7.0])
CAPS = st.sampled_from([math.inf, math.inf, 0.0, 0.5, 4.0])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_links = draw(st.integers(1, 6))
    capacity = [draw(RATES) for _ in range(num_links)]
    one_route = st.lists(st.integers(0, num_links - 1), min_size=1, max_size=4, unique=True)
    listed = draw(st.lists(one_route, min_size=1, max_size=8))
    routes = np.full((len(listed), 4), num_links)
    for row, links in zip(routes, listed, strict=True):
        row[: len(links)] = links
    weights = [draw(WEIGHTS) for _ in listed]
    caps = [draw(CAPS) for _ in listed]
    return np.array([*capacity, math.inf]), routes, np.array(weights), np.array(caps)


def filled_by_hand(problem: Problem) -> list[Fraction]:
    """Progressive filling, one stop at a time, in fractions."""
    capacity, routes, weights, caps = problem
    ways = [[link for link in row if link < len(capacity) - 1] for row in routes.tolist()]
    weight = [Fraction(value) for value in weights.tolist()]
    left = [Fraction(value) for value in capacity[:-1].tolist()]
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
    np.testing.assert_allclose(max_min_rates(*problem), expected, rtol=1e-12, atol=0)


@given(problems())
def test_compiled_rates_are_the_same(problem: Problem) -> None:
    pytest.importorskip("numba")
    from netsim.fluid import compiled_fairness

    np.testing.assert_allclose(
        compiled_fairness.max_min_rates(*problem), max_min_rates(*problem), rtol=1e-9, atol=1e-15
    )


def test_nothing_limits_what_crosses_no_link() -> None:
    routes = np.array([[1], [0]])
    rates = max_min_rates(np.array([5.0, math.inf]), routes, np.ones(2), np.full(2, math.inf))
    assert rates.tolist() == [math.inf, 5.0]


def test_scaling_capacities_by_a_power_of_two_scales_rates_exactly() -> None:
    routes = np.array([[0, 1], [1, 2], [0, 2], [0, 3], [2, 3]])
    capacity = np.array([3.0, 7.0, 1.1, math.inf])
    caps = np.full(5, math.inf)
    once = max_min_rates(capacity, routes, np.ones(5), caps)
    assert (max_min_rates(capacity * 2.0**40, routes, np.ones(5), caps) == once * 2.0**40).all()
