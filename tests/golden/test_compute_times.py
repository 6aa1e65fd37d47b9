"""Computing times of published trainings by the roofline, which is a lower bound of them."""

from __future__ import annotations

import pytest
from compute_cases import PUBLISHED, predictions


@pytest.fixture(scope="module")
def steps():
    return {name: (sum(parts.values()), parts, tokens) for name, (parts, tokens) in predictions().items()}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_steps_take_up_to_half_as_long_again(steps, name):
    seconds, _, tokens = steps[name]
    assert 1.0 < tokens / PUBLISHED[name] / seconds < 1.5


def test_halves_are_bound_by_memory_and_large_models_by_products(steps):
    for name, (seconds, parts, _) in steps.items():
        is_bound_by_memory = name in ("GPT-2, tf32", "GPT-2, bf16")
        assert (parts["memory"] > seconds / 2) == is_bound_by_memory
        assert (parts["products"] > seconds / 2) != is_bound_by_memory
