"""TCP as a fluid against ns-3, packet by packet."""

from __future__ import annotations

import numpy as np
import pytest
from ns3_cases import Comparison, shared, singles

UNSOUND = {"staggered_n8, 100 Mbit/s, queue 833"}  # see ns3/README.md


@pytest.fixture(scope="module")
def loss_free() -> list[Comparison]:
    return singles(lossy=False)


@pytest.fixture(scope="module")
def together() -> list[Comparison]:
    return [case for case in shared() if case.name not in UNSOUND]


def test_single_transfers_from_1_mb_up(loss_free: list[Comparison]) -> None:
    errors = [abs(case.mean_error) for case in loss_free if case.num_bytes >= 1_000_000]
    assert np.median(errors) <= 0.006
    assert np.quantile(errors, 0.95) <= 0.1
    assert max(errors) <= 0.25


def test_100_kb_takes_the_same_round_trips(loss_free: list[Comparison]) -> None:
    for case in loss_free:
        if case.num_bytes == 100_000:
            assert abs(case.seconds[0] - case.expected[0]) <= 0.05 * case.round_trip_seconds


def test_known_queues_bring_single_transfers_nearer() -> None:
    errors = [
        abs(case.mean_error) for case in singles(lossy=False, know_queue=True) if case.num_bytes >= 1_000_000
    ]
    assert np.median(errors) <= 0.005
    assert np.quantile(errors, 0.95) <= 0.035
    assert max(errors) <= 0.1


def test_random_loss() -> None:
    """A seed decides when the few losses happen, so only the middle of the seeds can be right.

    At 0.1 % only the luckiest of three seeds is left in the file: 2.9 s, where 17 losses are to be expected.
    """
    errors = [case.mean_error for case in singles(lossy=True) if "loss 0.001" not in case.name]
    assert abs(float(np.median(errors))) <= 0.06
    assert max(map(abs, errors)) <= 0.35


def test_shared_bottlenecks_and_regions(together: list[Comparison]) -> None:
    """A queue of 1,000 packets by default; theirs hold 833 to 8,333."""
    assert np.median([abs(case.makespan_error) for case in together]) <= 0.08
    assert np.median([abs(case.mean_error) for case in together]) <= 0.08
    for case in together:
        assert abs(case.makespan_error) <= 0.25, case.name
        assert abs(case.mean_error) <= 0.25, case.name


def test_known_queues_bring_shared_ones_nearer() -> None:
    cases = [case for case in shared(know_queue=True) if case.name not in UNSOUND]
    assert np.median([abs(case.makespan_error) for case in cases]) <= 0.02
    assert np.median([abs(case.mean_error) for case in cases]) <= 0.02
    for case in cases:
        assert abs(case.makespan_error) <= 0.24, case.name
        assert abs(case.mean_error) <= 0.2, case.name
