"""HALoS: servers of regions merge what their workers send, and exchange with a global server now and then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.options.halos import HALoSOptions
from exogym_core.strategy.parts.delayed_nesterov import DelayedNesterov
from exogym_core.strategy.parts.letters import opened, sealed
from exogym_core.strategy.served import ROUNDING_STEPS, ServedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["HALoSOptions", "HALoSStrategy"]


class HALoSStrategy(ServedStrategy):
    """Asynchrony in two levels: workers exchange with the server of their region, regions with a global one.

    A region's server takes in each displacement by delayed Nesterov and answers at once. `K` arrivals after the last
    merger it sends `base - local` to the global server, which takes that in likewise and answers with its parameters;
    then `local = (1 - merge) local + merge global` and `base = local`. What arrives meanwhile is part of that base and
    never goes up. When workers have ended, what has come since goes up too. The last `regions + 1` ranks serve, the
    global server last.

    Bytes: `4 P` up and down a worker round inside a region, and `4 P` up and down every `K` of its arrivals between.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        options: of `HALoSOptions`, and of every Strategy.

    References:
        Kim et al., HALoS, arXiv 2506.04531; the rule is as utnslab/halos runs it.
    """

    Options = HALoSOptions
    accepted_servers = (2, math.inf)
    kept = (*ServedStrategy.kept, "_base", "_since", "_steps", "_awaits", "outer")
    options: HALoSOptions

    def __init__(self, optim_spec: OptimizerLike | None = None, **options: Any) -> None:
        super().__init__(optim_spec, **options)
        self.num_servers = self.options.regions + 1

    @property
    def server_groups(self) -> tuple[int, ...]:
        """The regions' servers, then the global one."""
        return (self.num_servers - 1, 1)

    @property
    def server(self) -> int:
        """The worker's region's."""
        return self.num_nodes + self.rank * (self.num_servers - 1) // self.num_nodes

    @property
    def _is_global(self) -> bool:
        return self.rank == self.comm.world_size - 1

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        told = self.options
        lr, momentum, buffer = told.global_lr, told.global_momentum, told.global_buffer
        if not self._is_global:
            lr, momentum, buffer = told.local_lr, told.local_momentum, told.local_buffer
        self.outer = DelayedNesterov(self.phi, lr * buffer, momentum, buffer)
        self._base = self.phi.clone()
        self._since, self._steps, self._awaits = 0, 0.0, False

    def _next_steps(self, speed: float, fastest: float) -> int:
        """The authors round dynamic local updates up."""
        if not self.options.dylu or not speed or not fastest:
            return self.options.H
        return max(1, math.ceil(self.options.H * min(speed / fastest, 1.0) - ROUNDING_STEPS))

    def arrived(self, source: int, displacement: Tensor, steps: int) -> None:
        """One step of delayed Nesterov."""
        self.outer.step(displacement)

    def serve(self, updated: Callable[[float], None]) -> None:
        """A region's server, or the global one."""
        if self._is_global:
            super().serve(updated)
            return
        while letters := self.comm.take(wait=math.inf):
            for source, letter in letters:
                if source == self.comm.world_size - 1:
                    self._merge(opened(letter, 1)[0])
                else:
                    steps = self.take_in(source, letter)
                    self._steps, self._served = self._steps + steps, self._served + steps
                    self._since += 1
                if self._since >= self.options.K and not self._awaits:
                    self._send_up()
            updated(self._served * (self.num_servers - 1) / self.num_nodes)
        if self._since and not self._awaits:
            self._send_up()  # what has come since the last exchange

    def take_in(self, source: int, letter: Tensor) -> float:
        """As every server; the global one answers into the box that regions read."""
        if not self._is_global:
            return super().take_in(source, letter)
        displacement, (steps, _) = opened(letter, 2)
        self.arrived(source, displacement, int(steps))
        self.num_arrived += 1
        self.comm.put(sealed(self.phi, 0.0), source)
        return steps

    def _send_up(self) -> None:
        self.comm.put(sealed(self._base - self.phi, self._steps, 0.0), self.comm.world_size - 1)
        self._steps, self._awaits = 0.0, True

    def _merge(self, from_above: Tensor) -> None:
        self.phi.lerp_(from_above, self.options.merge)
        self._base = self.phi.clone()
        self._since, self._awaits = 0, False
