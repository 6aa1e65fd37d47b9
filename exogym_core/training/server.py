"""A rank that computes nothing: it keeps what workers send to it, and the model that could be shipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.checkpoints.rank_state import random_streams, restore_random_streams
from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.training.deposits import END, Deposits, Looks
from exogym_core.training.loop import RankOutcome
from exogym_core.training.snapshot import broadcast_state, cpu_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy

__all__ = ["Server"]


class Server:
    """One server of a run; workers are in `exogym_core.training.loop:Loop`.

    The last of all ranks has the model that is judged. It is looked at where a worker's loop would be: as often as
    workers' steps, in the mean over workers, come to a point of the grid. Likewise its state is kept when as many steps
    have gone in as a checkpoint is of, or at the end, for those checkpoints that workers have come to without it.

    Args:
        comm: the rank's communicator.
        model: like the workers' replicas.
        strategy: its own copy, not yet set up.
        looks: when the run is looked at.
        seed: of the run.
        checkpoints: where to save this rank's state, and what to go on from.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        strategy: Strategy,
        looks: Looks,
        *,
        seed: int,
        checkpoints: RankCheckpoints | None = None,
    ) -> None:
        self.comm, self.model, self.strategy = comm, model, strategy
        self._looks, self._seed, self._next = looks, seed, 0
        self._checkpoints = checkpoints if checkpoints is not None else RankCheckpoints()
        self._steps, self._saved_step = 0.0, 0  # gone in; of the last checkpoint
        self._has_served = False
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def run(self) -> RankOutcome:
        """Serve until no worker sends anything any more."""
        saved = self._checkpoints.load(self.comm.rank)
        if saved is None:
            self._set_up()
        else:
            self._resume(saved)
        try:
            if saved is None:
                self._updated(0.0)
            else:
                self._keep_and_look()
            if not self._has_served:
                self.strategy.serve(self._updated)
            self._has_served = True
            for step in self._checkpoints.begun(after=self._saved_step):
                self._save(step)
            self.strategy.finish()
            self.comm.mark({"served_wan_bytes": self.comm.traffic.wan_bytes})
            self.comm.mark({"looked": END})
            self._deposits.at_end(self._next)
            return RankOutcome(cpu_state(self.model), 0)
        finally:
            self.strategy.close()

    def _set_up(self) -> None:
        self.model.train()
        with self.comm.off_clock():
            broadcast_state(self.model, self.comm)
        self.strategy.setup(self.model, self.comm, max_steps=1, seed=self._seed)
        self._deposits = Deposits(self.comm, self.model, self.strategy, self._looks)

    def _updated(self, steps: float) -> None:
        """So many steps have gone in: look at the judged model and keep the state where that is due."""
        self._steps = steps
        self.comm.mark({"served_wan_bytes": self.comm.traffic.wan_bytes})
        self._keep_and_look()

    def _keep_and_look(self) -> None:
        steps = self._steps
        while (due := self._checkpoints.next_step(self._saved_step)) is not None and due <= steps:
            self._look(steps, before=due)
            self._save(due)
        self._look(steps)

    def _look(self, steps: float, before: int | None = None) -> None:
        """Look at the judged model if as many steps as the grid wants have gone into it."""
        if self.comm.rank < self.comm.world_size - 1 or self._looks.evaluate_every is None:
            return
        if self._looks.evaluate_seconds is not None:
            if before is None:
                self._deposits.after_step(int(steps))
                self._deposits.look(int(steps))
            return
        while self._next <= steps and (before is None or self._next < before):
            self._deposits.after_step(self._next)
            self.comm.mark({"looked": self._next})
            self._deposits.look(self._next)
            self._next += self._looks.evaluate_every

    # --- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of this rank that serving changes, besides the clock and the random streams."""
        return {
            "steps": self._steps,
            "next": self._next,
            "saved_step": self._saved_step,
            "has_served": self._has_served,
            "model": self.model.state_dict(),
            "strategy": self.strategy.state_dict(),
            "deposits": self._deposits.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._steps, self._next, self._saved_step = state["steps"], state["next"], state["saved_step"]
        self._has_served = state["has_served"]
        self.model.load_state_dict(state["model"])
        self.strategy.load_state_dict(state["strategy"])
        self._deposits.load_state_dict(state["deposits"])

    def _save(self, step: int) -> None:
        """Save this rank's part of the checkpoint of a step, and mark that: free of virtual time."""
        self._saved_step = step
        state = {
            **self.state_dict(),
            "communicator": self.comm.state_dict(),
            "random": random_streams(self._device),
        }
        files = self._checkpoints.save(step, self.comm.rank, state)
        self.comm.mark({"step": step, "checkpoint": files, **self._deposits.looks_so_far()})
        self.comm.flush()

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Set up anew and take over what was saved; the clock has heard of all that already."""
        with self.comm.repeating():
            self._set_up()
        self.comm.load_state_dict(saved["communicator"])
        with self.comm.repeating():
            self.load_state_dict(saved)
        restore_random_streams(saved["random"], self._device)
