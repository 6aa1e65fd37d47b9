"""Ranks that return train on at once, as torchft's do; pauses lose nothing: values, bytes, exact times, equal bits."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from experiments import one_weight, three_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planned_weather import assert_same, both, network
from torch import nn
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.simulated.meetings import HEARTBEAT_SECONDS

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import storms

H, VALUES = 5, 5000
AT_ONCE = {"averaging_timeout": 30, "rejoin": "at_once"}
HOSTS = ("a", "b", "c")


def star(*events: Mapping[str, Any], protocol: str = "ideal") -> dict[str, Any]:
    rates = dict.fromkeys(HOSTS, "80 Mbit/s")
    return star_form(rates, rates, events=list(events), protocol=protocol)


def away(kind: str, host: str, at: float, seconds: float) -> dict[str, Any]:
    return {"host": host, "at": f"{at} s", kind: True, "for": f"{seconds} s"}


# --- values, against a loop in plain torch -----------------------------------------------------------------


class Committed(NamedTuple):
    """A round as a rank saw it: local steps done, ranks, first value of the parameters, time, bytes sent."""

    step: int
    ranks: list[int]
    value: float
    seconds: float
    bytes_sent: int


def gradient(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Every rank goes towards a value of its own."""
    return weight.detach() - (1.0 + rank)


def train(comm: Communicator, steps: int = 40, **options: Any) -> list[Committed]:
    """DiLoCo, a second a step."""
    weight, optimizer = one_weight(comm, VALUES, H, **(options or AT_ONCE))
    seen: list[Committed] = []
    while optimizer.local_step < steps:
        comm.advance(1.0)
        weight.grad = gradient(weight, comm.rank)
        optimizer.step()
        if optimizer.local_step % H == 0:
            about = (optimizer.local_step, optimizer.averaged_ranks, float(weight[0].detach()))
            seen.append(Committed(*about, comm.now(), comm.traffic.bytes_sent))
    return seen


class Replica:
    """torchft's DiLoCo in plain torch: local parameters, `original_parameters`, the outer optimizer, the step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0
        self.weight, self.original = torch.zeros(1), nn.Parameter(torch.zeros(1))
        self.outer = torch.optim.SGD([self.original], lr=0.7, momentum=0.9, nesterov=True)

    def train(self) -> None:
        for _ in range(H):
            self.weight = self.weight - 0.1 * gradient(self.weight, self.rank)

    def heal(self, donor: Replica) -> None:
        """`manager.start_quorum`: the state dict of a member at the greatest step, applied before the all-reduce."""
        self.weight, self.step = donor.weight.clone(), donor.step
        self.original.data.copy_(donor.original)
        self.outer.load_state_dict(copy.deepcopy(donor.outer.state_dict()))


def commit(replicas: Sequence[Replica]) -> None:
    """A quorum heals those behind, `prepare_sync` averages pseudo-gradients, `perform_sync` takes the outer step."""
    newest = max(replica.step for replica in replicas)
    donor = next(replica for replica in replicas if replica.step == newest)
    for replica in replicas:
        if replica.step < newest:
            replica.heal(donor)
    mean = torch.stack([replica.original.detach() - replica.weight for replica in replicas]).mean(0)
    for replica in replicas:
        replica.original.grad = mean.clone()
        replica.outer.step()
        replica.weight = replica.original.detach().clone()
        replica.step += 1


@pytest.mark.parametrize("kind", ["crash", "pause"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_returns_is_healed_as_by_torchft(num_ranks: int, kind: str) -> None:
    topology = star(away(kind, "b", 12, 20))
    result = run_ranks(train, num_ranks, topology).results
    others = [rank for rank in range(num_ranks) if rank != 1]
    # Rank 1 is away from 12 to 32 s; it has ended its third round before the others have ended their seventh.
    members = [list(range(num_ranks))] * 2 + [others] * 4 + [list(range(num_ranks))] * 2
    assert [each.ranks for each in result[0]] == members
    assert [each.step for each in result[0]] == [H * number for number in range(1, 9)]
    assert [each.step for each in result[1]] == [5, 10, 35, 40]
    replicas = [Replica(rank) for rank in range(num_ranks)]
    trained = set[int]()
    for number, ranks in enumerate(members):
        for rank in range(num_ranks):  # rank 1 trains its third round while it is out of step
            if rank in ranks or (rank, number) == (1, 2):
                if rank not in trained:
                    replicas[rank].train()
                trained.add(rank)
        commit([replicas[rank] for rank in ranks])
        trained -= set(ranks)
        expected = float(replicas[0].weight)
        assert result[0][number].value == pytest.approx(expected, rel=1e-6)
        for rank in ranks:
            (same,) = [each for each in result[rank] if each.step == H * (number + 1)]
            assert same.value == pytest.approx(expected, rel=1e-6)


def test_the_others_wait_for_a_heartbeat_and_never_for_the_steps_of_a_rank_that_is_away() -> None:
    result = run_ranks(train, 2, star(away("crash", "b", 12, 20)))
    first, second = result.results
    third = first[2]
    assert third.seconds == 12 + HEARTBEAT_SECONDS  # it has ended its steps at 15.1 s
    later = [each.seconds for each in first[2:6]]
    assert [b - a for a, b in pairwise(later)] == [5.0] * 3
    assert second[2].seconds == first[6].seconds


def test_healing_is_charged_by_the_bytes_of_the_state() -> None:
    """Global parameters, momentum and the source's own parameters, to the one that is healed."""
    first, second = run_ranks(train, 2, star(away("crash", "b", 12, 20))).results
    an_average = 4 * VALUES  # of two ranks: 2 (n - 1) / n of the parameters
    form = (second[2].bytes_sent - second[1].bytes_sent) - an_average - 3 * 4 * VALUES
    assert 0 < form < 400  # the outer optimizer's state dict without tensors
    assert first[6].bytes_sent - first[5].bytes_sent == an_average
    healed = first[6].seconds - (first[5].seconds + 5.0)
    # At 10 MB/s, after two links of 10 ms; the first half of the source's average goes over the same link.
    wire = (3 * 4 * VALUES + form + 2 * VALUES) / 10e6 + 0.02
    assert healed == pytest.approx(wire + (first[1].seconds - first[0].seconds - 5.0), abs=1e-6)


# --- pauses -------------------------------------------------------------------------------------------------


def exchange(comm: Communicator) -> list[float]:
    """Steps of half a second and all-reduces of a megabyte, and when each ended."""
    ends = []
    for _ in range(3):
        comm.advance(0.5)
        comm.all_reduce(torch.zeros(250_000))
        ends.append(comm.now())
    return ends


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([away("pause", "b", 1.5, 10)], [1.0, 12.0, 13.0]),  # nothing is lost
        ([away("pause", "b", 0, 10)], [11.0, 12.0, 13.0]),
        ([away("pause", "b", 1.25, 5), away("pause", "b", 2.5, 10)], [1.0, 13.25, 14.25]),  # one in the other
        ([away("pause", "b", 1.5, 10), away("crash", "b", 3, 20)], [1.0, 24.0, 25.0]),  # a crash loses it all
        ([away("crash", "b", 1.5, 10), away("pause", "b", 3, 20)], [1.0, 24.0, 25.0]),
        ([away("pause", "b", 3.5, 1)], [1.0, 2.0, 3.0]),
    ],
)
def test_a_pause_interrupts_computing(events: list[dict[str, Any]], expected: list[float]) -> None:
    run = run_ranks(three_steps, 3, star(*events))
    assert run.results[1] == expected
    assert run.results[0] == run.results[2] == [1.0, 2.0, 3.0]
    assert run.compute_seconds[1] == 3.0


@given(st.integers(0, 2**12), st.integers(1, 2**14))
@settings(max_examples=10, deadline=None)
def test_a_pause_of_all_shifts_all_that_comes_later_by_its_length(at: int, seconds: int) -> None:
    """Bytes in flight stand still, too."""
    instant, length = at / 2**10, seconds / 2**10
    calm = run_ranks(exchange, 3, star()).results[0]
    paused = run_ranks(exchange, 3, star(*(away("pause", host, instant, length) for host in HOSTS))).results[
        0
    ]
    for before, after in zip(calm, paused, strict=True):
        assert after == pytest.approx(before + length * (before > instant), abs=2**-29)


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
def test_the_others_wait_for_a_paused_rank_in_their_call(protocol: str) -> None:
    calm = run_ranks(exchange, 3, star(protocol=protocol)).results
    paused = run_ranks(exchange, 3, star(away("pause", "b", 0.7, 8), protocol=protocol))
    for before, after in zip(calm, paused.results, strict=True):
        assert after[-1] == pytest.approx(before[-1] + 8, abs=0.5)  # TCP begins slowly after an idle time
    assert paused.exposed_seconds[0] > 8


# --- plans, and what was measured --------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "options"), [(1, {}), (3, {}), (3, AT_ONCE)], ids=str)
def test_shared_cores_are_planned_as_they_train(cores: int, options: dict[str, Any]) -> None:
    compute = {"fixed": "50 ms", "shared_cores": cores}
    assert_same(*both("DiLoCo", {"H": 5, **options}, 30, network(), compute))


def test_storms_are_planned_as_they_train() -> None:
    events = [{"host": "a.1", "at": "0.4 s", "crash": True, "for": "2 s"}]
    events += [{"host": "b.0", "at": "3 s", "pause": True, "for": "1 s"}]
    assert_same(*both("DiLoCo", {"H": 5, **AT_ONCE}, 100, network(events=events)), rounds=False)


@pytest.mark.parametrize("name", list(storms.STORMS))
def test_storms_of_failures_have_the_measured_step_efficiency(name: str) -> None:
    """The two of ft-diloco within 5 %, from their schedules; ranks that wait for the next round are far from it."""
    measured = storms.STORMS[name][1]
    assert storms.efficiency(name)[0] == pytest.approx(measured, rel=0.05)
    assert storms.efficiency(name, "next_round")[0] < 0.9 * measured
