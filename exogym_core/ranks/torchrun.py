"""Being one rank of a run whose processes torchrun has started, on one machine or several."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.communicator.base import Traffic
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.ranks.collecting import Collecting
from exogym_core.ranks.gloo_ranks import rows_in_order
from exogym_core.ranks.rng import RandomStates
from exogym_core.ranks.run import RunResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from exogym_core.communicator.base import Communicator
    from exogym_core.ranks.carrier import OnDeposit

__all__ = ["join_run", "torchrun_rank"]

T = TypeVar("T")

# Ranks wait for each other while one of them evaluates.
_TIMEOUT_SECONDS = 1800.0


def torchrun_rank() -> int | None:
    """This process's rank among those that torchrun has started, None where it did not start this one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"])
    return None


def join_run(
    body: Callable[[Communicator], T],
    seed: int = 0,
    on_deposit: OnDeposit | None = None,
    conclude: Callable[[], Any] = lambda: None,
) -> tuple[RunResult[T], Any]:
    """Run `body(comm)` as this process's rank; every process gets the results and rows of all.

    What `body` and `conclude` return is plain, as in `Communicator.all_gather_object`.

    The process's random generators are made from (seed, rank) for the run, and are as before afterwards.

    Args:
        body: what a rank does.
        seed: of the random streams.
        on_deposit: on rank 0 told (rank, note, tensors) of what ranks deposit, in a thread of its own.
        conclude: called on rank 0 when all has been deposited.

    Returns:
        The results, and on every rank what `conclude` has returned.

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
            if on_deposit is not None:
                collecting = Collecting(comm, on_deposit)
                comm.observed_by(collecting.put)
            result = body(comm)
            if on_deposit is not None:
                collecting.finish()
            with comm.off_clock():
                concluded = comm.broadcast_object(conclude() if comm.rank == 0 else None)
                ended = comm.all_gather_object((result, rows, vars(comm.traffic)))
    finally:
        before.load()
    marked = rows_in_order([own for _, own, _ in ended])
    untimed = [0.0] * len(ended)
    run = RunResult(
        results=[own for own, _, _ in ended],
        virtual_seconds=None,
        rank_virtual_seconds=None,
        compute_seconds=untimed,
        exposed_seconds=untimed,
        network_seconds=untimed,
        rows=marked,
        traffic=[Traffic(**own) for _, _, own in ended],
    )
    return run, concluded
