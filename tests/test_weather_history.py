"""The weather simulated by itself, and its counters in a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from worlds import chain_form

from exogym_core.communicator import Communicator, run_ranks
from netsim import Topology
from netsim.weather.faults import simulate_weather

STORMY = chain_form(
    bandwidth="100 Mbit/s",
    latency="1 ms",
    events=[
        {"at": "1 s", "link": ["a", "b"], "down": True, "for": "2 s"},
        {"at": "5 s", "host": "b", "crash": True, "for": "1 s"},
    ],
    traces=[{"link": ["a", "b"], "bandwidth": [["0 s", "50 Mbit/s"], ["4 s", "80 Mbit/s"]]}],
    background=[{"from": "a", "to": "b", "rate": "5 Mbit/s"}],
)


def test_every_change_is_there_with_its_instant() -> None:
    history = simulate_weather(Topology.from_mapping(STORMY), 10.0)
    expected = [(0.0, 50e6), (1.0, 0.0), (3.0, 50e6), (4.0, 80e6), (5.0, 0.0), (6.0, 80e6)]
    assert {link: list(points) for link, points in history.links.items()} == {0: expected, 1: expected}
    assert [tuple(outage) for outage in history.outages] == [(1, 5.0, 6.0)]
    assert history.until_seconds == 10.0


def test_what_has_not_happened_yet_is_not_there() -> None:
    history = simulate_weather(Topology.from_mapping(STORMY), 5.5)
    assert history.links[0][-1] == (5.0, 0.0)
    assert [tuple(outage) for outage in history.outages] == [(1, 5.0, None)]


def test_endless_drift_is_cut_and_says_where() -> None:
    drift = {"link": ["a", "b"], "kind": "lognormal", "every": "1 ms", "sigma": 0.1}
    quiet = {key: STORMY[key] for key in ("hosts", "links")}
    history = simulate_weather(Topology.from_mapping({**quiet, "drift": [drift]}), 1e9, most_changes=1000)
    assert history.until_seconds == pytest.approx(0.5, rel=0.01)


def test_a_trace_has_the_capacity_of_links_that_change(tmp_path: Path) -> None:
    """A trace showed what links carried, and nothing of what they could."""

    def body(comm: Communicator) -> None:
        import torch

        for _ in range(3):
            comm.all_reduce(torch.ones(2_500_000))

    path = tmp_path / "trace.json.gz"
    run = run_ranks(body, 2, Topology.from_mapping(STORMY), trace=path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "a->b capacity"]
    capacities = [(event["ts"] / 1e6, event["args"]["Mbit/s"]) for event in counters]
    expected = [(0.0, 50.0), (1.0, 0.0), (3.0, 50.0), (4.0, 80.0), (5.0, 0.0), (6.0, 80.0)]
    assert capacities == [point for point in expected if point[0] <= run.virtual_seconds]
    assert len(capacities) >= 4
