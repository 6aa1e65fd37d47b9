"""Ranks that stop answering are left out, and catch up: exact times, equal bits in threads and processes."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.workers.journal import Journal, request_from_record, request_to_line
from netsim.errors import DeadlockError, InputError
from netsim.ranks import Confirm, Fetch, Publish, largest_mesh

MEGABYTE = 250_000  # of fp32 values


def star(events: list[dict[str, Any]], protocol: str = "ideal", home: str = "8 Mbit/s") -> dict[str, Any]:
    """Three hosts, of which `home` has 1 MB/s or less, and the others 10 MB/s."""
    rates = {"a": "80 Mbit/s", "b": "80 Mbit/s", "home": home}
    return star_form(rates, rates, events=events, protocol=protocol)


def down(at: str, lasts: str | None) -> dict[str, Any]:
    event = {"link": ["home", "switch"], "at": at, "down": True}
    return event if lasts is None else {**event, "for": lasts}


def rounds(comm: Communicator) -> list[Any]:
    """Five rounds of 4 MB with 2 s of computing each; a rank left out fetches the others' state."""
    values = torch.full((4 * MEGABYTE,), float(comm.rank))
    reported: list[Any] = []
    number = 0
    while number < 5:
        comm.advance(2.0)
        mine = values

        def mean(peers: Communicator, weights: list[float], mine: torch.Tensor = mine) -> torch.Tensor:
            assert weights == [1.0] * peers.world_size
            total: torch.Tensor = peers.all_reduce(mine.clone(), "avg")
            return total

        members, got = comm.among_present(mean, 3.0, 20.0, number=number)
        if got is not None:
            values, number = got + comm.rank, number + 1
            comm.publish(number, [got])
        else:
            fetched = comm.fetch(number + 1)
            if fetched is None:
                return [*reported, "lost"]
            number, (state,) = fetched
            values = state + comm.rank
        reported.append(
            (number, members, float(values[0]), got is not None, comm.now(), comm.traffic.bytes_sent)
        )
    return reported


def facts(results: list[Any]) -> list[list[tuple[int, list[int], bool]]]:
    return [[(row[0], row[1], row[3]) for row in rows if row != "lost"] for rows in results]


ALL, OTHERS = [0, 1, 2], [0, 1]


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
def test_a_rank_cut_off_during_an_average_is_left_out_and_catches_up(protocol: str) -> None:
    # A round takes 2 s and the exchange about 5.4 s: home is cut off in the middle of the second.
    topology = star([down("11 s", "40 s")], protocol)
    results = run_ranks(rounds, 3, topology, collectives="ring").results
    first, second, home = facts(results)
    assert first == second
    assert [row[:2] for row in first[:4]] == [(1, ALL), (2, OTHERS), (3, OTHERS), (4, OTHERS)]
    assert home[0] == (1, ALL, True)
    assert home[1][1:] == (OTHERS, False)
    if protocol == "ideal":
        # The second exchange begins after two rounds of 2 s and one exchange of 4 * 4 / 3 MB at 1 MB/s.
        part = 4 / 3
        given_up = 4 + 4 * (part + 0.02) + 20
        again = given_up + 2 * (0.2 + 0.02)  # 4 MB between two hosts of 10 MB/s
        ends = [again + rounds * (2 + 3 + 0.44) for rounds in range(4)]  # they give home 3 s each time
        assert [row[4] for row in results[0][1:]] == pytest.approx(ends, abs=1e-5)
        # When its link is back, home gets the newest state, at 1 MB/s; the others have ended by then.
        assert home[1:] == [(5, OTHERS, False)]
        assert results[2][1][4] == pytest.approx(51 + 0.02 + 4, abs=1e-6)


def test_the_download_is_charged_to_its_receiver() -> None:
    quiet = run_ranks(rounds, 3, star([down("11 s", "40 s")]), collectives="ring").results[2]
    before, after = quiet[0][5], quiet[1][5]
    attempt = after - before - 4 * 4 * MEGABYTE
    assert attempt == pytest.approx(4 * 4 * MEGABYTE * 4 / 3, rel=1e-3)


def test_a_download_outlives_the_connections_that_tcp_gives_up() -> None:
    """TCP gives a dead link up after 924.6 s; whoever waits for a state connects anew."""
    results = run_ranks(rounds, 3, star([down("11 s", "1000 s")], "linux-tcp")).results
    assert [row[0] for row in results[2]] == [1, 5]
    assert 1011 + 4 < results[2][1][4] < 1011 + 8


def test_where_all_are_slow_alike_the_time_is_too_short() -> None:
    topology = star([], home="80 Mbit/s")
    for link in topology["links"]:
        link["bandwidth"] = "1 Mbit/s"
    with pytest.raises(InputError, match="not finished in 20 s, though all members answer"):
        run_ranks(rounds, 3, topology)


def test_they_go_on_at_once_when_a_link_comes_back_before_the_end_of_their_patience() -> None:
    def body(comm: Communicator) -> tuple[list[int], float]:
        members, _ = comm.among_present(lambda peers, weights: None, 60.0, 20.0)
        return members, comm.now()

    assert run_ranks(body, 3, star([down("0 s", "7 s")])).results == [(ALL, 7.0)] * 3
    assert run_ranks(body, 3, star([down("0 s", "70 s")])).results == [(OTHERS, 60.0)] * 3


def test_a_state_that_no_rank_publishes_is_a_deadlock() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            comm.fetch(1)

    with pytest.raises(DeadlockError, match="rank 2 in fetch"):
        run_ranks(body, 3, star([]))


def test_a_run_with_absent_ranks_can_be_written_down() -> None:
    requests: list[tuple[int, Any]] = []
    journal = Journal(on_request=lambda rank, request: requests.append((rank, request)))
    run_ranks(rounds, 3, star([down("11 s", "40 s")]), journal=journal)
    assert {Confirm, Fetch, Publish} <= {type(request) for _, request in requests}
    for rank, request in requests:
        assert request_from_record(json.loads(request_to_line(rank, request))[1:]) == request


@given(
    st.lists(st.floats(0.0, 5.0), min_size=4, max_size=4),
    st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
    st.floats(0.0, 5.0),
)
@settings(max_examples=30, deadline=None)
def test_the_mean_has_the_weights_of_those_present(
    delays: list[float], weights: list[float], seconds: float
) -> None:
    def body(comm: Communicator) -> tuple[list[int], list[float]]:
        comm.advance(delays[comm.rank])
        tensor = torch.arange(5, dtype=torch.float64) ** comm.rank
        return comm.average_present(tensor, seconds, weights[comm.rank]), tensor.tolist()

    results = run_ranks(body, 4).results
    members = results[0][0]
    first = min(delays)
    for rank, (present, values) in enumerate(results):
        assert present == members
        assert (rank in members) == (delays[rank] <= first + seconds) or abs(
            delays[rank] - first - seconds
        ) < 1e-8
        mine = [float(value) ** rank for value in range(5)]
        if rank in members:
            total = sum(weights[member] for member in members)
            mine = [
                sum(weights[member] * float(value) ** member for member in members) / total
                for value in range(5)
            ]
        assert values == pytest.approx(mine)


@given(st.integers(0, 7), st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_the_largest_set_that_all_reach_each_other_continues(
    num_ranks: int, pairs: set[tuple[int, int]]
) -> None:
    broken = {
        rank: {b if a == rank else a for a, b in pairs if rank in (a, b) and a != b} for rank in range(7)
    }
    sets = (ranks for size in range(num_ranks, -1, -1) for ranks in combinations(range(num_ranks), size))
    expected = next(ranks for ranks in sets if not any(b in broken[a] for a, b in combinations(ranks, 2)))
    assert largest_mesh(range(num_ranks), broken) == expected


def test_a_network_in_two_halves_is_decided_at_once() -> None:
    halves = {rank: range(500, 1000) if rank < 500 else range(500) for rank in range(1000)}
    assert largest_mesh(range(1000), halves) == tuple(range(500))
