"""Ranks in plans: a strategy's own steps on a model on the meta device."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from exogym_core.cost.compute import Coding
from exogym_core.run.loop import set_up, take_step
from exogym_core.run.recording import copied
from exogym_core.strategy.base import StepContext
from exogym_core.workers.streams import FORWARD_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy

__all__ = [
    "PlannedRank",
    "PlannedRounds",
    "arrive",
    "listing_once",
    "planned_copy",
    "planned_rank",
    "take_rounds",
    "without_updates",
]


class _WithoutUpdates(TorchFunctionMode):
    """In-place updates of meta tensors do nothing, since a rank alone receives parts as large as its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it is an update."""
        if func in _UPDATES and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


_UPDATES = (Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.copy_)


def without_updates(strategy: Strategy) -> AbstractContextManager[Any]:
    """`_WithoutUpdates` for strategies that send each step's gradients; in others all parts are equal."""
    return _WithoutUpdates() if strategy.overlaps_backward else nullcontext()


def arrive(parameter: Tensor) -> None:
    """Set a meta gradient on a parameter, and call its hooks as a backward pass does."""
    if parameter._backward_hooks:  # torch calls these itself
        torch.autograd.backward(parameter, torch.empty_like(parameter))
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


class PlannedRank:
    """A rank in a plan: the strategy's own steps, without values of gradients or arithmetic of optimizers.

    Where the strategy sends gradients during the backward pass, each parameter's gradient becomes available when its
    share of that pass is finished, the last parameters first.

    Args:
        comm: the rank's communicator.
        model: on the meta device.
        strategy: its own, not set up.
        computing: called with (step, share) of the computing; all of a 0-based step is a share of 1.
        max_steps: of the run.
        coding: cost of codecs; without speeds it takes no time, and the traffic counts the values.
        seed: of the run, which decides the ranks that meet.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        computing: Callable[[int, float], None],
        max_steps: int,
        coding: Coding | None = None,
        seed: int = 0,
    ) -> None:
        self.strategy, self._computing = strategy, computing
        free = _FreeCoding.model_construct({})
        self._coding = coding if coding is not None and coding.speeds else free
        set_up(strategy, model, comm, max_steps, seed, self._coding)
        # Ranks share a model's gradients, which hold no values: there is nothing to forget.
        strategy.zero_grad = _nothing  # type: ignore[method-assign]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = sum(parameter.numel() for parameter in self._parameters) or 1
        for optimizer in strategy.optimizers:
            optimizer.step = partial(_step_of_kinds, optimizer, optimizer.step)  # type: ignore[method-assign,assignment]

    def step(self, step: int) -> None:
        """Take a step as training does."""
        take_step(self.strategy, self._gradients, None, StepContext(step, last_micro_batch=False))

    def _gradients(self, step: None, context: StepContext) -> float:
        """Forward and backward pass of the step that `context` numbers; there is no loss."""
        context.last_micro_batch = True
        self.strategy.before_backward(last_micro_batch=True)
        overlaps = self.strategy.overlaps_backward
        self._computing(context.number, FORWARD_SHARE if overlaps else 1.0)
        for parameter in reversed(self._parameters):
            if overlaps:
                share = (1 - FORWARD_SHARE) * parameter.numel() / self._total
                self._computing(context.number, share)
                arrive(parameter)
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        return math.nan

    def take_alike(self, most: int, *, copies: bool) -> int:
        """Take up to `most` steps with equal requests, as declared by the strategy's `steps_to_exchange`.

        Steps that only compute are taken at once. Of steps that average gradients in a site one is taken, and a
        recording copies its requests.

        Args:
            most: largest number of steps.
            copies: the rank is recorded; otherwise no steps of the second kind are taken.

        Returns:
            Number of steps taken.
        """
        strategy = self.strategy
        number = max(min(strategy.steps_to_exchange - 1, most), 0)
        if strategy.site.gradients is None:
            for step in range(strategy.local_step, strategy.local_step + number):
                self._computing(step, 1.0)
            strategy.local_step += number
        elif copies and number > 1:
            self._take_copied(number)
        else:
            return 0
        return number

    def _take_copied(self, number: int) -> None:
        """Take one step, whose requests a recording copies for the others of `number`."""
        strategy, comm = self.strategy, self.strategy.comm
        comm.mark(copied(comm, None))
        self.step(strategy.local_step)
        comm.mark(copied(comm, number - 1))
        strategy.local_step += number - 1

    def still_optimizers(self, number: int | None = None) -> None:
        """Disable the steps of the first `number` optimizers: without values there is nothing to compute."""
        for optimizer in self.strategy.optimizers[:number]:
            optimizer.step = _nothing  # type: ignore[method-assign,assignment]


class _FreeCoding(Coding):
    """Coding that takes no time, and has speeds only so that encoded values are counted."""

    @property
    def speeds(self) -> Mapping[str, Any]:
        return {self.for_all: None}

    def seconds(self, codec: str, way: str, num_values: int) -> float:
        return 0.0


def _nothing(*_: Any) -> None:
    return None


def _step_of_kinds(optimizer: Optimizer, step: Callable[..., Any], *arguments: Any) -> None:
    """Step an optimizer on one parameter of each shape, and copy the states made for it to the others.

    On the meta device a step leaves behind only the shapes of states, which are equal for equal parameters.
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


def planned_copy(strategy: Strategy) -> Strategy:
    """Copy of a strategy for a rank of a plan, without a schedule of rates."""
    mine = copy.deepcopy(strategy)
    mine.lr_scheduler = None  # rates are values, and steps of equal rates may be computed at once
    return mine


def listing_once(model: nn.Module) -> nn.Module:
    """Copy of a model, with the same parameters, that lists them once: for ranks that only make their groups."""
    mine, whole = copy.copy(model), list(model.named_parameters())

    def named_parameters(prefix: str = "", recurse: bool = True, **options: Any) -> Iterator[Any]:
        if prefix or not recurse or options:
            return model.named_parameters(prefix, recurse, **options)
        return iter(whole)

    mine.named_parameters = named_parameters  # type: ignore[method-assign,assignment]
    return mine


def planned_rank(
    strategy: Strategy,
    comm: Communicator,
    model: nn.Module,
    computing: Callable[[int, float], None],
    max_steps: int,
    coding: Coding | None = None,
    seed: int = 0,
) -> PlannedRank | None:
    """`PlannedRank` with a copy of the strategy; None for a server, after it has served without arithmetic."""
    mine = planned_copy(strategy)
    if comm.rank < comm.world_size - mine.num_servers:
        return PlannedRank(comm, model, mine, computing, max_steps, coding, seed)
    mine.setup(model, comm, 1, seed)
    for name in mine.arithmetic:
        setattr(mine, name, _nothing)
    mine.serve(_nothing)  # until no worker sends anything any more
    mine.finish()
    return None


class PlannedRounds(NamedTuple):
    """Rounds of a strategy.

    Attributes:
        period: steps a round.
        number: number of rounds.
        start: steps before the first round, which are counted and not taken.
        remainder: steps after the last round.
    """

    period: int
    number: int
    start: int = 0
    remainder: int = 0

    @property
    def num_steps(self) -> int:
        """Steps that are taken."""
        return self.number * self.period + self.remainder


def take_rounds(
    runner: PlannedRank,
    rounds: PlannedRounds,
    after_step: Callable[[int], None],
    *,
    is_alone: bool,
) -> Iterator[int]:
    """Take rounds of a rank without values; yield the number of each as it ends, and then end what is in flight.

    Args:
        runner: the rank.
        rounds: the rounds.
        after_step: called after each step that is taken, with the number of steps until then.
        is_alone: the rank is recorded: steps that are alike are taken once, see `PlannedRank.take_alike`.
    """
    (period, _, start, _), num_steps = rounds, rounds.num_steps
    strategy, step = runner.strategy, 0
    strategy.local_step = start
    while step < num_steps:
        # As many in each round: its first one is taken.
        if step % period and strategy.workers.take_place(step):
            most = min(period - 1 - step % period, num_steps - step)
            step += runner.take_alike(most, copies=is_alone)
            if step == num_steps:
                break
        if strategy.workers.take_place(step):
            runner.step(start + step)
        else:
            strategy.skip_step()
            strategy.round_place()  # forgets that a round was missed
        step += 1
        after_step(step)
        if step % period == 0:
            yield step // period
    strategy.finish()  # calls in flight complete, after the last row
