"""The same files of whole experiments, wherever their ranks run and however often they are stopped."""

from __future__ import annotations

import pytest
from random_experiments import drawn, shown


# Absences, sites and chains, some with several seeds: in threads, stacked and in 1 to 4 processes; stopped, killed.
@pytest.mark.parametrize("seed", [1, 2, 7, 13, 14, 18, 20])
def test_experiments_give_the_same_everywhere(seed: int) -> None:
    problem = shown(drawn(seed))
    assert not problem, problem
