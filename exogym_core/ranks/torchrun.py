"""Being one rank of a run whose processes torchrun has started, on one machine or several."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.communicator.base import Traffic
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.ranks.gloo_ranks import rows_in_order
from exogym_core.ranks.rng import RandomStates
from exogym_core.ranks.run import RunResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from exogym_core.communicator.base import Communicator

__all__ = ["join_run", "torchrun_rank"]

T = TypeVar("T")

# Ranks wait for each other while one of them evaluates.
_TIMEOUT_SECONDS = 1800.0


def torchrun_rank() -> int | None:
    """This process's rank among those that torchrun has started, None where it did not start this one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"])
    return None


def join_run(body: Callable[[Communicator], T], seed: int = 0) -> RunResult[T]:
    """Run `body(comm)` as this process's rank; every process gets the results and rows of all.

    What `body` returns is plain, as in `Communicator.all_gather_object`.

    The process's random generators are made from (seed, rank) for the run, and are as before afterwards.

    Raises:
        InputError: torchrun's variables are not set.
        NetsimError: as `body` and its calls raise.
    """
    rows: list[Mapping[str, Any]] = []
    rendezvous = Rendezvous.from_environment(True, _TIMEOUT_SECONDS, "auto")
    before = RandomStates.of_process()
    RandomStates(seed, rendezvous.rank).load()
    try:
        with GlooCommunicator.connect(rendezvous, rows.append) as comm:
            result = body(comm)
            with comm.off_clock():
                ended = comm.all_gather_object((result, rows, vars(comm.traffic)))
    finally:
        before.load()
    marked = rows_in_order([own for _, own, _ in ended])
    untimed = [0.0] * len(ended)
    return RunResult(
        [own for own, _, _ in ended],
        None,
        None,
        untimed,
        untimed,
        marked,
        [Traffic(**own) for _, _, own in ended],
    )
