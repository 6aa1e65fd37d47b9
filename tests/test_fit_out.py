"""`fit(out=...)`: a run folder as the command line writes it, from a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import netgym
from exogym_core.results.report import Results
from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy import DiLoCoStrategy, Strategy
from netgym.cli.main import main
from netgym.tasks import MLP
from netsim.errors import InputError


class Mine(Strategy):
    """Sends nothing."""


def train(strategy: Strategy | None = None, *, stop_at: int | None = None, **options: Any) -> torch.nn.Module:
    """Train the same model on the same data; `stop_at` a step as Ctrl-C does."""

    def event(row: Mapping[str, Any]) -> None:
        if row["step"] == stop_at:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    keywords: dict[str, Any] = {"topology": "two-datacenters", "compute": "50 ms", "checkpoint_interval": 2}
    return netgym.Trainer(MLP(4, [], 2), data, data).fit(
        strategy=strategy or DiLoCoStrategy(inner_optim="adam", H=2),
        num_nodes=2,
        device="cpu",
        workers="threads",
        batch_size=4,
        max_steps=8,
        val_interval=2,
        progress=False,
        on_event=event,
        **keywords | options,
    )


def test_the_folder_is_one_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = train(out=tmp_path / "mine", target_loss=0.7), tmp_path / "mine"
    kept = {each.name for each in out.iterdir()}
    assert kept >= {"experiment.yaml", "environment.json", "metrics", "models", "summary.json", "report.html"}
    found = netgym.load(out)
    (entry,) = found.summary
    assert (entry["name"], entry["strategy"], entry["steps"]) == ("DiLoCo", "DiLoCo", 8)
    assert entry["final_loss"] == model.fit_result.final_loss
    assert entry["target_loss"] == 0.7
    assert list(found.to_pandas()["step"]) == [0, 2, 4, 6, 8]
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    output = capsys.readouterr().out
    assert "network two-datacenters; protocol linux-tcp" in output
    assert found.verdict[:20] in output
    assert "on the task fit(TensorDataset)" in (out / "report.html").read_text()
    assert main(["status", str(out)]) == 0
    assert "DiLoCo: finished after step 8" in capsys.readouterr().out


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(out=tmp_path / "whole")
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(out=stopped, stop_at=5)
    assert main(["status", str(stopped)]) == 0
    output = capsys.readouterr().out
    assert "DiLoCo: stopped after step 5" in output
    assert f"to continue from step 4: fit(resume_from={str(stopped)!r})" in output
    assert main(["run", "--resume", str(stopped)]) == 2
    remedy = f"task: is that of a Python program: continue there with fit(resume_from={str(stopped)!r})"
    assert remedy in capsys.readouterr().err
    model = train(resume_from=stopped)
    assert model.fit_result.resumed_step == 4
    for name in ("summary.json", "metrics/DiLoCo.csv", "models/DiLoCo.safetensors", "experiment.yaml"):
        whole = (tmp_path / "whole" / name).read_bytes().replace(b"name: whole", b"name: stopped")
        assert (stopped / name).read_bytes() == whole, name


def test_without_a_network_and_with_a_strategy_of_ones_own(tmp_path: Path) -> None:
    train(Mine(optim_spec="sgd"), out=tmp_path / "own", topology=None, compute=None, checkpoint_interval=None)
    found = netgym.load(tmp_path / "own")
    assert found.summary[0]["name"] == "Mine"
    assert found.summary[0]["strategy"].endswith("test_fit_out:Mine")
    assert "step" in found.plot().axes[0].get_xlabel()


@pytest.mark.parametrize("table", ["metrics/DiLoCo.csv", "metrics/DiLoCo.validation.csv"])
def test_a_table_that_was_changed_after_the_run_is_noticed(tmp_path: Path, table: str) -> None:
    """Rows that had changed places were plotted; folders of before have no digest and are read as ever."""
    train(out=tmp_path / "a")
    folder, path = RunFolder.open(tmp_path / "a"), tmp_path / "a" / table
    Results.load(folder)
    *rows, one, other = path.read_text().splitlines()
    path.write_text("\n".join([*rows, other, one, ""]))
    with pytest.raises(InputError, match=r"a: metrics or summary\.json were changed since the run"):
        Results.load(folder)
    facts = json.loads((folder.path / "environment.json").read_text())
    assert facts.pop("tables")
    (folder.path / "environment.json").write_text(json.dumps(facts))
    Results.load(folder)


@pytest.mark.parametrize("is_taken", [True, False])
def test_mistakes_leave_nothing(tmp_path: Path, is_taken: bool) -> None:
    out = tmp_path / "out"
    if is_taken:
        out.mkdir()
        (out / "mine").write_text("")
    with pytest.raises(InputError, match="not empty" if is_taken else "topology"):
        train(out=out, **({} if is_taken else {"topology": "lam"}))
    assert [each.name for each in tmp_path.rglob("*")] == (["out", "mine"] if is_taken else [])


def test_a_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    train(out=tmp_path / "first")
    with pytest.raises(InputError, match=r"fit: resume_from is the run folder .* leave out out="):
        train(resume_from=tmp_path / "first", out=tmp_path / "second")
