"""One rank's training loop: batches, micro-batches, the strategy's step, evaluation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.checkpoints.checkpoint import RankCheckpoints
from exogym_core.checkpoints.rank_state import random_streams, restore_random_streams
from exogym_core.data.batches import move_batch
from exogym_core.strategy.context import StepContext
from exogym_core.training.evaluation import Evaluation, FlatState, autocast_to, correlation_of
from exogym_core.training.trial import as_loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.communicator.base import Communicator, Handle
    from exogym_core.cost.compute import StepDurations
    from exogym_core.data.samples import Source, Step
    from exogym_core.strategy.base import Strategy

__all__ = ["LoopSettings", "NodeOutcome", "TrainNode"]

_FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


@dataclass(frozen=True)
class LoopSettings:
    """What every rank's loop has in common.

    Attributes:
        max_steps: steps to do; the data may end sooner.
        batch_size: samples a rank and step.
        val_interval: steps between evaluations; there is one at step 0 and one at the end too. None: none.
        correlation_interval: steps between comparisons of the replicas; None for none.
        autocast: `bf16` or `fp16` for forward passes in it; under `fp16` losses are scaled, and steps whose
            gradients overflow are left out. None for the model's own precision.
        scale_with_samples: a smaller batch takes proportionally less virtual time.
        seed: of the run.
    """

    max_steps: int
    batch_size: int
    val_interval: int | None = 100
    correlation_interval: int | None = None
    autocast: str | None = None
    scale_with_samples: bool = False
    seed: int = 42


@dataclass
class NodeOutcome:
    """What a rank ends with.

    Attributes:
        state: its model's state, on the CPU.
        average: on the last rank of those present, the state of the mean of their models, else None.
        max_steps: how many steps were to be done.
        remarks: what the user should be warned of.
    """

    state: dict[str, Tensor]
    average: dict[str, Tensor] | None
    max_steps: int
    remarks: tuple[str, ...] = ()


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


class TrainNode:
    """One rank of a run: its model, strategy, data and clock.

    Args:
        comm: the rank's communicator.
        model: its replica, on its device; changed in place.
        strategy: its own copy, not yet set up.
        data: its steps.
        settings: the loop's.
        durations: virtual seconds of its steps; None where computing is free.
        evaluation: on the first and the last rank, or all where the strategy may leave them behind, unless
            `val_interval` is None. The first judges its own model, the last the mean of all.
        checkpoints: where to save this rank's state, and what to go on from.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        data: Source,
        settings: LoopSettings,
        durations: StepDurations | None = None,
        evaluation: Evaluation | None = None,
        checkpoints: RankCheckpoints | None = None,
    ) -> None:
        self.comm, self.model, self.strategy, self.data = comm, model, strategy, data
        self.settings, self.durations, self.evaluation = settings, durations, evaluation
        self.checkpoints = checkpoints if checkpoints is not None else RankCheckpoints()
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.local_step = 0
        self.scaler: torch.amp.GradScaler | None = None
        self._flat = FlatState(model)
        may_judge = comm.rank == comm.world_size - 1 or strategy.leaves_behind
        self._mean = copy.deepcopy(model) if may_judge and comm.world_size > 1 else model
        self._flat_mean = FlatState(self._mean)
        self._handles: list[Handle[Tensor]] = []
        self._backward_clock: _BackwardClock | None = None

    # --- the run -------------------------------------------------------------------------------------------

    def train(self) -> NodeOutcome:
        """Train to the end and return what this rank has."""
        saved = self.checkpoints.load(self.comm.rank)
        if saved is None:
            self.start()
        else:
            self.resume(saved)
        try:
            while self.local_step < self.settings.max_steps and (step := self.data.next_step()) is not None:
                if self.strategy.is_ahead():
                    self.skip_step()
                else:
                    self.train_step(step)
                if self._is_due(self.settings.val_interval):
                    self.evaluate()
                if self._is_due(self.settings.correlation_interval):
                    self.correlate()
                if self.checkpoints.is_due(self.local_step):
                    self.save()
            return self.finish()
        finally:
            if self._backward_clock is not None:
                self._backward_clock.close()
            self.strategy.close()

    def start(self) -> None:
        """Make all replicas rank 0's, parameters and buffers, set the strategy up, and evaluate.

        The first copy is off the clock: a run begins when everyone has the model.
        """
        self._set_up()
        if self.settings.val_interval is not None:
            self.evaluate()

    def _set_up(self) -> None:
        if not self.model.training:
            self.model.train()
        if self.comm.world_size > 1:
            with self.comm.off_clock():
                self._flat.broadcast(self.comm)
        if self.strategy.overlaps_backward and self.durations is not None:
            self._backward_clock = _BackwardClock(self.model, self.comm)
        if self.settings.autocast == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        self.strategy.setup(self.model, self.comm, self.settings.max_steps, self.settings.seed)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.local_step % interval == 0

    def train_step(self, step: Step) -> None:
        """One step on one batch, marked with what it was like."""
        strategy, learning_rate = self.strategy, self.strategy.learning_rate
        weight = step.samples * self.comm.world_size / step.total_samples
        strategy.begin_step(StepContext(weight, step.samples, self.scaler, last_micro_batch=False))
        strategy.zero_grad()
        seconds = self._step_seconds(step)
        losses: list[tuple[Tensor, int]] = []
        last = len(step.micro_batches) - 1
        for index, (batch, samples) in enumerate(step.micro_batches):
            loss = self._forward(batch)
            losses.append((loss.detach(), samples))
            weight = samples / step.samples
            strategy.before_backward(index == last)
            self._backward(loss if weight == 1 else loss * weight, seconds * weight, index == last)
        strategy.step()
        self.local_step += 1
        traffic = self.comm.traffic
        self.comm.mark(
            {
                "step": self.local_step,
                "loss": _mean_loss(losses),
                "samples": step.samples,
                "lr": learning_rate,
                "bytes_sent": traffic.bytes_sent,
                "payload_bytes": traffic.payload_bytes,
                "wan_bytes": traffic.wan_bytes,
                **strategy.row(),
            }
        )

    def skip_step(self) -> None:
        """Leave out a step that others have done while this rank was away."""
        self.strategy.skip_step()
        self.local_step += 1

    def _step_seconds(self, step: Step) -> float:
        if self.durations is None:
            return 0.0
        seconds = self.durations.seconds(self.local_step)
        if self.settings.scale_with_samples and step.samples != self.settings.batch_size:
            seconds *= step.samples / self.settings.batch_size
        return seconds

    def _forward(self, batch: Any) -> Tensor:
        if self.device.type != "cpu":
            batch = move_batch(batch, self.device)
        with autocast_to(self.settings.autocast, self.device):
            output = self.model(batch)
        return as_loss(output, f"rank {self.comm.rank}, step {self.local_step + 1}")

    def _backward(self, loss: Tensor, seconds: float, last: bool) -> None:
        """Backward on the clock: spread over parameters where the strategy sends gradients meanwhile."""
        clock, scaler = self._backward_clock, self.scaler
        if scaler is not None:
            loss = scaler.scale(loss)
        if clock is not None and last:
            self.comm.advance(seconds * _FORWARD_SHARE)
            clock.begin(seconds * (1 - _FORWARD_SHARE))
            loss.backward()  # type: ignore[no-untyped-call]
            clock.end()
            return
        loss.backward()  # type: ignore[no-untyped-call]
        if seconds:
            self.comm.advance(seconds)

    # --- looking on, off the clock -------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Judge the first rank's model and the mean of all; nobody else waits.

        Every rank deposits its values and goes on; the last rank collects them. Ranks that the strategy has left
        behind are not looked at.
        """
        present = self.strategy.present_ranks
        if self.comm.rank not in present:
            return
        self._post_average(present)
        if self.evaluation is None:
            return
        row: dict[str, Any] = {"step": self.local_step}
        if self.comm.rank == present[0]:
            row["local_loss"] = self.evaluation.loss(self.model)
        if self.comm.rank == present[-1]:
            mean = self._received_average(present)
            row["global_loss"] = row["local_loss"] if mean is self.model else self.evaluation.loss(mean)
            row["accuracy"] = self.evaluation.accuracy(mean)
        if len(row) > 1:
            self.comm.mark(row)

    def _post_average(self, present: Sequence[int]) -> None:
        if len(present) == 1:
            return
        self._settle_average()  # of the last evaluation: surely long there
        peers = self._peers(present)
        with self.comm.off_clock():
            self._handles = self._flat.post_average(peers, peers.world_size - 1)

    def _peers(self, present: Sequence[int]) -> Communicator:
        is_everyone = len(present) == self.comm.world_size
        return self.comm if is_everyone else self.comm.group(present, reuse=True)

    def _received_average(self, present: Sequence[int]) -> nn.Module:
        """The mean of the models present, on the rank that judges it."""
        if len(present) == 1:
            return self.model
        with self.comm.off_clock():
            self._flat_mean.receive(self._handles)
        return self._mean

    def _settle_average(self) -> None:
        with self.comm.off_clock():
            for handle in self._handles:
                handle.wait()

    def correlate(self) -> None:
        """Compare the replicas, on the last rank."""
        present = self.strategy.present_ranks
        if self.comm.rank not in present:
            return
        peers = self._peers(present)
        with self.comm.off_clock():
            replicas = peers.gather(self._flat.parameters(), peers.world_size - 1)
        if replicas is not None:
            self.comm.mark({"step": self.local_step, "correlation": correlation_of(replicas)})

    def finish(self) -> NodeOutcome:
        """The last evaluation, unless it has just been done, and the outcome."""
        self.strategy.finish()
        present = self.strategy.present_ranks
        if self.settings.val_interval is not None and not self._is_due(self.settings.val_interval):
            self.evaluate()
        elif not self._handles and self.comm.rank in present:  # not evaluated, or that was before a restart
            self._post_average(present)
        self._settle_average()
        average = None
        if self.comm.rank == present[-1]:
            average = _cpu_state(self._received_average(present))
        return NodeOutcome(_cpu_state(self.model), average, self.settings.max_steps)

    # --- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of this rank that a step changes, besides the clock and the random streams."""
        return {
            "local_step": self.local_step,
            "model": self.model.state_dict(),
            "strategy": self.strategy.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "data": self.data.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, after `start`."""
        self.local_step = state["local_step"]
        self.model.load_state_dict(state["model"])
        self.strategy.load_state_dict(state["strategy"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.data.load_state_dict(state["data"])

    def save(self) -> None:
        """Save this rank as it is at the end of a step, and mark that: free of virtual time.

        Raises:
            InputError: the rank has a call in flight, or its state holds what cannot be kept.
            RecordError: a file cannot be written.
        """
        self._settle_average()
        state = {
            **self.state_dict(),
            "buffers": dict(self._passing_buffers()),
            "communicator": self.comm.state_dict(),
            "random": random_streams(self.device),
        }
        files = self.checkpoints.save(self.local_step, self.comm.rank, state)
        self.comm.mark({"step": self.local_step, "checkpoint": files})
        self.comm.flush()

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Set up anew and take over what `save` saved; the clock has heard of all that already."""
        with self.comm.repeating():
            self._set_up()
        self.comm.load_state_dict(saved["communicator"])  # first: strategies look at its counters
        self.load_state_dict(saved)
        with torch.no_grad():
            for name, buffer in self._passing_buffers():
                buffer.copy_(saved["buffers"][name])
        restore_random_streams(saved["random"], self.device)

    def _passing_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers that the model's own state_dict leaves out."""
        kept = self.model.state_dict().keys()
        return [(name, buffer) for name, buffer in self.model.named_buffers() if name not in kept]


def _mean_loss(losses: list[tuple[Tensor, int]]) -> float:
    """The mean over micro-batches, weighted by samples."""
    if len(losses) == 1:
        return float(losses[0][0])
    return sum(float(loss) * samples for loss, samples in losses) / sum(samples for _, samples in losses)


def _cpu_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
