"""Loops of a worker (a batch, its gradients, the strategy's step, a row) and of a server."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.cost.speeds import charge_updates
from exogym_core.data.batches import device_of
from exogym_core.events import Announced, EvaluationPoint, EvaluationTaken, Grid, Saved, Served, StepDone
from exogym_core.run.snapshots import (
    EvaluationTimes,
    Snapshots,
    broadcast_state,
    final_state,
    load_named,
    passing_buffers,
    take_shapes,
)
from exogym_core.strategy.base import StepContext
from exogym_core.strategy.parts.codecs import coding_report
from exogym_core.strategy.parts.state import State, Stateful
from exogym_core.workers.rng import random_streams, restore_random_streams
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding, Updates
    from exogym_core.data.samples import Source, StepSamples
    from exogym_core.events import RoundPlace
    from exogym_core.learner import TorchLearner
    from exogym_core.stages.learner import StageRank
    from exogym_core.strategy.base import Strategy

__all__ = ["Loop", "RankOutcome", "Role", "Server", "set_up", "take_step"]

Samples = TypeVar("Samples")

_MOST_AHEAD = 64  # steps taken at once: the run monitor sees their rows after the last


@dataclass
class RankOutcome:
    """Result of one rank.

    Attributes:
        state: its model's state, on the CPU.
        max_steps: steps to do.
        remarks: warnings for the user.
        coding: "charged" or "not charged" for values that it encoded; None where coding is free, or none were.
        options: options of its strategy as they were used, and its optimizers.
        reads: figures of the network that it has read, see `CallState`.
    """

    state: dict[str, Any]
    max_steps: int
    remarks: tuple[str, ...] = ()
    coding: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    reads: Collection[str] = ()


def _plain(value: Any, depth: int = 4) -> Any:
    """A value as JSON has it, of mappings without what is None or off; of other objects the name of their class."""
    if isinstance(value, Mapping) and depth:
        given = {str(key): each for key, each in value.items() if each is not None and each is not False}
        return {key: _plain(each, depth - 1) for key, each in sorted(given.items())}
    if isinstance(value, list | tuple) and depth:
        return [_plain(each, depth - 1) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def take_step(
    strategy: Strategy,
    gradients: Callable[[Samples, StepContext], float],
    step: Samples,
    context: StepContext,
    announce: Callable[[float], None] | None = None,
) -> float:
    """Take one local step of a strategy that has been set up; return the loss.

    Args:
        strategy: of the rank.
        gradients: leaves the gradients of samples in `.grad`, and returns their mean loss.
        step: the samples.
        context: number of the step.
        announce: called with the loss before anything is exchanged.

    Raises:
        InputError: an override of `step` has not counted the step.
    """
    strategy.begin_step(context)
    strategy.zero_grad()
    loss = gradients(step, context)
    if announce is not None:
        announce(loss)
    number = strategy.local_step
    strategy.step()
    if strategy.local_step == number:  # no round of it would ever come
        name = type(strategy).__name__
        raise InputError(f"{name}: step() has not counted step {number + 1}: end it with super().step()")
    return loss if context.loss is None else context.loss


def set_up(
    strategy: Strategy, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None
) -> None:
    """Set a strategy up; an override of `setup` that takes no `coding` was written when coding was free."""
    takes_coding = coding is not None and "coding" in inspect.signature(strategy.setup).parameters
    strategy.setup(model, comm, max_steps, seed, **({"coding": coding} if takes_coding else {}))


@dataclass(eq=False)
class Role(Stateful):
    """Rank of a run: model, strategy and snapshots, saved and restored with the communicator and the random streams.

    Args:
        comm: the rank's communicator.
        model: its replica, on its device; changed in place.
        strategy: its own copy, not yet set up.
        seed: of the run.
        evaluations: steps and times of evaluations.
        checkpoints: folder for this rank's state, and the checkpoint to resume from.
        is_copy: the replicas are copies of one model, so nothing needs to be broadcast.
    """

    state = State("model", "strategy", deposits="snapshots")

    comm: Communicator
    model: nn.Module
    strategy: Strategy
    _: KW_ONLY
    seed: int = 42
    evaluations: EvaluationTimes = field(default_factory=EvaluationTimes)
    checkpoints: RankCheckpoints = field(default_factory=RankCheckpoints)
    is_copy: bool = False
    snapshots: Snapshots = field(init=False)

    def start(self) -> None:
        """Make all replicas rank 0's, off the clock, and set the strategy up."""
        raise NotImplementedError

    def _begin(self) -> bool:
        """Start, or resume from the checkpoint; returns whether there was one."""
        self.comm.device = device_of(self.model)
        resumed = self.checkpoints.resumed
        if resumed is None:
            self.start()
        else:
            self._resume(resumed.rank_state(self.comm.rank, device_of(self.model)))
        if not self.is_copy and not self.comm.members_change:
            # Real ranks end the broadcast of the model one after the other, and begin their steps together.
            with self.comm.off_clock():
                self.comm.barrier()
        return resumed is not None

    def _save(self, step: int) -> None:
        """Save this rank's part of the checkpoint of `step`, and mark that: free of virtual time.

        Raises:
            InputError: the rank has a call in flight, or its state holds what cannot be kept.
            RecordError: a file cannot be written.
        """
        call_state = self.comm.state
        reads = set(call_state.reads)
        of_calls = self.comm.state_dict()
        call_state.reads = reads  # a checkpoint shows the rank nothing of the network
        state = {
            **self.state_dict(),
            "buffers": passing_buffers(self.model),
            "communicator": of_calls,
            "random": random_streams(device_of(self.model)),
        }
        files = self.checkpoints.save(step, self.comm.rank, state)
        self.comm.mark(Saved(step, files, self.snapshots.num_timed, self.snapshots.num_deposited))
        self.comm.flush()

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Start again and load the saved state; the clock has repeated all requests until then."""
        with self.comm.repeating():
            self.start()
        self.comm.load_state_dict(saved["communicator"])  # first: strategies read its counters
        if "model" in saved:
            take_shapes(self.model, saved["model"] | saved.get("buffers", {}), is_whole=True)
        else:
            self.strategy.workers.leave()
        load_named(self.model, saved.get("buffers", {}))
        with self.comm.repeating():  # messages in flight are sent again, and passes under way taken again
            self.load_state_dict(saved)
        restore_random_streams(saved["random"], device_of(self.model))


@dataclass(eq=False)
class Loop(Role):
    """A worker of a run. A step goes: loop -> learner.gradients -> strategy.step -> communicator -> mark.

    Args:
        comm, model, strategy, seed, evaluations, checkpoints, is_copy: as for every role.
        data: its steps.
        make_learner: makes the learner; called before the strategy is set up.
        max_steps: steps to do; the data may end sooner.
        until: virtual seconds after which no step begins. Ranks of a synchronous strategy end together, after the first
            exchange that none of them finishes before it.
        coding: virtual time of codecs; None where it is free.
        updates: virtual time of optimizers' steps; None where they are free.
        stage: the part of its worker's model that the rank has; None: all of it.

    Attributes:
        peers: connects the ranks that are workers for the strategy: all, or those with the same stage.
        local_step: steps done.
        learner: turns batches into gradients; available after `start`, as `snapshots` are.
    """

    state = State("local_step", "learner", "data", payload_then="_payload_then")

    data: Source
    make_learner: Callable[[], TorchLearner]
    max_steps: int
    _: KW_ONLY
    stage: StageRank | None = None
    until: float | None = None
    coding: Coding | None = None
    updates: Updates | None = None
    peers: Communicator = field(init=False)
    learner: TorchLearner = field(init=False)
    local_step: int = field(default=0, init=False)
    _payload_then: int = field(default=-1, init=False)  # payload bytes sent when ranks were last together
    _is_off_clock: bool = field(default=False, init=False)  # the strategy, in some step
    _is_forwarded: bool = field(default=False, init=False)  # the model, for the first time

    def declared_state(self) -> dict[str, str]:
        """Attributes to keep: without the model where the rank has dropped it."""
        declared = super().declared_state()
        return {k: name for k, name in declared.items() if k != "model" or not self.strategy.workers.is_out}

    def run(self) -> RankOutcome:
        """Train to the end and return this rank's result."""
        self._begin()
        self.strategy.workers.begin()  # before any evaluation
        try:
            while self.go_on():
                pass
            return self._finish()
        finally:
            self.close()

    def go_on(self) -> bool:
        """Take the next step, or several at once; returns False at the end of the run."""
        if self.local_step >= self.max_steps or (self.until is not None and self._is_late(self.until)):
            return False
        workers, every = self.strategy.workers, self.checkpoints.every
        if workers.has_absences and (out := workers.sits_out(self.local_step)):
            self._sit_out(out)
        else:
            ahead = self._steps_ahead() if self.learner.runs_ahead else 0
            step = None if ahead else self.data.next_step()
            if not ahead and step is None:
                return False
            self.snapshots.evaluate(self.local_step)
            if step is None:
                self._run_ahead(ahead)
            else:
                self.do(step)
        if every is not None and self.local_step % every == 0 and workers.can_save(self.local_step):
            self._save(self.local_step)
        return True

    def _sit_out(self, num_steps: int) -> None:
        """Pass `num_steps` in which this rank takes no part, but not beyond the next checkpoint or the end."""
        dates = [self.checkpoints.every]
        if not self.strategy.workers.is_out:
            self.snapshots.evaluate(self.local_step)
            self._take_place()
            dates += [self.evaluations.evaluate_every, self.evaluations.correlate_every]
        step, num_steps = self.local_step, min(num_steps, self.max_steps - self.local_step)
        num_steps = min(
            num_steps, *(every - step % every for every in dates if every is not None), sys.maxsize
        )
        self.strategy.sit_out(num_steps)
        self.data.sit_out(num_steps)
        self.local_step += num_steps

    def _is_late(self, until: float) -> bool:
        """Return True once `until` has passed: for this rank, or for all of the ranks that step together.

        Those end together, after a step in which they exchanged something or could have.
        """
        if self.strategy.workers.is_alone and self.stage is None:
            return self.comm.now() >= until
        payload = self.comm.state.traffic.payload_bytes
        has_met, self._payload_then = payload != self._payload_then, payload
        if not (has_met or self.strategy.has_ended_round):
            return False
        peers = self.strategy.workers.peers if self.stage is None else self.comm  # stages end together
        return peers.is_over(until, self.local_step)

    def _steps_ahead(self) -> int:
        """Number of next steps that may be taken at once: nothing is exchanged, evaluated or saved among them."""
        of_single_steps = (
            self.until,
            self.updates,
            self.evaluations.evaluate_seconds,
            self.strategy.workers.number,  # others may be ahead
        )
        if any(each is not None for each in of_single_steps):
            return 0
        if not (self.data.has_whole_steps and self.strategy.is_synchronous):
            return 0
        site = self.strategy.site
        if site.gradients is not None and site.averager is None:  # several calls a step
            return 0
        step, steps = self.local_step, min(self.strategy.steps_to_exchange, self.max_steps - self.local_step)
        dates = (self.evaluations.evaluate_every, self.evaluations.correlate_every, self.checkpoints.every)
        return min(steps, _MOST_AHEAD, *(every - step % every for every in dates if every is not None))

    # --- a step --------------------------------------------------------------------------------------------

    def _run_ahead(self, num_steps: int) -> None:
        """Take `num_steps` at once, or a single one where the other ranks take single ones."""
        strategy = self.strategy
        taken = self.learner.run_ahead(self.data, strategy, num_steps)
        if not taken and (step := self.data.next_step()) is not None:
            self.do(step)
            return
        averager = strategy.site.averager
        for each in taken:
            learning_rate = strategy.learning_rate
            about = (self.local_step, each.step.samples, each.step.samples_of, self.learner.scaler)
            sizes = self.data.sizes
            strategy.begin_step(StepContext(*about, last_micro_batch=False, comm=self.comm, data_sizes=sizes))
            self.learner.charge(self.local_step, each)
            if averager is not None:
                averager.charge()
            strategy.finish_step()
            self.comm.mark(self._step_done(each.loss, each.step.samples, learning_rate, None, None))
            self.local_step += 1
        self.snapshots.after_step(self.local_step)

    def do(self, step: StepSamples) -> None:
        """Take a step, or skip it if others did it while this rank was absent."""
        strategy, learning_rate = self.strategy, self.strategy.learning_rate
        workers = strategy.workers
        if workers.has_absences and not self._take_place():
            strategy.skip_step()
        else:
            about_step = (self.local_step, step.samples, step.samples_of, self.learner.scaler)
            sizes = self.data.sizes
            context = StepContext(*about_step, last_micro_batch=False, comm=self.peers, data_sizes=sizes)

            def announce(loss: float) -> None:
                if not self._is_forwarded:
                    self._is_forwarded = bool(self.snapshots.parameters())
                place = workers.announced(self.local_step)
                if place is not None:
                    about = (step.samples, learning_rate, context.count, place)
                    self.comm.mark(Announced(self._step_done(loss, *about)))

            has_news = self.comm.members_change or not self._is_forwarded
            num_off_clock = self.comm.state.num_off_clock
            loss = take_step(strategy, self.learner.gradients, step, context, announce if has_news else None)
            self._is_off_clock |= self.comm.state.num_off_clock > num_off_clock
            place = strategy.round_place() if workers.has_absences else None
            self.comm.mark(self._step_done(loss, context.samples, learning_rate, context.count, place))
        self.local_step += 1
        self.snapshots.after_step(self.local_step)

    def _take_place(self) -> bool:
        """Take the rank's place in a round that begins; a global model that it downloads is made anew.

        Returns False where the rank takes no part in the step.
        """
        workers = self.strategy.workers
        was_out = workers.is_out
        takes_part = workers.take_place(self.local_step)
        if was_out and not workers.is_out:
            self.snapshots.after_step(self.local_step)
            if self.updates is not None:
                charge_updates(self.strategy.optimizers[1:], self.updates, self.comm.advance)
        return takes_part

    def _step_done(
        self, loss: float, samples: int, learning_rate: float, count: float | None, place: RoundPlace | None
    ) -> StepDone:
        """Event of the step under way; samples count where their loss is computed."""
        samples = samples if self.learner.has_loss else 0
        traffic = self.comm.state.traffic
        sent = (traffic.bytes_sent, traffic.payload_bytes, traffic.wan_bytes)
        return StepDone(self.local_step + 1, loss, samples, learning_rate, *sent, count, place)

    # --- the two ends --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make all replicas rank 0's, off the clock, and set learner and strategy up."""
        if not self.model.training:
            self.model.train()
        self.peers = self.comm if self.stage is None else self.stage.peers
        together = self.comm.inside if self.comm.members_change else self.peers
        if together is not None and together.world_size > 1 and not self.is_copy:
            with self.comm.off_clock():
                broadcast_state(self.model, together)
        self.learner = self.make_learner()
        set_up(self.strategy, self.model, self.peers, self.max_steps, self.seed, self.coding)
        if self.stage is not None:
            self.stage.clip_together(self.strategy)
        if self.updates is not None:
            charge_updates(self.strategy.optimizers, self.updates, self.comm.advance)
        self.learner.take_over(self.strategy.optimizers)
        self.snapshots = Snapshots(self.peers, self.model, self.strategy, self.evaluations)

    def _finish(self) -> RankOutcome:
        self.strategy.finish()
        self.snapshots.at_end(self.local_step)
        coding = (
            None if self.coding is None else coding_report(self.comm.state.traffic, self.strategy.trainable)
        )
        options: dict[str, Any] = _plain(self.strategy.arguments)
        options["optimizers"] = [
            {"name": type(each).__name__} | _plain(getattr(each, "defaults", {}))
            for each in self.strategy.optimizers
        ]
        remarks = self.strategy.workers.remarks
        if self._is_off_clock and self.comm.rank == 0:
            name = type(self.strategy).__name__
            remarks = (
                *remarks,
                f"{name}: makes calls off the clock, which cost nothing; netgym check finds values that train",
            )
        state = {} if self.strategy.workers.is_out else final_state(self.model)
        reads = sorted(self.comm.state.reads)
        return RankOutcome(state, self.max_steps, remarks, coding=coding, options=options, reads=reads)

    def close(self) -> None:
        """Remove hooks from the model, free gradients and optimizers' states, and end processes that read data."""
        self.data.close()
        self.model.zero_grad(set_to_none=True)
        for optimizer in self.strategy.optimizers:
            optimizer.state.clear()
        self.learner.close()
        self.strategy.close()


class Server(Role):
    """A server of a run, which trains nothing.

    The last of all ranks has the judged model. It is evaluated where a worker's loop would be: when workers' steps, in
    the mean over workers, reach a point of the grid. Likewise its state is kept when as many steps have gone in as a
    checkpoint is of, or at the end, for those checkpoints that workers have reached without it.
    """

    state = State(steps="_steps", next="_next", saved_step="_saved_step", has_served="_has_served")
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
            for step in self.checkpoints.begun(after=self._saved_step):
                self._save(step)
            self.strategy.finish()
            self.comm.mark(Served(self.comm.state.traffic.wan_bytes))
            self.comm.mark(EvaluationTaken(EvaluationPoint(Grid.END), None))
            self.snapshots.at_end(self._next)
            return RankOutcome(final_state(self.model), 0, reads=sorted(self.comm.state.reads))
        finally:
            self.strategy.close()

    def start(self) -> None:
        """Make the model rank 0's, off the clock, and set the strategy up."""
        self.model.train()
        if not self.is_copy:
            with self.comm.off_clock():
                broadcast_state(self.model, self.comm)
        self.strategy.setup(self.model, self.comm, max_steps=1, seed=self.seed)
        self.snapshots = Snapshots(self.comm, self.model, self.strategy, self.evaluations)

    def _updated(self, steps: float) -> None:
        """Evaluate the judged model and save the state where that is due after `steps`, in the mean over workers."""
        self._steps = steps
        self.comm.mark(Served(self.comm.state.traffic.wan_bytes))
        self._save_and_evaluate()

    def _save_and_evaluate(self) -> None:
        steps = self._steps
        every = self.checkpoints.every
        while every is not None and (due := self._saved_step + every) <= steps:
            self._evaluate(steps, before=due)
            self._save(due)
        self._evaluate(steps)

    def _evaluate(self, steps: float, before: int | None = None) -> None:
        """Evaluate the judged model at each point of the grid up to `steps`."""
        if self.comm.rank < self.comm.world_size - 1 or self.evaluations.evaluate_every is None:
            return
        if self.evaluations.evaluate_seconds is not None:
            if before is None:
                self.snapshots.after_step(int(steps))
                self.snapshots.evaluate(int(steps))
            return
        while self._next <= steps and (before is None or self._next < before):
            self.snapshots.after_step(self._next)
            self.comm.mark(EvaluationTaken(EvaluationPoint(Grid.STEP, self._next), self._next))
            self.snapshots.evaluate(self._next)
            self._next += self.evaluations.evaluate_every

    def _save(self, step: int) -> None:
        self._saved_step = step
        super()._save(step)
