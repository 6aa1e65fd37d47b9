"""Errors of mismatched calls name ranks, calls and places, on every transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import confused
import pytest
import torch
from conformance_cases import TRANSPORTS, run

from exogym_core.communicator import Communicator
from netsim.errors import DeadlockError, MismatchError


def _dtype(comm: Communicator) -> None:
    comm.all_gather(confused.ones().long() if comm.rank == 1 else confused.ones())


def _order(comm: Communicator) -> None:
    calls: list[Callable[[torch.Tensor], Any]] = [comm.all_reduce, comm.all_gather]
    for call in reversed(calls) if comm.rank == 1 else calls:
        call(confused.ones())


def _group(comm: Communicator) -> None:
    comm.group([1, 0, 2] if comm.rank == 1 else [0, 1, 2]).all_reduce(confused.ones())


def _once_too_often(comm: Communicator) -> None:
    for _ in range(3 if comm.rank == 1 else 2):
        comm.all_reduce(confused.ones())


def _one_rank_gone(comm: Communicator) -> None:
    if comm.rank != 1:
        comm.all_reduce(confused.ones())


def _asynchronous(comm: Communicator) -> None:
    handle = comm.all_reduce(confused.ones(4 if comm.rank == 1 else 3), async_op=True)
    handle.wait()


def _in_a_group(comm: Communicator) -> None:
    if comm.rank > 0:
        comm.group([1, 2]).all_reduce(confused.ones(4 if comm.rank == 1 else 3))


_TABLE = {
    confused.another_operation: ["broadcast", "all_reduce"],
    confused.another_shape: ["float32[3]", "float32[4]"],
    _dtype: ["float32[3]", "int64[3]"],
    confused.another_reduction: ["op=sum", "op=max"],
    confused.another_root: ["src=0", "src=1"],
    _order: ["all_reduce", "all_gather"],
    _group: [],
    _once_too_often: ["ended", "all_reduce"],
    _one_rank_gone: ["ended", "all_reduce"],
    confused.a_message_of_another_size: ["send(float32[5])", "recv(float32[3])"],
    _asynchronous: ["float32[3]", "float32[4]"],
    _in_a_group: ["float32[3]", "float32[4]"],
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", _TABLE)
def test_a_mismatch_is_reported(body: Callable[[Communicator], None], transport: str) -> None:
    with pytest.raises((MismatchError, DeadlockError)) as caught:
        run(transport, body, 3)
    first = str(caught.value).splitlines()[0]
    assert "rank" in first
    assert "1" in first
    assert f"{Path(body.__code__.co_filename).name}:" in first
    for words in _TABLE[body]:
        assert words in first


def _crossed_making_of_groups(comm: Communicator) -> None:
    if comm.rank < 2:
        comm.group([0, 1])
    if comm.rank == 2:
        comm.recv(confused.ones(), 0)
    if comm.rank == 1:
        comm.group([1, 2])


_DEADLOCKS = {
    confused.circle_of_receives: "rank 1 waits for rank 2 in recv",
    confused.missing_send: "rank 1 waits for rank 0 in recv",
    confused.missing_receive: "rank 1 waits for rank 0 in send",
    confused.another_tag: "rank 1 waits for rank 0",
    confused.crossed_groups: "rank 1 waits for ranks 0, 2 in all_reduce",
    confused.from_anyone: "rank 1",
    confused.handles_in_a_circle: "rank 1 waits for rank 2 in recv",
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", _DEADLOCKS)
def test_ranks_that_wait_in_a_cycle_are_reported_at_once(
    body: Callable[[Communicator], None], transport: str
) -> None:
    """Over gloo too, long before its time-out, with every rank's call and place."""
    with pytest.raises(DeadlockError) as caught:
        run(transport, body, 3, timeout_seconds=600)
    first, *table = str(caught.value).splitlines()
    assert first.startswith("deadlock: ")
    assert _DEADLOCKS[body] in first
    assert "confused.py:" in first or body is confused.from_anyone
    assert "  rank 1" in {line.split(":")[0] for line in table} or body is confused.from_anyone


def test_ranks_that_make_groups_in_different_orders_are_reported_at_once() -> None:
    """Over gloo the members of a group connect when they make it; in simulation there is nothing to wait for."""
    with pytest.raises(
        DeadlockError, match=r"rank 1 waits for rank 2 in group\(\[1, 2\]\) at test_mism"
    ) as caught:
        run("gloo", _crossed_making_of_groups, 3, timeout_seconds=600)
    assert "rank 2 waits for rank 0 in recv(float32[3]) at test_mismatches.py:" in str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equal_calls_that_are_swapped_on_one_rank_are_reported_by_their_places(transport: str) -> None:
    """They would give each other's values, silently; who means it says so."""
    with pytest.raises(MismatchError, match=r"rank 1 called all_reduce.* at confused.py:\d+") as caught:
        run(transport, confused.swapped, 3)
    assert "ranks 0, 2 called" in str(caught.value)

    def meant(comm: Communicator) -> list[float]:
        comm.compare_places(False)
        return confused.swapped(comm)

    assert run(transport, meant, 3).results[0] == [102.0, 201.0]
