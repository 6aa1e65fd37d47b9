"""Averaging among the ranks that come in time: exact times in the kernel, equal bits in threads and processes."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_ports import Ports
from worlds import regions_form

from exogym_core.communicator import run_ranks
from exogym_core.workers.journal import Journal, request_from_record, request_to_line
from netsim.errors import DeadlockError, InputError
from netsim.network.clock import on_grid
from netsim.ranks import Advance, Answer, Arrival, Exit, Join, Kernel, Key, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.communicator import Communicator

TOPOLOGY = regions_form({"a": 3}, latency="1 ms", protocol="ideal")
MEETING = Key("meeting", 0)


def simulate(
    streams: Sequence[Sequence[Request]], log: list[list[Request]] | None = None
) -> tuple[Kernel, dict[int, Answer]]:
    """Run the streams to their end on a network that takes no time; `log` gets what is served."""
    ports = Ports(len(streams))
    ports.log = ports.log if log is None else log
    kernel = Kernel(len(streams), ports, ports)
    for stream, requests in zip(kernel.streams, streams, strict=True):
        stream.extend([*requests, Exit()])
    kernel.run()
    return kernel, dict(ports.answers)


def arriving(delays: Sequence[float], seconds: float) -> list[list[Request]]:
    """One rank a delay, which comes after it."""
    num = len(delays)
    return [
        [Advance(delay), Join(MEETING, rank, tuple(range(num)), seconds)] for rank, delay in enumerate(delays)
    ]


def present(*members: int) -> tuple[Arrival, ...]:
    return tuple(Arrival(member, 1.0) for member in members)


def test_all_present_settles_at_the_last_arrival() -> None:
    kernel, answers = simulate(arriving([2.0, 0.5, 1.0], 10.0))
    assert answers == dict.fromkeys(range(3), present(0, 1, 2))
    assert kernel.end_seconds == [2.0, 2.0, 2.0]
    assert kernel.exposed_seconds == [0.0, 1.5, 1.0]


def test_the_deadline_counts_from_the_first_and_includes_its_own_instant() -> None:
    kernel, answers = simulate(arriving([1.0, 2.0, 2.0 + 2.0**-30, 0.0], 2.0))
    assert answers == dict.fromkeys(range(4), present(0, 1, 3))
    assert kernel.end_seconds == [2.0, 2.0, 2.0 + 2.0**-30, 2.0]
    assert kernel.exposed_seconds == [1.0, 0.0, 0.0, 2.0]


def test_without_end_one_waits_for_all() -> None:
    """An infinite time, to come in and to be through, is a time like others and no overflow."""
    _, answers = simulate(arriving([2.0, 0.5, 1.0], math.inf))
    assert answers == dict.fromkeys(range(3), present(0, 1, 2))


def test_an_ended_rank_does_not_come() -> None:
    streams = [*arriving([0.0, 1.0, 0.0], 3.0)[:2], []]
    kernel, answers = simulate(streams)
    assert answers == dict.fromkeys(range(2), present(0, 1))
    assert kernel.end_seconds == [3.0, 3.0, 0.0]


def test_a_log_brings_a_fresh_kernel_to_the_same_state_without_ranks() -> None:
    log: list[list[Request]] = [[], [], []]
    logged_again: list[list[Request]] = [[], [], []]
    first, _ = simulate(arriving([0.0, 5.0, 1.0], 2.0), log)
    again, answers = simulate(log, logged_again)
    assert answers == {}
    assert (again.end_seconds, again.exposed_seconds) == (first.end_seconds, first.exposed_seconds)
    assert logged_again == log


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


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_give_what_threads_give(processes: int) -> None:
    threads = run_ranks(rounds, 3, TOPOLOGY)
    others = run_ranks(rounds, 3, TOPOLOGY, workers={"kind": "processes", "processes": processes})
    assert others.results == threads.results
    assert others.rank_virtual_seconds == threads.rank_virtual_seconds
    assert others.exposed_seconds == threads.exposed_seconds


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


@pytest.mark.parametrize("workers", ["threads", {"kind": "processes", "processes": 2}])
def test_a_deadlock_at_the_same_time_is_reported(workers: Any) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.average_present(torch.ones(1), 1.0)
            comm.recv(torch.ones(1), src=1)
        else:
            comm.recv(torch.ones(1), src=0)

    with pytest.raises(DeadlockError, match="deadlock: rank 0 waits for"):
        run_ranks(body, 2, TOPOLOGY, workers=workers)


def test_a_run_with_deadlines_can_be_written_down() -> None:
    requests: list[tuple[int, Any]] = []
    journal = Journal(on_request=lambda rank, request: requests.append((rank, request)))
    run_ranks(rounds, 3, TOPOLOGY, journal=journal)
    assert any(isinstance(request, Join) for _, request in requests)
    for rank, request in requests:
        assert request_from_record(json.loads(request_to_line(rank, request))[1:]) == request


@pytest.mark.parametrize(("seconds", "weight"), [(-1.0, 1.0), (float("inf"), 1.0), (1.0, 0.0)])
def test_what_has_no_meaning_is_refused(seconds: float, weight: float) -> None:
    with pytest.raises(InputError, match="average_present"):
        run_ranks(lambda comm: comm.average_present(torch.ones(1), seconds, weight), 1)
