"""Loops of a worker (a batch, its gradients, the strategy's step, a row) and of a server."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exogym_core.checkpoints.files import random_streams, restore_random_streams
from exogym_core.checkpoints.own_code import StateTrial
from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.cost.speeds import charge_updates
from exogym_core.run.snapshots import (
    END,
    EvaluationTimes,
    Snapshots,
    broadcast_state,
    final_state,
    passing_buffers,
)
from exogym_core.strategy.base import StepContext
from exogym_core.strategy.participation.absence import Participation
from exogym_core.strategy.parts.codecs import coding_report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding, Updates
    from exogym_core.data.samples import Source, StepSamples
    from exogym_core.run.learner import Learner
    from exogym_core.strategy.base import Strategy

__all__ = ["Loop", "RankOutcome", "Role", "Server", "take_step"]

Samples = TypeVar("Samples")


@dataclass
class RankOutcome:
    """Result of one rank.

    Attributes:
        state: its model's state, on the CPU.
        max_steps: steps to do.
        remarks: warnings for the user.
        coding: "charged" or "not charged" for values that it encoded; None where coding is free, or none were.
    """

    state: dict[str, Any]
    max_steps: int
    remarks: tuple[str, ...] = ()
    coding: str | None = None


def take_step(
    strategy: Strategy,
    learner: Learner[Samples],
    step: Samples,
    context: StepContext,
    announce: Callable[[float], None] = lambda loss: None,
) -> float:
    """Take one local step of a strategy that has been set up; return the loss.

    `announce` is called with the loss before anything is exchanged.
    """
    strategy.begin_step(context)
    strategy.zero_grad()
    loss = learner.gradients(step, context)
    announce(loss)
    strategy.step()
    return loss


class Role:
    """Rank of a run: model, strategy and snapshots, saved and restored with the communicator and the random streams.

    Args:
        comm: the rank's communicator.
        model: its replica, on its device; changed in place.
        strategy: its own copy, not yet set up.
        seed: of the run.
        evaluations: steps and times of evaluations.
        checkpoints: folder for this rank's state, and the checkpoint to go on from.
        is_copy: the replicas are copies of one model, so nothing needs to be broadcast.
    """

    snapshots: Snapshots
    participation: Participation

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        *,
        seed: int = 42,
        evaluations: EvaluationTimes | None = None,
        checkpoints: RankCheckpoints | None = None,
        is_copy: bool = False,
    ) -> None:
        self.comm, self.model, self.strategy, self._seed = comm, model, strategy, seed
        self._is_copy = is_copy
        self._evaluations = evaluations if evaluations is not None else EvaluationTimes()
        self._checkpoints = checkpoints if checkpoints is not None else RankCheckpoints()
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def start(self) -> None:
        """Make all replicas rank 0's, off the clock, and set the strategy up."""
        raise NotImplementedError

    def _begin_snapshots(self) -> None:
        """Begin snapshots of a strategy that is set up."""
        self.participation = Participation(self.strategy, self.comm)
        self.snapshots = Snapshots(self.comm, self.model, self.strategy, self._evaluations)

    def state_dict(self) -> dict[str, Any]:
        """State that a step changes, besides the clock and the random streams."""
        return {
            "model": self.model.state_dict(),
            "strategy": self.strategy.state_dict(),
            "deposits": self.snapshots.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, after `start`."""
        self.model.load_state_dict(state["model"])
        self.strategy.load_state_dict(state["strategy"])
        self.snapshots.load_state_dict(state["deposits"])

    def _begin(self) -> bool:
        """Start, or resume from the checkpoint; returns whether there was one."""
        saved = self._checkpoints.load(self.comm.rank)
        if saved is None:
            self.start()
        else:
            self._resume(saved)
        return saved is not None

    def _save(self, step: int) -> None:
        """Save this rank's part of the checkpoint of `step`, and mark that: free of virtual time.

        Raises:
            InputError: the rank has a call in flight, or its state holds what cannot be kept.
            RecordError: a file cannot be written.
        """
        state = {
            **self.state_dict(),
            "buffers": passing_buffers(self.model),
            "communicator": self.comm.state_dict(),
            "random": random_streams(self._device),
        }
        files = self._checkpoints.save(step, self.comm.rank, state)
        self.comm.mark({"step": step, "checkpoint": files, **self.snapshots.timed_evaluations()})
        self.comm.flush()

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Start again and load the saved state; the clock has repeated all requests until then."""
        with self.comm.repeating():
            self.start()
        self.comm.load_state_dict(saved["communicator"])  # first: strategies read its counters
        with self.comm.repeating():  # messages in flight are sent again
            self.load_state_dict(saved)
        with torch.no_grad():
            for name, buffer in saved.get("buffers", {}).items():
                passing_buffers(self.model)[name].copy_(buffer)
        restore_random_streams(saved["random"], self._device)


class Loop(Role):
    """A worker of a run. A step goes: loop -> learner.gradients -> strategy.step -> communicator -> mark.

    Args:
        comm, model, strategy, seed, evaluations, checkpoints, is_copy: as for every role.
        data: its steps.
        make_learner: makes the learner; called before the strategy is set up.
        max_steps: steps to do; the data may end sooner.
        until: virtual seconds after which no step begins. Ranks of a synchronous strategy end together, where they
            first meet after one of them is past it.
        coding: virtual time of codecs; None where it is free.
        updates: virtual time of optimizers' steps; None where they are free.

    Attributes:
        local_step: steps done.
        learner: turns batches into gradients; available after `start`, as `snapshots` are.
    """

    learner: Learner[StepSamples]

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        data: Source,
        make_learner: Callable[[], Learner[StepSamples]],
        max_steps: int,
        *,
        seed: int = 42,
        until: float | None = None,
        evaluations: EvaluationTimes | None = None,
        checkpoints: RankCheckpoints | None = None,
        is_copy: bool = False,
        coding: Coding | None = None,
        updates: Updates | None = None,
    ) -> None:
        super().__init__(
            comm,
            model,
            strategy,
            seed=seed,
            evaluations=evaluations,
            checkpoints=checkpoints,
            is_copy=is_copy,
        )
        self.data, self.max_steps, self.local_step = data, max_steps, 0
        self._make_learner, self._until = make_learner, until
        self._coding, self._updates = coding, updates
        self._trial: StateTrial | None = None
        if self._checkpoints.every is not None:
            self._trial = StateTrial(strategy, model, self._set_up_strategy)
        self._is_tried = False
        self._payload_then = -1  # payload bytes sent when ranks were last together

    def run(self) -> RankOutcome:
        """Train to the end and return this rank's result."""
        self._begin()
        self.participation.begin()  # before any evaluation
        try:
            while (step := self._next_step()) is not None:
                self.snapshots.evaluate(self.local_step)
                self.do(step)
                is_due = self._checkpoints.is_due(self.local_step)
                self._try_state(is_due)
                if is_due:
                    self._save(self.local_step)
            return self._finish()
        finally:
            self.close()

    def _try_state(self, is_due: bool) -> None:
        """Try the state of a strategy of one's own: after the first step, and where the first checkpoint is due."""
        if self._trial is not None and (is_due or not self._is_tried):
            self._trial.refuse_incomplete(self.strategy)
            self._is_tried = True
            if is_due:
                self._trial = None

    def _next_step(self) -> StepSamples | None:
        """Next step's samples; None at the end of the run."""
        if self.local_step >= self.max_steps or self._is_late():
            return None
        return self.data.next_step()

    def _is_late(self) -> bool:
        """Return True once `until` has passed: for this rank, or for one of the ranks that step together.

        Ranks that step together agree where they meet anyway, after a step in which they exchanged
        something: so no rank waits for it.
        """
        if self._until is None:
            return False
        if self.participation.is_alone:
            return self.comm.now() >= self._until
        payload = self.comm.traffic.payload_bytes
        has_met, self._payload_then = payload != self._payload_then, payload
        if not has_met:
            return False
        late, peers = self.comm.now() >= self._until, self.participation.peers
        with self.comm.off_clock():
            return bool(peers.all_reduce(torch.tensor([int(late)]), op="max"))

    # --- a step --------------------------------------------------------------------------------------------

    def do(self, step: StepSamples) -> None:
        """Take a step, or skip it if others did it while this rank was absent."""
        if self.participation.skips(self.local_step):
            self.strategy.skip_step()
        else:
            self._train(step)
        self.local_step += 1
        self.snapshots.after_step(self.local_step)

    def _train(self, step: StepSamples) -> None:
        strategy, learning_rate = self.strategy, self.strategy.learning_rate
        weight = step.samples * self.strategy.num_nodes / step.total_samples
        context = StepContext(
            self.local_step, weight, step.samples, self.learner.scaler, False, step.samples_of
        )
        traffic = self.comm.traffic

        def row(loss: float) -> dict[str, Any]:
            return {
                "step": self.local_step + 1,
                "loss": loss,
                "samples": step.samples,
                "lr": learning_rate,
                "bytes_sent": traffic.bytes_sent,
                "payload_bytes": traffic.payload_bytes,
                "wan_bytes": traffic.wan_bytes,
            }

        def announce(loss: float) -> None:
            place = self.participation.announced(self.local_step)
            if place is not None:
                self.comm.mark({"announced": {**row(loss), **place}})

        loss = take_step(strategy, self.learner, step, context, announce)
        self.comm.mark({**row(loss), **strategy.row()})

    # --- the two ends --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make all replicas rank 0's, off the clock, and set learner and strategy up."""
        if not self.model.training:
            self.model.train()
        together = self.comm.inside if self.comm.members_change else self.comm
        if together is not None and together.world_size > 1 and not self._is_copy:
            with self.comm.off_clock():
                broadcast_state(self.model, together)
        self.learner = self._make_learner()
        self._set_up_strategy(self.strategy, self.model, self.comm)
        if self._updates is not None:
            charge_updates(self.strategy.optimizers, self._updates, self.comm.advance)
        self.learner.take_over(self.strategy.optimizers)
        self._begin_snapshots()

    def _set_up_strategy(self, strategy: Strategy, model: nn.Module, comm: Communicator) -> None:
        about = (model, comm, self.max_steps, self._seed)
        if self._coding is None or "coding" not in inspect.signature(strategy.setup).parameters:
            strategy.setup(*about)  # also an override from times in which coding was free
        else:
            strategy.setup(*about, coding=self._coding)

    def _finish(self) -> RankOutcome:
        self.strategy.finish()
        self.snapshots.at_end(self.local_step)
        coding = None if self._coding is None else coding_report(self.comm.traffic, self.strategy.trainable)
        return RankOutcome(final_state(self.model), self.max_steps, coding=coding)

    def close(self) -> None:
        """Remove hooks from the model."""
        self.learner.close()
        self.strategy.close()

    def state_dict(self) -> dict[str, Any]:
        """Steps, learner and data as well."""
        return {
            "local_step": self.local_step,
            "payload_then": self._payload_then,
            "learner": self.learner.state_dict(),
            "data": self.data.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, after `start`."""
        self.local_step, self._payload_then = state["local_step"], state["payload_then"]
        self.learner.load_state_dict(state["learner"])
        super().load_state_dict(state)
        self.data.load_state_dict(state["data"])


class Server(Role):
    """A server of a run, which trains nothing.

    The last of all ranks has the judged model. It is evaluated where a worker's loop would be: when workers' steps, in
    the mean over workers, reach a point of the grid. Likewise its state is kept when as many steps have gone in as a
    checkpoint is of, or at the end, for those checkpoints that workers have reached without it.
    """

    _next = 0  # step of the next evaluation
    _steps, _saved_step = 0.0, 0  # gone in; of the last checkpoint
    _has_served = False

    def run(self) -> RankOutcome:
        """Serve until no worker sends anything any more."""
        is_resumed = self._begin()
        try:
            if is_resumed:
                self._save_and_evaluate()
            else:
                self._updated(0.0)
            if not self._has_served:
                self.strategy.serve(self._updated)
            self._has_served = True
            for step in self._checkpoints.begun(after=self._saved_step):
                self._save(step)
            self.strategy.finish()
            self.comm.mark({"served_wan_bytes": self.comm.traffic.wan_bytes})
            self.comm.mark({"looked": END})
            self.snapshots.at_end(self._next)
            return RankOutcome(final_state(self.model), 0)
        finally:
            self.strategy.close()

    def start(self) -> None:
        """Make the model rank 0's, off the clock, and set the strategy up."""
        self.model.train()
        if not self._is_copy:
            with self.comm.off_clock():
                broadcast_state(self.model, self.comm)
        self.strategy.setup(self.model, self.comm, max_steps=1, seed=self._seed)
        self._begin_snapshots()

    def _updated(self, steps: float) -> None:
        """Evaluate the judged model, and save the state, where that is due after so many steps that have gone in."""
        self._steps = steps
        self.comm.mark({"served_wan_bytes": self.comm.traffic.wan_bytes})
        self._save_and_evaluate()

    def _save_and_evaluate(self) -> None:
        steps = self._steps
        while (due := self._checkpoints.next_step(self._saved_step)) is not None and due <= steps:
            self._evaluate(steps, before=due)
            self._save(due)
        self._evaluate(steps)

    def _evaluate(self, steps: float, before: int | None = None) -> None:
        """Evaluate the judged model if as many steps as the grid wants have gone into it."""
        if self.comm.rank < self.comm.world_size - 1 or self._evaluations.evaluate_every is None:
            return
        if self._evaluations.evaluate_seconds is not None:
            if before is None:
                self.snapshots.after_step(int(steps))
                self.snapshots.evaluate(int(steps))
            return
        while self._next <= steps and (before is None or self._next < before):
            self.snapshots.after_step(self._next)
            self.comm.mark({"looked": self._next})
            self.snapshots.evaluate(self._next)
            self._next += self._evaluations.evaluate_every

    def state_dict(self) -> dict[str, Any]:
        """Counts of steps as well."""
        return {
            "steps": self._steps,
            "next": self._next,
            "saved_step": self._saved_step,
            "has_served": self._has_served,
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, after `start`."""
        self._steps, self._next, self._saved_step = state["steps"], state["next"], state["saved_step"]
        self._has_served = state["has_served"]
        super().load_state_dict(state)

    def _save(self, step: int) -> None:
        self._saved_step = step
        super()._save(step)
