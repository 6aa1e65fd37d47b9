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

from netgym.cli.main import main

HERE = Path(__file__).parent / "real_runs"
RECORDED = {entry["name"]: entry for entry in json.loads((HERE / "compared.json").read_text())}
TOLERANCE = 0.05  # of a run, and of each of its rounds, after the first one
STRATEGIES = ("DiLoCo", "DiLoCo int8", "Streaming DiLoCo", "DeMo")


def test_simulated_runs_take_as_long_as_real_ones(tmp_path: Path) -> None:
    """Seconds of the run and of each round after the first one, bytes to the last one."""
    chosen = ["--set", f"strategies={strategies()}", "--out", str(tmp_path / "out")]
    assert main(["compare", str(HERE / "experiment.yaml"), *chosen]) == 0
    for name in STRATEGIES:
        seconds, sent = steps(tmp_path / "out" / "metrics" / f"{name.replace(' ', '-')}.csv")
        recorded = RECORDED[name]
        real = statistics.median(recorded["real_seconds"])
        ends = seconds[4::5]
        assert abs((ends[-1] - ends[0]) / real - 1) < TOLERANCE, name
        rounds = [after - before for before, after in itertools.pairwise(ends)]
        for measured, simulated in zip(recorded["real_rounds"][1:], rounds, strict=True):
            assert abs(simulated / measured - 1) < TOLERANCE, name
        assert sent == recorded["real_bytes"], name


def strategies() -> str:
    adamw = "lr: 4e-3, optim_spec: adamw"
    return (
        f"[{{name: DiLoCo, H: 5, {adamw}}}, {{name: DiLoCo, label: DiLoCo int8, H: 5, codec: int8, {adamw}}},"
        f" {{name: StreamingDiLoCo, label: Streaming DiLoCo, H: 5, num_fragments: 3, tau: 1, {adamw}}},"
        " {name: DeMo, lr: 4e-3}]"
    )


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
