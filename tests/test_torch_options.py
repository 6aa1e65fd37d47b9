"""Arguments of torch's optimizers and schedules: a wrong value is one line that names it, a right one passes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy
from netgym.experiment.rehearsal import rehearse
from netsim.errors import InputError

OPTIMIZERS = sorted(
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer) and name not in ("Optimizer", "LBFGS")
)
#: Schedules that a file can write -> arguments without which they are refused.
SCHEDULES: dict[str, dict[str, Any]] = {
    "ConstantLR": {},
    "CosineAnnealingLR": {"T_max": 6},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {},
    "MultiStepLR": {"milestones": [2, 4]},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 7},
    "PolynomialLR": {},
    "StepLR": {"step_size": 2},
}
#: Values of the wrong kind for any argument but those of text, and what each of these takes in their place.
WRONG = ["text", {"a": 1}, [["text"]]]
TEXTS = {"adjust_lr_fn", "anneal_strategy", "mode", "scale_mode"}


def arguments(called: Any) -> list[tuple[str, Any]]:
    """Names and defaults of what a class of torch takes besides its first argument."""
    return [(name, each.default) for name, each in list(inspect.signature(called).parameters.items())[1:]]


def tried(**options: Any) -> None:
    rehearse(AllReduceStrategy(**options), 1, 6)


def test_rehearsals_of_many_workers_take_a_few_of_them_and_still_name_what_does_not_fit():
    rehearse(AllReduceStrategy(), 100_000, 6)  # each of them would take minutes
    with pytest.raises(InputError, match="ranks_per_worker=7 does not divide the 300 ranks"):
        rehearse(DiLoCoStrategy(ranks_per_worker=7), 300, 6)


OF_OPTIMIZERS = [
    (name, option, default)
    for name in OPTIMIZERS
    for option, default in arguments(getattr(torch.optim, name))
]
OF_SCHEDULES = [
    (name, option, SCHEDULES[name].get(option, default))
    for name in SCHEDULES
    for option, default in arguments(getattr(lr_scheduler, name))
]


@pytest.mark.parametrize(("name", "option", "default"), OF_OPTIMIZERS)
def test_an_optimizers_argument_is_refused_by_its_name(name: str, option: str, default: Any) -> None:
    for wrong in WRONG[option in TEXTS :]:
        with pytest.raises(InputError, match=rf"^optimizer {name}: {option}=[^\n]*$"):
            tried(optim_spec={"name": name, "lr": 0.1} | {option: wrong})
    if name not in ("Muon", "SparseAdam"):  # which train no vectors, and no dense gradients
        tried(optim_spec={"name": name, option: list(default) if isinstance(default, tuple) else default})


@pytest.mark.parametrize(("name", "option", "default"), OF_SCHEDULES)
def test_a_schedules_argument_is_refused_by_its_name(name: str, option: str, default: Any) -> None:
    given = SCHEDULES[name]
    for wrong in WRONG:
        with pytest.raises(InputError, match=rf"^lr_scheduler_kwargs: {name}: {option}=[^\n]*$"):
            tried(lr_scheduler=name, lr_scheduler_kwargs=given | {option: wrong})
    tried(lr_scheduler=name, lr_scheduler_kwargs=given | {option: default})
    if type(default) is int and option != "last_epoch":
        with pytest.raises(InputError, match=rf"{option}=-2 must be at least 0"):
            tried(lr_scheduler=name, lr_scheduler_kwargs=given | {option: -2})
