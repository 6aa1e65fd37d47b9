"""The ideal network against SimGrid 3.32 as a plain fluid: instants of delivery, transfer by transfer."""

from __future__ import annotations

import numpy as np
import pytest
from simgrid_cases import Row, case, golden, star, wan4

from netsim import Clock, Network, schedule, start_collective
from netsim.transfers import time_flows

LARGEST_ERROR = 1e-6  # of a transfer's duration


def largest_error(rows: list[Row], finish: np.ndarray, expected: np.ndarray) -> float:
    start = np.array([row[0] for row in rows])
    error: float = np.max(np.abs(finish - expected) / (expected - start))
    return error


@pytest.mark.parametrize("name", ["star8.a2a8", "wan4_8.a2a8", "star64.a2a64"])
def test_all_to_all_is_as_in_simgrid(name: str) -> None:
    topology, rows = case(name)
    assert largest_error(rows, time_flows(topology, rows, "ideal"), np.array(golden(name))) <= LARGEST_ERROR


def test_random_transfers_are_as_in_simgrid() -> None:
    """What comes first cannot depend on what starts later: the first part is a case of its own."""
    topology, rows = case("random100.random_steady")
    part = rows[:1500]
    expected = np.array(golden("random100.random_steady")[:1500])
    settled = expected < rows[1500][0]
    finish = time_flows(topology, part, "ideal")
    assert settled.sum() > 1200
    kept = [row for row, is_settled in zip(part, settled, strict=True) if is_settled]
    assert largest_error(kept, finish[settled], expected[settled]) <= LARGEST_ERROR


@pytest.mark.parametrize(
    ("place", "seconds"),
    [
        ("star", 4.095),
        ("regions", 34.6626),
        ("round robin", 270.9126),
    ],
)
def test_ring_all_reduce_over_64_hosts_is_as_in_simgrid(place: str, seconds: float) -> None:
    """100 MB in chunks of ceil(1e8 / 64); a rank sends on when its previous send and receive are done."""
    num = 64
    topology = star(num) if place == "star" else wan4(num)
    hosts = [i % 4 * (num // 4) + i // 4 for i in range(num)] if place == "round robin" else list(range(num))
    clock = Clock()
    network = Network(clock, topology, "ideal")
    made = schedule("all_reduce", num, num_bytes=100_000_000, algorithm="ring")
    ring = start_collective(network, made, hosts, on_done=lambda member: None)
    for member in range(num):
        ring.arrive(member)
    clock.run()
    assert clock.now == pytest.approx(seconds, rel=1e-9)
