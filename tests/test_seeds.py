"""Several seeds: the summary's one object a strategy, and a winner only where it wins with every seed."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiments import VERDICTS, check_verdict, entry, experiment, json_of, results_of, stored

from exogym_core.results import report
from exogym_core.results.fit_result import FitResult
from exogym_core.results.report import Results, verdict
from exogym_core.results.run_folder import RunFolder
from exogym_core.results.seeds import Tally, merged
from netgym.cli.main import main
from netgym.experiment.comparison import add_seeds
from netgym.experiment.experiment import Experiment

EXPERIMENT = experiment(
    topology="two-datacenters",
    compute="{fixed: 50 ms, jitter: 0.2}",
    steps=6,
    batch_size=4,
    target_loss=2.3,
    strategies="[AllReduce, {name: DiLoCo, H: 3}]",
)


def seed_entry(
    name: str, seconds: float | None, final_loss: float = 0.2, target: str = "held", **more: Any
) -> dict[str, Any]:
    return entry(name, virtual_seconds_to_target=seconds, final_loss=final_loss, target=target, **more)


def read_results(
    path: Path, runs: dict[str, dict[int, dict[str, Any]]], seeds: list[int], target_loss: float | None = 0.3
) -> Results:
    """A run folder written by hand, read back."""
    folder = RunFolder.create(path / "run", "x")
    plain = stored(runs, evaluate={"every": 2}, seed=seeds[0], seeds=seeds, target_loss=target_loss)
    folder.write_text("experiment.yaml", yaml.safe_dump(plain))
    tally = Tally(list(runs), seeds)
    for name, by_seed in runs.items():
        for seed, each in by_seed.items():
            rows = [
                {"step": step, "train_loss": 2.0 / step, "virtual_seconds": step + seed, "bytes_sent": step}
                for step in range(1, 5)
            ]
            losses = each.pop("losses", {step: (2.0 + seed) / (step + 1) for step in (0, 2, 4)})
            validation = [{"step": step, "judged_loss": loss} for step, loss in losses.items()]
            tally.add(name, seed, each)
            folder.write_result(name, FitResult(history=rows, validation=validation), seed=seed)
    folder.write_summary(tally.summary())
    return Results.load(folder)


class TestMerged:
    def test_numbers_become_means_with_deviations(self) -> None:
        whole = merged({5: seed_entry("A", 10.0, 0.2), 6: seed_entry("A", 14.0, 0.4)}, [5, 6])
        assert whole["virtual_seconds_to_target"] == 12.0
        assert whole["virtual_seconds_to_target_std"] == pytest.approx(statistics.stdev([10.0, 14.0]))
        assert whole["bytes_sent_per_worker"] == 1_000_000
        assert whole["bytes_sent_per_worker_std"] == 0
        assert (whole["seeds"], whole["steps"], whole["name"]) == ([5, 6], 4, "A")
        assert [run["seed"] for run in whole["by_seed"]] == [5, 6]
        assert "incomplete" not in whole


class TestReport:
    @pytest.mark.parametrize("row", VERDICTS["several seeds"].values(), ids=VERDICTS["several seeds"])
    def test_the_verdict_counts_the_seeds(self, tmp_path: Path, row: dict[str, Any]) -> None:
        runs = {
            name: {
                seed: seed_entry(name, None, **one) if isinstance(one, dict) else seed_entry(name, one)
                for seed, one in enumerate(by_seed)
            }
            for name, by_seed in row["strategies"].items()
        }
        results = read_results(tmp_path, runs, [*next(iter(runs.values()))], **row.get("settings", {}))
        check_verdict(results, row)
        assert results.incomplete == any(
            "incomplete" in one for each in runs.values() for one in each.values()
        )


class TestExperiment:
    def load(self, tmp_path: Path, extra: str, *overrides: str) -> Experiment:
        path = tmp_path / "small.yaml"
        path.write_text(EXPERIMENT + extra)
        return Experiment.load(path, overrides)

    def test_a_number_counts_up_from_the_seed_and_a_list_is_itself(self, tmp_path: Path) -> None:
        assert self.load(tmp_path, "").seeds == [0]
        assert self.load(tmp_path, "seeds: 3\nseed: 5\n").seeds == [5, 6, 7]
        assert self.load(tmp_path, "seeds: [4, 2]\n").seeds == [4, 2]
        alone = self.load(tmp_path, "seeds: [4]\n").to_mapping()
        assert (alone["seed"], alone["seeds"]) == (4, None)
        stored = self.load(tmp_path, "seeds: 2\n")
        assert stored.to_mapping()["seeds"] == [0, 1]
        (tmp_path / "stored.yaml").write_text(stored.to_yaml())
        assert Experiment.load(tmp_path / "stored.yaml").to_yaml() == stored.to_yaml()

    def test_the_network_s_draws_follow_the_seed_unless_they_are_held_fixed(self, tmp_path: Path) -> None:
        network = """\
topology:
  regions: {a: {hosts: 1, nic: 1 Gbit/s}, b: {hosts: 1, nic: 1 Gbit/s}}
  wan: [{between: [a, b], bandwidth: 1 Gbit/s, latency: 1 ms}]
  drift: [{link: [a, b], kind: lognormal, every: 1 s, sigma: 0.3, seed: 7}]
"""
        text = EXPERIMENT.replace("topology: two-datacenters\n", network)
        (tmp_path / "small.yaml").write_text(text)
        free = Experiment.load(tmp_path / "small.yaml")
        (tmp_path / "small.yaml").write_text(text + "network_seed: 100\n")
        held = Experiment.load(tmp_path / "small.yaml")

        def drift_seed(experiment: Experiment) -> int:
            return experiment.topology.weather.drift[0].seed

        assert [drift_seed(free.with_seed(seed)) for seed in (0, 1, 2)] == [7, 8, 9]
        assert {drift_seed(held.with_seed(seed)) for seed in (0, 1, 2)} == {107}
        assert drift_seed(free) == 7, "what is stored is what the file says"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write_report", lambda folder: folder.write_text("report.html", ""))
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    return tmp_path


class TestCompare:
    def test_every_strategy_meets_every_seed_and_each_pair_is_what_it_is_alone(
        self, small: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = json_of(["compare", "small.yaml", "--seeds", "1,2", "--json", "--out", "both"], capsys)
        assert (output["run_folder"], output["winner"]) == (
            "both",
            verdict(Results.load(RunFolder.open("both"))).winner,
        )
        assert output["network"]["placement"] == "east: 1, west: 1", (
            "under the table too, not on the page alone"
        )
        both = results_of(small / "both")
        kinds = [("metrics", ".csv"), ("metrics", ".validation.csv"), ("models", ".safetensors")]
        runs = [f"{name}.seed-{seed}" for name in ("AllReduce", "DiLoCo") for seed in (1, 2)]
        names = {f"{folder}/{run}{end}" for run in runs for folder, end in kinds}
        assert both.keys() == names | {"summary.json"}
        assert [(one["name"], one["seeds"]) for one in output["summary"]] == [
            ("AllReduce", [1, 2]),
            ("DiLoCo", [1, 2]),
        ]
        words = "run small.yaml --strategy DiLoCo --seeds 1 --set seed=2 --out one"
        assert main(words.split()) == 0
        one = results_of(small / "one")
        assert one["metrics/DiLoCo.csv"] == both["metrics/DiLoCo.seed-2.csv"]
        assert one["models/DiLoCo.safetensors"] == both["models/DiLoCo.seed-2.safetensors"]
        assert both["metrics/DiLoCo.seed-1.csv"] != both["metrics/DiLoCo.seed-2.csv"]

    def test_seeds_are_added_to_a_run(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """`--seeds` was refused with `--resume`, and files of a single seed have other names."""

        def files(folder: str) -> dict[str, int]:
            found = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in found}

        begin = ["compare", "small.yaml", "--set", "checkpoint.every=3", "--jobs", "1"]
        assert main([*begin, "--set", "seed=1", "--out", "grown"]) == 0
        kept = {time for name, time in files("grown").items() if name.startswith(("metrics/", "models/"))}
        for name in ("killed", "early"):
            shutil.copytree("grown", name)
            killed = RunFolder(Path(name))
            if name == "early":  # before the first strategy was finished
                killed.write_summary([])
            stored = Experiment.load(f"{name}/experiment.yaml")
            add_seeds(killed, stored, [1, 2])
            killed.write_text("experiment.yaml", stored.to_yaml())  # it is the last to change
            assert main(["compare", "--resume", name, "--jobs", "1"]) == 0
            assert results_of(killed.path) == results_of(Path("grown")), "with --seeds left out"
            assert files(name).keys() == files("grown").keys(), (
                "from the checkpoints, which have the former names"
            )
        assert main(["compare", "--resume", "grown", "--seeds", "2,1", "--jobs", "1"]) == 0
        assert main([*begin, "--seeds", "2,1", "--out", "new"]) == 0
        assert results_of(Path("grown")) == results_of(Path("new"))
        assert files("grown").keys() == files("new").keys(), "recordings and checkpoints too"
        assert kept <= set(files("grown").values())
        assert main(["compare", "--resume", "grown", "--seeds", "2"]) == 2
        line = (
            "--seeds: grown has 2 seeds (2, 1), and seeds can only be added: give these and others, or begin"
        )
        assert line in capsys.readouterr().err

    @pytest.mark.thorough
    def test_a_stopped_run_goes_on_across_seeds(self, small: Path) -> None:
        assert main(["compare", "small.yaml", "--seeds", "2", "--out", "whole"]) == 0
        whole = results_of(small / "whole")
        # As a kill leaves it after the first seed and one strategy of the second.
        shutil.copytree("whole", "cut")
        summary = json.loads((small / "cut/summary.json").read_text())
        summary[1]["by_seed"] = summary[1]["by_seed"][:1]
        summary[1] |= {"seeds": [0], "incomplete": True}
        (small / "cut/summary.json").write_text(json.dumps(summary))
        for path in small.glob("cut/m*/DiLoCo.seed-1.*"):
            path.unlink()
        assert main(["compare", "--resume", "cut"]) == 0
        assert results_of(small / "cut") == whole
        digests = [RunFolder.open(name).digest() for name in ("whole", "cut")]
        (small / "cut/metrics/DiLoCo.seed-1.csv").write_text("")
        assert digests[0] == digests[1] != RunFolder.open("cut").digest(), "it covers every seed"


FAILING = """
from exogym_core.strategy import AllReduceStrategy

class Failing(AllReduceStrategy):
    def step(self):
        if self.local_step == 3:
            raise RuntimeError("boom")
        super().step()
"""


class TestFailures:
    @pytest.fixture(autouse=True)
    def failing(self, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (small / "failing_for_test.py").write_text(FAILING)
        monkeypatch.syspath_prepend(str(small))
        extra = ", {name: 'failing_for_test:Failing', label: Failing}, {name: FedAvg, H: 2}]\n"
        (small / "failing.yaml").write_text(EXPERIMENT.replace("]\n", extra))

    def test_one_that_fails_is_marked_and_the_others_go_on(
        self, small: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The comparison ended there: no table, and whoever came after never ran."""
        assert main(["compare", "failing.yaml", "--seeds", "2", "--out", "out"]) == 1
        captured = capsys.readouterr()
        assert "boom" in captured.err
        assert "Failing failed: " in captured.err
        assert captured.err.splitlines()[-1].startswith("error: 1 of 4 strategies failed: Failing")
        assert captured.out.splitlines()[-1] == "out"
        assert "Failing (failed)" in captured.out
        summary = {one["name"]: one for one in json.loads((small / "out/summary.json").read_text())}
        assert list(summary) == ["AllReduce", "DiLoCo", "Failing", "FedAvg"]
        assert summary["Failing"]["failed"] is True
        assert "boom" in summary["Failing"]["error"]
        assert summary["Failing"]["steps"] == 3
        assert summary["Failing"]["seeds"] == [0], "it is not tried again"
        assert all("failed" not in one for name, one in summary.items() if name != "Failing")
        assert summary["FedAvg"]["seeds"] == [0, 1]
