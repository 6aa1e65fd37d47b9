"""Ranks that share the cores of one machine (`compute.shared_cores`)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_ports import finished
from test_coding import fit
from test_crashed_hosts import compute, crash, star

from exogym_core.communicator import run_ranks
from exogym_core.strategy import DiLoCoStrategy
from netsim.ranks import Advance, Mark

GRID = 2.0**-30
_Works = st.lists(st.lists(st.integers(0, 5 << 28), max_size=4), min_size=1, max_size=6)


def shared_ends(works: list[list[int]], num_cores: int) -> list[Fraction]:
    """The end of each rank's works (in steps of the grid), one after the other, by equal shares of all cores."""
    left = [[Fraction(each) for each in work if each] for work in works]
    now, ends = Fraction(0), [Fraction(0)] * len(works)
    while busy := [rank for rank, work in enumerate(left) if work]:
        speed = min(Fraction(1), Fraction(num_cores, len(busy)))
        step = min(left[rank][0] for rank in busy)
        now += step / speed
        for rank in busy:
            left[rank][0] -= step
            if not left[rank][0]:
                del left[rank][0]
                ends[rank] = now
    return ends


@given(_Works, st.integers(1, 7))
def test_computing_ranks_have_equal_shares(works: list[list[int]], num_cores: int) -> None:
    streams = [[Advance(each * GRID) for each in work] for work in works]
    kernel, _ = finished(streams, shared_cores=num_cores)
    expected = [float(end * Fraction(GRID)) for end in shared_ends(works, num_cores)]
    assert kernel.end_seconds == pytest.approx(expected, rel=0, abs=30 * GRID)
    assert all((end / GRID).is_integer() for end in kernel.end_seconds)
    assert max(kernel.end_seconds) * num_cores >= sum(map(sum, works)) * GRID - 30 * GRID
    if num_cores >= len(works):
        alone, _ = finished(streams)
        assert kernel.end_seconds == alone.end_seconds


def test_computing_is_what_it_takes_and_not_what_was_asked() -> None:
    """Three ranks on two cores: 1.5 times as long for each, until the shortest is through."""
    streams = [[Advance(1.0), Mark({})], [Advance(1.0), Mark({})], [Advance(3.0), Mark({})]]
    kernel, ports = finished(streams, shared_cores=2)
    assert [row.virtual_seconds for row in ports.rows] == [1.5, 1.5, 3.5]
    assert kernel.compute_seconds == [1.5, 1.5, 3.5]


@pytest.mark.parametrize("seconds", [1e7, 1e9])
def test_runs_of_years_end(seconds: float) -> None:
    """So far from zero the clock is coarser than the grid."""
    streams = [[Advance(seconds + 0.7 * rank), Advance(1 / 3), Advance(0.1)] for rank in range(3)]
    kernel, _ = finished(streams, shared_cores=2)
    assert kernel.end_seconds == pytest.approx([1.5 * seconds] * 3, rel=1e-6)


def test_a_crash_leaves_its_core_to_the_others() -> None:
    """Steps of 1 s of three ranks on two cores; the second's host is down from 1 s to 11 s, and its step is lost."""
    run = run_ranks(compute, 3, star(crash("b", 1.0, 10)), shared_cores=2)
    others, second = run.results[0], run.results[1]
    thirds = [1 + 1 / 3, 2 + 1 / 3, 3 + 1 / 3]
    assert others == run.results[2] == pytest.approx(thirds, abs=3 * GRID)
    assert second == [12.0, 13.0, 14.0]
    assert run.compute_seconds == pytest.approx([10 / 3, 3.0, 10 / 3], abs=3 * GRID)


@pytest.mark.parametrize(("num_cores", "seconds"), [(4, 0.02), (2, 0.04)])
def test_devices_of_hosts_are_not_shared_as_well(num_cores: int, seconds: float) -> None:
    """Two steps of 10 ms; two ranks on each host of one device."""
    region = {"hosts": 1, "devices": 1, "nic": "10 Gbit/s"}
    result = fit(
        DiLoCoStrategy(H=3),
        compute={"fixed": "10 ms", "shared_cores": num_cores},
        num_nodes=4,
        placement=["a.0", "a.0", "b.0", "b.0"],
        topology={
            "name": "two hosts",
            "regions": {"a": region, "b": region},
            "wan": [{"between": ["a", "b"], "bandwidth": "1 Gbit/s", "rtt": "1 ms"}],
        },
        max_steps=2,
    )
    assert result.virtual_seconds == pytest.approx(seconds, abs=4 * GRID)


def test_carriers_and_resumed_runs_agree(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "compute": {"fixed": "10 ms", "jitter": 0.5, "coding": "1 MB/s", "shared_cores": 2},
        "num_nodes": 4,
        "topology": "wan-4-regions",
        "checkpoint_interval": 3,
        "max_steps": 6,
    }
    strategy = DiLoCoStrategy(H=3, optim_spec="adamw", codec="int8")
    threads = fit(strategy, **options, save_dir=tmp_path)
    assert (
        threads.virtual_seconds
        > fit(strategy, **{**options, "compute": {**options["compute"], "shared_cores": 4}}).virtual_seconds
    )
    assert fit(strategy, **options, workers={"kind": "processes", "processes": 2}).history == threads.history
    resumed = fit(strategy, **options, resume_from=threads.checkpoint_folder)
    assert resumed.virtual_seconds == threads.virtual_seconds
