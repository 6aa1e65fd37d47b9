"""Reached means reached: the first evaluation at or below the target, and the loss held from there."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.results.target import Judged, Reached, reach


def run(*losses, versions=None):
    numbers = range(len(losses)) if versions is None else versions
    return [Judged(number, 10.0 * number, loss) for number, loss in zip(numbers, losses, strict=True)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((), Reached("missed")),
        ((0.9, 0.51, 0.6), Reached("missed")),
        ((0.9, 0.5), Reached("touched", 10.0, 1)),  # nothing follows
        ((0.9, 0.5, 0.4), Reached("touched", 10.0, 1)),  # one alone proves nothing
        ((0.9, 0.5, 0.4, 0.4), Reached("held", 10.0, 1)),
        ((0.9, 0.5, 0.9, 0.4, 0.4), Reached("held", 10.0, 1)),  # a spike does not undo it
        ((0.9, 0.34, 0.4, 0.56, 0.7), Reached("touched", 10.0, 1)),  # diverges
        ((0.9, 0.34, math.nan, math.nan, 0.3), Reached("touched", 10.0, 1)),
        ((math.nan, 0.5, 0.5, 0.5), Reached("held", 10.0, 1)),
        ((math.inf, math.nan), Reached("missed")),
    ],
)
def test_the_rule(losses, expected):
    assert reach(run(*losses), 0.5) == expected


def test_a_model_that_is_judged_again_is_no_later_model():
    """Rounds of many steps are judged several times: what is repeated is no evidence that a loss is held."""
    again = run(0.9, 0.4, 0.4, 0.4, 0.4, versions=[0, 1, 1, 1, 1])
    assert reach(again, 0.5).target == "touched"
    followed = run(0.9, 0.4, 0.4, 0.45, 0.45, 0.9, versions=[0, 1, 1, 2, 2, 3])
    assert reach(followed, 0.5).target == "touched"  # the median of 0.45 and 0.9 is above
    assert reach([*followed, *run(0.3, versions=[4])], 0.5).target == "held"


def test_without_virtual_time_it_is_told_all_the_same():
    evaluations = [Judged(number, None, 0.1) for number in range(3)]
    assert reach(evaluations, 0.5) == Reached("held", None, 0)


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 1))
def test_held_is_what_the_words_say(losses, target):
    reached = reach(run(*losses), target)
    below = [place for place, loss in enumerate(losses) if loss <= target]
    assert (reached.target == "missed") == (not below)
    if below:
        later = losses[below[0] + 1 :]
        assert reached.position == below[0]
        assert (reached.target == "held") == (len(later) >= 2 and median(later) <= target)
