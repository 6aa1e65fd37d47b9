"""Averaging among the ranks that come in time: exact times in the kernel, equal bits in threads and processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_ports import finished
from worlds import regions_form

from exogym_core.communicator import Communicator, run_ranks
from netsim.network.clock import on_grid
from netsim.ranks import Advance, Answer, Arrival, Join, Kernel, Key, Request

TOPOLOGY = regions_form({"a": 3}, latency="1 ms", protocol="ideal")
MEETING = Key("meeting", 0)


def simulate(streams: Sequence[Sequence[Request]]) -> tuple[Kernel, dict[int, Answer]]:
    """Run the streams to their end on a network that takes no time."""
    kernel, ports = finished(streams)
    return kernel, dict(ports.answers)


def arriving(delays: Sequence[float], seconds: float) -> list[list[Request]]:
    """One rank a delay, which comes after it."""
    num = len(delays)
    return [
        [Advance(delay), Join(MEETING, rank, tuple(range(num)), seconds)] for rank, delay in enumerate(delays)
    ]


def present(*members: int) -> tuple[Arrival, ...]:
    return tuple(Arrival(member, 1.0) for member in members)


def test_the_deadline_counts_from_the_first_and_includes_its_own_instant() -> None:
    kernel, answers = simulate(arriving([1.0, 2.0, 2.0 + 2.0**-30, 0.0], 2.0))
    assert answers == dict.fromkeys(range(4), present(0, 1, 3))
    assert kernel.end_seconds == [2.0, 2.0, 2.0 + 2.0**-30, 2.0]
    assert kernel.exposed_seconds == [1.0, 0.0, 0.0, 2.0]


def test_without_end_one_waits_for_all() -> None:
    """An infinite time, to come in and to be through, is a time like others and no overflow."""
    _, answers = simulate(arriving([2.0, 0.5, 1.0], math.inf))
    assert answers == dict.fromkeys(range(3), present(0, 1, 2))


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=6), st.floats(0.0, 4.0))
def test_exactly_those_within_the_deadline_are_included(delays: list[float], seconds: float) -> None:
    arrivals = [on_grid(delay) for delay in delays]
    deadline = min(arrivals) + on_grid(seconds)
    _, answers = simulate(arriving(delays, seconds))
    expected = present(*(rank for rank, at in enumerate(arrivals) if at <= deadline))
    assert answers == dict.fromkeys(range(len(delays)), expected)


# --- whole runs --------------------------------------------------------------------------------------------


def rounds(comm: Communicator) -> list[Any]:
    """Rank 2 is late in the second round and ends after the third; the others continue."""
    seen: list[Any] = []
    values = torch.arange(1000, dtype=torch.float32) / 7 + comm.rank
    for number in range(5 if comm.rank < 2 else 3):
        comm.advance(3.0 if (comm.rank, number) == (2, 1) else 0.1)
        before = values.clone()
        members = comm.average_present(values, 1.0, weight=comm.rank + 1.0)
        kept = comm.rank not in members
        assert not kept or torch.equal(values, before)
        seen.append((members, values.tolist(), comm.now(), comm.traffic.bytes_sent))
        values += comm.rank
    return seen


def test_a_late_rank_is_left_out_and_named_and_an_ended_one_hangs_no_other() -> None:
    result = run_ranks(rounds, 3, TOPOLOGY)
    named = [[members for members, *_ in seen] for seen in result.results]
    assert named[0] == named[1]
    assert named[0][:2] == [[0, 1, 2], [0, 1]]
    assert named[0][3:] == [[0, 1], [0, 1]]
    assert named[2][:2] == [[0, 1, 2], [0, 1]]
    sent = [traffic for *_, traffic in result.results[2]]
    assert sent[1] == sent[0]


def test_all_present_is_the_weighted_average_bit_for_bit() -> None:
    def body(comm: Communicator) -> tuple[list[int], bool]:
        generator = torch.Generator().manual_seed(comm.rank)
        mine = torch.randn(513, generator=generator)
        plain, weighted = mine.clone(), mine * (comm.rank + 1.0)
        members = comm.average_present(plain, 1.0)
        expected = comm.all_reduce(mine.clone(), "avg")
        own = mine.clone()
        comm.average_present(own, 1.0, weight=comm.rank + 1.0)
        expected_weighted = comm.all_reduce(weighted).div_(6.0)
        return members, torch.equal(plain, expected) and torch.equal(own, expected_weighted)

    assert run_ranks(body, 3, TOPOLOGY).results == [([0, 1, 2], True)] * 3


def test_the_average_is_charged_as_an_all_reduce_among_those_present() -> None:
    def body(comm: Communicator) -> tuple[float, int]:
        if comm.rank < 2:
            comm.average_present(torch.ones(1000), 0.5)
        return comm.now(), comm.traffic.bytes_sent

    def plain(comm: Communicator) -> tuple[float, int]:
        if comm.rank < 2:
            comm.advance(0.5)
            comm.group([0, 1]).all_reduce(torch.ones(1000))
        return comm.now(), comm.traffic.bytes_sent

    assert run_ranks(body, 3, TOPOLOGY).results == run_ranks(plain, 3, TOPOLOGY).results
