"""gloo's barrier that names who has not come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from netsim.files.errors import BrokenCallError

if TYPE_CHECKING:
    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator

__all__ = ["monitored_barrier"]

_COMES, _GOES = 1 << 30, (1 << 30) + 1  # tags; a program's own are small


def monitored_barrier(comm: SimulatedCommunicator, seconds: float, wait_all_ranks: bool) -> None:
    """Rank 0 hears from all others and then lets them go on.

    Args:
        comm: of the group.
        seconds: of virtual time that rank 0 gives the others; the group is broken after them.
        wait_all_ranks: tell all that have not come, and not only the first.

    Raises:
        RuntimeError: on rank 0, with who has not come; on those who have, that others have not.
    """
    if comm.rank == 0:
        _hear(comm, seconds, wait_all_ranks)
        return
    try:
        comm.isend(torch.zeros(8, dtype=torch.uint8), 0, _COMES).wait(seconds)  # type: ignore[call-arg]
        comm.irecv(torch.zeros(8, dtype=torch.uint8), 0, _GOES).wait(seconds)  # type: ignore[call-arg]
    except BrokenCallError as error:
        raise RuntimeError(
            f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank 0. Please check rank 0 logs for faulty rank.\n{error}"
        ) from None


def _hear(comm: SimulatedCommunicator, seconds: float, wait_all_ranks: bool) -> None:
    if seconds <= 0:
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:.10g} ms.")
    others = range(1, comm.world_size)
    coming: list[Any] = [comm.irecv(torch.zeros(8, dtype=torch.uint8), rank, _COMES) for rank in others]
    end, missing = comm.now() + seconds, list[int]()
    for rank, handle in zip(others, coming, strict=True):
        try:
            handle.wait(max(end - comm.now(), 0.0))
        except BrokenCallError:
            missing.append(rank)
    if missing:
        shown = missing if wait_all_ranks else missing[:1]
        names = f"Rank{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}"
        raise RuntimeError(f"{names} failed to pass monitoredBarrier in {seconds * 1e3:.10g} ms")
    for handle in [comm.isend(torch.zeros(8, dtype=torch.uint8), rank, _GOES) for rank in others]:
        handle.wait()
