"""Rehearsal of a strategy before anything is trained: set up on every rank, its schedule taken to the last step."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from exogym_core.run.loop import set_up
from exogym_core.run.recording import run_alone
from exogym_core.strategy.optimizers import trial_step, try_schedule
from exogym_core.workers.run import run_ranks
from netgym.tasks import build_model
from netsim.errors import InputError

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Updates
    from exogym_core.strategy import Strategy

__all__ = ["rehearse"]

_MANY = 256  # workers: more take longer than a second


def rehearse(
    strategy: Strategy,
    num_workers: int,
    num_steps: int,
    updates: Updates | None = None,
    *,
    on_cpu: bool = True,
) -> None:
    """Set a strategy up on `num_workers` ranks with a small stand-in model, and step optimizers and schedule.

    Of many workers the first and the last are set up, each alone; all of them where that fails.
    Optimizers need a speed in `updates` where it has any.
    Unless the run is `on_cpu`, what torch refuses there alone, `capturable`, is not tried.

    Raises:
        InputError: an optimizer has no speed; or an optimizer, the schedule or the sites cannot be made for these
            workers and steps.
    """
    name = type(strategy).__name__
    model = build_model("mlp", inputs=8, hidden=[16, 12], classes=4, seed=0)
    try_schedule(strategy.optim_spec, model, strategy.lr_scheduler, strategy.lr_scheduler_kwargs, num_steps)

    def body(comm: Communicator, *_: object) -> None:
        own, replica = copy.deepcopy((strategy, model))
        set_up(own, replica, comm, num_steps, 0, None)
        for optimizer in own.optimizers:
            if updates is not None:
                updates.seconds(optimizer)
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                parameter.grad = torch.ones_like(parameter)
            try:
                trial_step(optimizer)
            except Exception as error:
                if on_cpu or "capturable" not in str(error):
                    option = "optim_spec" if optimizer is own.optim else "outer_optim_spec"
                    kind = type(optimizer).__name__
                    what = f"{name}: {option}={kind} cannot step: {error}"
                    raise InputError(what, about=(option,)) from error
        own.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run gives them again
        num_ranks = num_workers + strategy.num_servers
        if num_workers > _MANY:
            with suppress(Exception):  # whatever it is, all of them raise it as a run does
                for rank in (0, *range(num_workers - 1, num_ranks)):
                    run_alone(body, num_ranks, rank)
                return
        run_ranks(body, num_ranks, workers="threads")
