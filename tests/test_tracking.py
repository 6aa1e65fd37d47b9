"""Loggers, of an experiment and of fit: with stand-ins for the packages, and with them, offline."""

from __future__ import annotations

import csv
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import experiments
import pytest
import yaml
from experiments import samples

import netgym
from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy
from netgym.experiment.comparison import open_loggers
from netgym.experiment.experiment import Experiment
from netgym.tasks import build_model, build_task
from netsim.errors import InputError, UnknownNameError
from netsim.files.documents import parse_document


def experiment(loggers: str) -> Experiment:
    text = f"task: digits\nworkers: {{count: 2}}\nsteps: 1\nstrategies: [AllReduce]\nloggers: {loggers}\n"
    return Experiment.from_document(parse_document(text))


@pytest.mark.thorough
def test_mlflow_has_virtual_time_as_its_time_axis_and_no_row_twice(offline: Path) -> None:
    """With MLflow itself, in a file store."""
    from mlflow.tracking import MlflowClient

    for last in (2, 3):
        with open_loggers(experiment("[mlflow]"), RunFolder(offline), "DiLoCo") as (logger,):
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
    assert run.data.tags["run_folder"] == offline.name


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a file of wandb: LevelDB's log format behind a header of 7 bytes."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service may be writing yet
    data, place, parts = path.read_bytes(), 7, b""
    while place < len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a record in one part, or the last part of one
            yield Record.FromString(parts)
            parts = b""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder that wandb and MLflow write to."""
    import wandb

    wandb.teardown()  # it keeps settings of before
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield tmp_path
    wandb.teardown()


def test_a_comparison_reaches_all_three(offline: Path) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = "{task: digits, name: small, workers: {count: 2, kind: threads}, device: cpu, steps: 2, topology: lan, "
    text += "compute: 50 ms, evaluate: {every: 1, samples: 16}, loggers: [tensorboard, wandb, mlflow], "
    text += "strategies: [AllReduce, {name: DiLoCo, H: 2, lr: 0.01}]}"
    found = netgym.compare(yaml.safe_load(text), out=offline / "run", progress=False, jobs=1)
    losses = {entry["name"]: entry["final_loss"] for entry in found.summary}
    client = MlflowClient()
    runs = {
        run.data.params["strategy.name"]: run
        for run in client.search_runs([client.get_experiment_by_name("small").experiment_id])
    }
    assert runs.keys() == losses.keys()
    assert runs["DiLoCo"].data.params["strategy.H"] == "2"
    logged: dict[str, list[Any]] = {"run": [], "history": [], "exit": []}
    for path in offline.glob("wandb/offline-run-*/run-*.wandb"):
        for record in wandb_records(path):
            if (kind := record.WhichOneof("record_type")) in logged:
                logged[kind].append(getattr(record, kind))
    for run in logged["run"]:
        config = {each.key: json.loads(each.value_json) for each in run.config.update}
        assert {
            "strategy.name": run.display_name,
            "task.name": "digits",
            "steps": 2,
        }.items() <= config.items()
        assert (run.project, run.run_group) == ("small", "run")
        kept = offline / "run" / "checkpoints" / f"{run.display_name}.wandb"
        assert kept.read_text() == f"{run.run_id}\n", "to go on with"
    assert {run.display_name for run in logged["run"]} == losses.keys()
    assert [each.exit_code for each in logged["exit"]] == [0, 0]
    rows = [
        {each.nested_key[0]: json.loads(each.value_json) for each in row.item} for row in logged["history"]
    ]
    assert sorted(row["step"] for row in rows if "train_loss" in row) == [1, 1, 2, 2]
    for name, loss in losses.items():
        assert runs[name].info.status == "FINISHED"
        assert runs[name].data.metrics["judged_loss"] == loss
        events = EventAccumulator(str(offline / "run" / "tensorboard" / name))
        events.Reload()
        assert events.Scalars("judged_loss")[-1].value == pytest.approx(loss)
        assert [each.step for each in events.Scalars("train_loss")] == [1, 2]
        milliseconds = [
            round(1000 * at) for at in found.to_pandas().query("strategy == @name")["virtual_seconds"]
        ]
        assert [each.step for each in events.Scalars("by_virtual_ms/judged_loss")] == milliseconds


def test_a_fit_ends_its_wandb_run_as_it_ended(offline: Path) -> None:
    def event(row: Mapping[str, Any]) -> None:
        if row["kind"] == "step":
            raise KeyboardInterrupt

    task = build_task("digits")
    trainer = netgym.Trainer(build_model(None, task, seed=0), task.train, task.validation)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            strategy=AllReduceStrategy(), num_nodes=1, max_steps=1, device="cpu", workers="threads",
            progress=False, wandb_project="fits", on_event=event,
        )  # fmt: skip
    (path,) = offline.glob("wandb/offline-run-*/run-*.wandb")
    ends = [each.exit.exit_code for each in wandb_records(path) if each.WhichOneof("record_type") == "exit"]
    assert ends == [1]


# --- what fit writes, and only when asked -------------------------------------------------------------------


def logged_fit(model=None, **arguments):
    given = {"max_steps": 5, "val_interval": 2, "strategy": DiLoCoStrategy(H=2)}
    return experiments.fit(model, samples(), samples(), **(given | arguments))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_named_run_leaves_the_files_of_exo_gym(tmp_path):
    strategy = DiLoCoStrategy("adam", H=2, lr=0.01)
    result = logged_fit(run_name="mine", correlation_interval=5, strategy=strategy).fit_result
    folder = tmp_path / "logs" / "mine"
    train, validation = rows(folder / "train.csv"), rows(folder / "validation.csv")
    assert list(train[0])[:5] == ["step", "examples_trained", "train_loss", "train_perplexity", "lr"]
    assert {"virtual_seconds", "bytes_sent"} <= train[0].keys()
    assert list(validation[0])[:5] == [
        "step",
        "local_loss",
        "local_perplexity",
        "global_loss",
        "global_perplexity",
    ]
    assert [float(row["train_loss"]) for row in train] == [row["train_loss"] for row in result.history]
    assert [int(row["step"]) for row in validation] == [0, 2, 4, 5]
    assert float(rows(folder / "correlation.csv")[0]["correlation"]) <= 1
    config = json.loads((folder / "config.json").read_text())
    assert config["strategy"] == "DiLoCoStrategy"
    options = config["strategy_config"]
    assert (options["H"], options["outer_lr"], options["lr"]) == (2, None, 0.01)
    assert "local_step" not in options, "what the strategy was told, not what it keeps"
    assert config["model_parameters"] == pytest.approx(53e-6)
    assert config["num_nodes"] == 2
    logged_fit(run_name="mine")
    assert (tmp_path / "logs" / "mine-2").is_dir()


def test_nothing_is_written_when_disabled(tmp_path):
    logged_fit(run_name="mine", wandb_project="theirs", disable_logging=True)
    assert not list(tmp_path.iterdir())


def test_wandb_gets_the_rows_on_the_chosen_axis(monkeypatch, tmp_path):
    logged, metrics, state = [], [], {}
    run = types.SimpleNamespace(
        id="a1",
        log=logged.append,
        define_metric=lambda name, **options: metrics.append((name, options)),
        finish=lambda exit_code=None: state.update(finished=True),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: state.update(options) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    logged_fit(
        wandb_project="theirs", log_x_axis="examples", checkpoint_interval=4, save_dir=tmp_path / "saved"
    )
    assert state["project"] == "theirs"
    assert state["finished"]
    assert state["config"]["strategy"] == "DiLoCoStrategy"
    assert not any(isinstance(value, dict) for value in state["config"].values())
    assert metrics == [("examples_trained", {}), ("*", {"step_metric": "examples_trained"})]
    assert [row["examples_trained"] for row in logged if "local_loss" in row] == [0, 16, 32, 40]
    assert [row["step"] for row in logged if "train_loss" in row] == [1, 2, 3, 4, 5]
    run.summary = {"step": 4}
    del logged[:]
    logged_fit(wandb_project="theirs", resume_from=next((tmp_path / "saved").iterdir()))
    assert (state["id"], state["resume"]) == ("a1", "allow")
    assert {row["step"] for row in logged} == {5}


def test_wandb_that_is_missing_or_asked_wrongly(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'netgym\[tracking\]'"):
        logged_fit(wandb_project="theirs")
    with pytest.raises(UnknownNameError, match="did you mean 'examples'"):
        logged_fit(wandb_project="theirs", log_x_axis="example")
