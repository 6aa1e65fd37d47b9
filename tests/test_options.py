"""One route for options: what `training/options.py` tells of one is all that file, fit, request and checkpoint need."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from exogym_core import Trainer
from exogym_core.app.experiment import Experiment
from exogym_core.app.settings import Settings
from exogym_core.training.options import OPTIONS, OtherOptions, RunOptions, file_values
from netsim.files.documents import parse_document
from netsim.files.errors import InputError

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
    told = {name: each.default for name, each in inspect.signature(Trainer.fit).parameters.items()}
    for name in ("self", "others"):
        del told[name]
    assert told == {each.name: each.default for each in fields(RunOptions)}
    assert all(f"\n            {name}: " in (Trainer.fit.__doc__ or "") for name in told)


def test_every_key_of_an_experiment_that_an_option_names_is_there():
    for option in OPTIONS.values():
        if option.key is not None:
            assert option.key.split(".")[0] in Settings.model_fields


def test_what_a_file_says_reaches_fit_by_the_table():
    experiment = Experiment.from_document(parse_document(FILE))
    assert file_values(experiment.settings)["max_steps"] == 7
    given = experiment.fit_arguments()
    expected = {"num_nodes": 3, "max_steps": 7, "batch_size": 5, "val_interval": 3, "correlation_interval": 2}
    assert expected.items() <= given.items()
    assert given["devices"] == ["cpu"]
    assert "device" not in given
    assert given["checkpoint_interval"] == 4
    assert given.keys() <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("val_size", -1), ("seed", 0.5), ("max_steps", True), ("target_loss", "x")],
)
def test_checks_of_the_table_name_the_option(name, value):
    with pytest.raises(InputError, match=f"fit: {name} is {value!r}; give a (whole|finite) number"):
        Trainer(None, None).fit(num_nodes=1, **{name: value})


ADDING = '''
import sys, types, importlib.util, pathlib
spec = importlib.util.find_spec("exogym_core.training.options")
text = pathlib.Path(spec.origin).read_text()
new = """    patience: int = option(
        3, check=whole_number(1), key="patience", file_type=int, same=True, about="of a saint."
    )
"""
text = text.replace("    on_event: Callable", new + "    on_event: Callable", 1)   # the one place
module = types.ModuleType(spec.name)
sys.modules[spec.name] = module
exec(compile(text, spec.origin, "exec"), module.__dict__)

import torch
from exogym_core import Trainer
from exogym_core.app.experiment import Experiment
from exogym_core.training.resumption import _settings
from exogym_core.strategy import AllReduceStrategy
from exogym_core.training.program import Program
from exogym_core.training.request import FitRequest
from netsim.files.documents import parse_document
from netsim.files.errors import InputError

file = "{task: digits, workers: {count: 1}, steps: 1, patience: 5, strategies: [AllReduce]}"
given = Experiment.from_document(parse_document(file)).fit_arguments()
assert given["patience"] == 5
request = FitRequest.check({**given, "strategy": AllReduceStrategy()})
assert request.patience == 5
program = Program(request, torch.nn.Linear(1, 1), torch.utils.data.TensorDataset(torch.zeros(4, 1)), None)
assert _settings(program)["patience"] == 5
assert "patience: of a saint." in Trainer.fit.__doc__
try:
    Trainer(None, None).fit(num_nodes=1, patience=0)
except InputError as error:
    print(error)
'''


def test_a_new_option_is_one_line_in_one_place():
    """One field in the table: the file has the key, fit the keyword, the request the value, the checkpoint knows it."""
    done = subprocess.run([sys.executable, "-c", ADDING], capture_output=True, text=True, check=False)
    assert done.stdout == "fit: patience is 0; give a whole number from 1 up\n", done.stderr


def test_type_checkers_know_all_options_that_fit_does_not_spell_out() -> None:
    """`batchsize=3` passed them, as any other name."""
    spelt = inspect.signature(Trainer.fit, follow_wrapped=False).parameters
    code = Trainer.fit.__code__
    named = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    hidden = {each.name: each.type for each in fields(RunOptions) if each.name not in named}
    assert {name: str(each.__forward_arg__) for name, each in OtherOptions.__annotations__.items()} == hidden
    assert set(hidden) <= set(spelt)
