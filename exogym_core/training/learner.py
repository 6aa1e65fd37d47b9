"""From a batch to gradients, and the virtual time that this takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from exogym_core.data.batches import move_batch
from exogym_core.data.losses import as_loss
from exogym_core.training.evaluation import autocast_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import StepDurations
    from exogym_core.data.samples import StepSamples
    from exogym_core.strategy.context import StepContext

__all__ = ["Learner", "StepCost", "TorchLearner"]

_FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


Samples = TypeVar("Samples", contravariant=True)


class Learner(Protocol[Samples]):
    """What turns batches into gradients on one rank. The loop knows nothing else of models.

    Attributes:
        scaler: what it scales gradients with, None where it does not.
    """

    scaler: torch.amp.GradScaler | None

    def gradients(self, step: Samples, context: StepContext) -> float:
        """Leave the gradients of a step's samples in `.grad`, advance the clock, and return their mean loss."""

    def state_dict(self) -> dict[str, Any]:
        """What it keeps between steps, the model apart."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore that."""

    def close(self) -> None:
        """Let go of the model."""


class StepCost:
    """Virtual seconds of a rank's steps.

    Args:
        durations: of a whole batch; None where computing is free.
        batch_size: of a whole batch.
        scale_with_samples: a smaller one takes proportionally less.
    """

    def __init__(
        self, durations: StepDurations | None, batch_size: int = 1, scale_with_samples: bool = False
    ) -> None:
        self._durations, self._batch_size, self._scales = durations, batch_size, scale_with_samples

    @property
    def is_free(self) -> bool:
        """Whether computing takes no time."""
        return self._durations is None

    def seconds(self, number: int, samples: int) -> float:
        """Of the 0-based step `number` with so many samples."""
        if self._durations is None:
            return 0.0
        seconds = self._durations.seconds(number)
        if self._scales and samples != self._batch_size:
            seconds *= samples / self._batch_size
        return seconds


class _BackwardClock:
    """Moves a rank's clock through the backward pass, parameter by parameter, as gradients become ready.

    Its hooks must be registered before the strategy's, so that the time for a gradient has passed when the
    strategy sends it.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._seconds = 0.0
        self._left = 0.0
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in parameters) or 1
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(parameter.numel() / total))  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def _hook(self, share: float) -> Any:
        def advance(_: Tensor) -> None:
            if self._seconds:
                seconds = min(self._seconds * share, self._left)
                self._left -= seconds
                self._comm.advance(seconds)

        return advance

    def begin(self, seconds: float) -> None:
        """The backward pass that starts now takes so long."""
        self._seconds = self._left = seconds

    def end(self) -> None:
        """It is through: parameters without a gradient have cost nothing yet."""
        self._comm.advance(self._left)
        self._seconds = self._left = 0.0

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class TorchLearner:
    """One rank's torch model: forward and backward passes over a step's micro-batches.

    Make it before the strategy is set up: hooks on the model run in the order in which they came.

    Args:
        model: the replica, on its device.
        comm: the rank's, for its clock.
        before_backward: told before each backward pass whether it is the step's last (`Strategy.before_backward`).
        cost: of its steps in virtual time.
        autocast: `bf16` or `fp16` for forward passes in it; under `fp16` losses are scaled. None for the model's
            own precision.
        spreads_backward: virtual time passes in the last backward pass as its gradients become ready, since the
            strategy sends them meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        before_backward: Callable[[bool], None],
        cost: StepCost,
        autocast: str | None = None,
        spreads_backward: bool = False,
    ) -> None:
        self._model, self._comm, self._before_backward = model, comm, before_backward
        self._cost, self._autocast = cost, autocast
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.scaler = torch.amp.GradScaler(self._device.type) if autocast == "fp16" else None
        self._clock = _BackwardClock(model, comm) if spreads_backward and not cost.is_free else None

    def gradients(self, step: StepSamples, context: StepContext) -> float:
        """As `Learner` says."""
        seconds = self._cost.seconds(context.number, step.samples)
        losses: list[tuple[Tensor, int]] = []
        last = len(step.micro_batches) - 1
        for index, (batch, samples) in enumerate(step.micro_batches):
            loss = self._forward(batch, context.number)
            losses.append((loss.detach(), samples))
            weight = samples / step.samples
            context.last_micro_batch = index == last
            self._before_backward(index == last)
            self._backward(loss if weight == 1 else loss * weight, seconds * weight, index == last)
        return losses[0][0].item() if not last else _mean_loss(losses)

    def _forward(self, batch: Any, number: int) -> Tensor:
        if self._device.type != "cpu":
            batch = move_batch(batch, self._device)
        if self._autocast is None:
            output = self._model(batch)
        else:
            with autocast_to(self._autocast, self._device):
                output = self._model(batch)
        return as_loss(output, f"rank {self._comm.rank}, step {number + 1}")

    def _backward(self, loss: Tensor, seconds: float, last: bool) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self._clock is not None and last:
            self._comm.advance(seconds * _FORWARD_SHARE)
            self._clock.begin(seconds * (1 - _FORWARD_SHARE))
            loss.backward()  # type: ignore[no-untyped-call]
            self._clock.end()
            return
        loss.backward()  # type: ignore[no-untyped-call]
        if seconds:
            self._comm.advance(seconds)

    def state_dict(self) -> dict[str, Any]:
        """As `Learner` says."""
        return {"scaler": self.scaler and self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Learner` says."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Remove the hooks."""
        if self._clock is not None:
            self._clock.close()


def _mean_loss(losses: list[tuple[Tensor, int]]) -> float:
    """The mean over micro-batches, weighted by samples."""
    return sum(float(loss) * samples for loss, samples in losses) / sum(samples for _, samples in losses)
