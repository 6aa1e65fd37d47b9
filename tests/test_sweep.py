"""Sweeps and tuning: what is tried, one folder for all of it, and going on after whatever happened."""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import experiments
import pytest
from experiments import experiment, json_of, results_of
from forks import Fork

import netgym
from exogym_core.results.report import RunReport
from netgym.cli.main import main
from netgym.experiment.experiment import Experiment
from netgym.studies import sweep
from netgym.studies import sweep as sweep_module
from netgym.studies.points import Sweep, batches_of
from netgym.studies.report import StudyReport
from netgym.studies.study import Study
from netgym.studies.sweep import Estimate, Probe, SweepProgress, estimate, estimated, objective
from netsim.errors import InputError
from netsim.files.documents import load_document, parse_document

PULSE = """\
from exogym_core.strategy import Strategy
from exogym_core.strategy.options import option, positive_int

class Pulse(Strategy):
    period: int = option(5, positive_int)
    blend: float = option(1.0)

    def communicate(self, step):
        self.comm.barrier()
"""
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


@pytest.mark.probes
def test_a_sweep_marks_what_fails_and_does_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One folder, a run folder a point, one table; the estimate comes first, the folder last; exit code 1."""
    sizes = [{"batch_size": size, "minibatch_size": parts} for size, parts in ((4, 4), (4, 8), (8, 8))]
    path = write(
        tmp_path, f"sweep: {{seeds: 2, topology: [lan, wan-4-regions], points: {json.dumps(sizes)}}}\n"
    )
    out = tmp_path / "out"
    assert main(["sweep", str(path), "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("6 points: about ")
    assert "of this machine for 16 runs" in captured.err
    failing = "topology=lan, batch_size=4, minibatch_size=8: minibatch_size: 8 does not divide batch_size 4"
    assert f"2 of them will be marked as failed: point {failing}" in captured.err
    assert "point 4 of 6: topology=wan-4-regions, batch_size=4, minibatch_size=4" in captured.err
    assert "error: 2 of 6 points failed" in captured.err
    placed = ["lan: lan: 2", "wan-4-regions: asia: 1, eu: 1"]
    assert "".join(f"placement on {line}\n" for line in placed) in captured.out
    assert "\ntopology wan-4-regions, batch_size 4" in captured.out
    assert captured.out.splitlines()[-2:] == [f"digest {Study.open(out).digest()}", str(out)]
    assert f"<dd>{'; '.join(placed)}</dd>" in (out / "report.html").read_text()
    entries = read(out)
    assert [entry.get("failed", False) for entry in entries] == [False, True, False] * 2
    assert entries[1]["error"].startswith("minibatch_size: 8 does not divide batch_size 4")
    assert [entry["name"] for entry in entries[2]["strategies"]] == ["AllReduce", "DiLoCo"]
    rows = table(out)
    assert len(rows) == 4 * 2 * 2 * 3, "points, strategies, seeds, evaluations"
    assert {(row["topology"], row["batch_size"]) for row in rows} == {
        (network, size) for network in ("lan", "wan-4-regions") for size in "48"
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
    shutil.rmtree(tmp_path / "whole/points/0002")  # a point whose folder is gone is run again
    again = json_of(["sweep", "--resume", str(tmp_path / "whole"), "--json"], capsys)
    assert again["digest"] == whole["digest"]
    resumed = json_of(["sweep", "--resume", str(tmp_path / "cut"), "--json"], capsys)
    assert resumed["digest"] == whole["digest"]
    assert resumed["points"] == whole["points"]
    assert (tmp_path / "cut/points/0000/summary.json").stat().st_mtime_ns == before, "left as it was"
    assert [row | {"run": ""} for row in table(tmp_path / "cut")] == [
        row | {"run": ""} for row in table(tmp_path / "whole")
    ]


def test_points_of_an_edited_experiment_are_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of another experiment are named and replaced, others are kept; the end is that of a new sweep."""
    text = experiment(topology="lan", compute="50 ms", strategies="[AllReduce]")
    sweep = "sweep:\n  strategies.*.lr: [0.01, 0.02]\n  compute.fixed: [50 ms, 60 ms]\n"
    path, out, edited = tmp_path / "small.yaml", tmp_path / "out", tmp_path / "out/experiment.yaml"
    path.write_text(text + sweep)
    assert main(["sweep", str(path), "--out", str(out), "--jobs", "1"]) == 0
    finished = (out / "points/0000/summary.json").stat().st_mtime_ns
    resume = ["sweep", "--resume", str(out), "--trust", "--json", "--jobs", "1"]
    edited.write_text(f"# nothing else\n{edited.read_text()}")
    assert main(resume) == 0
    assert "run again" not in capsys.readouterr().err
    edited.write_text(edited.read_text().replace("0.02", "0.03"))
    assert main(resume) == 0
    line = "point 3 (another strategies.*.lr), 4 (another strategies.*.lr)"
    assert f"run again, as the experiment was changed since: {line}" in capsys.readouterr().err
    assert (out / "points/0000/summary.json").stat().st_mtime_ns == finished
    edited.write_text(edited.read_text().replace("steps: 4", "steps: 3").replace("- 60 ms", ""))
    capsys.readouterr()
    again = json_of(resume, capsys)
    path.write_text(
        text.replace("steps: 4", "steps: 3") + sweep.replace("0.02", "0.03").replace(", 60 ms", "")
    )
    new = json_of(["sweep", str(path), "--out", str(tmp_path / "new"), "--json", "--jobs", "1"], capsys)
    assert again["digest"] == new["digest"]
    assert again["points"] == new["points"]


OF_POINTS = "strategies=[[{name: 'own_swept:Own', label: A}], [{name: 'own_swept:Own', label: B, lr: 0.02}]]"


@pytest.mark.parametrize(
    "command",
    [
        ["sweep", "--vary", "strategies.*.lr=[0.01, 0.02]"],
        ["sweep", "--vary", OF_POINTS],
        ["tune", "--over", "lr=0.01,0.02"],
    ],
)
def test_a_point_is_not_trained_with_edited_code_next_to_results_of_the_former(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows and points were mixed from two codes, in silence."""

    def write_code(base: str) -> None:
        (tmp_path / "own_swept.py").write_text(f"from netgym.strategy import {base} as Own")
        sys.modules.pop("own_swept", None)
        importlib.invalidate_caches()

    path, out = tmp_path / "small.yaml", tmp_path / "out"
    strategies = "[AllReduce]" if OF_POINTS in command else "[{name: 'own_swept:Own', lr: 0.01}]"
    path.write_text(experiment(topology="lan", compute="50 ms", strategies=strategies))
    write_code("LocalSGDStrategy")
    assert main([*command, str(path), "--seeds", "1", "--out", str(out), "--jobs", "1"]) == 0
    assert "code: strategy own_swept:Own of " in capsys.readouterr().err
    first, second = sorted(out.rglob("points/000?"))
    kept = (first / "summary.json").stat().st_mtime_ns
    resume = [command[0], "--resume", str(out), "--jobs", "1"]
    facts = (out / "environment.json").read_text()
    shutil.rmtree(second)
    write_code("AllReduceStrategy")
    capsys.readouterr()
    assert main(resume) == 2
    line = f"{out}: own_swept was edited since its first results; "
    refused = capsys.readouterr().err
    assert f"{line}undo the edit, or add --edited-code" in refused
    assert "to continue: netgym" not in refused, "which was refused again"
    assert (out / "environment.json").read_text() == facts
    assert not second.exists()
    assert main([*resume, "--edited-code"]) == 0
    assert f"warning: {line}the run continues with the current code" in capsys.readouterr().err
    assert (first / "summary.json").stat().st_mtime_ns == kept
    assert main(["compare", str(second / "experiment.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert results_of(second) == results_of(tmp_path / "again")
    shutil.rmtree(second)
    assert main(resume) == 0, "the code that was accepted"
    (out / "environment.json").write_text(facts.replace("code_digests", "of an earlier version"))
    shutil.rmtree(second)
    assert main(resume) == 0, "a folder without digests"


@pytest.mark.parametrize(
    "command",
    [["compare"], ["sweep", "--vary", "strategies.*.lr=[0.01, 0.02]"], ["tune", "--over", "lr=0.01,0.02"]],
)
def test_a_failed_strategy_is_mended_next_to_results_of_others(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No row was of the code before, and --edited-code was asked for."""

    def write_code(rest: str) -> None:
        text = "from netgym.strategy import LocalSGDStrategy\nclass Own(LocalSGDStrategy):\n    "
        (tmp_path / "own_mended.py").write_text(text + rest)
        sys.modules.pop("own_mended", None)
        importlib.invalidate_caches()

    path, out = tmp_path / "small.yaml", tmp_path / "out"
    strategies = "[AllReduce, {name: 'own_mended:Own', label: Own, H: 2, lr: 0.01}]"
    path.write_text(experiment(topology="lan", compute="50 ms", strategies=strategies))
    write_code("def communicate(self, *_): raise ValueError('of step 2')\n")
    main([*command, str(path), "--out", str(out), "--jobs", "1"])
    assert "of step 2" in capsys.readouterr().err
    write_code("pass\n")
    assert main([command[0], "--resume", str(out), "--jobs", "1"]) == 0
    ends = [entry for each in out.rglob("summary.json") for entry in json.loads(each.read_text())]
    assert not any(entry.get("failed") for entry in ends)
    (comparison,) = out.rglob("comparison") if command[0] == "tune" else [out]
    assert "Own" in (comparison / "report.html").read_text()
    write_code("pass  # edited\n")
    for each in out.rglob("points/0001"):
        shutil.rmtree(each)
    assert main([command[0], "--resume", str(out), "--jobs", "1"]) == (0 if command == ["compare"] else 2)


@pytest.mark.thorough
@pytest.mark.probes
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


def test_the_estimate_counts_what_is_trained_and_what_is_retimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points that retime others wait for the longest training, whose runs use idle jobs; a busy machine is slow."""
    times = {"retimed_seconds": (0.5, 0.25), "page_seconds": 2.0, "slowdown": 3.0}
    measured = Probe(1.0, 1.0, 0.0, 1_000_000, **times)
    monkeypatch.setattr(sweep_module, "probe", lambda _: measured)
    text = experiment(
        topology="lan",
        compute="1 ms",
        steps=4,
        sweep="{topology: [lan, home-tiers, wan-4-regions], strategies.*.lr: [0.1, 0.2]}",
    )
    (tmp_path / "small.yaml").write_text(text)
    study = Study.create(load_document(tmp_path / "small.yaml"), tmp_path, str(tmp_path / "out"), "small")
    num_strategies = len(study.base().strategies)
    trained, retimed = num_strategies * (1.0 + 4 * 1.0), num_strategies * (0.5 + 4 * 0.25)
    expected = {1: 2 * trained + 4 * retimed, 2: trained + 2 * retimed, 4: trained / 2 + retimed}
    for jobs, seconds in expected.items():
        found = estimated(study, jobs)[2]
        assert found is not None
        assert (found.num_runs, found.num_retimed) == (6 * num_strategies, 4 * num_strategies)
        assert found.seconds == pytest.approx(3.0 * (seconds + 2.0))
    study.folder.release()


@pytest.mark.parametrize("slowdown", [0.5, 1.0, 3.0])
def test_the_time_left_weighs_points_by_their_work(slowdown: float) -> None:
    """A step of a retimed point counted as one of a trained point: the time left was hours in place of minutes."""
    found = Estimate(100.0, 0, 6, of_points={0: 90.0, **dict.fromkeys(range(1, 6), 2.0)})
    progress = SweepProgress(lambda *_: None, 7, found)
    progress.skip(6)
    bounds = sorted([1.0, slowdown])
    done = 0.0
    for number in range(6):
        progress.point(number, "")
        for share in (1e-6, 0.5, 0.999):
            progress.step(number, share, str)
            now = done + share * found.of_points[number]
            left = progress.seconds_left(slowdown * now)
            assert left is not None
            low, high = (bound * (100.0 - now) for bound in bounds)
            assert low - 1e-6 <= left <= high + 1e-6
        done += found.of_points[number]
        progress.finish(number, "")
    assert progress.seconds_left(done) is None
    progress = SweepProgress(lambda *_: None, 2)
    assert progress.seconds_left(5.0) is None, "unknown at the start"
    progress.finish(0, "")
    assert progress.seconds_left(5.0) == pytest.approx(5.0)


def test_the_estimate_counts_trainings_that_depend_on_time_at_every_point(tmp_path: Path) -> None:
    """A round with a time-out goes on without the late, so that no other network's losses are known."""
    waiting = "[AllReduce, {name: DiLoCo, H: 2, timeout_waiting_for_peers: 1 s}, {name: AsyncDiLoCo, H: 2}]"
    sweep = "{topology: [lan, home-tiers, wan-4-regions]}"
    text = experiment(topology="lan", compute="1 ms", strategies=waiting, sweep=sweep)
    (tmp_path / "small.yaml").write_text(text)
    study = Study.planned(load_document(tmp_path / "small.yaml"), tmp_path)
    points = [study.experiment_at(point) for point in study.sweep.grid()]
    found = estimate(Probe(1.0, 1.0, 0.0, 1_000_000), dict(enumerate(points)), points[0])
    assert (found.num_runs, found.num_retimed) == (9, 2)


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


def test_an_extra_that_is_missing_leaves_no_folder_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without a point would be in the way of `report runs/*`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write(tmp_path, "sweep: {strategies.*.lr: [0.01, 0.02]}\n")
    assert main(["sweep", str(path), "--on", "ray"]) == 2
    assert "error: ray: Ray is not installed: pip install 'netgym[ray]'\n" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


# --- netgym tune --------------------------------------------------------------------------------------------

TUNED = experiments.experiment(topology="lan", compute="50 ms", steps=6, evaluate="{every: 3, samples: 32}")
# Of these rates one trains, one hardly moves and one destroys the model: the best is known beforehand.
PLANTED = {"lr": [1e-7, 0.03, 1e4]}


@pytest.fixture
def tuned_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(TUNED)
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of tuning over rates of which one is the best."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "small.yaml").write_text(TUNED)
    return tuned(folder / "small.yaml", out=folder / "out")


def tuned(path: Path, **given: Any) -> netgym.studies.tuning.TuneResult:  # type: ignore[name-defined]
    return netgym.tune(path, **{"over": PLANTED, "seeds": [7], "out": "out"} | given)


def test_a_planted_optimum_is_found_and_the_comparison_has_other_seeds(
    planted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = planted
    monkeypatch.chdir(result.folder.parent)
    assert [each.strategy for each in result.chosen] == ["AllReduce", "DiLoCo"]
    for each in result.chosen:
        assert (each.point, each.edges, each.num_points, each.num_failed) == ({"lr": 0.03}, [], 3, 0)
        assert [neighbour["point"] for neighbour in each.neighbours] == [{"lr": 1e-7}, {"lr": 1e4}]
        losses = [neighbour["final_loss"] for neighbour in each.neighbours]
        assert all(loss is None or loss > each.final_loss for loss in losses)
    assert (result.tuning_seeds, result.seeds) == ([7], [0])
    resolved = (result.comparison.path / "experiment.yaml").read_text()
    assert resolved.count("lr: 0.03") == 2
    written = json.loads((result.folder / "tune.json").read_text())
    assert written["chosen"][0]["point"] == {"lr": 0.03}
    assert written["digest"] == result.comparison.digest()
    assert netgym.load(result.folder).summary == result.summary, (
        "a tune's folder was opened as a run without rows"
    )
    methods = RunReport(result.comparison).methods
    assert "the tuning seeds 7 alone: AllReduce by a grid of 3 points (lr of 1e-07, 0.03, 10000)" in methods
    assert methods.endswith(", best: lr 0.03. The best point had the lowest mean final loss.")
    assert f"<p>{methods}</p>" in (result.comparison.path / "report.html").read_text()
    html = result._repr_html_()
    assert html.count("<p>") == 3
    assert "DiLoCo: best is lr=0.03" in html
    capsys.readouterr()
    assert main(["report", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out/comparison"
    assert main(["status", "out"]) == 0
    assert capsys.readouterr().out == "out: finished: 6 of 6 points finished\n"


def test_a_point_that_fails_is_left_out_and_a_strategy_without_points_too(
    tuned_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "{name: sgd, lr: 1, nesterov: true}"
    arguments = [
        "tune",
        "small.yaml",
        "--over",
        "lr=0.01",
        "--over",
        f"DiLoCo.outer_optim_spec=sgd,{fails}",
        "--seeds",
        "1",
        "--json",
    ]
    found = {each["strategy"]: each for each in json_of(arguments, capsys)["chosen"]}
    best = {"lr": 0.01, "outer_optim_spec": "sgd"}
    assert (found["DiLoCo"]["point"], found["DiLoCo"]["num_failed"]) == (best, 1)
    over = ["--over", f"DiLoCo.outer_optim_spec=[{fails}]", "--over", "AllReduce.lr=0.01"]
    assert main(["tune", "small.yaml", *over, "--seeds", "1"]) == 1
    out, errors = capsys.readouterr()
    assert "DiLoCo: every point failed (1 of 1): left out of the comparison" in errors
    assert "DiLoCo     all failed" in out


@pytest.mark.parametrize("command", ["tune", "sweep"])
@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("perriod=[2]", "unknown argument of Pulse 'perriod'"),
        ("blend=[1, nan]", "Pulse: blend='nan' must be"),
    ],
)
def test_a_value_that_a_strategy_of_the_users_own_refuses_is_refused_before_anything_runs(
    command: str, value: str, line: str, tuned_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other strategies' points were trained first, and a text in the place of a number was taken."""
    (tuned_file.parent / "pulse.py").write_text(PULSE)
    own = ["strategies=[AllReduce, 'pulse:Pulse']", "--over", f"pulse:Pulse.{value}"]
    if command == "sweep":
        own = ["strategies=['pulse:Pulse']", "--vary", f"strategies.*.{value}"]
    assert main([command, "small.yaml", "--set", *own]) == 2
    assert line in (found := capsys.readouterr().err)
    assert "points:" not in found
    assert not list(tuned_file.parent.glob("runs/*"))


@pytest.mark.parametrize(
    "sweep",
    [
        "topology: net.yaml\nsweep: {KEY: [1 Mbit/s]}",
        "sweep: {topology: [net.yaml], KEY: [1 Mbit/s]}",
        "sweep: {KEY: [1 Mbit/s], points: [{topology: net.yaml}]}",
        "sweep: {points: [{KEY: 1 Mbit/s, topology: net.yaml}]}",
    ],
)
def test_keys_inside_a_topology_file_are_those_of_the_file(sweep: str, tmp_path: Path) -> None:
    """They were looked for in another form of the network, or lost where the topology came after them."""
    wan = [{"between": ["a", "b"], "bandwidth": "9 Mbit/s", "rtt": "50 ms"}]
    regions = {name: {"hosts": 1, "nic": "1 Gbit/s", "latency": "1 ms"} for name in "ab"}
    (tmp_path / "net.yaml").write_text(json.dumps({"regions": regions, "wan": wan}))
    text = experiment(compute="50 ms") + sweep.replace("KEY", "topology.wan.0.bandwidth")
    study = Study.planned(parse_document(text, "small.yaml"), tmp_path)
    (found,) = (study.experiment_at(point) for point in study.sweep.grid())
    assert found.to_mapping()["topology"]["wan"][0]["bandwidth"] == "1 Mbit/s"


def test_networks_named_by_an_earlier_version_are_those_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gave a network with changed keys its file's name: its points are kept, and compete with those of now."""
    path, out = tmp_path / "small.yaml", tmp_path / "out"
    lr = "{strategies.*.lr: [0.01, 0.02]}"
    path.write_text(experiment(compute="50 ms", strategies="[AllReduce]", steps=2, sweep=lr))
    vary = ["--topology", "two-datacenters", "--vary", "topology.wan.0.bandwidth=[1 Mbit/s, 9 Mbit/s]"]
    assert main(["sweep", str(path), *vary, "--out", str(out), "--jobs", "1"]) == 0
    stored, edited = out / "points/0000/experiment.yaml", out / "experiment.yaml"
    text = stored.read_text()
    stored.write_text(re.sub("name: two-datacenters with .*", "name: two-datacenters", text))
    assert stored.read_text() != text
    edited.write_text(f"# nothing else\n{edited.read_text()}")
    capsys.readouterr()
    assert main(["sweep", "--resume", str(out), "--trust", "--jobs", "1"]) == 0
    assert "run again" not in capsys.readouterr().err
    assert len(StudyReport([out]).decisions) == 2


def test_seeds_on_a_network_that_an_earlier_version_stored_are_pooled(tmp_path: Path) -> None:
    """It stored networks in canonical form, in which a swept key has another value, or none."""
    path, out = tmp_path / "small.yaml", tmp_path / "out"
    sweep = '{seed: [0, 1], topology.regions.east.nic: ["9 Mbit/s"]}'
    text = experiment(
        topology="two-datacenters", compute="50 ms", strategies="[AllReduce]", steps=2, sweep=sweep
    )
    path.write_text(text)
    assert main(["sweep", str(path), "--out", str(out), "--jobs", "1"]) == 0
    stored = out / "points/0000/experiment.yaml"
    plain = Experiment.load(stored)
    stored.write_text(json.dumps({**plain.to_mapping(), "topology": plain.topology.to_mapping()}))  # type: ignore[union-attr]
    assert len(StudyReport([out]).groups) == 1


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have Ctrl-C come as a point is trained; returns a list with an entry for each of them."""
    calls, train = [], sweep.compare

    def interrupted(*given: Any, **more: Any) -> Any:
        if more.get("resume"):  # not of the probe
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
        return train(*given, **more)

    monkeypatch.setattr(sweep, "compare", interrupted)
    return calls


def test_an_interrupted_search_resumes_to_the_same_result(
    tuned_file: Path, planted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = interrupt_at(monkeypatch, 5)
    over = ["--over", "lr=1e-7,0.03,1e4"]
    assert main(["tune", "small.yaml", *over, "--seeds", "7,", "--out", "again", "--jobs", "1"]) == 130
    assert "to continue: netgym tune --resume again" in capsys.readouterr().err
    assert main(["report", "again"]) == 2
    assert "again: the comparison has not begun" in capsys.readouterr().err
    assert (
        json_of(["tune", "--resume", "again", "--json", "--jobs", "1"], capsys)["digest"]
        == planted.comparison.digest()
    )
    assert len(calls) == 5 + 3  # the interrupted point, the one after it, and the comparison


def test_the_key_is_checked_with_its_place(tuned_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned_file.write_text(TUNED + "tune:\n  over: {DiLoCo: {H: [2, 3]}}\n")
    assert main(["validate", "small.yaml"]) == 0
    assert "tuning of 2 strategies on 2 seeds" in capsys.readouterr().out
    tuned_file.write_text(TUNED + "tune:\n  over: {DiLoCoo: {H: [2, 3]}}\n")
    assert main(["validate", "small.yaml"]) == 2
    assert "small.yaml:12: tune: over: unknown strategy 'DiLoCoo'" in capsys.readouterr().err
    tuned_file.write_text(TUNED + "tune:\n  over: {H: [2, 3]}\n")
    for command in ("validate", "tune"):
        assert main([command, "small.yaml"]) == 2
        assert "small.yaml:12: tune.over.H: expected" in capsys.readouterr().err.replace(
            "tune: over.H", "tune.over.H"
        )
    with pytest.raises(InputError, match="No such file"):
        netgym.tune("nowhere.yaml")
