"""The benchmark: a file's score depends only on the model and the network."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from experiments import json_of

from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy import STRATEGIES
from netgym.bench.entry import board_rows, digest_of, entries_of, own_entry
from netgym.cli.main import main
from netgym.studies.study import Study
from netsim import load_document
from netsim.errors import InputError

TIER = """\
name: bench-tiny
task: digits
model: {name: mlp, hidden: [8]}
workers: {count: 2, kind: threads}
device: cpu
compute: {flops: {device: t4}, coding: 1 MB/s}
steps: 8
evaluate: {every: 2, samples: 32}
target_loss: 2.29
seeds: 2
strategies: [{name: AllReduce, lr: 0.02}, {name: DiLoCo, H: 2, lr: 0.02}]
sweep: {topology: [wan-4-regions]}
"""

MINE = """\
from exogym_core.strategy import DiLoCoStrategy


class Entry(DiLoCoStrategy):
    def __init__(self, H=2, **options):
        super().__init__(H=H, lr=0.02, **options)
"""

HALVES = """\
import torch
from exogym_core.strategy import Strategy


class Halves(Strategy):
    def __init__(self):
        super().__init__(lr=0.02)

    def step(self):
        self.optimizer_step()
        with torch.no_grad():
            for parameter in self.trainable:
                sent = parameter.to(torch.bfloat16)
                parameter.copy_(self.comm.all_reduce(sent, "avg"))
        super().step()
"""

SLOW = (
    MINE
    + """
    def step(self):
        sum(range(200_000))  # of the machine that runs it
        super().step()
"""
)


def bench(folder: Path, source: str, capsys: pytest.CaptureFixture[str], tier: str = TIER) -> dict[str, Any]:
    folder.mkdir()
    (folder / "tier.yaml").write_text(tier)
    (folder / "mine.py").write_text(source)
    arguments = ["bench", str(folder / "mine.py"), "--tier", str(folder / "tier.yaml")]
    assert main([*arguments, "--out", str(folder / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "code: strategy mine:Entry of" in captured.err
    document: dict[str, Any] = json.loads(captured.out)
    assert document["run_folder"] == str(folder / "out")
    (entry,) = document["entries"]
    assert json.loads((folder / "out/entries/mine.json").read_text()) == entry
    return dict(entry)


def timed(entry: dict[str, Any]) -> list[Any]:
    keys = ("virtual_seconds_to_target", "bytes_to_target", "final_losses")
    return [[score[key] for key in keys] for score in entry["scores"]]


def test_host_time_never_counts_and_evaluation_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A strategy that wastes the machine's time has the same score, and so has one that is looked at more often."""
    mine = bench(tmp_path / "a", MINE, capsys)
    assert mine["digest"] == digest_of(mine)
    assert mine["source"] == MINE
    assert mine["scores"][0]["held"] == 2
    assert mine["scores"][0]["virtual_seconds_to_target"] > 0
    slow = bench(tmp_path / "b", SLOW, capsys)
    assert timed(slow) == timed(mine)
    often = bench(tmp_path / "c", MINE, capsys, TIER.replace("every: 2", "every: 1"))
    assert timed(often) == timed(mine)
    assert often["tier_digest"] != mine["tier_digest"], "and is on another board"


def test_coding_is_charged_and_so_is_what_is_in_flight_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An overlapped round that ends after the last step is waited for: bytes and seconds are those of all rounds."""
    tier = TIER.replace("strategies: [", "strategies: [{name: DelayedDiLoCo, H: 2, lr: 0.02}, ")
    tier = tier.replace(
        "{name: DiLoCo, H: 2,",
        "{name: DiLoCo, H: 2, codec: int8, label: Int8, lr: 0.02}, {name: DiLoCo, H: 2,",
    )
    path = tmp_path / "tier.yaml"
    path.write_text(tier)
    assert main(["bench", "--tier", str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    capsys.readouterr()
    (point,) = Study.open(tmp_path / "out").entries
    of = {entry["name"]: entry for entry in point["strategies"]}
    assert of["Int8"]["computing_seconds"] > of["DiLoCo"]["computing_seconds"], "1 MB/s of coding"
    assert of["Int8"]["bytes_sent"] < of["DiLoCo"]["bytes_sent"]
    assert of["DelayedDiLoCo"]["bytes_sent"] == of["DiLoCo"]["bytes_sent"]
    one_round = of["DiLoCo"]["network_seconds"] / 4
    assert of["DelayedDiLoCo"]["virtual_seconds"] > one_round + of["DelayedDiLoCo"]["computing_seconds"]


def test_bytes_that_were_not_recorded_are_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tier.yaml").write_text(TIER.replace("seeds: 2", "seeds: 1"))
    words = ["bench", "AllReduce", "--tier", str(tmp_path / "tier.yaml"), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    table = tmp_path / "out/points/0000/metrics/AllReduce.csv"
    table.write_text(table.read_text().replace("bytes_sent", "sent"))
    RunFolder.open(tmp_path / "out/points/0000").record_tables(are_final=True)
    (entry,) = entries_of(tmp_path / "out", {"tier": "", "tier_digest": ""})
    assert entry["scores"][0]["virtual_seconds_to_target"] > 0
    assert entry["scores"][0]["bytes_to_target"] is None


def test_an_entry_with_uncharged_coding_gets_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tier.yaml").write_text(TIER.replace("seeds: 2", "seeds: 1"))
    (tmp_path / "halves.py").write_text(HALVES)
    arguments = ["bench", str(tmp_path / "halves.py"), "--tier", str(tmp_path / "tier.yaml")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert "Halves    0 of 1  -      coding not charged" in captured.out
    assert "Halves: no score: coding not charged: encode with self.charged(codec)" in captured.err
    assert json.loads((tmp_path / "out/entries/Halves.json").read_text())["scores"][0]["held"] == 0
    (run,) = (tmp_path / "out").rglob("*/summary.json")
    assert '"coding": "not charged"' in run.read_text()
    assert main(["report", str(run.parent)]) == 0
    captured = capsys.readouterr()
    assert "Halves (coding not charged)" in captured.out
    assert "Coding is not charged to Halves: the times lack what encoding takes." in " ".join(
        captured.out.split()
    )


def test_the_table_leaves_out_what_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tier.yaml").write_text(TIER)
    assert main(["bench", "--tier", str(tmp_path / "tier.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    document = json_of(["bench", "--table", str(tmp_path / "out"), "--json"], capsys)
    assert {row["strategy"] for row in document["rows"]} == {"AllReduce", "DiLoCo"}
    path = tmp_path / "out/entries/DiLoCo.json"
    entry = json.loads(path.read_text())
    entry["scores"][0]["virtual_seconds_to_target"] /= 2
    path.write_text(json.dumps(entry))
    assert main(["bench", "--table", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert captured.err == "warning: DiLoCo.json: changed since it was made: its digest does not fit\n"
    page = (tmp_path / "out/index.html").read_text()
    assert "AllReduce leads" in page
    assert "default-src 'none'" in page


def test_entries_are_ordered_by_targets_held_then_by_time() -> None:
    def entry(name: str, *seconds: float | None) -> dict[str, Any]:
        return {"strategy": name, "scores": [{"virtual_seconds_to_target": each} for each in seconds]}

    rows = board_rows(
        [entry("a", 1.0, None), entry("b", 9.0, 4.0), entry("c", 1.0, 16.0), entry("d", None, None)]
    )
    assert [(row[0]["strategy"], row[1]) for row in rows] == [("c", 2), ("b", 2), ("a", 1), ("d", 0)]
    assert rows[0][2] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no class that derives from a strategy: call the one to be run Entry"),
        ("class A(B): pass\nclass C(B): pass", "has A, C: call the one to be run Entry"),
        ("class A(:", "cannot be read as Python"),
        ("class A(B): pass\nOPTIONS = rates()", "mine.py:2: OPTIONS is no plain mapping"),
    ],
)
def test_files_that_do_not_say_which(text: str, message: str, tmp_path: Path) -> None:
    """Finding the class runs nothing of the file."""
    path = tmp_path / "mine.py"
    with pytest.raises(InputError, match=r"mine\.py: cannot be read: No such file"):
        own_entry(path)
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        own_entry(path)
    assert message in str(caught.value)
    path.write_text("raise SystemExit\nclass One(Base): pass\nclass _Part(Base): pass\nclass Plain: pass")
    assert own_entry(path) == ("mine:One", {})


def test_one_shipped_strategy_or_all_of_a_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with the options that each task lists for it; a file has options by task of its own."""
    point = (
        "{task: {name: digits}, strategies: [{name: AllReduce, lr: 0.02}, {name: FedAvg, H: 2, lr: 0.01}]}"
    )
    text = TIER.partition("strategies:")[0] + "strategies: [AllReduce]\n"
    (tmp_path / "tier.yaml").write_text(
        f"{text}topology: lan\nsweep: {{points: [{point}]}}\n".replace("seeds: 2", "seeds: 1")
    )
    tier = ["--tier", str(tmp_path / "tier.yaml"), "--json"]

    def ran(*what: str) -> dict[str, Any]:
        out = tmp_path / "-".join(["out", *(Path(each).stem for each in what)])
        entries = json_of(["bench", *what, *tier, "--out", str(out)], capsys)["entries"]
        stored = Study.open(out).experiment_at(Study.open(out).sweep.grid()[0])
        rates = {each.label: each.options["lr"] for each in stored.strategies}
        assert set(rates) == {entry["strategy"] for entry in entries}
        digests.update(entry["tier_digest"] for entry in entries)
        return rates

    digests: set[str] = set()
    assert ran() == {"AllReduce": 0.02}
    assert ran("FedAvg") == {"FedAvg": 0.01}
    assert ran("all") == {"AllReduce": 0.02, "FedAvg": 0.01}
    (tmp_path / "mine.py").write_text(
        MINE.replace("lr=0.02, ", "") + '\nOPTIONS = {"digits": {"lr": 0.03}}\n'
    )
    assert ran(str(tmp_path / "mine.py")) == {"mine": 0.03}
    assert len(digests) == 1, "all are on one board"
    assert (
        json_of(["bench", "--resume", str(tmp_path / "out"), "--json"], capsys)["entries"][0]["tier_digest"]
        in digests
    )


@pytest.mark.parametrize(
    ("name", "tasks", "networks"),
    [
        ("small", ["digits", "text"], ["wan-4-regions", "home-tiers"]),
        (
            "full",
            ["digits", "text", "text"],
            ["wan-4-regions", "home-tiers", "two-datacenters", "home-churn"],
        ),
    ],
)
def test_shipped_tiers_make_valid_points(
    name: str, tasks: list[str], networks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every task on every network with three seeds, for every shipped strategy; six are run without being asked for."""
    path = Path(str(resources.files("netgym.bench").joinpath(f"{name}.yaml")))
    study = Study.of_file(path)
    experiments = [study.experiment_at(point) for point in study.sweep.grid()]
    assert [each.settings.task.name for each in experiments] == tasks * len(networks)
    assert list(dict.fromkeys(each.topology.name for each in experiments if each.topology)) == networks
    for experiment in experiments:
        assert sorted(entry.label for entry in experiment.strategies) == sorted(STRATEGIES)
        assert len(experiment.seeds) == 3
    assert len(load_document(path).data["strategies"]) == 6  # type: ignore[call-overload, index]


def test_the_models_of_the_tiers_have_the_documented_sizes() -> None:
    """A byte GPT of a million parameters, and one of ten."""
    path = Path(str(resources.files("netgym.bench").joinpath("full.yaml")))
    study = Study.of_file(path)
    sizes = []
    for point in study.sweep.grid()[:3]:
        experiment = study.experiment_at(point)
        sizes.append(
            sum(each.numel() for each in experiment.build_model(experiment.build_task()).parameters())
        )
    assert sizes == [25_274, 1_040_768, 9_575_936]


@pytest.mark.parametrize("tier", ["small", "full"])
def test_shipped_tiers_begin(tmp_path: Path, tier: str) -> None:
    """Their networks are those of their points, and what needs one was refused without."""
    document = load_document(str(resources.files("netgym.bench").joinpath(f"{tier}.yaml")))
    study = Study.create(document, tmp_path, str(tmp_path / "out"), "bench")
    assert study.base().topology is not None
    study.folder.release()
