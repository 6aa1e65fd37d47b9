"""The example of a worker at home: its line goes down, the run goes on without it, and it comes back."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from netgym.cli.main import main as netgym

EXAMPLE = Path(__file__).parents[2] / "examples" / "home_worker.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "out"
    small = [arg for key in ("steps=440", "evaluate.every=110") for arg in ("--set", key)]
    assert netgym(["compare", str(EXAMPLE), *small, "--out", str(out)]) == 0
    return out


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((folder / "summary.json").read_text())}


def test_the_run_goes_on_without_home_and_tells_when(folder: Path) -> None:
    waiting, going_on = entries(folder).values()
    assert "dropped_peers" not in waiting
    (absence,) = going_on["dropped_peers"]
    assert absence["rank"] == 3
    # The line is down from 25 s to 85 s; the round that ends then is the seventh, and the servers wait 2 s for home.
    assert absence["step"] == 140
    assert 29 < absence["virtual_seconds"] < 33
    assert 85 < absence["back_virtual_seconds"] < 86
    assert absence["back_step"] % 20 == 0
    assert waiting["virtual_seconds"] - going_on["virtual_seconds"] == pytest.approx(54, abs=2)


def test_metrics_tell_with_how_many_each_step_was_done(folder: Path) -> None:
    with open(folder / "metrics" / "time-outs.csv", newline="") as file:
        peers = [int(row["num_peers"]) for row in csv.DictReader(file)]
    back = entries(folder)["time-outs"]["dropped_peers"][0]["back_step"]
    assert peers == [4] * 120 + [3] * (back - 120) + [4] * (440 - back)


def test_the_report_tells_it_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert netgym(["report", str(folder)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"time-outs continued without rank 3 from step 140 \(3\d\.\d+ s\) to step \d+ \(85\.\d+ s\)\.", output
    )
    assert "continued without rank 3" in (folder / "report.html").read_text()


def test_a_late_joiner_is_a_key_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    join = "strategies.time-outs.join_at={2: 10 s}"
    options = ["--strategy", "time-outs", "--set", "steps=80", "--set", "evaluate.every=80", "--set", join]
    assert netgym(["run", str(EXAMPLE), *options, "--out", str(out)]) == 0
    (entry,) = entries(out).values()
    assert [(row["rank"], row["step"]) for row in entry["dropped_peers"]] == [(2, 20)]
    assert entry["dropped_peers"][0]["back_virtual_seconds"] > 10
