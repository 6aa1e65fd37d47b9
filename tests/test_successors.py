"""A name that was dropped is refused in one line that says what to write instead."""

from __future__ import annotations

import inspect

import pytest
import torch

from exogym_core import LocalTrainer, OptimSpec, Strategy, Trainer
from exogym_core.strategy import STRATEGIES, DiLoCoStrategy, FedAvgStrategy
from exogym_core.strategy.options.arguments import accepted_arguments
from exogym_core.successors import FIT_ARGUMENTS, STRATEGY_ARGUMENTS
from exogym_core.tasks import MLP
from netsim.files.errors import InputError, UnknownNameError

MODEL = MLP()


def fit(**arguments):
    LocalTrainer(MODEL, []).fit(strategy=FedAvgStrategy(), num_nodes=1, **arguments)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: fit(eval_interval=10), "unknown argument of fit 'eval_interval': it is val_interval="),
        (
            lambda: fit(lazily_load_dataset=True),
            "unknown argument of fit 'lazily_load_dataset': a dataset is never copied, and files are mapped "
            "lazily; leave it out",
        ),
        (lambda: fit(galaxy_size=4), "unknown argument of fit 'galaxy_size': it is num_nodes="),
        (
            lambda: fit(local_steps=500),
            "unknown argument of fit 'local_steps': it belongs to the strategy, as in DiLoCoStrategy(H=...)",
        ),
        (lambda: Trainer(MODEL, [], port=1), "unknown argument of Trainer 'port': nothing listens on a port"),
        (lambda: Trainer(MODEL, [], val_data=[]), "unknown argument of Trainer 'val_data': did you mean"),
        (
            lambda: FedAvgStrategy(model=MODEL),
            "unknown argument of FedAvgStrategy 'model': the Trainer gives it to the strategy; leave it out",
        ),
        (
            lambda: fit(averaging_timeout=60),
            "unknown argument of fit 'averaging_timeout': it belongs to the strategy, as in DiLoCoStrategy(averag",
        ),
    ],
)
def test_dropped_arguments_name_their_successor(call, line):
    with pytest.raises(UnknownNameError) as caught:
        call()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", [Strategy, DiLoCoStrategy, FedAvgStrategy])
def test_a_strategy_takes_no_model_and_no_optimizer_that_is_built(strategy):
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    with pytest.raises(
        InputError, match="the first argument is a model; the Trainer gives it to the strategy, leave it out"
    ):
        strategy(MODEL, optimizer)
    with pytest.raises(InputError, match=r"is built already; each rank builds its own, pass OptimSpec\(SGD"):
        strategy(optim_spec=optimizer)
    assert strategy(optim_spec=OptimSpec("sgd", lr=0.1)).optim_spec.kwargs == {"lr": 0.1}


@pytest.mark.parametrize(
    ("name", "told"), [("launch", r"it is fit\(\.\.\.\)"), ("_build_connection", "run_ranks")]
)
def test_dropped_methods_name_their_successor(name, told):
    with pytest.raises(AttributeError, match=f"Trainer.{name} does not exist: .*{told}"):
        getattr(Trainer(MODEL, []), name)
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        _ = Trainer(MODEL, []).nonsense


def test_no_name_that_exists_is_called_dropped():
    known = {*inspect.signature(Trainer).parameters, *inspect.signature(Trainer.fit).parameters}
    assert not known & FIT_ARGUMENTS.keys()
    for strategy in STRATEGIES.values():
        assert not set(accepted_arguments(strategy)) & STRATEGY_ARGUMENTS.keys()


def test_the_model_given_stays_as_it_was():
    data = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.zeros(8, dtype=torch.long))
    before = [parameter.clone() for parameter in MODEL.parameters()]
    trained = Trainer(MODEL, data).fit(strategy=FedAvgStrategy(), num_nodes=2, max_steps=1, batch_size=2)
    assert trained is not MODEL
    assert all(map(torch.equal, before, MODEL.parameters()))
