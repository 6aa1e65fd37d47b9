"""EXO Gym's functions for exchanges, each in the place where it was and with what to write instead.

They acted on one process-wide group. Ranks here are threads and processes alike, and a strategy has a communicator
of its own.
"""

from __future__ import annotations

from exogym_core.successors import dropped_function

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

_OF_THE_STRATEGY = "a strategy's exchanges go through its communicator: write self.comm.{}"

all_gather = dropped_function(
    "all_gather", _OF_THE_STRATEGY.format("all_gather(tensor), which returns the list")
)
all_reduce = dropped_function("all_reduce", _OF_THE_STRATEGY.format("all_reduce(tensor)"))
broadcast = dropped_function("broadcast", _OF_THE_STRATEGY.format("broadcast(tensor, src=0)"))
reduce_scatter = dropped_function("reduce_scatter", _OF_THE_STRATEGY.format("reduce_scatter(tensors)"))
