"""`netgym tune`: the best point of each strategy, its neighbours and edges, and the comparison on other seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiments import experiment, json_of

import netgym
from exogym_core.results.report import RunReport
from netgym.cli.main import main
from netgym.studies import sweep
from netsim.errors import InputError

EXPERIMENT = experiment(topology="lan", compute="50 ms", steps=6, evaluate="{every: 3, samples: 32}")
# Of these rates one trains, one hardly moves and one destroys the model: the best is known beforehand.
PLANTED = {"lr": [1e-7, 0.03, 1e4]}


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of tuning over rates of which one is the best."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "small.yaml").write_text(EXPERIMENT)
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
    assert capsys.readouterr().out == "out: 7 runs: 7 finished\n"


def test_a_notebook_gets_a_bar_a_search(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of a search was an output of its own."""
    from IPython import display

    opened, updates, handle = [], [], display.DisplayHandle()

    def show(html: Any, display_id: bool = False) -> Any:
        if display_id:  # others are lines
            opened.append(html.data)
        return handle

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(handle, "update", lambda html: updates.append(html.data))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    tuned(experiment, over={"lr": [0.01, 0.02]})
    searches = [each for each in opened if 'max="2"' in each]
    assert [each.partition("</progress> ")[2] for each in searches] == [
        f"{name}: point 1 of 2: strategies.*.lr=0.01" for name in ("AllReduce", "DiLoCo")
    ]
    assert len(opened) == 4, "a bar for each run of the comparison, too"
    ended = [each for each in updates if each.startswith('<progress value="2" max="2">')]
    assert len(ended) == 2


def test_a_best_point_at_an_end_of_its_values_is_reported(experiment: Path) -> None:
    result = tuned(
        experiment,
        over={"lr": [1e-7, 0.01], "DiLoCo": {"lr": {"low": 1e-7, "high": 1e-6}}},
        search="random",
        trials=2,
    )
    assert result.chosen[0].edges == ["lr at its largest value 0.01: try larger ones"]
    by_grid = tuned(experiment, over={"lr": [0.02, 1e4]}, out="grid")
    assert [each.edges for each in by_grid.chosen] == [
        ["lr at its smallest value 0.02: try smaller ones"]
    ] * 2


def test_a_point_that_fails_is_left_out_and_a_strategy_without_points_too(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "tune",
        "small.yaml",
        "--over",
        "lr=0.01",
        "--over",
        "DiLoCo.H=2,-1",
        "--seeds",
        "1",
        "--json",
    ]
    found = {each["strategy"]: each for each in json_of(arguments, capsys)["chosen"]}
    assert (found["DiLoCo"]["point"], found["DiLoCo"]["num_failed"]) == ({"lr": 0.01, "H": 2}, 1)
    assert (
        main(["tune", "small.yaml", "--over", "DiLoCo.H=-1", "--over", "AllReduce.lr=0.01", "--seeds", "1"])
        == 1
    )
    out, errors = capsys.readouterr()
    assert "DiLoCo: every point failed (1 of 1): left out of the comparison" in errors
    assert "DiLoCo     all failed" in out


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have Ctrl-C come as a point is trained; returns a list with an entry for each of them."""
    calls, train = [], sweep.compare

    def interrupted(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return train(*given, **more)

    monkeypatch.setattr(sweep, "compare", interrupted)
    return calls


def test_an_interrupted_search_resumes_to_the_same_result(
    experiment: Path, planted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_a_search_of_ones_own_strategies_resumes_without_their_folder_at_hand(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their file lies next to the experiment, and is found for points, searches not begun, and the comparison."""
    source = "from exogym_core.strategy import AllReduceStrategy\n\n\n"
    source += "".join(f"class {name}(AllReduceStrategy):\n    pass\n\n\n" for name in ("First", "Second"))
    (experiment.parent / "tuned_methods.py").write_text(source)
    strategies = [{"name": f"tuned_methods:{name}"} for name in ("First", "Second")]
    document = yaml.safe_load(EXPERIMENT) | {"strategies": strategies}
    experiment.write_text(yaml.safe_dump(document))
    interrupt_at(monkeypatch, 2)
    over = ["--over", "lr=0.03,0.1", "--seeds", "7,", "--out", "again", "--jobs", "1"]
    assert main(["tune", "small.yaml", *over]) == 130
    elsewhere = experiment.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["tune", "--resume", "../again", "--jobs", "1"]) == 0
    found = json.loads((experiment.parent / "again/tune.json").read_text())
    assert [each["num_points"] for each in found["chosen"]] == [2, 2]


def test_the_key_is_checked_with_its_place(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment.write_text(EXPERIMENT + "tune:\n  over: {DiLoCo: {H: [2, 3]}}\n")
    assert main(["validate", "small.yaml"]) == 0
    assert "tuning of 2 strategies on 2 seeds" in capsys.readouterr().out
    experiment.write_text(EXPERIMENT + "tune:\n  over: {DiLoCoo: {H: [2, 3]}}\n")
    assert main(["validate", "small.yaml"]) == 2
    assert "small.yaml:12: tune: over: unknown strategy 'DiLoCoo'" in capsys.readouterr().err
    experiment.write_text(EXPERIMENT + "tune:\n  over: {H: [2, 3]}\n")
    for command in ("validate", "tune"):
        assert main([command, "small.yaml"]) == 2
        assert "small.yaml:12: tune.over.H: expected" in capsys.readouterr().err.replace(
            "tune: over.H", "tune.over.H"
        )
    with pytest.raises(InputError, match="No such file"):
        netgym.tune("nowhere.yaml")
