"""One rank of a plan: a strategy's own steps on a model without values."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exogym_core.run.loop import take_step
from exogym_core.strategy.base import StepContext
from exogym_core.strategy.parts.selectors import IndexSelector, RandomIndexSelector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.speeds import Coding
    from exogym_core.strategy.base import Strategy

__all__ = [
    "PlannedLearner",
    "PlannedRank",
    "PlannedServer",
    "arrive",
    "choose_by_number",
    "draws_bytes",
    "quiet_schedules",
    "shapes_alone",
]


class ShapesAlone(TorchFunctionMode):
    """Joins, copies, norms and updates in place of tensors without values, in a tenth of torch's own time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked."""
        if func is torch.cat and not kwargs and len(args) == 1 and _are_flat(args[0]):
            return _empty((sum(part.numel() for part in args[0]),), args[0][0])
        if func in _IN_PLACE and args[0].is_meta:
            return args[0]
        if func is torch.linalg.vector_norm and args[0].is_meta and len(args) == 2 and not kwargs:
            return _empty((), args[0])
        if func is torch.empty_like and not kwargs and args[0].is_meta and args[0].is_contiguous():
            return _empty(args[0].shape, args[0])
        return func(*args, **(kwargs or {}))


_IN_PLACE = (Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.copy_)


def shapes_alone(strategy: Strategy) -> AbstractContextManager[Any]:
    """`ShapesAlone` for strategies that send every step's gradients bucket by bucket.

    Those join thousands of tensors; for others, looking at each call of torch's takes longer than it saves.
    """
    return ShapesAlone() if strategy.overlaps_backward else nullcontext()


def _are_flat(parts: Sequence[Tensor]) -> bool:
    """True if the tensors have one dimension and one type, and no values."""
    return bool(parts) and all(
        [part.is_meta and part.dim() == 1 and part.dtype == parts[0].dtype for part in parts]  # noqa: C419 - twice as fast
    )


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def arrive(parameter: Tensor) -> None:
    """A gradient without values comes to a parameter, as if a backward pass had brought it."""
    if parameter._backward_hooks:  # what they do is torch's own affair
        torch.autograd.backward(parameter, torch.empty_like(parameter))
        return
    if parameter.grad is None:
        parameter.grad = _empty(parameter.shape, parameter)
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


_FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


class PlannedLearner:
    """Leaves a gradient without values in every parameter, and tells of a step's computing.

    Where the strategy sends gradients while the backward pass goes on, each parameter's gradient comes when
    its share of that pass is done, the last parameters' first.

    Args:
        model: on the meta device.
        strategy: its own, set up.
        computing: told (step, share) of what is computed, as it is: all of a 0-based step is a share of 1.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, computing: Callable[[int, float], None]) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self._strategy, self._computing = strategy, computing
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = sum(parameter.numel() for parameter in self._parameters) or 1

    def gradients(self, step: None, context: StepContext) -> float:
        """Forward and backward pass of the step that `context` numbers; there is no loss."""
        context.last_micro_batch = True
        self._strategy.before_backward(last_micro_batch=True)
        if not self._strategy.overlaps_backward:
            self._computing(context.number, 1.0)
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
            return math.nan
        self._computing(context.number, _FORWARD_SHARE)
        backward = 1 - _FORWARD_SHARE
        for parameter in reversed(self._parameters):
            self._computing(context.number, backward * parameter.numel() / self._total)
            arrive(parameter)
        return math.nan

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave the strategy's optimizers as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a plan is made at once."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    def close(self) -> None:
        """There is nothing to let go of."""


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
    """True if its bytes depend on random numbers, so that plans show expected values."""
    return choose_by_number(copy.deepcopy(strategy))


@contextmanager
def quiet_schedules() -> Iterator[None]:
    """Without torch's warning that schedules go on and optimizers do not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
