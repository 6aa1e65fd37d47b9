"""Async DiLoCo: a server applies each worker's displacement as it arrives."""

from __future__ import annotations

from exogym_core.strategy.options import number, option, positive_int
from exogym_core.strategy.participation.servers import ServedStrategy
from exogym_core.strategy.parts.outer import DelayedNesterov
from exogym_core.strategy.parts.state import State

__all__ = ["AsyncDiLoCoStrategy"]


class AsyncDiLoCoStrategy(ServedStrategy, name="AsyncDiLoCo"):
    """`H` local steps, then the displacement goes to a server, which answers with its parameters.

    The server applies each displacement `phi - theta_i` on arrival by `DelayedNesterov`, and the worker
    continues from the answer; it waits for its own answer alone. Displacements are stale by what others have
    sent meanwhile. With one worker it is DiLoCo. `servers` further ranks keep the parameters: one here.

    Bytes: `4 P + 8` up and `4 P + 4` down a worker round, for P parameters.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_lr: e.
        outer_momentum: beta.
        buffer: N, arrivals a momentum step; by default the number of workers.
        momentum_share: c, the part of the momentum that the steps between take.
        dylu: workers do fewer local steps the slower they are, see `ServedStrategy`.
        options: of every Strategy.

    References:
        Liu et al., Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135 (delayed Nesterov and
        dynamic local updates).
    """

    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    buffer: int | None = option(None, positive_int)
    momentum_share: float = option(0.0, number)

    state = State("outer")

    def prepare(self) -> None:
        """Begin with the same parameters everywhere."""
        super().prepare()
        buffer = self.num_nodes if self.buffer is None else self.buffer
        self.outer = DelayedNesterov(
            self.phi, self.outer_lr, self.outer_momentum, buffer, self.momentum_share
        )
