"""Loop of a server rank: it serves workers, and evaluates and saves the judged model when that is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.run.loop import RankOutcome, Role
from exogym_core.run.snapshots import END, broadcast_state, final_state

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Server"]


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
