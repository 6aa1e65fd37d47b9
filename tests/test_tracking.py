"""Loggers that an experiment names, against stand-ins for the packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exogym_core.app.experiment import Experiment
from exogym_core.app.tracking import flat_config, open_loggers
from exogym_core.results.record import RunFolder
from netsim.files.documents import parse_document
from netsim.files.errors import InputError


def experiment(loggers: str) -> Experiment:
    text = f"task: digits\nworkers: {{count: 2}}\nsteps: 1\nstrategies: [AllReduce]\nloggers: {loggers}\n"
    return Experiment.from_document(parse_document(text))


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_told_with_the_remedy(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.utils.tensorboard", "wandb", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(InputError, match=rf"{package}.* not installed.* pip install 'netgym\[tracking\]'"),
        open_loggers(experiment(f"[{package}]"), RunFolder(tmp_path), "DiLoCo"),
    ):
        pass


def test_tensorboard_gets_scalars_by_step_and_by_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, path: str) -> None:
            written.append(Path(path).relative_to(tmp_path).as_posix())

        def add_scalar(self, *scalar: object) -> None:
            written.append(scalar)

        def close(self) -> None:
            written.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with open_loggers(experiment("[csv, tensorboard]"), RunFolder(tmp_path), "a/b") as loggers:
        for logger in loggers:
            logger.event({"kind": "step", "step": 3, "train_loss": 0.5, "virtual_seconds": 1.25})
            logger.event({"kind": "step", "step": 4, "train_loss": 0.4, "virtual_seconds": None})
    assert written == [
        "tensorboard/a-b",
        ("train_loss", 0.5, 3),
        ("by_virtual_ms/train_loss", 0.5, 1250),
        ("virtual_seconds", 1.25, 3),
        ("train_loss", 0.4, 4),
        "closed",
    ]


def test_wandb_goes_on_with_the_run_it_had_and_logs_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []

    class Run:
        """Stands for a run of wandb: its summary holds the last value of each metric."""

        def __init__(self) -> None:
            self.id, self.summary, self.steps, self.codes = "a1b2", {}, [], []

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            pass

        def log(self, row: dict[str, Any]) -> None:
            self.summary.update(row)
            self.steps.append(row["step"])

        def finish(self, exit_code: int) -> None:
            self.codes.append(exit_code)

    run = Run()
    module = ModuleType("wandb")
    module.init = lambda **options: begun.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for last in (3, 5):
        with open_loggers(experiment("[wandb]"), RunFolder(tmp_path), "DiLoCo") as (logger,):
            for step in range(1, last + 1):
                logger.event({"kind": "step", "step": step, "train_loss": 0.5, "virtual_seconds": None})
    assert [options.get("id") for options in begun] == [None, "a1b2"]
    assert [options.get("resume") for options in begun] == [None, "allow"]
    assert run.steps == [1, 2, 3, 4, 5]
    assert run.codes == [0, 0]
    with (
        pytest.raises(KeyboardInterrupt),
        open_loggers(experiment("[wandb]"), RunFolder(tmp_path), "AllReduce"),
    ):
        raise KeyboardInterrupt
    assert run.codes == [0, 0, 1], "one that was stopped has not come to its end"
    assert all("strategies" not in options["config"] for options in begun)


def test_a_run_has_one_flat_configuration_of_its_own() -> None:
    """MLflow had neither rate nor strategy nor network; W&B's runs had all strategies each."""
    text = """
task: digits
workers: {count: 2}
steps: 1
topology: lan
compute: {fixed: 50 ms, jitter: 0.1}
strategies: [AllReduce, {name: DiLoCo, H: 4, lr: 0.01}]
seeds: 2
"""
    whole = Experiment.from_document(parse_document(text))
    for label, seeded in (("DiLoCo", whole), ("DiLoCo.seed-1", whole.with_seed(1))):
        config = flat_config(seeded, label)
        assert (config["strategy.name"], config["strategy.H"], config["strategy.lr"]) == ("DiLoCo", 4, 0.01)
        assert (config["topology"], config["compute.jitter"], config["steps"]) == ("lan", 0.1, 1)
        assert not any(isinstance(value, dict) for value in config.values())
    assert flat_config(whole, "AllReduce")["strategy.name"] == "AllReduce"


def test_mlflow_has_virtual_time_as_its_time_axis_and_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLflow itself, in a file store; skipped where it is not installed."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for last in (2, 3):
        with open_loggers(experiment("[mlflow]"), RunFolder(tmp_path), "DiLoCo") as (logger,):
            for step in range(1, last + 1):
                logger.event({"kind": "step", "step": step, "train_loss": 0.5, "virtual_seconds": step * 1.5})
    client = MlflowClient()
    (run,) = client.search_runs([client.search_experiments()[0].experiment_id])
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [(each.step, each.timestamp - run.info.start_time) for each in history] == [
        (1, 1500),
        (2, 3000),
        (3, 4500),
    ]
    by_time = client.get_metric_history(run.info.run_id, "by_virtual_ms/train_loss")
    assert [each.step for each in by_time] == [1500, 3000, 4500]
    assert run.data.tags["run_folder"] == tmp_path.name
