"""A rank that computes nothing: it keeps what workers send to it, and the model that could be shipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exogym_core.training.deposits import END, Deposits, Looks
from exogym_core.training.loop import RankOutcome
from exogym_core.training.snapshot import broadcast_state, cpu_state

if TYPE_CHECKING:
    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy

__all__ = ["Server"]


class Server:
    """One server of a run; workers are in `exogym_core.training.loop:Loop`.

    The last of all ranks has the model that is judged. It is looked at where a worker's loop would be: as often as
    workers' steps, in the mean over workers, come to a point of the grid.

    Args:
        comm: the rank's communicator.
        model: like the workers' replicas.
        strategy: its own copy, not yet set up.
        looks: when the run is looked at.
        seed: of the run.
    """

    def __init__(
        self, comm: Communicator, model: nn.Module, strategy: Strategy, looks: Looks, *, seed: int
    ) -> None:
        self.comm, self.model, self.strategy = comm, model, strategy
        self._looks, self._seed, self._next = looks, seed, 0

    def run(self) -> RankOutcome:
        """Serve until no worker sends anything any more."""
        self.model.train()
        with self.comm.off_clock():
            broadcast_state(self.model, self.comm)
        self.strategy.setup(self.model, self.comm, max_steps=1, seed=self._seed)
        self._deposits = Deposits(self.comm, self.model, self.strategy, self._looks)
        try:
            self._updated(0.0)
            self.strategy.serve(self._updated)
            self.strategy.finish()
            self.comm.mark({"served_wan_bytes": self.comm.traffic.wan_bytes})
            self.comm.mark({"looked": END})
            self._deposits.at_end(self._next)
            return RankOutcome(cpu_state(self.model), 0)
        finally:
            self.strategy.close()

    def _updated(self, steps: float) -> None:
        """Look at the judged model if as many steps as the grid wants have gone into it."""
        self.comm.mark({"served_wan_bytes": self.comm.traffic.wan_bytes})
        if self.comm.rank < self.comm.world_size - 1 or self._looks.evaluate_every is None:
            return
        if self._looks.evaluate_seconds is not None:
            self._deposits.after_step(int(steps))
            self._deposits.look(int(steps))
            return
        while self._next <= steps:
            self._deposits.after_step(self._next)
            self.comm.mark({"looked": self._next})
            self._deposits.look(self._next)
            self._next += self._looks.evaluate_every
