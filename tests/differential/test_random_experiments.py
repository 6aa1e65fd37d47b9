"""The same files of whole experiments, wherever their ranks run and however often they are stopped."""

from __future__ import annotations

import pytest
from random_experiments import drawn, shown


@pytest.mark.parametrize("seed", range(8))
def test_experiments_give_the_same_everywhere(seed: int) -> None:
    problem = shown(drawn(seed))
    assert not problem, problem
