"""Sweeps: what is tried, one folder for all of it, and going on after whatever happened."""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import experiment, json_of
from forks import Fork
from hypothesis import given
from hypothesis import strategies as st

from netgym.cli.main import main
from netgym.experiment.experiment import Experiment
from netgym.studies import sweep as sweep_module
from netgym.studies.points import Range, Sweep, batches_of
from netgym.studies.study import Study
from netgym.studies.sweep import Probe, estimated, objective, probe
from netsim.errors import InputError
from netsim.files.documents import load_document, parse_document

EXPERIMENT = experiment(topology="lan", compute="50 ms", target_loss=2.2)


def write(folder: Path, sweep: str = "") -> Path:
    path = folder / "small.yaml"
    path.write_text(EXPERIMENT + sweep)
    return path


def parsed(text: str) -> Sweep:
    return Sweep.parse(parse_document(text, "s.yaml"))


def read(folder: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())
    return entries


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_is_every_combination_the_last_key_first() -> None:
    sweep = parsed("sweep: {a: [1, 2], b.c: [x, y], points: [{d: 0}, {d: 1, e: 2}]}")
    assert sweep.num_points == len(sweep.grid()) == 8
    assert sweep.grid()[:3] == [
        {"a": 1, "b.c": "x", "d": 0},
        {"a": 1, "b.c": "x", "d": 1, "e": 2},
        {"a": 1, "b.c": "y", "d": 0},
    ]


@given(st.integers(1, 50), st.integers(0, 50), st.booleans(), st.floats(0, 1, exclude_max=True))
def test_numbers_of_a_range_lie_in_it(low: int, width: int, log: bool, fraction: float) -> None:
    """Whole bounds give whole numbers, others any; both ends can come."""
    whole = Range(low=low, high=low + width, log=log)
    assert isinstance(whole.at(fraction), int)
    assert low <= whole.at(fraction) <= low + width
    assert whole.at(0.0) == low
    assert whole.at(math.nextafter(1.0, 0.0)) == low + width
    some = Range(low=float(low), high=float(low + width), log=log)
    assert low * (1 - 1e-12) <= some.at(fraction) <= (low + width) * (1 + 1e-12)


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_a_search_with_the_same_results_proposes_the_same(search: str) -> None:
    """This is how a killed search goes on."""
    if search == "optuna":
        pytest.importorskip("optuna")
    text = "{lr: {low: 1e-4, high: 1e-1, log: true}, H: {low: 1, high: 64}, topology: [lan, {name: x}]"
    sweep = parsed(f"sweep: {text}, search: {search}, trials: 15, minimise: final_loss}}")

    def asked() -> list[dict[str, Any]]:
        points = []
        for batch, report in batches_of(sweep):
            points += batch
            results = {3: None, 4: math.inf}
            report([results.get(len(points), point["lr"]) for point in batch])
        return points

    first = asked()
    assert len(first) == 15
    assert first == asked()
    assert all(1e-4 <= point["lr"] <= 1e-1 and isinstance(point["H"], int) for point in first)
    if search == "optuna":  # it has learned where the loss is small
        assert sum(point["lr"] < 3e-3 for point in first[10:]) >= 4


def test_a_random_search_ends_when_its_space_is_used_up() -> None:
    ((points, _),) = batches_of(parsed("sweep: {a: [1, 2, 3], search: random, trials: 50}"))
    assert sorted(point["a"] for point in points) == [1, 2, 3]


def test_an_objective_counts_targets_that_were_held() -> None:
    entries: list[dict[str, Any]] = [
        {"virtual_seconds_to_target": 3.0, "target": "touched"},
        {"virtual_seconds_to_target": 5.0, "target": "held"},
        {"virtual_seconds_to_target": 1.0, "target": "held", "failed": True},
    ]
    assert objective("virtual_seconds_to_target", entries) == 5.0
    assert objective("virtual_seconds_to_target", entries[:1]) == math.inf
    with pytest.raises(InputError, match="minimise losss: the summary has no such field"):
        objective("losss", entries)


def test_the_estimate_times_steps_whose_rows_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the steps between two exchanges are reported at once, so a step seemed to take no time."""
    clock, forward = [0.0], torch.nn.Linear.forward

    def slow(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        clock[0] += 1.0 if torch.is_grad_enabled() else 0.0
        return forward(layer, inputs)

    monkeypatch.setattr(torch.nn.Linear, "forward", slow)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    given = {
        "steps": 9,
        "strategies": [{"name": "DiLoCo", "H": 9}],
        "workers": {"count": 2, "kind": "threads"},
    }
    (tmp_path / "small.yaml").write_text(experiment(**given))
    assert probe(Experiment.load(tmp_path / "small.yaml")).step_seconds == 4.0, "two layers, two workers"


def test_a_sweep_marks_what_fails_and_does_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One folder, a run folder a point, one table; the estimate comes first, the folder last; exit code 1."""
    path = write(tmp_path, "sweep: {seeds: 2, topology: [lan, wan-4-regions], strategies.*.lr: [0.01, -1]}\n")
    out = tmp_path / "out"
    assert main(["sweep", str(path), "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("4 points: about ")
    assert "of this machine for 8 runs" in captured.err
    assert (
        "2 of them will be marked as failed: point topology=lan, strategies.*.lr=-1: strategies[0].lr"
        in captured.err
    )
    assert "point 3 of 4: topology=wan-4-regions, strategies.*.lr=0.01" in captured.err
    assert "error: 2 of 4 points failed" in captured.err
    assert captured.out.splitlines()[-1] == str(out)
    entries = read(out)
    assert [entry.get("failed", False) for entry in entries] == [False, True, False, True]
    assert entries[1]["error"].startswith("strategies[0].lr: SimpleReduceStrategy: lr=-1")
    assert [entry["name"] for entry in entries[2]["strategies"]] == ["AllReduce", "DiLoCo"]
    rows = table(out)
    assert len(rows) == 2 * 2 * 2 * 3, "points, strategies, seeds, evaluations"
    assert {(row["topology"], row["strategies.*.lr"]) for row in rows} == {
        ("lan", "0.01"),
        ("wan-4-regions", "0.01"),
    }
    assert main(["compare", str(out / "points/0000/experiment.yaml"), "--out", str(tmp_path / "again")]) == 0
    ours, again = (
        folder / "metrics/DiLoCo.seed-1.csv" for folder in (out / "points/0000", tmp_path / "again")
    )
    assert ours.read_bytes() == again.read_bytes(), "a point is a run like any other"


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After kill -9 in the middle of a point the digest is that of a sweep that was not stopped."""
    sweep = "{strategies.DiLoCo.H: {low: 1, high: 4}, search: random, trials: 3}"
    path = write(tmp_path, f"sweep: {sweep}\n")
    whole = json_of(["sweep", str(path), "--out", str(tmp_path / "whole"), "--json"], capsys)
    running = Fork(main, ["sweep", str(path), "--out", str(tmp_path / "cut"), "--jobs", "1"])
    running.wait_for(lambda: "\npoint 2 of 3" in running.err)
    running.kill()
    cut = read(tmp_path / "cut")
    assert len(cut) < 3
    before = (tmp_path / "cut/points/0000/summary.json").stat().st_mtime_ns
    resumed = json_of(["sweep", "--resume", str(tmp_path / "cut"), "--json"], capsys)
    assert resumed["digest"] == whole["digest"]
    assert resumed["points"] == whole["points"]
    assert (tmp_path / "cut/points/0000/summary.json").stat().st_mtime_ns == before, "left as it was"
    assert [row | {"run": ""} for row in table(tmp_path / "cut")] == [
        row | {"run": ""} for row in table(tmp_path / "whole")
    ]


def test_points_side_by_side_give_the_sweep_that_runs_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "sweep: {strategies.*.lr: [0.01, 0.02, -1]}\n")
    documents = []
    for name, options in (("one", []), ("two", ["--jobs", "2"])):
        assert main(["sweep", str(path), "--out", str(tmp_path / name), "--json", *options]) == 1
        documents.append(json.loads(capsys.readouterr().out) | {"run_folder": ""})
    assert documents[0] == documents[1]
    assert main(["sweep", str(path), "--jobs", "2", "--on", "ray"]) == 2
    assert "error: --jobs 2: is for this machine, and --on ray is not" in capsys.readouterr().err


def test_flags_vary_keys_and_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    arguments = [
        "sweep",
        str(write(tmp_path)),
        "--vary",
        "strategies.*.lr={low: 1e-3, high: 1e-1, log: true}",
    ]
    arguments += ["--search", "optuna", "--trials", "2", "--minimise", "virtual_seconds_to_target"]
    document = json_of([*arguments, "--out", str(tmp_path / "out"), "--json"], capsys)
    assert document["run_folder"] == str(tmp_path / "out")
    assert len({entry["point"]["strategies.*.lr"] for entry in document["points"]}) == 2
    assert main(["sweep", str(write(tmp_path)), "--vary", "steps=[2, 3]", "--estimate"]) == 0
    assert "2 points: about" in capsys.readouterr().out
    document = json_of(
        ["sweep", str(write(tmp_path)), "--vary", "steps=[2, 3]", "--estimate", "--json"], capsys
    )
    assert (document["num_points"], document["num_runs"]) == (2, 4)
    assert document["seconds"] > 0
    assert document["memory_bytes"] > 1e6


def test_the_estimate_is_of_points_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the sum of their times: 13 minutes for a sweep that took five."""
    monkeypatch.setattr(sweep_module, "probe", lambda _: Probe(1.0, 1.0, 0.0, 1_000_000))
    document = load_document(write(tmp_path))
    document = replace(document, data={**document.data, "sweep": {"strategies.*.lr": [0.1, 0.2, 0.3, 0.4]}})
    study = Study.create(document, tmp_path, str(tmp_path / "out"), "small")
    alone, pairs = (estimated(study, jobs)[2] for jobs in (1, 2))
    study.folder.release()
    assert alone is not None
    assert pairs is not None
    assert (alone.at_once, pairs.at_once) == (1, 2)
    assert pairs.seconds == alone.seconds / 2
    assert "2 points at once with 1 MB of memory each" in str(pairs)


def test_a_network_next_to_the_file_travels_with_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two.yaml").write_text(
        "name: two\nhosts: [a, b]\nlinks: [{between: [a, b], bandwidth: 1 Gbit/s, latency: 1 ms}]\n"
    )
    path = write(tmp_path, "sweep: {topology: [two.yaml, lan]}\n")
    assert main(["validate", str(path)]) == 0
    assert "; a sweep of 2 points" in capsys.readouterr().out
    assert main(["sweep", str(path), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "two.yaml").unlink()
    assert main(["sweep", "--resume", str(tmp_path / "out")]) == 0, "there is nothing left to do"
    assert {row["topology"] for row in table(tmp_path / "out")} == {"two", "lan"}
    assert main(["compare", "--resume", str(tmp_path / "out")]) == 2
    assert "is a sweep: use: netgym sweep --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        (
            "optuna",
            ["--search", "optuna", "--trials", "2", "--minimise", "final_loss"],
            "search optuna: Optuna is not installed: pip install 'netgym[ray]'",
        ),
        ("ray", ["--on", "ray"], "ray: Ray is not installed: pip install 'netgym[ray]'"),
    ],
)
def test_an_extra_that_is_missing_leaves_no_folder_behind(
    missing: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told with the line that installs it; a folder without a point would be in the way of `report runs/*`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    path = write(tmp_path, "sweep: {strategies.*.lr: [0.01, 0.02]}\n")
    assert main(["sweep", str(path), *options]) == 2
    assert f"error: {message}\n" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []
