"""Law of `collectives: auto`: whole rounds are as fast as by any one algorithm, so each strategy is at its best."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from experiments import outcome
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.cost.compute import Compute
from exogym_core.results.fit_result import FitResult
from exogym_core.run import algorithms
from exogym_core.run.algorithms import choose_algorithms, first_rounds, least_seconds, rivals
from exogym_core.run.recording import Recording
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy, build_strategy
from netgym.planning.measure import Measured
from netgym.planning.models import SequenceModel
from netgym.planning.setting import Setting
from netsim import Network, Topology, start_collective
from netsim.collectives.choice import schedule
from netsim.collectives.closed_form import after_entry
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.network.clock import Clock
from netsim.topology.protocol import PRESETS
from netsim.units import parse_seconds

pytestmark = pytest.mark.filterwarnings("ignore:.* no route")  # drawn sites are nearer by a third one
Form = dict[str, Any]
ROUNDS = 3  # the first meets cold connections
STRATEGIES = [
    ("AllReduce", {"bucket_bytes": 100_000}, 1),
    ("AllReduce", {"bucket_bytes": 1_000_000}, 1),
    ("AllReduce", {"sharding": "FULL_SHARD"}, 1),
    ("DiLoCo", {"H": 3}, 3),
    ("DiLoCo", {"H": 2, "codec": "int8"}, 2),
    ("StreamingDiLoCo", {"H": 4, "num_fragments": 2}, 4),
]


class Sized(nn.Module):
    """Parameters of given sizes, and a loss that is linear in them."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.stack([part.mean() for part in self.parts]).sum() * batch[0].float().mean()


def trained(number: int, sizes: list[int], network: Form, collectives: Any, **options: Any) -> FitResult:
    """Some rounds of a strategy of `STRATEGIES` on a network."""
    name, arguments, period = STRATEGIES[number]
    about: Form = {"num_nodes": 6, "max_steps": ROUNDS * period, "batch_size": 1, "device": "cpu"}
    about |= {"workers": "threads", "progress": False, "strategy": build_strategy(name, **arguments)}
    trainer = Trainer(Sized(sizes), TensorDataset(torch.ones(6 * ROUNDS * period, 1)))
    return trainer.fit(**(about | network | options), collectives=collectives).fit_result


def round_seconds(strategy: int, result: FitResult) -> float:
    """Seconds of the rounds after the first."""
    ends = [row["virtual_seconds"] for row in result.history]
    return float(ends[-1] - ends[STRATEGIES[strategy][2] - 1])


def network(wan: list[tuple[str, str]], nics: list[tuple[str, str]], protocol: str, compute: str) -> Form:
    """Three regions of two hosts: bandwidth and round trip between them, bandwidth and latency in each."""
    pairs = (["a", "b"], ["b", "c"], ["c", "a"])
    return {
        "topology": {
            "regions": {
                name: {"hosts": 2, "nic": nic, "latency": latency}
                for name, (nic, latency) in zip("abc", nics, strict=True)
            },
            "wan": [
                {"between": pair, "bandwidth": rate, "rtt": trip}
                for pair, (rate, trip) in zip(pairs, wan, strict=True)
            ],
        },
        "protocol": protocol,
        "compute": compute,
    }


rates = st.sampled_from(["10 Mbit/s", "50 Mbit/s", "300 Mbit/s", "2 Gbit/s"])
trips = st.sampled_from(["5 ms", "30 ms", "80 ms", "200 ms"])
nics = st.tuples(st.sampled_from(["1 Gbit/s", "10 Gbit/s", "100 Mbit/s"]), st.sampled_from(["50 us", "5 ms"]))
networks = st.builds(
    network,
    st.tuples(*[st.tuples(rates, trips)] * 3),
    st.tuples(nics, nics, nics),
    st.sampled_from(["linux-tcp", "linux-tcp", "ideal"]),
    st.sampled_from(["1 ms", "50 ms", "500 ms"]),
)
sizes = st.lists(st.sampled_from([2_000, 20_000, 200_000, 1_000_000]), min_size=2, max_size=8)
# Buckets of two sizes: the fastest algorithms of each alone take a seventh longer than one for both.
MIXED = network(
    [("300 Mbit/s", "5 ms"), ("300 Mbit/s", "200 ms"), ("2 Gbit/s", "80 ms")],
    [("10 Gbit/s", "50 us"), ("1 Gbit/s", "5 ms"), ("10 Gbit/s", "50 us")],
    "linux-tcp",
    "50 ms",
)
SLOW = network([("50 Mbit/s", "5 ms")] * 3, [("10 Gbit/s", "50 us")] * 3, "ideal", "500 ms")
PARTS = [200_000, 1_000_000, 2_000]
OFFERED = sorted(name for name, row in ALGORITHMS["all_reduce"].items() if row.is_offered)


@given(st.integers(0, len(STRATEGIES) - 1), sizes, networks, st.sampled_from(OFFERED))
@example(0, PARTS, MIXED, "gloo")
@settings(max_examples=1)
def test_rounds_are_as_fast_as_by_any_one_algorithm(
    strategy: int, sizes: list[int], where: Form, name: str
) -> None:
    """Except by a ring that encodes means at every hop, which changes their values."""
    assume("codec" not in STRATEGIES[strategy][1] or name != "ring")
    best = round_seconds(strategy, trained(strategy, sizes, where, name))
    assert round_seconds(strategy, trained(strategy, sizes, where, "auto")) <= best * (1 + 1e-6)


@given(st.sampled_from(OFFERED), st.integers(0, 5), sizes, networks, st.sampled_from(sorted(PRESETS)))
@example("direct", 0, [1_000_000], SLOW, "ideal")
@example("nccl-ring", 0, [20_000_000], SLOW, "nccl-sockets")  # in loops
@settings(max_examples=20)
def test_bytes_and_members_that_wait_for_the_last_member_come_after_it(
    algorithm: str, late: int, sizes: list[int], where: Form, protocol: str
) -> None:
    topology, kind, hosts = Topology.from_mapping(where["topology"]), PRESETS[protocol], tuple(range(6))
    made = schedule(
        "all_reduce", 6, num_bytes=4 * sum(sizes), algorithm=algorithm, hosts=hosts, topology=topology
    )
    clock, ends = Clock(), dict[int, float]()
    started = start_collective(
        Network(clock, topology, kind), made, hosts, on_done=lambda member: ends.update({member: clock.now})
    )
    for member in set(hosts) - {late}:
        started.arrive(member)
    clock.run(until=1000.0)
    started.arrive(late)
    clock.run()
    load, seconds = (each[late] for each in after_entry(made, hosts, topology, kind))
    after = np.array([ends[member] - 1000 for member in hosts]) * (1 + 1e-6)
    assert load.max() <= after.max()
    assert (seconds <= np.where(after < 0, -np.inf, after)).all()
    assert load.max() > 0
    assert seconds.max() > 0


@given(
    st.integers(0, len(STRATEGIES) - 1),
    sizes,
    networks,
    st.sampled_from(sorted(PRESETS)),
    st.tuples(*[st.sampled_from([1, 2, 10])] * 6),
)
@example(0, PARTS, MIXED, "linux-tcp", (1, 1, 1, 1, 1, 1))
# Most bytes have crossed when the last rank comes.
@example(3, [1_000_000], SLOW, "ideal", (1, 1, 1, 1, 1, 10))
@settings(max_examples=10)
def test_rounds_left_out_by_their_bound_would_not_be_chosen(
    strategy: int, sizes: list[int], where: Form, protocol: str, slowness: tuple[int, ...]
) -> None:
    name, arguments, period = STRATEGIES[strategy]
    topology, step = Topology.from_mapping(where["topology"]), parse_seconds(where["compute"])
    means = [step * each for each in slowness]
    made = build_strategy(name, **arguments)
    recording = first_rounds(made, Sized(sizes), 6, ROUNDS * period, None, "auto")
    assert recording is not None

    seconds = [partial(lambda mean, _: mean, each) for each in means]

    def world(collectives: Any, protocol: str = where["protocol"]) -> World:
        return World.build(6, topology, None, protocol, collectives)

    for algorithm in OFFERED:
        there = world({"all_reduce": algorithm}, protocol)
        ends: list[list[float]] = [[] for _ in range(6)]
        for row in recording.replay(there, seconds, Schedules(there)).rows:
            ends[row.rank].append(row.virtual_seconds)
        first, *_, last = map(max, zip(*ends, strict=True))
        assert least_seconds(recording, there, means) <= last - first
    chosen = choose_algorithms(recording, world("auto"), means)
    algorithms._choose.cache_clear()
    with patch.object(algorithms, "least_seconds", return_value=0.0):
        assert choose_algorithms(recording, world("auto"), means) == chosen


def test_bounds_leave_most_rounds_out_where_bytes_take_the_time_and_equal_rounds_are_chosen_for_once() -> (
    None
):
    with torch.device("meta"):
        model = Sized([10**9])
    recording = first_rounds(build_strategy("DiLoCo", H=3), model, 16, 9, None, "auto")
    assert recording is not None
    world = World.build(16, Topology.load("wan-4-regions"), None, "ideal", "auto")
    with patch.object(Recording, "replay", autospec=True, side_effect=Recording.replay) as replay:
        choose_algorithms(recording, world, [0.5] * 16)
        assert 0 < replay.call_count <= len(rivals(recording, world)["all_reduce"]) / 2
        replay.reset_mock()
        again = first_rounds(build_strategy("DiLoCo", H=3), model, 16, 9, None, "auto")
        assert again is not None
        choose_algorithms(again, world, [0.5] * 16)
        assert not replay.call_count
        choose_algorithms(again, world, [0.25] * 16)
        assert replay.call_count


class Odd(DiLoCoStrategy):
    """Reads values, or fails, where there are no values."""

    error: type[Exception] | None = None

    def communicate(self, step: int) -> None:
        parameter = next(self.model.parameters())
        if self.error is not None and parameter.is_meta:
            raise self.error("at a\nloss")
        parameter.sum().item()
        super().communicate(step)


@pytest.mark.parametrize(("error", "warns"), [(None, False), (TypeError, False), (KeyError, True)])
def test_strategies_that_fail_without_values_choose_by_call(error: Any, warns: bool) -> None:
    strategy = Odd(H=1)
    strategy.error = error
    line = r"auto chooses for each call: a round of Odd without values raises KeyError: 'at a"
    with pytest.warns(UserWarning, match=line) if warns else nullcontext():
        assert trained(0, PARTS, MIXED, "auto", strategy=strategy).collectives["all_reduce"]


def test_processes_resumed_trainings_and_plans_choose_alike(tmp_path: Path) -> None:
    first = trained(0, PARTS, MIXED, "auto")
    assert first.collectives == {"all_reduce": ["gloo"]}
    processes = trained(0, PARTS, MIXED, "auto", workers={"kind": "processes", "processes": 2})
    assert outcome(processes) == outcome(first)
    stopped = {"checkpoint_interval": 1, "save_dir": tmp_path}
    part = trained(0, PARTS, MIXED, "auto", **stopped, max_steps=1)
    resumed = trained(0, PARTS, MIXED, "auto", **stopped, resume_from=part.checkpoint_folder)
    assert outcome(resumed) == outcome(first)
    with torch.device("meta"):
        model = SequenceModel(Sized(PARTS), 1)
    topology, compute = Topology.from_mapping(MIXED["topology"]), Compute.parse("50 ms")
    setting = Setting(model, topology, compute, 6, 1)
    planned = Measured(build_strategy("AllReduce", bucket_bytes=100_000), setting)
    assert planned.plan.collectives == first.collectives
    ends = [row["virtual_seconds"] for row in first.history]
    assert planned.figures.round_seconds[:ROUNDS] == pytest.approx(ends, abs=1e-9)


def test_a_given_algorithm_is_kept() -> None:
    assert trained(0, PARTS, MIXED, {"all_reduce": "ring"}).collectives == {"all_reduce": ["ring"]}


class Reads(AllReduceStrategy):
    """Declares rounds, and computes with values of gradients."""

    def step(self) -> None:
        self.large = float(self.trainable[0].grad.abs().max()) > 1  # type: ignore[union-attr]
        super().step()


def test_a_strategy_that_needs_values_is_trained_by_the_fastest_algorithm_of_each_call() -> None:
    about = {"strategy": Reads(bucket_bytes=100_000)}
    assert trained(0, PARTS, MIXED, "auto", **about).collectives == {"all_reduce": ["direct", "gloo"]}
