"""`fit(out=...)`: a run folder as the command line writes it, from a program."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import Squares, fit, samples
from forks import Fork
from torch.utils.data import Dataset, TensorDataset

import netgym
from exogym_core.results.loggers import FolderLogger
from exogym_core.results.report import Results
from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy import (
    STRATEGIES,
    DiLoCoStrategy,
    OptimSpec,
    SPARTAStrategy,
    Strategy,
    build_strategy,
)
from netgym.cli.main import main
from netgym.tasks import MLP
from netsim.errors import InputError, NetsimError


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
    keywords |= {"num_nodes": 2, "device": "cpu", "workers": "threads", "batch_size": 4, "max_steps": 8}
    keywords |= {"val_interval": 2, "progress": False, "on_event": event}
    chosen = strategy or DiLoCoStrategy(inner_optim="adam", H=2)
    return netgym.Trainer(MLP(4, [], 2), data, data).fit(strategy=chosen, **keywords | options)


def test_the_folder_has_the_micro_batch_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exogym_core.run.program.fitting_size", lambda *_, **__: 2)
    result = train(out=tmp_path / "mine", minibatch_size="auto", max_steps=2).fit_result
    assert result.minibatch_size == 2
    assert "minibatch_size: 2\n" in (tmp_path / "mine" / "experiment.yaml").read_text()


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
    remedy = (
        f"task: is of a Python program: continue there with fit(resume_from={str(stopped)!r}), on another"
    )
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


def test_a_table_that_was_changed_after_the_run_is_noticed(tmp_path: Path) -> None:
    """Rows that had changed places were plotted; folders of before have no digest and are read as ever."""
    train(out=tmp_path / "a")
    folder, path = RunFolder.open(tmp_path / "a"), tmp_path / "a" / "metrics/DiLoCo.validation.csv"
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of eight steps."""
    train(out=(folder := tmp_path_factory.mktemp("finished") / "run"))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"batch_size": 2}, "batch_size"),
        ({"strategy": DiLoCoStrategy(H=2, optim_spec=OptimSpec("sgd", lr=0.3))}, "options"),
        (
            {"strategy": Mine(optim_spec="sgd")},
            "no checkpoint of Mine, but checkpoints of DiLoCo: start a new run",
        ),
        ({"max_steps": 3}, "max_steps ends the run after 3 steps"),
        ({"out": "second"}, r"fit: resume_from is the run folder .* leave out out="),
    ],
)
def test_a_refused_resume_changes_nothing(tmp_path: Path, finished: Path, changed: Any, line: str) -> None:
    """The summary became [], and experiment.yaml had the refused settings."""
    before = contents(shutil.copytree(finished, tmp_path / "run"))
    with pytest.raises(InputError, match=line):
        train(**{"resume_from": tmp_path / "run", **changed})
    assert contents(tmp_path / "run") == before


def test_a_finished_run_is_extended_only_by_more_steps(tmp_path: Path, finished: Path) -> None:
    before = contents(shutil.copytree(finished, tmp_path / "run"))
    train(resume_from=tmp_path / "run")
    assert contents(tmp_path / "run") == before
    train(resume_from=tmp_path / "run", max_steps=10)
    added = contents(tmp_path / "run")["log.txt"].removeprefix(before["log.txt"]).decode().splitlines()
    assert added[:2] == ["resumed after 8 steps", "DiLoCoStrategy: 10 steps"]


def test_a_finished_run_without_checkpoints_is_not_trained_over(tmp_path: Path) -> None:
    train(out=tmp_path / "run", checkpoint_interval=None)
    before = contents(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"no checkpoint of DiLoCo, but none \(checkpoint_interval= makes some\)"
    ):
        train(resume_from=tmp_path / "run", checkpoint_interval=None)
    assert contents(tmp_path / "run") == before


def test_checkpoints_one_level_deeper_are_named(tmp_path: Path, finished: Path) -> None:
    """The run began at step 0 without a word."""
    train(save_dir=tmp_path / "stored", topology=None, compute=None)
    with pytest.raises(
        InputError, match=r"resume_from: .*stored has no checkpoint: name .*stored/DiLoCoStrategy"
    ):
        train(resume_from=tmp_path / "stored", topology=None, compute=None)
    with pytest.raises(InputError, match=r"checkpoints has no checkpoint: name .*checkpoints/DiLoCo"):
        train(resume_from=finished / "checkpoints")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no checkpoint: leave it out to train from the start"):
        train(resume_from=tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (
            lambda: DiLoCoStrategy(
                H=2, outer_optim=OptimSpec("sgd", lr=np.float32(0.5), nesterov=np.bool_(0))
            ),
            {
                "num_nodes": np.int64(2),
                "batch_size": np.int32(4),
                "seed": np.uint8(3),
                "shuffle": np.bool_(True),
            },
        ),
        (
            lambda: SPARTAStrategy(p_sparta=np.float32(0.25), max_norm=np.int64(1)),
            {"compute": {"fixed": np.float64(0.1)}, "until": np.float32(0.25), "target_loss": np.float16(1)},
        ),
    ],
)
def test_numbers_of_numpy_are_numbers(tmp_path: Path, strategy: Any, options: dict[str, Any]) -> None:
    train(strategy(), out=tmp_path / "a", **{"max_steps": 2} | options)
    text = (tmp_path / "a" / "experiment.yaml").read_text()
    assert "numpy" not in text
    assert "np." not in text
    assert netgym.load(tmp_path / "a").summary[0]["steps"] == 2


class Odd(Squares):
    """A model with something besides parameters and plain buffers."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        match self.kind:
            case "grows":
                self.register_buffer("seen", torch.zeros(1))
            case "none" | "passing":
                self.register_buffer("seen", None, persistent=self.kind == "none")
            case "dropped":
                self.register_buffer("seen", torch.ones(2))
            case "sparse":
                self.register_buffer("graph", torch.eye(3).to_sparse())
            case "lazy":
                self.norm = torch.nn.LazyBatchNorm1d()
            case "meta":
                self.layer = torch.nn.Linear(6, 1, device="meta")
            case "quantised":
                inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
                self.inner = torch.ao.quantization.quantize_dynamic(inner, {torch.nn.Linear}, torch.qint8)
            case "expanded":
                self.register_buffer("row", torch.ones(1).expand(4))

    def forward(self, batch: Any) -> torch.Tensor:
        if self.kind == "grows" and self.training:
            self.seen = torch.cat([self.seen, batch[0].mean()[None].detach()])
        elif self.kind in ("none", "passing"):
            self.seen = batch[0].mean().detach()
        elif self.kind == "dropped":
            self.seen = None
        return super().forward(batch)

    def get_extra_state(self) -> Any:
        return threading.Lock() if self.kind == "locked" else {"kind": (self.kind,)}

    def set_extra_state(self, state: Any) -> None:
        self.found = state


def odd(kind: str) -> torch.nn.Module:
    return type("Odd", (Odd,), {"kind": kind})()


@pytest.mark.parametrize("kind", ["extra", "grows", "none", "dropped"])
def test_states_that_change_are_kept(tmp_path: Path, kind: str) -> None:
    """They were lost after the last step."""
    options = {"validation": samples(8), "checkpoint_interval": 3, "max_steps": 4, "progress": False}
    with pytest.warns(
        UserWarning, match="has the model's tensors, not its _extra_state: that is in fit_result"
    ):
        model: Any = fit(odd(kind), out=tmp_path / "run", **options)
    assert model.found == {"kind": (kind,)}
    for name in ("summary.json", "metrics/AllReduce.csv", "models/AllReduce.safetensors", "report.html"):
        assert (tmp_path / "run" / name).is_file()
    with pytest.warns(UserWarning, match="_extra_state"):
        again: Any = fit(odd(kind), resume_from=tmp_path / "run", **options)
    assert again.state_dict().keys() == model.state_dict().keys()
    if kind == "grows":
        assert len(model.seen) == 1 + 4
        assert again.seen.equal(model.seen)


@pytest.mark.filterwarnings("ignore:torch.*quant")
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("sparse", "Odd: 'graph' is sparse: keep it dense"),
        ("lazy", "Odd: 'norm.weight' has no shape yet: run a batch through the model first"),
        ("meta", "Odd: 'layer.weight' is on the meta device, without values"),
        ("quantised", "a module is quantised: train it as it was before"),
        ("expanded", r"'row' has several elements at one place of memory \(expand\)"),
        (
            "locked",
            "Odd cannot give its state, and take it again, as at the end of a run: TypeError: cannot pickle",
        ),
    ],
)
def test_states_that_cannot_be_kept_are_refused_before_anything_is_written(
    tmp_path: Path, kind: str, line: str
) -> None:
    with pytest.raises(InputError, match=line):
        fit(odd(kind), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_fails_at_the_end_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page, a logger and a trace that cannot be written each cost a line."""

    def full(*given: Any) -> None:
        if len(given) != 1 or not isinstance(given[0], FolderLogger):  # a logger also writes at evaluations
            raise OSError(28, "No space left on device")

    def no_trace(*_: Any) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr("exogym_core.results.report.write_report", lambda folder: full(folder, folder))
    monkeypatch.setattr("exogym_core.results.loggers.FolderLogger.close", full)
    monkeypatch.setattr("netsim.network.trace.write_trace", no_trace)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="trace|FolderLogger|page") as told:
        model: Any = train(out=tmp_path / "run", run_name="mine", trace=tmp_path / "trace.json")
    lines = "\n".join(str(each.message) for each in told)
    assert "trace: the disk is full" in lines
    assert "FolderLogger: has not taken the last rows: OSError: [Errno 28]" in lines
    assert "run: has no page yet (netgym report writes one): OSError: [Errno 28]" in lines
    assert model.fit_result.complete
    assert netgym.load(tmp_path / "run").summary[0]["steps"] == 8


def accuracy(model: Any, batch: Any) -> Any:
    return "good"


def listener(row: Mapping[str, Any]) -> None:
    if row["step"] == 2:
        raise StopIteration


class Short(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"data": Short()}, r"^rank 0 failed at test_fit_out.py:\d+: StopIteration"),
        (
            {"validation": samples(8), "accuracy": accuracy},
            r"^fit: accuracy \(test_fit_out.py:\d+\) returned 'good'; return the fraction right, a number",
        ),
        (
            {"on_event": listener},
            "^fit: on_event stopped the run at step 2; the trainer's `result` has what was done",
        ),
    ],
)
def test_odd_failures_are_a_line_that_names_the_users_code(options: dict[str, Any], line: str) -> None:
    with pytest.raises(NetsimError, match=line):
        fit(**options)


def test_progress_that_cannot_be_shown_ends_no_run(tmp_path: Path) -> None:
    def body() -> None:
        os.close(2)
        assert train(progress=True, out=tmp_path / "out").fit_result.complete

    assert Fork(body).end().returncode == 0


@pytest.mark.parametrize("name", sorted(name for name in STRATEGIES if build_strategy(name).num_servers))
def test_a_strategy_with_servers_leaves_a_folder_that_reads_back(name: str, tmp_path: Path) -> None:
    """There were more hosts in it than workers, and no page."""
    fit(strategy=build_strategy(name), out=tmp_path / "out", topology="lan", compute="10 ms", num_nodes=4)
    (entry,) = netgym.load(tmp_path / "out").summary
    assert entry["name"] == name
    assert "placement: null" in (tmp_path / "out" / "experiment.yaml").read_text()


def test_a_folder_whose_disk_was_full_at_once_is_started_again(
    tmp_path: Path, finished: Path, capsys: Any
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(finished / "experiment.yaml", tmp_path / "run")
    assert main(["compare", "--resume", str(tmp_path / "run")]) == 2
    assert "run: this run ended before it had begun: remove it, and start again" in capsys.readouterr().err
