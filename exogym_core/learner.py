"""Gradients of a batch, the virtual time that they take, and the micro-batch that fits into memory.

`minibatch_size="auto"` is the largest micro-batch whose memory all ranks of this machine have at once. Two small
forward passes measure what autograd keeps of a sample; the rest is a straight line, so nothing has to run out of
memory, and an error in the model is raised as it is. The answer depends on the machine and changes last bits: it is
kept in the resolved experiment.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from exogym_core.data.batches import autocast_to, device_of, move_batch
from exogym_core.workers.rng import kept_rng
from exogym_core.workers.streams import BackwardSeconds
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import StepDurations
    from exogym_core.data.samples import Source, StepSamples
    from exogym_core.strategy.base import StepContext, Strategy

__all__ = [
    "LocalStep",
    "TorchLearner",
    "fitting_size",
    "loss_and_count",
    "memory_limit",
    "saved_bytes",
]


_SHARE_OF_GPU, _SHARE_OF_RAM = 0.9, 0.5  # EXO Gym's
_MARGIN = 1.3  # temporaries that autograd does not keep, and fragments
_COPIES = 5  # parameters, their gradients, two moments, and a copy for averages


def memory_limit(device: torch.device) -> float:
    """Bytes that all ranks on `device` may use together."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory) * _SHARE_OF_GPU
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, float(Path(path).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return total * _SHARE_OF_RAM


def saved_bytes(model: nn.Module, batch: Any, precision: str | None = None) -> int:
    """Bytes that autograd keeps between the forward and the backward pass of `model` on `batch`."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # alive, so that no other storage gets its address
        return tensor

    device = device_of(model)
    model.train()
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        autocast_to(precision, device),
    ):
        model(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def fitting_size(
    model: nn.Module,
    sample_batch: Callable[[int], Any],
    batch_size: int,
    num_ranks: int,
    *,
    limit_bytes: float | None = None,
    precision: str | None = None,
) -> int:
    """The largest divisor of `batch_size` with which `num_ranks` ranks fit into memory.

    Args:
        model: on its device; it is copied.
        sample_batch: makes a batch of so many samples, on the model's device.
        batch_size: samples a rank and step.
        num_ranks: ranks that share the memory.
        limit_bytes: limit for all of them; by default 90 % of the GPU's memory, half of this machine's.
        precision: of the forward pass, as `autocast`.

    Raises:
        Exception: as raised by the model, at once.
    """
    device = device_of(model)
    if limit_bytes is None:
        limit_bytes = memory_limit(device)
    sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    if len(sizes) == 1:
        return 1
    with kept_rng(device):
        replica = copy.deepcopy(model)
        # From 2 on: batch normalisation refuses a single sample.
        few, more = 2, 4
        costs = [saved_bytes(replica, sample_batch(size), precision) for size in (few, more)]
    per_sample = max(costs[1] - costs[0], 0) / (more - few)
    once = max(costs[0] - few * per_sample, 0.0)
    weights = sum(value.nbytes for value in [*model.parameters(), *model.buffers()])

    def needed(size: int) -> float:
        return num_ranks * _MARGIN * (_COPIES * weights + once + size * per_sample)

    fitting = [size for size in sizes if needed(size) <= limit_bytes]
    if not fitting:
        warnings.warn(
            f"fit: {num_ranks} ranks need {needed(1) / 1e9:.1f} GB even with one sample at a time, of "
            f"{limit_bytes / 1e9:.1f} GB that they should take; use fewer ranks or a smaller model",
            UserWarning,
            stacklevel=2,
        )
    return max(fitting, default=1)


class LocalStep(NamedTuple):
    """A local step that has been taken ahead of virtual time.

    Attributes:
        step: its samples.
        loss: their mean loss.
        with_gradient: names of parameters that got one.
    """

    step: StepSamples
    loss: float
    with_gradient: Collection[str]


def loss_and_count(output: Any, where: str, *, with_gradient: bool = False) -> tuple[Tensor, float | None]:
    """A model's output: its mean loss, a scalar tensor, and what that is the mean of, where the model says so.

    Args:
        output: the loss, `(loss, count)`, or a mapping with `loss` and perhaps `count`; a count is the number of
            tokens or samples that count in the batch. In a tuple it is an int or a tensor of whole numbers, which no
            accuracy is.
        where: begins the errors' lines.
        with_gradient: refuse a loss without a gradient.

    Raises:
        InputError: it is something else.
    """
    loss, count = output, None
    if isinstance(output, Mapping) and "loss" in output:
        loss, count = output["loss"], output.get("count")
    elif isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], int | Tensor):
        whole = not isinstance(output[1], Tensor) or not (
            output[1].is_floating_point() or output[1].is_complex()
        )
        loss, count = output if whole else (output, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        is_tensor = isinstance(loss, Tensor)
        what = f"a tensor of shape {list(loss.shape)}" if is_tensor else type(loss).__name__
        if isinstance(loss, tuple):
            what = f"({', '.join(type(each).__name__ for each in loss)})"
        raise InputError(
            f"{where}: the model returned {what}; it must return the batch's mean loss, a scalar tensor, alone or as "
            "(loss, count) with a whole number"
        )
    if with_gradient and not loss.requires_grad:
        raise InputError(f"{where}: the model returned a loss without a gradient; do not detach it")
    if count is None:
        return loss, None
    if isinstance(count, Tensor) and count.numel() == 1:
        count = 1 if count.is_meta else count.item()
    if not isinstance(count, int | float) or not 0 <= count < math.inf:
        what = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise InputError(
            f"{where}: the model returned a loss with count {what}; it must be the number of tokens or samples that "
            "the loss is the mean of"
        )
    return loss, float(count)


class _BackwardClock:
    """Moves a rank's clock through the backward pass, parameter by parameter, as gradients become ready.

    Its hooks must be registered before the strategy's, so that the time for a gradient has passed when the
    strategy sends it.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._backward: BackwardSeconds | None = None  # of the pass under way
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        total = sum(parameter.numel() for parameter in trained.values()) or 1
        self._shares = {name: parameter.numel() / total for name, parameter in trained.items()}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.advance(name))  # type: ignore[no-untyped-call]
            for name, parameter in trained.items()
        ]

    def advance(self, name: str) -> None:
        """The gradient of the parameter of this name is ready."""
        if self._backward is not None:
            share = self._shares[name]
            self._comm.advance(self._backward.gradient(share), ("gradient", share))

    def begin(self, seconds: float, samples: int, share: float = 1.0) -> None:
        """Charge the forward pass of a `share` of a step that takes `seconds`, and begin its backward pass."""
        self._backward = BackwardSeconds()
        self._comm.advance(self._backward.begin(seconds * share), ("forward", samples, share))

    def begin_backward(self, seconds: float, samples: int, share: float) -> None:
        """Begin a backward pass that takes a `share` of a step's `seconds`; its forward pass was charged before."""
        self._backward = BackwardSeconds()
        self._comm.advance(self._backward.begin_alone(seconds * share), ("backward", samples, share))

    def end(self) -> None:
        """Charge the rest: parameters without a gradient have cost nothing yet."""
        assert self._backward is not None
        self._comm.advance(self._backward.rest(), ("rest",))
        self._backward = None

    def close(self) -> None:
        """Remove the gradient hooks from the model, which outlives the learner."""
        for hook in self._hooks:
            hook.remove()


class TorchLearner:
    """Turns batches into gradients on one rank: forward and backward passes over a step's micro-batches.

    Make it before the strategy is set up: hooks on the model run in the order in which they came.

    Args:
        model: the replica, on its device.
        comm: the rank's, for its clock.
        before_backward: called before each backward pass with whether it is the step's last.
        cost: virtual seconds of its steps; None: computing is free.
        autocast: `bf16` or `fp16` for forward passes in it; under `fp16` losses are scaled. None for the model's
            own precision.
        spreads_backward: virtual time passes in the last backward pass as its gradients become ready, since the
            strategy sends them meanwhile.

    Attributes:
        scaler: scales losses and gradients; None without.
        runs_ahead: local steps may be taken several at once, by `run_ahead`.
        has_loss: the rank computes the loss; others of a chain of stages do not.
    """

    runs_ahead = False
    has_loss = True
    _order: Sequence[str] | None = None  # of gradients in a backward pass; None where no hook awaits them

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        before_backward: Callable[[bool], None],
        cost: StepDurations | None,
        autocast: str | None = None,
        spreads_backward: bool = False,
    ) -> None:
        self._model, self._comm, self._before_backward = model, comm, before_backward
        self._cost, self._device = cost, device_of(model)
        self._autocast = autocast_to(autocast, self._device)
        self.scaler = torch.amp.GradScaler(self._device.type) if autocast == "fp16" else None
        self._clock = _BackwardClock(model, comm) if spreads_backward and cost is not None else None

    def gradients(self, step: StepSamples, context: StepContext) -> float:
        """Leave the gradients of all micro-batches in `.grad`, and return their mean loss.

        Micro-batches are weighed by their samples, or by the counts that come with their losses. How many there are in
        all is known at the last one: until then gradients are multiples of the first that counts anything.
        """
        seconds = 0.0 if self._cost is None else self._cost.seconds(context.number, step.samples)
        losses: list[tuple[Tensor, float]] = []
        last, first = len(step.micro_batches) - 1, 0.0
        for index, (batch, samples) in enumerate(step.micro_batches):
            loss, count = self._forward(batch, context.number)
            weight = share = samples / step.samples
            if count is not None:
                context.count = (context.count or 0.0) + count
                if index < last:
                    first = first or count
                    weight = count / (first or 1.0)
                else:
                    weight = count / (context.count or 1.0)
                    with torch.no_grad():  # a detached sparse gradient would be another one
                        for parameter in self._model.parameters():
                            if parameter.grad is not None:
                                parameter.grad.mul_(first / (context.count or 1.0))
            if index and (count is None) != (context.count is None):
                raise InputError(
                    f"rank {self._comm.rank}, step {context.number + 1}: the model returned a count for some "
                    "micro-batches only; return (loss, count) for all or for none"
                )
            losses.append((loss.detach(), samples if count is None else count))
            context.last_micro_batch = index == last
            self._before_backward(index == last)
            clock = self._clock if index == last else None
            if clock is not None:
                clock.begin(seconds, step.samples, share)
            self._backward(loss, weight)
            if clock is not None:
                clock.end()
            elif self._cost is not None:
                self._comm.advance(seconds * share, ("step", step.samples, share))
        if not last:
            return losses[0][0].item() if losses[0][1] else 0.0
        total = step.samples if context.count is None else context.count or 1.0
        return sum(float(loss) * number for loss, number in losses if number) / total

    def _forward(self, batch: Any, number: int) -> tuple[Tensor, float | None]:
        if self._device.type != "cpu":
            batch = move_batch(batch, self._device)
        with self._autocast:
            output = self._model(batch)
        where = f"rank {self._comm.rank}, step {number + 1}"
        return loss_and_count(output, where, with_gradient=True)

    def _backward(self, loss: Tensor, weight: float) -> None:
        if weight != 1:
            loss = loss * weight
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if weight:  # else nothing in it counts, and its loss may be nan
            loss.backward()  # type: ignore[no-untyped-call]

    def run_ahead(self, data: Source, strategy: Strategy, num_steps: int) -> list[LocalStep]:
        """Take the next local steps of `strategy`, updates included; none where ranks do not go together."""
        return []

    def charge(self, number: int, taken: LocalStep) -> None:
        """Advance virtual time by the forward and backward pass of a step already computed; `number` from 0."""
        seconds = 0.0 if self._cost is None else self._cost.seconds(number, taken.step.samples)
        if self._clock is None:
            if self._cost is not None:
                self._comm.advance(seconds, ("step", taken.step.samples, 1.0))
            return
        self._clock.begin(seconds, taken.step.samples)
        for name in self._order or ():
            if name in taken.with_gradient:
                self._clock.advance(name)
        self._clock.end()

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Prepare the strategy's optimizers, the first of which applies the gradients, once it is set up."""

    def state_dict(self) -> dict[str, Any]:
        """State of the gradient scaler."""
        return {"scaler": self.scaler and self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the gradient scaler."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Remove the clock's gradient hooks from the model, which outlives the learner."""
        if self._clock is not None:
            self._clock.close()
