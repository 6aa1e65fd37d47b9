"""The arguments of HALoS."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import fraction, number, option, positive_int
from exogym_core.strategy.options.served import ServedOptions

__all__ = ["HALoSOptions"]


@dataclass(frozen=True)
class HALoSOptions(ServedOptions):
    """What HALoS takes.

    Args:
        H: local steps a round.
        K: arrivals at a region's server between its exchanges with the global one.
        local_lr, local_momentum, local_buffer: of the regions' delayed Nesterov; its rate is `local_lr * local_buffer`.
        global_lr, global_momentum, global_buffer: of the global one, likewise.
        merge: the share of the global parameters in what a region's server goes on from.
        regions: servers of regions; workers are dealt out to them in contiguous blocks.
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
