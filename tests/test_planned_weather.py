"""Plans beside training on the same network: unlike devices, overlap, weather and chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_planning import Tiny, setting, trained

from exogym_core.cost.compute import Compute
from exogym_core.strategy import build_strategy
from netgym.planning.measure import Plan, Setting, measure
from netgym.planning.models import SequenceModel
from netsim.topology.topology import Topology

RANKS, BATCH, LENGTH = 4, 2, 4


def network(**more: Any) -> dict[str, Any]:
    """Two sites of two hosts; half of a step's time would go into the line between them."""
    regions = {name: {"hosts": 2, "nic": "1 Gbit/s", "latency": "1 ms"} for name in "ab"}
    wan = [{"between": ["a", "b"], "bandwidth": "1 Mbit/s", "rtt": "40 ms"}]
    return {"regions": regions, "wan": wan, "protocol": "ideal", **more}


def both(
    name: str,
    options: dict[str, Any],
    steps: int,
    topology: dict[str, Any],
    compute: Any = "50 ms",
    protocol: str = "ideal",
) -> tuple[Plan, list[float]]:
    """The plan of so many steps, and when training was through with each."""
    where = replace(
        setting(compute, protocol=protocol, half=False),
        topology=Topology.from_mapping(topology),
        tokens=float(steps * RANKS * BATCH * LENGTH),
    )
    planned = measure(build_strategy(name, **options), where)
    result = trained(name, options, steps, topology=topology, protocol=protocol, compute=compute)
    return planned, [row["virtual_seconds"] for row in result.history if row["step"]]


def assert_same(planned: Plan, ends: list[float], *, rounds: bool = True) -> None:
    """All steps take as long as planned, and the last round, to a millionth."""
    assert planned.days * 86_400 == pytest.approx(ends[-1], rel=1e-6)
    if rounds:
        length = planned.steps_per_round
        assert planned.seconds_per_round == pytest.approx(ends[-1] - ends[-1 - length], rel=1e-6)


OVERLAPPED: list[tuple[str, dict[str, Any]]] = [
    ("AllReduce", {}),
    ("AllReduce", {"bucket_bytes": 400}),
    ("StreamingDiLoCo", {"H": 6, "tau": 2, "num_fragments": 2}),
    ("StreamingDiLoCo", {"H": 6, "tau": 2, "num_fragments": 3, "codec": "int8"}),
    ("StreamingDiLoCo", {"H": 6, "tau": 2, "num_fragments": 1, "codec": "int8"}),
    ("EagerDiLoCo", {"H": 3}),
    ("AsyncSPARTA", {"delay": 2, "interval": 4, "index_selector": "partitioned"}),
]


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp"])
@pytest.mark.parametrize(("name", "options"), OVERLAPPED, ids=str)
def test_what_overlaps_is_planned_as_it_trains(name: str, options: dict[str, Any], protocol: str) -> None:
    """Buckets during the backward pass, fragments and rounds in flight; on a narrow line, so that it shows."""
    narrow = network()
    narrow["wan"][0]["bandwidth"] = "300 kbit/s"
    assert_same(*both(name, options, 24, narrow, protocol=protocol))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AllReduce", {}),
        ("DiLoCo", {"H": 4}),
        ("StreamingDiLoCo", {"H": 4}),
        ("StreamingDiLoCo", {"H": 4, "tau": 2, "num_fragments": 1, "codec": "int8"}),
    ],
    ids=str,
)
def test_unlike_devices_are_planned_as_they_train(name: str, options: dict[str, Any]) -> None:
    """Three workers with H100s on one site, one with an A100 on the other: the slowest decides.

    Codes of a fragment go in stages, each begun in the step in which the one before is found through.
    """
    topology = network()
    topology["regions"]["a"] |= {"hosts": 3, "device": "h100"}
    topology["regions"]["b"] |= {"hosts": 1, "device": "a100"}
    planned, ends = both(name, options, 16, topology, {"flops": {"utilisation": 1e-8}})
    assert_same(planned, ends)
    assert planned.compute_utilisation < 0.5


WEATHER: dict[str, dict[str, Any]] = {
    "a line that is down at the beginning": {
        "events": [{"at": "200 ms", "link": ["a", "b"], "down": True, "for": "1 s"}]
    },
    "a line that is down later": {"events": [{"at": "3 s", "link": ["a", "b"], "down": True, "for": "1 s"}]},
    "a host that is away": {
        "events": [{"at": "2 s", "host": "b.1", "crash": True}, {"at": "4 s", "host": "b.1", "up": True}]
    },
    "a trace": {
        "traces": [
            {
                "link": ["a", "b"],
                "bandwidth": [["0 s", "1 Mbit/s"], ["2 s", "200 kbit/s"], ["3 s", "1 Mbit/s"]],
            }
        ]
    },
}


@pytest.mark.parametrize("weather", WEATHER)
@pytest.mark.parametrize("name", ["AllReduce", "DiLoCo", "StreamingDiLoCo"])
def test_weather_is_planned_until_it_is_over(name: str, weather: str) -> None:
    """Days are those of training through it, and a round is one after it."""
    options = {
        "AllReduce": {},
        "DiLoCo": {"H": 5},
        "StreamingDiLoCo": {"H": 6, "tau": 1, "num_fragments": 2},
    }[name]
    planned, ends = both(name, options, 120, network(**WEATHER[weather]))
    assert_same(planned, ends)
    assert planned.steady
    assert any("the network changes until" in remark for remark in planned.remarks)


CHANCE: dict[str, tuple[dict[str, Any], Any]] = {
    "jitter": ({}, {"fixed": "50 ms", "jitter": 0.2}),
    "stragglers": ({}, {"fixed": "50 ms", "stragglers": {"fraction": "20 %", "slowdown": 3}}),
    "drift": (
        {"drift": [{"link": ["a", "b"], "kind": "lognormal", "every": "200 ms", "sigma": 0.5, "seed": 1}]},
        "50 ms",
    ),
    "others": ({"background": [{"from": "a.0", "to": "b.0", "bytes": "20 kB", "every": "500 ms"}]}, "50 ms"),
}


@pytest.mark.parametrize("chance", CHANCE)
@pytest.mark.parametrize("name", ["AllReduce", "DiLoCo", "StreamingDiLoCo", "SPARTA"])
def test_a_short_budget_meets_the_draws_that_training_meets(name: str, chance: str) -> None:
    """All its rounds are simulated, with the same seeds."""
    options: dict[str, Any] = {
        "AllReduce": {},
        "DiLoCo": {"H": 5},
        "StreamingDiLoCo": {"H": 5, "tau": 1, "num_fragments": 2},
        "SPARTA": {"p_sparta": 0.1, "index_selector": "partitioned"},
    }[name]
    more, compute = CHANCE[chance]
    planned, ends = both(name, options, 60, network(**more), compute)
    assert_same(planned, ends, rounds=False)
    assert any("all rounds of the budget were simulated" in remark for remark in planned.remarks)


def test_weather_after_the_budget_is_named() -> None:
    with torch.device("meta"):
        model = SequenceModel(Tiny(), LENGTH)
    late = network(events=[{"at": "1 h", "link": ["a", "b"], "bandwidth": "2 Mbit/s"}])
    budget = float(60 * RANKS * BATCH * LENGTH)
    where = Setting(model, Topology.from_mapping(late), Compute.parse("50 ms"), RANKS, BATCH, budget)
    (remark, *_) = measure(build_strategy("AllReduce"), where).remarks
    assert remark.endswith("that training meets: it ends before event of link a-b at 1 h")


def test_of_a_long_budget_a_sample_tells_how_sure_it_is() -> None:
    """Stragglers whose first steps happen to be alike were taken for none, 29 % too short."""
    with torch.device("meta"):
        model = SequenceModel(Tiny(), LENGTH)
    compute = Compute.parse({"fixed": "50 ms", "stragglers": {"fraction": "20 %", "slowdown": 3}})
    where = Setting(model, Topology.from_mapping(network()), compute, RANKS, BATCH, 1e9)
    planned = measure(build_strategy("AllReduce"), where)
    assert not planned.steady
    (remark,) = planned.remarks
    assert "figures are means over 499 of them, known to 1.2%" in remark
    # Of four workers one at least is slow with a probability of 1 - 0.8^4 = 59 %, and then all wait 100 ms for it.
    assert planned.seconds_per_round == pytest.approx(0.121 + 0.59 * 0.1, rel=0.04)
