"""AD-PSGD: each worker averages with one other at a time, whenever it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option, positive_int
from exogym_core.strategy.parts.flat import flatten, widened, write_back
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ADPSGDStrategy"]


class ADPSGDStrategy(Strategy, name="ADPSGD"):
    """Asynchronous decentralised SGD: after its step a worker sends its parameters to a random other one.

    The receiver, at its own next step, moves half-way towards them and sends back what it had; the first then
    moves by half the difference to what it had sent. So both meet in the middle, no rank waits, and the sum of all
    parameters is kept but for messages under way. One exchange of a worker's own is in flight at a time; what has not
    been answered at the end is left. The paper's averaging of a pair is atomic; here it takes the network's time.

    Bytes: `4 P` there and `4 P` back an exchange, whatever the number of workers; fp64 parameters travel as they are.

    Args:
        optim_spec: the optimizer of local steps (AdamW by default; the paper's is SGD).
        interval: local steps between the exchanges that a worker begins.
        options: of every Strategy.

    References:
        Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, arXiv 1710.06952.
    """

    interval: int = option(1, positive_int)
    positional = ("optim_spec",)

    judged = "own"
    round_steps = property(lambda self: self.interval)
    is_synchronous = False
    state = State("sent", "draws")

    def prepare(self) -> None:
        """Begin with nothing under way."""
        self.sent: Tensor | None = None  # awaits its answer
        self.draws = torch.Generator().manual_seed(self.seed * 1_000_003 + self.rank)

    def step(self) -> None:
        """A local step, then received messages, then an exchange of this rank's own."""
        self.clip_gradients()
        self.optimizer_step()
        if self.num_nodes > 1:
            self.mix()
        super().step()

    @torch.no_grad()
    def mix(self) -> None:
        """Average with received parameters, then send to one neighbour."""
        own = flatten(list(map(widened, self.trainable)))
        for source, theirs in self.comm.take("offers"):
            self.comm.put(own, source, "answers")
            own = own.lerp(theirs, 0.5)
        for _, theirs in self.comm.take("answers"):
            assert self.sent is not None
            own = own + (theirs - self.sent) / 2
            self.sent = None
        write_back(own, self.trainable)
        if self.sent is None and (self.local_step + 1) % self.interval == 0:
            other = int(torch.randint(self.num_nodes - 1, (1,), generator=self.draws))
            self.sent = own
            self.comm.put(own, other + (other >= self.rank), "offers")
