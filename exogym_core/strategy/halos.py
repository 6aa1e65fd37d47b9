"""HALoS: regional servers merge their workers' displacements, and exchange with a global server periodically."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.options import fraction, number, option, positive_int
from exogym_core.strategy.participation.servers import (
    ROUNDING_STEPS,
    ServedStrategy,
    from_message,
    to_message,
)
from exogym_core.strategy.parts.outer import DelayedNesterov
from exogym_core.strategy.parts.state import State, Stateful

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


__all__ = ["HALoSStrategy"]


class _BetweenMergers(Stateful):
    """A region's server between two exchanges with the global one.

    Attributes:
        base: parameters after the last merger.
        since: arrivals from then on.
        steps: local steps that have arrived and not been sent up.
        awaits: the global server has not answered yet.
    """

    state = State("base", "since", "steps", "awaits")

    def __init__(self, phi: Tensor) -> None:
        self.base, self.since, self.steps, self.awaits = phi.clone(), 0, 0.0, False


class HALoSStrategy(ServedStrategy, name="HALoS"):
    """Asynchrony in two levels: workers exchange with the server of their region, regions with a global one.

    A regional server applies each displacement by delayed Nesterov and answers at once. `K` arrivals after the last
    merger it sends `base - local` to the global server, which applies it in the same way and answers with its
    parameters; then `local = (1 - merge) local + merge global` and `base = local`. Displacements that arrive meanwhile
    are part of that base and never go up. When workers have ended, later displacements go up too. The last
    `regions + 1` ranks serve, the global server last.

    Bytes: `4 P` up and down a worker round inside a region, and `4 P` up and down every `K` of its arrivals between.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        H: local steps a round.
        K: arrivals at a region's server between its exchanges with the global one.
        local_lr, local_momentum, local_buffer: of the regions' delayed Nesterov; its rate is `local_lr * local_buffer`.
        global_lr, global_momentum, global_buffer: those of the global server.
        merge: the share of the global parameters in those with which a region's server continues.
        regions: servers of regions; workers are dealt out to them in contiguous blocks.
        dylu: workers do fewer local steps the slower they are, see `ServedStrategy`.
        options: of every Strategy.

    References:
        Kim et al., HALoS, arXiv 2506.04531; the rule is as utnslab/halos runs it.
    """

    H: int = option(8, positive_int)
    K: int = option(32, positive_int)
    local_lr: float = option(0.2, number)
    local_momentum: float = option(0.9, number)
    local_buffer: int = option(16, positive_int)
    global_lr: float = option(0.15, number)
    global_momentum: float = option(0.5, number)
    global_buffer: int = option(2, positive_int)
    merge: float = option(0.25, fraction)
    regions: int = option(2, positive_int)

    accepted_servers = (2, math.inf)
    state = State("_above", "outer")

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        self.num_servers = self.regions + 1

    @property
    def server_groups(self) -> tuple[int, ...]:
        """The regions' servers, then the global one."""
        return (self.num_servers - 1, 1)

    @property
    def server(self) -> int:
        """Server of the worker's region."""
        return self.num_nodes + self.rank * (self.num_servers - 1) // self.num_nodes

    @property
    def _is_global(self) -> bool:
        return self.rank == self.comm.world_size - 1

    def prepare(self) -> None:
        """Begin with the same parameters everywhere."""
        super().prepare()
        lr, momentum, buffer = self.local_lr, self.local_momentum, self.local_buffer
        if self._is_global:
            lr, momentum, buffer = self.global_lr, self.global_momentum, self.global_buffer
            # Regional servers take messages of workers and of the global server from one box.
            self.answers_box = ""
        else:
            self.num_sharing = self.num_servers - 1
        self.outer = DelayedNesterov(self.phi, lr * buffer, momentum, buffer)
        self._above = _BetweenMergers(self.phi)

    def _whole_steps(self, steps: float) -> int:
        """The authors round dynamic local updates up."""
        return math.ceil(steps - ROUNDING_STEPS)

    def serve(self, updated: Callable[[float], None]) -> None:
        """A region's server, or the global one."""
        super().serve(updated)
        if self._above.since and not self._above.awaits:
            self._send_up()  # displacements since the last exchange

    def take_in(self, source: int, message: Tensor) -> float:
        """Apply a displacement and answer, or merge the global server's answer; exchange with it if due."""
        if source == self.comm.world_size - 1:
            self._merge(from_message(message, 1)[0])
            return 0.0
        steps = super().take_in(source, message)
        if not self._is_global:
            self._above.steps += steps
            self._above.since += 1
            if self._above.since >= self.K and not self._above.awaits:
                self._send_up()
        return steps

    def _send_up(self) -> None:
        above = self._above
        self.comm.put(to_message(above.base - self.phi, above.steps, 0.0), self.comm.world_size - 1)
        above.steps, above.awaits = 0.0, True

    def _merge(self, from_above: Tensor) -> None:
        self.phi.lerp_(from_above, self.merge)
        self._above.base = self.phi.clone()
        self._above.since, self._above.awaits = 0, False
