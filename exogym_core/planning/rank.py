"""One rank of a plan: a strategy's own steps on a model without values."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.planning.learner import PlannedLearner
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.parts.selectors import IndexSelector, RandomIndexSelector
from exogym_core.training.loop import take_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding
    from exogym_core.strategy.base import Strategy

__all__ = ["PlannedRank", "PlannedServer", "choose_by_number", "draws_bytes", "quiet_schedules"]


class PlannedRank:
    """One rank of a plan: the strategy's own steps, without its optimizers' arithmetic."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        computing: Callable[[int, float], None],
        num_steps: int,
        coding: Coding | None = None,
    ) -> None:
        self.comm, self.model, self.strategy = comm, model, strategy
        strategy.setup(model, comm, num_steps, 0, **({} if coding is None else {"coding": coding}))
        # Ranks share a model's gradients, which hold no values: there is nothing to forget.
        strategy.zero_grad = _nothing  # type: ignore[method-assign]
        self.learner = PlannedLearner(model, strategy, computing)
        self._computing = computing
        for optimizer in strategy.optimizers:
            optimizer.step = partial(_step_of_kinds, optimizer, optimizer.step)  # type: ignore[method-assign,assignment]

    def step(self, step: int) -> None:
        """One step as training does it."""
        take_step(self.strategy, self.learner, None, StepContext(step, last_micro_batch=False))

    def quiet_step(self, step: int) -> None:
        """One that sends nothing: time passes and the step is counted."""
        self._computing(step, 1.0)
        self.strategy.local_step += 1

    def still_optimizers(self, number: int | None = None) -> None:
        """From now on the first `number` optimizers' steps do nothing: without values there is nothing to compute."""
        for optimizer in self.strategy.optimizers[:number]:
            optimizer.step = _nothing  # type: ignore[method-assign,assignment]


class PlannedServer:
    """A server of a plan: it takes in and answers as in training, without its arithmetic.

    Attributes:
        staleness: of each displacement of a worker, how many others the server has taken in since that worker had its
            parameters.
    """

    def __init__(self, comm: Communicator, model: nn.Module, strategy: Strategy) -> None:
        self.staleness: list[int] = []
        self._strategy = strategy
        self._answered: dict[int, int] = {}
        strategy.setup(model, comm, 1, 0)
        for name in getattr(strategy, "arithmetic", ()):
            setattr(strategy, name, self._arrived if name == "arrived" else _nothing)

    def run(self) -> None:
        """Until no worker sends anything any more."""
        self._strategy.serve(_nothing)
        self._strategy.finish()

    def _arrived(self, source: int, *_: object) -> None:
        arrived: int = self._strategy.judged_version
        if source < self._strategy.num_nodes:
            self.staleness.append(arrived - self._answered.get(source, 0))
        self._answered[source] = arrived + 1


def _nothing(*_: Any) -> None:
    return None


def _step_of_kinds(optimizer: Optimizer, step: Callable[..., Any], *arguments: Any) -> None:
    """An optimizer's step on one parameter of each shape; the others get the states that it has made for that one.

    Without values all that a step leaves behind is the shapes of states, and those of equal parameters are equal.
    """
    like: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    others: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            first = like.setdefault((number, parameter.shape, parameter.dtype), parameter)
            if first is not parameter:
                others.append((parameter, first, parameter.grad))
                parameter.grad = None
    step(*arguments)
    for parameter, first, gradient in others:
        parameter.grad = gradient
        if first in optimizer.state and parameter not in optimizer.state:
            optimizer.state[parameter] = {
                name: torch.empty_like(value) if isinstance(value, torch.Tensor) else value
                for name, value in optimizer.state[first].items()
            }


class _ExpectedSelector(IndexSelector):
    """As many indices as a random selector chooses on average, without drawing them."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        return torch.empty(self.count(param.numel()), dtype=torch.long, device="meta")


def choose_by_number(strategy: Strategy) -> bool:
    """Have random selectors say how many they choose; whether there were any (bytes are then expected ones)."""
    found = False
    for owner in (strategy, *getattr(strategy, "modules", ())):
        if isinstance(getattr(owner, "index_selector", None), RandomIndexSelector):
            owner.index_selector = _ExpectedSelector(owner.index_selector.p)
            found = True
    return found


def draws_bytes(strategy: Strategy) -> bool:
    """Whether its bytes depend on random numbers, so that plans tell what is to be expected."""
    return choose_by_number(copy.deepcopy(strategy))


@contextmanager
def quiet_schedules() -> Iterator[None]:
    """Without torch's warning that schedules go on and optimizers do not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
