"""What weather did and what links carried in the course of a run, and their counters in a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from experiments import experiment
from worlds import chain_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.results.report.network import NetworkSection
from exogym_core.results.run_folder import RunFolder
from netgym.cli.main import main
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


def test_endless_drift_is_cut_and_says_where() -> None:
    drift = {"link": ["a", "b"], "kind": "lognormal", "every": "1 ms", "sigma": 0.1}
    quiet = {key: STORMY[key] for key in ("hosts", "links")}
    history = simulate_weather(Topology.from_mapping({**quiet, "drift": [drift]}), 1e9, most_changes=1000)
    assert history.until_seconds == pytest.approx(0.5, rel=0.01)


# --- what crossed each link ---------------------------------------------------------------------------------

TWO = chain_form(latency="0 s")
EXPERIMENT = experiment(workers="{count: 4, kind: threads}", topology="wan-4-regions", compute="50 ms")


def _sends(comm: Communicator, num_steps: int = 1000) -> None:
    for step in range(num_steps):
        if comm.rank == 0:
            comm.send(torch.zeros(250), 1)
        else:
            comm.recv(torch.empty(250), 0)
        comm.advance(0.001)
        comm.mark({"step": step})


def test_bytes_are_those_of_the_links_at_a_bounded_number_of_instants() -> None:
    """1,000 messages of 1,000 B at 1 MB/s, and 1 ms of computing after each."""
    found = run_ranks(_sends, 2, TWO, workers="threads", protocol="ideal")
    rows = found.link_history
    assert 120 <= len(rows) <= 241
    assert rows[0] == {"virtual_seconds": 0.0, "a->b": 0}
    assert rows[-1] == {"virtual_seconds": found.virtual_seconds, "a->b": 1_000_000}
    assert found.link_bytes == [1_000_000, 0]
    instants = [row["virtual_seconds"] for row in rows]
    assert instants == sorted(set(instants))
    for row in rows[1:-1]:
        assert row["a->b"] == pytest.approx(row["virtual_seconds"] * 500_000, abs=1_001)
    (use,) = NetworkSection.of(TWO, [("sends", rows)]).use
    assert use["span_seconds"] == pytest.approx(2.0 / 120, rel=0.01)
    assert use["links"] == {"a->b": pytest.approx([0.5] * 120, abs=0.1)}


def test_every_compared_run_tells_what_its_links_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No trace is asked for: a file a strategy, which no digest covers, and on the page a choice of strategies."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    assert main(["compare", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out"), "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    folder = RunFolder(tmp_path / "out")
    every, seldom = folder.read_links("AllReduce"), folder.read_links("DiLoCo")
    wan = "us-east->eu"
    assert every[-1][wan] == pytest.approx(2 * seldom[-1][wan], rel=0.01)
    page = (tmp_path / "out/report.html").read_text()
    assert '"use":[{"name":"AllReduce","span_seconds":' in page
    assert '{"name":"DiLoCo","span_seconds":' in page
    (tmp_path / "out/links/DiLoCo.csv").unlink()
    assert folder.digest() == digest
    assert main(["report", str(tmp_path / "out")]) == 0
    assert '{"name":"DiLoCo","span_seconds":' not in (tmp_path / "out/report.html").read_text()
