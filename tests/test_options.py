"""One route for options: a field of `RunConfig` serves file, schema, fit, help, request and checkpoint."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import fit
from forks import Fork

from exogym_core import Trainer
from exogym_core.config import OPTIONS, RunConfig, Settings, file_values
from netgym.experiment.experiment import Experiment
from netsim.errors import InputError
from netsim.files.documents import parse_document

FILE = """
task: digits
workers: {count: 3}
steps: 7
batch_size: 5
device: [cpu]
evaluate: {every: 3, correlation_every: 2}
checkpoint: {every: 4}
strategies: [AllReduce]
"""


def test_fit_and_the_table_tell_the_same_names_in_the_same_order_with_the_same_defaults():
    defaults = {name: each.default for name, each in inspect.signature(Trainer.fit).parameters.items()}
    del defaults["self"]
    assert defaults == {each.name: each.default for each in fields(RunConfig)}
    assert all(f"\n            {name}: " in (Trainer.fit.__doc__ or "") for name in defaults)


def test_every_key_of_an_experiment_that_an_option_names_is_there():
    for option in OPTIONS.values():
        if option.key is not None:
            assert option.key.split(".")[0] in Settings.model_fields


def test_what_a_file_says_reaches_fit_by_the_table():
    experiment = Experiment.from_document(parse_document(FILE))
    assert file_values(experiment.settings)["max_steps"] == 7
    given = experiment.fit_arguments(experiment.strategies[0])
    expected = {"num_nodes": 3, "max_steps": 7, "batch_size": 5, "val_interval": 3, "correlation_interval": 2}
    assert expected.items() <= given.items()
    assert given["devices"] == ["cpu"]
    assert "device" not in given
    assert given["checkpoint_interval"] == 4
    assert given.keys() <= OPTIONS.keys()


ADDING = """
import sys, types, importlib.util, pathlib
for name in [name for name in sys.modules if name.partition(".")[0] in ("exogym_core", "netgym")]:
    del sys.modules[name]
spec = importlib.util.find_spec("exogym_core.config")
text = pathlib.Path(spec.origin).read_text()
field = "    patience: Count = option(3, key='patience', same=True)\\n"
text = text.replace("    accuracy: Accuracy", f"{field}    accuracy: Accuracy", 1)
text = text.replace("        accuracy: `f", "        patience: of a saint.\\n        accuracy: `f", 1)
module = types.ModuleType(spec.name)
sys.modules[spec.name] = module
exec(compile(text, spec.origin, "exec"), module.__dict__)

import torch
from exogym_core import Trainer
from netgym.experiment.experiment import Experiment
from netgym.cli.inspect_commands import schema_of
from exogym_core.config import checked_config
from exogym_core.run.resumption import run_settings
from exogym_core.run.program import Program
from exogym_core.run.request import FitRequest
from netsim.files.documents import parse_document
from netsim.errors import InputError

file = "{task: digits, workers: {count: 1}, steps: 1, patience: 5, strategies: [AllReduce]}"
experiment = Experiment.from_document(parse_document(file))
given = experiment.fit_arguments(experiment.strategies[0])
assert given["patience"] == 5
request = FitRequest.check(checked_config(**given))
assert request.patience == 5
program = Program(request, torch.nn.Linear(1, 1), torch.utils.data.TensorDataset(torch.zeros(4, 1)), None)
assert run_settings(program)["patience"] == 5
assert "patience: of a saint." in Trainer.fit.__doc__
key = schema_of("experiment")["properties"]["patience"]
assert (key["default"], key["minimum"], key["description"]) == (3, 1, "of a saint.")
try:
    Experiment.from_document(parse_document(file.replace("5", "0"), "a.yaml"))
except InputError as error:
    print(error)
try:
    Trainer(None, None).fit(num_nodes=1, patience=0)
except InputError as error:
    print(error)
"""


def test_a_new_option_is_one_field_in_one_place():
    """A field and its line of documentation: file, schema, fit, help, request and checkpoint have it."""
    done = Fork(exec, ADDING, {}).end()
    assert done.stdout.splitlines() == [
        "a.yaml:1: patience: expected at least 1, got 0",
        "fit: patience is 0; give a whole number from 1 up",
    ], done.stderr


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


ODD = [
    True, -1, 1.5, math.nan, "", "x", b"x", [], [None], {}, {None: None}, {1}, object(), Unprintable,
    lambda *_: None, np.array([1, 2]), torch.tensor(3), Path("/nonexistent/x"), "5 s", "a\0b", "x" * 10_000, 1j, ...,
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "wandb_project"])
def test_an_odd_value_of_any_option_is_taken_or_refused_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step: paths, functions and lists were looked at when they were needed."""
    monkeypatch.chdir(tmp_path)
    steps: list[Any] = []
    options = {
        "topology": "lan",
        "compute": "1 ms",
        "max_steps": 1,
        "progress": False,
        "on_event": steps.append,
    }
    for value in ODD:
        steps.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit(**options | {name: value})
        except InputError as error:
            line = str(error).partition("\n")[0]
            assert not steps, f"{name}: {line}: after the first step"
            assert 10 < len(line) < 1000, line


def test_a_value_that_has_no_text_is_told_by_its_type() -> None:
    with pytest.raises(InputError, match="fit: num_nodes is a Unprintable; give a whole number from 1 up"):
        fit(num_nodes=Unprintable())
