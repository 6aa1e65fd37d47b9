"""Joins and leaves of hosts as data become crashes and returns, in every simulation of the network."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from experiments import fitted

from exogym_core.strategy import DiLoCoStrategy
from netsim import Topology

EXAMPLES = Path(__file__).parents[1] / "examples" / "availability"


def network(availability: Any, events: Any = (), hosts: int = 3) -> Topology:
    regions = {"us": {"hosts": hosts, "nic": "100 Mbit/s", "latency": "1 ms"}}
    return Topology.from_mapping({"regions": regions, "availability": availability, "events": list(events)})


def loaded(folder: Path, rows: str, hosts: int = 3) -> Topology:
    (folder / "churn.csv").write_text(f"start_s,host,event\n{rows}")
    path = folder / "net.yaml"
    path.write_text(
        f"regions: {{us: {{hosts: {hosts}, nic: 100 Mbit/s, latency: 1 ms}}}}\navailability: [{{file: churn.csv}}]\n"
    )
    return Topology.load(path)


def is_there(topology: Topology, host: str, at: float) -> bool:
    spans = [
        (event.at, event.at + (event.for_ or 1e18)) for event in topology.weather.events if event.host == host
    ]
    return not any(begin <= at < end for begin, end in spans)


def test_absences_are_events_of_the_resolved_topology(tmp_path: Path) -> None:
    found = loaded(tmp_path, "10,us.0,leave\n25,us.2,join\n40.5,us.0,join\n50,us.1,leave\n")
    crashes = [
        {"at": "0 s", "host": "us.2", "crash": True, "for": "25 s"},
        {"at": "10 s", "host": "us.0", "crash": True, "for": "30.5 s"},
        {"at": "50 s", "host": "us.1", "crash": True},
    ]
    assert found.weather == network([], crashes).weather
    again = Topology.from_mapping(found.to_mapping())
    assert again.weather == found.weather
    assert "availability" not in found.to_mapping()


def test_drawn_absences_depend_on_seed_and_host_alone() -> None:
    spot = {"spot": {"mtbf": "1 h", "away": "5 min"}, "until": "30 h"}
    first, again = network([spot]), network([spot])
    assert first.weather == again.weather != network([{**spot, "seed": 1}]).weather
    counts = [sum(event.host == f"us.{rank}" for event in first.weather.events) for rank in range(3)]
    assert all(10 < count < 50 for count in counts)  # 30 h / 65 min = 28 in the mean
    daily = {"diurnal": {"away": "9 h", "spread": "2 h"}, "hosts": ["us.0", "us.1"], "until": "72 h"}
    events = network([daily]).weather.events
    starts = {host: [event.at for event in events if event.host == host] for host in ("us.0", "us.1")}
    for own in starts.values():
        assert len(own) == 3
        assert own[0] <= 2 * 3600
        assert [after - before for before, after in pairwise(own)] == pytest.approx([86400.0] * 2)
    assert starts["us.0"] != starts["us.1"]
    assert all(event.for_ == 9 * 3600 for event in events)


def test_rounds_go_on_with_hosts_that_are_there(tmp_path: Path) -> None:
    """Rounds of 0.2 s: us.2 joins at 0.5 s, us.1 leaves from 1.0 to 1.5 s."""
    topology = loaded(tmp_path, "0.5,us.2,join\n1.0,us.1,leave\n1.5,us.1,join\n")
    strategy = DiLoCoStrategy(H=2, timeout_waiting_for_peers=0.05, averaging_timeout=0.5)
    options = {"num_nodes": 3, "max_steps": 24, "compute": "100 ms", "protocol": "ideal", "val_size": 0}
    result = fitted(strategy=strategy, topology=topology, num_epochs=99, **options)
    assert result.dropped_peers is not None
    absent = {(each["rank"], each["back_step"] is not None) for each in result.dropped_peers}
    assert absent == {(1, True), (2, True)}
    peers = [row["num_peers"] for row in result.history]
    assert (peers[0], peers[-1], min(peers)) == (2, 3, 2)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_of_public_traces_load(path: Path) -> None:
    topology = Topology.load(path)
    assert topology.source
    assert len(topology.weather.events) > 10
    assert all(event.crash for event in topology.weather.events)
