"""Ranks that wait for the clock beside others that are off it: no deadlock, and the same everywhere."""

from __future__ import annotations

import pytest
import torch
from worlds import chain_form

from exogym_core.communicator import run_ranks
from netsim.errors import DeadlockError

WORKERS = ["threads", {"kind": "processes", "processes": 2}, {"kind": "processes", "processes": 3}]
TOPOLOGY = chain_form("abc", "1 Gbit/s", "1 ms")


def polling(comm):
    """Rank 1 is slow and looks whether a message has come, while the others are off the clock."""
    times = []
    for step in range(3):
        comm.advance(3.0 if comm.rank == 1 else 1.0)
        if comm.rank == 0:
            comm.isend(torch.tensor([float(step)]), 1, tag=step)
        if comm.rank == 1:
            got = comm.irecv(torch.zeros(1), 0, tag=step)
            times.append((got.is_completed(), comm.now()))
        with comm.off_clock():
            times.append(float(comm.all_reduce(torch.ones(1))))
        comm.mark({"step": step})
    return times, comm.now()


def test_polling_while_others_wait_off_the_clock_is_no_deadlock():
    """It was reported as one: the clock waited for rank 0, which waited off the clock for rank 1, which polled."""
    runs = [run_ranks(polling, 3, TOPOLOGY, workers=workers) for workers in WORKERS]
    results = runs[0].results
    assert next(times for times, _ in results) == [3.0, 3.0, 3.0]
    assert all(run.results == results for run in runs)
    assert all(run.rank_virtual_seconds == runs[0].rank_virtual_seconds for run in runs)
    assert all(
        [(row.rank, row.virtual_seconds) for row in run.rows]
        == [(row.rank, row.virtual_seconds) for row in runs[0].rows]
        for run in runs
    )


def test_a_rank_that_waits_off_the_clock_is_held_until_the_other_has_come():
    """Rank 1 asks for the time at 3 s; what it gives off the clock afterwards cannot be had at 1 s."""

    def body(comm):
        comm.advance(3.0 if comm.rank == 1 else 1.0)
        if comm.rank == 1:
            comm.now()
        with comm.off_clock():
            comm.all_reduce(torch.ones(1))
        return comm.now()

    assert run_ranks(body, 2, {**TOPOLOGY, "name": "two"}).results == [3.0, 3.0]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_deadlock_is_reported_as_before(workers):
    def body(comm):
        if comm.rank == 1:
            comm.now()
            return
        with comm.off_clock():
            comm.all_reduce(torch.ones(1))

    with pytest.raises(DeadlockError, match=r"deadlock: rank 0 waits for rank"):
        run_ranks(body, 3, TOPOLOGY, workers=workers)
