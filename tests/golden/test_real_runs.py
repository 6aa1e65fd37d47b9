"""Whole runs over real gloo between shaped links, recorded by benchmarks/real_runs.py, against their simulation.

`real_runs/experiment.yaml` is the resolved experiment, with the compute time measured then; `compared.json` the times.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from forks import benchmark

from netgym.cli.main import main

HERE = Path(__file__).parent / "real_runs"
RECORDED = {entry["name"]: entry for entry in json.loads((HERE / "compared.json").read_text())}
TOLERANCE = 0.05  # of a run, and of each of its rounds, after the first one
ADAMW = "lr: 4e-3, optim_spec: adamw"
STRATEGIES = {
    "DiLoCo": f"name: DiLoCo, H: 5, {ADAMW}",
    "DiLoCo int8": f"name: DiLoCo, label: DiLoCo int8, H: 5, codec: int8, {ADAMW}",
    "Streaming DiLoCo": "name: StreamingDiLoCo, label: Streaming DiLoCo, H: 5, num_fragments: 3, tau: 1, "
    + ADAMW,
    "DeMo": "name: DeMo, lr: 4e-3",
}


@pytest.mark.parametrize(
    "names", [["DiLoCo"], pytest.param([*STRATEGIES][1:], marks=pytest.mark.thorough)], ids=", ".join
)
def test_simulated_runs_take_as_long_as_real_ones(tmp_path: Path, names: list[str]) -> None:
    """Seconds of the run and of each round after the first one, bytes to the last one."""
    strategies = ", ".join(f"{{{STRATEGIES[name]}}}" for name in names)
    chosen = ["--set", f"strategies=[{strategies}]", "--out", str(tmp_path / "out")]
    assert main(["compare", str(HERE / "experiment.yaml"), *chosen]) == 0
    for name in names:
        seconds, sent = steps(tmp_path / "out" / "metrics" / f"{name.replace(' ', '-')}.csv")
        recorded = RECORDED[name]
        real = statistics.median(recorded["real_seconds"])
        ends = seconds[4::5]
        assert abs((ends[-1] - ends[0]) / real - 1) < TOLERANCE, name
        rounds = [after - before for before, after in itertools.pairwise(ends)]
        for measured, simulated in zip(recorded["real_rounds"][1:], rounds, strict=True):
            assert abs(simulated / measured - 1) < TOLERANCE, name
        assert sent == recorded["real_bytes"], name


def steps(path: Path) -> tuple[list[float], float]:
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    column: dict[str, Any] = {name: [row[index] for row in rows] for index, name in enumerate(header)}
    return [float(value) for value in column["virtual_seconds"]], float(column["bytes_sent"][-1])


@pytest.mark.parametrize("name", RECORDED)
def test_the_page_tells_what_was_recorded(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "real-runs.md").read_text()
    entry = RECORDED[name]
    real = sorted(entry["real_seconds"])
    median = statistics.median(real)
    row = f"{median:.2f} ({', '.join(f'{each:.2f}' for each in real)}) | {entry['simulated_seconds']:.2f} |"
    assert row in page
    digits = 2 if median > 50 else 3
    for kind in ("real_rounds", "simulated_rounds"):
        assert " ".join(f"{each:.{digits}f}" for each in entry[kind]) in page
    assert entry["real_bytes"] == entry["simulated_bytes"]
    assert entry["loss"] < 1e-4


# --- simulated gloo against torch.distributed's over shaped links -------------------------------------------

CASES = sorted((Path(__file__).parent / "testbed").glob("*.json"))


# Prints this comparison case by case.
GLOO = benchmark("gloo")


def test_simulated_gloo_takes_as_long_as_gloo() -> None:
    """Operations of 5 ms and more: warm and new connections, pauses, concurrent, late and uneven calls."""
    compared = [each for path in CASES for each in GLOO.compare(json.loads(path.read_text()))]
    count, median, high = GLOO.summary(compared)
    assert count == 458
    assert median <= 0.02
    assert high <= 0.17


@pytest.mark.parametrize(
    ("folder", "count", "mean"),
    [("sites", 192, 0.07), ("unseen", 48, 0.08), ("held_out", 60, 0.08), ("long", 113, 0.03)],
)
def test_collectives_are_as_far_from_gloo_as_the_pages_say(folder: str, count: int, mean: float) -> None:
    """Queues of 64 kB to 1 MB between sites, of which nobody had seen `held_out`; long links, drawn."""
    compared = [
        each
        for path in sorted((Path(__file__).parent / folder).glob("*.json"))
        for each in GLOO.compare(json.loads(path.read_text()))
    ]
    assert len(compared) == count
    assert sum(abs(each.error) for each in compared) / count <= mean
    assert sum(abs(each.error_beyond) for each in compared) / count <= 0.05
