"""Asynchronous calls over gloo, and members that go on early: in order, compared or not, leaving nothing behind."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch

from exogym_core.communicator import Communicator, run_ranks
from netsim import schedule
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.errors import MismatchError
from netsim.ranks import needs_nobody


def _many(comm):
    """Calls of all kinds in flight together, parts of unequal shapes among them."""
    sums = [
        comm.all_reduce(torch.full((1000 * (index + 1),), 1.0 + comm.rank), async_op=True)
        for index in range(5)
    ]
    mine = [torch.full((comm.rank + 1, other + 2), float(comm.rank)) for other in range(comm.world_size)]
    parts = comm.all_to_all(mine, async_op=True)
    gathered = comm.all_gather(torch.tensor([comm.rank]), async_op=True)
    shapes = [tuple(part.shape) for part in parts.wait()]
    return [float(each.wait()[0]) for each in sums], shapes, [int(each) for each in gathered.wait()]


def _known(comm):
    """Parts whose shapes the receiver knows, and, where calls are compared, shapes that are wrong."""
    mine = [torch.full((comm.rank + 1,), float(other)) for other in range(comm.world_size)]
    got = comm.all_to_all(mine, shapes=[(rank + 1,) for rank in range(comm.world_size)])
    comm.all_to_all(mine, shapes=[(7,)] * comm.world_size)
    return [part.tolist() for part in got]


def test_given_shapes_are_not_sent_again() -> None:
    with pytest.raises(
        MismatchError, match=r"rank \d, all_to_all: shapes=\[\[7\], \[7\]\], but the ranks send"
    ):
        run_ranks(_known, 2, transport="gloo")


@pytest.mark.parametrize("compare", [True, False])
def test_calls_in_flight_give_what_they_give_in_simulation(compare: bool) -> None:
    real = run_ranks(_many, 3, transport="gloo", compare_calls=compare)
    simulated = run_ranks(_many, 3)
    assert real.results == simulated.results
    assert real.results[2] == ([6.0] * 5, [(1, 4), (2, 4), (3, 4)], [0, 1, 2])


# --- members without dependencies continue at once ----------------------------------------------------------

CARRIERS: list[Any] = ["threads", {"kind": "processes", "processes": 2}]


def disagree(comm: Communicator) -> None:
    """Rank 1 comes when the root of its broadcast has long gone on, and then catches what it can."""
    try:
        if comm.rank:
            comm.advance(1.0)
            comm.now()
        comm.broadcast(torch.ones(3 + comm.rank))
        comm.now()
    except MismatchError:
        pass


@pytest.mark.parametrize("workers", CARRIERS)
def test_a_mismatch_with_a_rank_that_has_continued_ends_the_run(workers: Any) -> None:
    with pytest.raises(
        MismatchError, match=r"rank 0 called broadcast\(float32\[3\], src=0\) .*rank 1 called"
    ):
        run_ranks(disagree, 2, "two-datacenters", workers=workers)


def without_elements(comm: Communicator) -> list[Any]:
    """Rank 1 comes a second later to all of them; nobody waits for it but in all_to_all."""
    if comm.rank == 1:
        comm.advance(1.0)
    empty, at = torch.ones(0), []
    comm.all_reduce(empty)
    comm.broadcast(empty, src=1)
    comm.reduce(empty, dst=2)
    comm.scatter(empty, [empty] * 3 if comm.rank == 1 else None, src=1)
    gathered = comm.all_gather(empty), comm.gather(empty, dst=0), comm.reduce_scatter([empty] * 3)
    assert [part.shape for part in gathered[0]] == [(0,)] * 3
    assert gathered[1] is None if comm.rank else [part.shape for part in gathered[1]] == [(0,)] * 3
    assert gathered[2].shape == (0,)
    at.append(comm.now())
    comm.all_to_all([torch.ones(0, comm.rank)] * 3)
    return [*at, comm.now()]


@pytest.mark.parametrize(
    ("workers", "topology"), [*zip(CARRIERS, ["two-datacenters"] * 2, strict=True), ("threads", None)]
)
def test_collectives_without_elements_cost_nothing_but_all_to_all(workers: Any, topology: str | None) -> None:
    """all_reduce and all_gather waited for nobody and the others cost a latency."""
    results = run_ranks(without_elements, 3, topology, workers=workers).results
    assert [first for first, _ in results] == [0.0, 1.0, 0.0]
    assert all(last >= 1.0 for _, last in results)


@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "sendrecv"])
def test_a_collective_of_no_elements_has_no_messages(op: str) -> None:
    for algorithm in ALGORITHMS[op]:
        made = schedule(op, 4, num_bytes=0, algorithm=algorithm)
        assert needs_nobody(op, False, True) == (made.num_messages == 0)
        assert made.num_messages == 0 or op in ("all_to_all", "barrier")


def cancel(comm: Communicator) -> float:
    """Bytes that a cancelled receive with a tag of its own leaves behind."""
    if comm.rank:
        return 0.0
    sizes = []
    for tag in range(401):
        assert comm.irecv(torch.zeros(4), 1, tag=tag).cancel()
        if tag in (100, 400):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    return (sizes[1] - sizes[0]) / 300


def test_receives_that_are_taken_back_leave_nothing() -> None:
    """Each left 3.1 kB."""
    tracemalloc.start()
    try:
        run = run_ranks(cancel, 2, "two-datacenters")
    finally:
        tracemalloc.stop()
    assert run.results[0] < 100
