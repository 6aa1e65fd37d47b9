"""The benchmark: somebody's file gets a score that nothing but the model and the network decides."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from exogym_core.app.bench.entry import board_rows, digest_of, strategy_reference
from exogym_core.app.cli import main
from exogym_core.app.studies.study import Study
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

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
    told = capsys.readouterr()
    assert "code: strategy mine:Entry of" in told.err
    document: dict[str, Any] = json.loads(told.out)
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


def test_the_table_leaves_out_what_was_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tier.yaml").write_text(TIER)
    assert main(["bench", "--tier", str(tmp_path / "tier.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    assert main(["bench", "--table", str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["strategy"] for row in document["rows"]} == {"AllReduce", "DiLoCo"}
    path = tmp_path / "out/entries/DiLoCo.json"
    entry = json.loads(path.read_text())
    entry["scores"][0]["virtual_seconds_to_target"] /= 2
    path.write_text(json.dumps(entry))
    assert main(["bench", "--table", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert told.err == "warning: DiLoCo.json: changed since it was made: its digest does not fit\n"
    page = (tmp_path / "out/index.html").read_text()
    assert "AllReduce leads" in page
    assert "default-src 'none'" in page


def test_who_holds_more_targets_leads_then_who_is_sooner() -> None:
    def entry(name: str, *seconds: float | None) -> dict[str, Any]:
        return {"strategy": name, "scores": [{"virtual_seconds_to_target": each} for each in seconds]}

    rows = board_rows(
        [entry("a", 1.0, None), entry("b", 9.0, 4.0), entry("c", 1.0, 16.0), entry("d", None, None)]
    )
    assert [(row[0]["strategy"], row[1]) for row in rows] == [("c", 2), ("b", 2), ("a", 1), ("d", 0)]
    assert rows[0][2] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "has no class that derives from a strategy: call the one to be run Entry"),
        ("class A(B): pass\nclass C(B): pass", "has A, C: call the one to be run Entry"),
        ("class A(:", "cannot be read as Python"),
    ],
)
def test_files_that_do_not_say_which(text: str, told: str, tmp_path: Path) -> None:
    """Finding the class runs nothing of the file."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        strategy_reference(path)
    assert told in str(caught.value)
    path.write_text("raise SystemExit\nclass One(Base): pass\nclass _Part(Base): pass\nclass Plain: pass")
    assert strategy_reference(path) == "mine:One"


def test_the_shipped_tier_makes_valid_points(capsys: pytest.CaptureFixture[str]) -> None:
    """Two tasks on two networks with six strategies and three seeds, the second task at a rate of its own."""
    from importlib import resources
    from pathlib import Path

    study = Study.of_file(Path(str(resources.files("exogym_core.app.bench").joinpath("small.yaml"))))
    experiments = [study.experiment_at(point) for point in study.sweep.grid()]
    assert [experiment.settings.task.name for experiment in experiments] == [
        "digits",
        "text",
        "digits",
        "text",
    ]
    assert all(len(experiment.strategies) == 6 and len(experiment.seeds) == 3 for experiment in experiments)
    assert {experiment.strategies[0].options["lr"] for experiment in experiments} == {4e-3, 2e-3}
    assert main(["bench", "--tier", "huge"]) == 2
    assert "choose from small, or give a file" in capsys.readouterr().err
