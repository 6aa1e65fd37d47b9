"""What fit writes, and only when asked."""

from __future__ import annotations

import csv
import json
import sys
import types

import experiments
import pytest
import torch
from experiments import mlp, samples

from exogym_core.strategy import DiLoCoStrategy
from netsim.errors import InputError, RankError, UnknownNameError


def fit(model=None, **arguments):
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
    result = fit(run_name="mine", correlation_interval=5, strategy=strategy).fit_result
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
    fit(run_name="mine")
    assert (tmp_path / "logs" / "mine-2").is_dir()


def test_a_run_that_fails_leaves_what_it_did(tmp_path):
    class Failing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.calls = 0

        def forward(self, batch):
            self.calls += self.training
            if self.calls == 5:
                raise ArithmeticError("enough")
            return self.inner(batch)

    with pytest.raises(RankError):
        fit(Failing(), run_name="broken")
    # How many steps were told before the failure depends on host time; they are in order.
    steps = [int(row["step"]) for row in rows(tmp_path / "logs" / "broken" / "train.csv")]
    assert steps == list(range(1, len(steps) + 1))


def test_nothing_is_written_when_disabled(tmp_path):
    fit(run_name="mine", wandb_project="theirs", disable_logging=True)
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
    fit(wandb_project="theirs", log_x_axis="examples", checkpoint_interval=4, save_dir=tmp_path / "saved")
    assert state["project"] == "theirs"
    assert state["finished"]
    assert state["config"]["strategy"] == "DiLoCoStrategy"
    assert not any(isinstance(value, dict) for value in state["config"].values())
    assert metrics == [("examples_trained", {}), ("*", {"step_metric": "examples_trained"})]
    assert [row["examples_trained"] for row in logged if "local_loss" in row] == [0, 16, 32, 40]
    assert [row["step"] for row in logged if "train_loss" in row] == [1, 2, 3, 4, 5]
    run.summary = {"step": 4}
    del logged[:]
    fit(wandb_project="theirs", resume_from=next((tmp_path / "saved").iterdir()))
    assert (state["id"], state["resume"]) == ("a1", "allow")
    assert {row["step"] for row in logged} == {5}


def test_wandb_that_is_missing_or_asked_wrongly(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'netgym\[tracking\]'"):
        fit(wandb_project="theirs")
    with pytest.raises(UnknownNameError, match="did you mean 'examples'"):
        fit(wandb_project="theirs", log_x_axis="example")
