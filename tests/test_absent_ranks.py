"""Ranks that stop answering are left out, and catch up: exact times, equal bits in threads and processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from experiments import Squares, fitted, one_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from worlds import finished, regions_form, star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.simulated.meeting_requests import Arrival, Join, Met
from exogym_core.communicator.simulated.reach import largest_mesh
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import DiLoCoStrategy
from netsim.errors import DeadlockError, InputError
from netsim.ranks import Advance, Answer, Kernel, Key, Request

MEGABYTE = 250_000  # of fp32 values


def star(
    events: Sequence[Mapping[str, Any]] = (), protocol: str = "ideal", home: str = "8 Mbit/s"
) -> dict[str, Any]:
    """Two hosts of 10 MB/s, and one at home of 1 MB/s or less."""
    rates = {"a": "80 Mbit/s", "b": "80 Mbit/s", "home": home}
    return star_form(rates, rates, events=list(events), protocol=protocol)


def down(at: float, lasts: float | None = None) -> dict[str, Any]:
    event = {"link": ["home", "switch"], "at": f"{at} s", "down": True}
    return event if lasts is None else {**event, "for": f"{lasts} s"}


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
    topology = star([down(11, 40)], protocol)
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


def test_a_download_outlives_the_connections_that_tcp_gives_up() -> None:
    """TCP gives a dead link up after 924.6 s; whoever waits for a state connects anew."""
    results = run_ranks(rounds, 3, star([down(11, 1000)], "linux-tcp")).results
    assert [row[0] for row in results[2]] == [1, 5]
    assert 1011 + 4 < results[2][1][4] < 1011 + 8


def test_where_all_are_slow_alike_the_time_is_too_short() -> None:
    topology = star(home="80 Mbit/s")
    for link in topology["links"]:
        link["bandwidth"] = "1 Mbit/s"
    with pytest.raises(
        InputError, match=r"not finished in 20 s, though all members.*averaging_timeout.*adopted workers"
    ):
        run_ranks(rounds, 3, topology)


def test_they_go_on_at_once_when_a_link_comes_back_before_the_end_of_their_patience() -> None:
    def body(comm: Communicator) -> tuple[list[int], float]:
        members, _ = comm.among_present(lambda peers, weights: None, 60.0, 20.0)
        return members, comm.now()

    assert run_ranks(body, 3, star([down(0, 7)])).results == [(ALL, 7.0)] * 3
    assert run_ranks(body, 3, star([down(0, 70)])).results == [(OTHERS, 60.0)] * 3


def test_a_state_that_no_rank_publishes_is_a_deadlock() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            comm.fetch(1)

    with pytest.raises(DeadlockError, match="rank 2 in fetch"):
        run_ranks(body, 3, star())


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


# --- averaging among the ranks that come in time ------------------------------------------------------------

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


def present(*members: int, alive: int) -> Met:
    return Met(tuple(Arrival(member, 1.0) for member in members), alive, 0)


def test_the_deadline_counts_from_the_first_and_includes_its_own_instant() -> None:
    kernel, answers = simulate(arriving([1.0, 2.0, 2.0 + 2.0**-30, 0.0], 2.0))
    assert answers == dict.fromkeys(range(4), present(0, 1, 3, alive=4))
    assert kernel.seconds.end == [2.0, 2.0, 2.0 + 2.0**-30, 2.0]
    assert kernel.seconds.exposed == [1.0, 0.0, 0.0, 2.0]


def test_without_end_one_waits_for_all() -> None:
    """An infinite time, to come in and to be through, is a time like others and no overflow."""
    _, answers = simulate(arriving([2.0, 0.5, 1.0], math.inf))
    assert answers == dict.fromkeys(range(3), present(0, 1, 2, alive=3))


# --- whole runs --------------------------------------------------------------------------------------------


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


# --- diLoCo that goes on without ranks which are late or cut off, and lets them catch up --------------------

H, ROUNDS, VALUES = 5, 8, 50_000  # 200 kB: 0.2 s at home's 1 MB/s


AWAY = {"averaging_timeout": 3, "timeout_waiting_for_peers": "2 s"}


# --- in a loop of one's own, against what is computed here --------------------------------------------------


def towards(rank: int) -> float:
    return 1.0 + rank


def loop(comm: Communicator, **options: Any) -> list[tuple[int, list[int], float]]:
    """Every rank goes towards a value of its own; a second a step."""
    weight, optimizer = one_weight(comm, VALUES, H, **options)
    rows = []
    while optimizer.local_epoch < ROUNDS:
        weight.grad = weight.detach() - towards(comm.rank)
        comm.advance(1.0)
        optimizer.step()
        if optimizer.local_step % H == 0:
            rows.append((optimizer.local_epoch, optimizer.averaged_ranks, float(weight.detach()[7])))
    return rows


def expected(present: Sequence[Sequence[int]]) -> list[float]:
    """The parameters after each round: Nesterov's step (0.7, 0.9) on the mean displacement of those present."""
    theta, momentum, values = 0.0, None, []
    for ranks in present:
        ends = []
        for rank in ranks:
            value = theta
            for _ in range(H):
                value -= 0.1 * (value - towards(rank))
            ends.append(value)
        gradient = theta - sum(ends) / len(ends)
        momentum = gradient if momentum is None else 0.9 * momentum + gradient
        theta -= 0.7 * (gradient + 0.9 * momentum)
        values.append(theta)
    return values


@pytest.mark.parametrize(
    ("events", "present"),
    [
        ([], [ALL] * 8),
        # Cut off in round 3; back in round 5, at whose end the others wait for it.
        ([down(12, 13)], [ALL] * 2 + [OTHERS] * 2 + [ALL] * 4),
        # Its step is lost, and it is late for round 3 when it has done it again: it begins with round 6.
        (
            [{"host": "home", "at": "12 s", "crash": True, "for": "13 s"}],
            [ALL] * 2 + [OTHERS] * 3 + [ALL] * 3,
        ),
        ([down(12)], [ALL] * 2 + [OTHERS] * 6),
        ([{"host": "home", "at": "12 s", "crash": True}], [ALL] * 2 + [OTHERS] * 6),
    ],
)
def test_the_outer_step_is_the_mean_of_those_present(events: Any, present: list[list[int]]) -> None:
    results = run_ranks(lambda comm: loop(comm, **AWAY), 3, star(events)).results
    assert results[0] == results[1]
    assert [row[1] for row in results[0]] == present
    values = expected(present)
    assert [row[2] for row in results[0]] == pytest.approx(values, rel=1e-4)
    for number, ranks, value in results[2]:  # who was away goes on from what the others had
        if number <= ROUNDS:
            assert ranks in (ALL, OTHERS)
            assert value == pytest.approx(values[number - 1], rel=1e-4)


def test_before_it_joins_a_rank_neither_computes_nor_has_work_to_lose() -> None:
    """Its wait counted as computing, which a crash of its host began again: it came 13 s late."""
    crash = {"host": "home", "at": "12 s", "crash": True, "for": "1 s"}
    runs = [run_ranks(lambda comm: loop(comm, join_at={2: 17}), 3, star(events)) for events in ([], [crash])]
    assert runs[0].results == runs[1].results
    assert [run.compute_seconds for run in runs] == [[40.0, 40.0, 25.0]] * 2


@pytest.mark.parametrize(
    "wait", [{"timeout_waiting_for_peers": 1}, {"all_reduce_strategy": "no_wait", "matchmaking_time": 1}]
)
def test_a_rank_that_joins_over_a_slow_link_is_waited_for_while_it_downloads(wait: Any) -> None:
    """The state takes as long as three rounds: it came late for every round, for ever."""
    topology = star()
    topology["links"][2]["bandwidth"] = "200 kbit/s"  # 400 kB, parameters and momentum: 16 s
    options = {"averaging_timeout": 100, "join_at": {2: 12}, **wait}
    results = run_ranks(lambda comm: loop(comm, **options), 3, topology).results
    present = [row[1] for row in results[0]]
    assert present == [OTHERS] * 2 + [ALL] * 6
    assert [row[2] for row in results[2]] == [row[2] for row in results[0][2:]]


def test_a_rank_too_slow_for_averages_delays_no_other_by_its_downloads() -> None:
    slow = {"link": ["home", "switch"], "at": "4 s", "bandwidth": "200 kbit/s", "for": "1 h"}
    options = {"averaging_timeout": 4, "timeout_waiting_for_peers": 1}
    results = run_ranks(lambda comm: loop(comm, **options), 3, star([slow]))
    assert [row[1] for row in results.results[0]] == [OTHERS] * 8
    # Each round takes 5 s and 0.04 s; two averages were given up after 4 s, and its download of 16 s waited for once.
    assert results.rank_virtual_seconds[0] == pytest.approx(0.22 + 4 + 16 + 4 + 8 * 5.06, abs=0.3)


def late(comm: Communicator, **options: Any) -> list[list[int]]:
    """Rank 2 needs 1.5 s a step; when is each round over, and who is there?"""
    inner = comm.advance
    comm.advance = lambda seconds: inner(seconds * (1.5 if comm.rank == 2 else 1.0))  # type: ignore[method-assign]
    return [row[1] for row in loop(comm, **options)] + [[round(comm.now())]]


def test_no_wait_continues_without_computing_ranks_and_wait_for_all_does_not() -> None:
    patient = run_ranks(lambda comm: late(comm, averaging_timeout=60), 3, star()).results[0]
    assert patient == [ALL] * 8 + [[63]]  # 7.5 s and 0.31 s for the exchange each, and 0.22 s to begin with
    hasty = run_ranks(
        lambda comm: late(comm, all_reduce_strategy="NO_WAIT", matchmaking_time=1), 3, star()
    ).results[0]
    assert OTHERS in hasty
    assert hasty[-1][0] < patient[-1][0]


# --- in a fit -----------------------------------------------------------------------------------------------


def samples() -> TensorDataset:
    inputs = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs @ torch.arange(8.0).view(8, 1))


def fit(events: Sequence[Mapping[str, Any]] = (), options: Any = AWAY, **arguments: Any) -> FitResult:
    given: dict[str, Any] = {
        **{"num_nodes": 3, "max_steps": 40, "val_interval": 4, "correlation_interval": 8},
        **{"topology": star(events), "compute": 1.0},
        "strategy": DiLoCoStrategy("sgd", lr=0.01, H=H, **options),
    }
    return fitted(Squares(8), samples(), samples(), **{**given, **arguments})


def test_a_run_reports_absences_with_times() -> None:
    told = []
    result = fit([down(12, 13)], collectives="ring", on_event=lambda row: told.append(dict(row)))
    changes = [(row["step"], row["dropped_peers"]) for row in told if "dropped_peers" in row]
    assert [step for step, _ in changes] == [1, 11, 21], (
        "known while it trains, as the ranks of a round change"
    )
    assert [[each["back_step"] for each in absences] for _, absences in changes] == [[], [None], [20]]
    assert changes[-1][1] == result.dropped_peers
    assert [row["num_peers"] for row in result.history] == [3] * 10 + [2] * 10 + [3] * 20
    assert result.averaged_ranks == {
        5: ALL,
        10: ALL,
        15: OTHERS,
        20: OTHERS,
        25: ALL,
        30: ALL,
        35: ALL,
        40: ALL,
    }
    assert result.dropped_peers is not None
    (first,) = result.dropped_peers
    # Rounds of 5 s, exchanges of 0.08 s for three and 0.04 for two; they wait 2 s for home, once.
    assert (first["rank"], first["step"], first["back_step"]) == (2, 15, 20)
    assert first["virtual_seconds"] == pytest.approx(17.2, abs=0.01)
    assert first["back_virtual_seconds"] == pytest.approx(25.02, abs=0.01)
    # It has the state of step 20 only at 25 s, and the others wait for its steps until 30 s.
    assert [row["step"] for row in result.history] == list(range(1, 41))
    seconds = [row["virtual_seconds"] for row in result.history]
    assert seconds == sorted(seconds)
    assert result.virtual_seconds == seconds[-1]
    samples_seen = [row["examples_trained"] for row in result.history]
    assert samples_seen[9] == 10 * 12
    assert samples_seen[19] - samples_seen[9] == 10 * 8
    assert [row["step"] for row in result.validation] == list(range(0, 41, 4))
    assert [row["step"] for row in result.correlation] == list(range(8, 41, 8))
    assert result.bytes_sent == result.history[-1]["bytes_sent"]


def test_a_rank_that_joins_after_the_end_changes_no_figure() -> None:
    """It counted as computing all the time, and weather between the end and its coming as met."""
    result = fit([down(400, 1)], {**AWAY, "join_at": {2: "500 s"}})
    assert result.dropped_peers is not None
    assert [(row["rank"], row["back_step"]) for row in result.dropped_peers] == [(2, None)]
    assert result.computing_seconds == pytest.approx(2 / 3 * 40)
    assert result.later_weather == "event of link home-switch at 6 min 40 s"


def test_a_lone_rank_waits_for_no_other() -> None:
    assert fit(num_nodes=1).dropped_peers is None
