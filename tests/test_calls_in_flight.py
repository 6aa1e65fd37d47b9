"""Asynchronous calls over gloo: issued in order, two under way at a time, compared or not."""

from __future__ import annotations

import threading

import pytest
import torch

from exogym_core.communicator import run_ranks
from exogym_core.communicator.gloo.calls import _CallQueue
from netsim.errors import MismatchError


def test_two_calls_are_under_way_and_issued_in_order() -> None:
    """The second begins when the first has been issued, the third when one of them is done."""
    calls = _CallQueue(2)
    issued: list[int] = []
    begun, proceed = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]

    def call(number: int) -> int:
        issued.append(number)
        calls.issued()
        calls.issued()  # once more is once
        begun[number].set()
        assert proceed[number].wait(10.0)
        return number

    futures = [calls.submit(lambda number=number: call(number)) for number in range(3)]
    assert begun[0].wait(10.0)
    assert begun[1].wait(10.0)
    assert not begun[2].is_set()
    assert not calls.idle
    proceed[1].set()
    assert futures[1].result(10.0) == 1
    assert begun[2].wait(10.0)
    assert not futures[0].done()
    proceed[0].set()
    proceed[2].set()
    assert [future.result(10.0) for future in futures] == [0, 1, 2]
    assert issued == [0, 1, 2]
    assert calls.idle
    calls.stop()
    for thread in calls._threads:
        thread.join(10.0)
        assert not thread.is_alive()


def test_a_call_that_fails_before_it_is_issued_lets_the_next_one_go() -> None:
    calls = _CallQueue(2)

    def fail() -> None:
        raise ValueError("no")

    failed, after = calls.submit(fail), calls.submit(lambda: 7)
    with pytest.raises(ValueError, match="no"):
        failed.result(10.0)
    assert after.result(10.0) == 7
    calls.stop()


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
