"""One rank's training loop: a batch, its gradients, the strategy's step, a row; then whoever wants to look."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exogym_core.checkpoints.rank_state import random_streams, restore_random_streams
from exogym_core.checkpoints.trial import StateTrial
from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.cost.updates import charge_updates
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.parts.charged import told_coding
from exogym_core.training.deposits import Deposits, Looks
from exogym_core.training.snapshot import broadcast_state, cpu_state, passing_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding
    from exogym_core.cost.updates import Updates
    from exogym_core.data.samples import Source, StepSamples
    from exogym_core.strategy.base import Strategy
    from exogym_core.training.learner import Learner

__all__ = ["Loop", "RankOutcome", "take_step"]

Samples = TypeVar("Samples")


@dataclass
class RankOutcome:
    """What a rank ends with.

    Attributes:
        state: its model's state, on the CPU.
        max_steps: how many steps were to be done.
        remarks: what the user should be warned of.
        coding: whether what it encoded was "charged" or "not charged"; None where coding is free, or nothing was.
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
    """One local step of a strategy that has been set up, whoever learns; returns the loss.

    `announce` is told of it before anything is exchanged.
    """
    strategy.begin_step(context)
    strategy.zero_grad()
    loss = learner.gradients(step, context)
    announce(loss)
    strategy.step()
    return loss


class Loop:
    """One rank of a run. A step walks: loop -> learner.gradients -> strategy.step -> communicator -> mark.

    Args:
        comm: the rank's communicator.
        model: its replica, on its device; changed in place.
        strategy: its own copy, not yet set up.
        data: its steps.
        make_learner: makes what turns batches into gradients; called before the strategy is set up.
        max_steps: steps to do; the data may end sooner.
        seed: of the run.
        until: virtual seconds after which no step begins. Ranks of a synchronous strategy end together, where they
            first meet after one of them is past it.
        looks: when the run is looked at.
        checkpoints: where to save this rank's state, and what to go on from.
        coding: what the work of codecs costs; None where it is free.
        updates: what optimizers' steps cost; None where they are free.

    Attributes:
        local_step: steps done.
        learner: turns batches into gradients; there from the start on, as are `deposits`.
        deposits: this rank's side of looking on.
    """

    learner: Learner[StepSamples]
    deposits: Deposits

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
        looks: Looks | None = None,
        checkpoints: RankCheckpoints | None = None,
        coding: Coding | None = None,
        updates: Updates | None = None,
    ) -> None:
        self.comm, self.model, self.strategy, self.data = comm, model, strategy, data
        self.max_steps, self.local_step = max_steps, 0
        self._make_learner, self._seed, self._until = make_learner, seed, until
        self._looks = looks if looks is not None else Looks()
        self._checkpoints = checkpoints if checkpoints is not None else RankCheckpoints()
        self._coding, self._updates = coding, updates
        self._trial: StateTrial | None = None
        if self._checkpoints.every is not None:
            self._trial = StateTrial(strategy, model, self._set_up_strategy)
        self._is_tried = False
        self._payload_then = -1  # payload bytes sent when ranks were last together
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def run(self) -> RankOutcome:
        """Train to the end and return what this rank has."""
        saved = self._checkpoints.load(self.comm.rank)
        if saved is None:
            self.start()
        else:
            self._resume(saved)
        if self.comm.members_change and self.strategy.absence is not None:
            self.strategy.absence.begin()  # before anybody looks: the others may be ahead by many rounds
        try:
            while (step := self._next_step()) is not None:
                self.deposits.look(self.local_step)
                self.do(step)
                is_due = self._checkpoints.is_due(self.local_step)
                self._try_state(is_due)
                if is_due:
                    self._save()
            return self._finish()
        finally:
            self.close()

    def _try_state(self, is_due: bool) -> None:
        """Try what a strategy of one's own keeps: after the first step, and where the first checkpoint is due."""
        if self._trial is not None and (is_due or not self._is_tried):
            self._trial.refuse_incomplete(self.strategy)
            self._is_tried = True
            if is_due:
                self._trial = None

    def _next_step(self) -> StepSamples | None:
        """What to do next; None where the run ends."""
        if self.local_step >= self.max_steps or self._is_late():
            return None
        return self.data.next_step()

    def _is_late(self) -> bool:
        """Whether the time is over: for this rank, or where ranks go together for one of them.

        Ranks that go together are asked where they are together anyway, after a step in which they exchanged
        something: so nobody waits for the question.
        """
        if self._until is None:
            return False
        alone = not self.strategy.is_synchronous or self.strategy.num_nodes == 1
        absence, payload = self.strategy.absence, self.comm.traffic.payload_bytes
        present = list(range(self.comm.world_size)) if absence is None else list(absence.present)
        if alone or self.comm.rank not in present:
            return self.comm.now() >= self._until
        has_met, self._payload_then = payload != self._payload_then, payload
        if not has_met:
            return False
        late = self.comm.now() >= self._until
        whole = len(present) == self.comm.world_size
        peers = self.comm if whole else self.comm.group(present, reuse=True)
        with self.comm.off_clock():
            return bool(peers.all_reduce(torch.tensor([int(late)]), op="max"))

    # --- a step --------------------------------------------------------------------------------------------

    def do(self, step: StepSamples) -> None:
        """One step; left out where others have done it while this rank was away."""
        absence = self.strategy.absence
        if absence is not None and absence.is_ahead(self.local_step):
            self.strategy.skip_step()
        else:
            self._train(step)
        self.local_step += 1
        self.deposits.after_step(self.local_step)

    def _train(self, step: StepSamples) -> None:
        strategy, learning_rate = self.strategy, self.strategy.learning_rate
        weight = step.samples * self.strategy.num_nodes / step.total_samples
        context = StepContext(
            self.local_step, weight, step.samples, self.learner.scaler, False, step.samples_of
        )
        traffic, absence = self.comm.traffic, strategy.absence

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
            """Others may be through with a round in which this rank dies before it has marked the step."""
            if absence is not None and self.comm.members_change and absence.ends_round(self.local_step):
                self.comm.mark({"announced": {**row(loss), **absence.place(self.local_step + 1)}})

        loss = take_step(strategy, self.learner, step, context, announce)
        self.comm.mark({**row(loss), **strategy.row()})

    # --- the two ends --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make all replicas rank 0's, parameters and buffers, and set the strategy up.

        The first copy is off the clock: a run begins when everyone has the model.
        """
        self._set_up()

    def _set_up(self) -> None:
        if not self.model.training:
            self.model.train()
        together = self.comm.inside if self.comm.members_change else self.comm
        if together is not None and together.world_size > 1:
            with self.comm.off_clock():
                broadcast_state(self.model, together)
        self.learner = self._make_learner()
        self._set_up_strategy(self.strategy, self.model, self.comm)
        if self._updates is not None:
            charge_updates(self.strategy.optimizers, self._updates, self.comm.advance)
        self.deposits = Deposits(self.comm, self.model, self.strategy, self._looks)

    def _set_up_strategy(self, strategy: Strategy, model: nn.Module, comm: Communicator) -> None:
        about = (model, comm, self.max_steps, self._seed)
        if self._coding is None or "coding" not in inspect.signature(strategy.setup).parameters:
            strategy.setup(*about)  # also an override from times in which coding was free
        else:
            strategy.setup(*about, coding=self._coding)

    def _finish(self) -> RankOutcome:
        self.strategy.finish()
        self.deposits.at_end(self.local_step)
        coding = None if self._coding is None else told_coding(self.comm.traffic, self.strategy.trainable)
        return RankOutcome(cpu_state(self.model), self.max_steps, coding=coding)

    def close(self) -> None:
        """Let go of the model."""
        self.learner.close()
        self.strategy.close()

    # --- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of this rank that a step changes, besides the clock and the random streams."""
        return {
            "local_step": self.local_step,
            "payload_then": self._payload_then,
            "model": self.model.state_dict(),
            "learner": self.learner.state_dict(),
            "strategy": self.strategy.state_dict(),
            "data": self.data.state_dict(),
            "deposits": self.deposits.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, after `start`."""
        self.local_step, self._payload_then = state["local_step"], state["payload_then"]
        self.model.load_state_dict(state["model"])
        self.learner.load_state_dict(state["learner"])
        self.strategy.load_state_dict(state["strategy"])
        self.data.load_state_dict(state["data"])
        self.deposits.load_state_dict(state["deposits"])

    def _save(self) -> None:
        """Save this rank as it is at the end of a step, and mark that: free of virtual time.

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
        files = self._checkpoints.save(self.local_step, self.comm.rank, state)
        self.comm.mark({"step": self.local_step, "checkpoint": files, **self.deposits.looks_so_far()})
        self.comm.flush()

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Set up anew and take over what was saved; the clock has heard of all that already."""
        with self.comm.repeating():
            self._set_up()
        self.comm.load_state_dict(saved["communicator"])  # first: strategies look at its counters
        with self.comm.repeating():  # what was in flight is sent again
            self.load_state_dict(saved)
        with torch.no_grad():
            for name, buffer in passing_buffers(self.model).items():
                buffer.copy_(saved["buffers"][name])
        restore_random_streams(saved["random"], self._device)
