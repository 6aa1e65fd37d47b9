"""Plans beside training on the same network: devices, overlap, weather, chance, crashes and other mishaps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments import json_of
from test_planning import NETWORK, setting, tiny_model, trained

from exogym_core.cost.compute import Compute
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import build_strategy
from netgym.cli.main import main
from netgym.planning.measure import Plan, RefusedPlanError, Setting, measure
from netgym.planning.setting import Crashes
from netsim import Topology
from netsim.errors import InputError

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
) -> tuple[Plan, FitResult]:
    """The plan of so many steps, and their run."""
    where = replace(
        setting(compute, protocol=protocol, half=False),
        topology=Topology.from_mapping(topology),
        tokens=float(steps * RANKS * BATCH * LENGTH),
    )
    planned = measure(build_strategy(name, **options), where)
    return planned, trained(name, options, steps, topology=topology, protocol=protocol, compute=compute)


def assert_same(planned: Plan, run: FitResult, *, rounds: bool = True, rel: float = 1e-6) -> None:
    """The whole run takes as long as planned, and the last round."""
    assert planned.days * 86_400 == pytest.approx(run.virtual_seconds, rel=rel)
    if rounds:
        ends, length = [row["virtual_seconds"] for row in run.history], planned.steps_per_round
        assert planned.seconds_per_round == pytest.approx(ends[-1] - ends[-1 - length], rel=rel)


OVERLAPPED: list[tuple[str, dict[str, Any]]] = [
    ("AllReduce", {"bucket_bytes": 400}),
    ("StreamingDiLoCo", {"H": 6, "tau": 2, "num_fragments": 3, "codec": "int8"}),
    ("AsyncSPARTA", {"delay": 2, "interval": 4, "index_selector": "partitioned"}),
]


@pytest.mark.parametrize(
    ("name", "options", "protocol"),
    [*((*each, "linux-tcp") for each in OVERLAPPED), (*OVERLAPPED[1], "ideal")],
    ids=str,
)
def test_what_overlaps_is_planned_as_it_trains(name: str, options: dict[str, Any], protocol: str) -> None:
    """Buckets during the backward pass, fragments and rounds in flight; on a narrow line, so that it shows.

    Ranks whose sends are buffered drift apart: for 85 rounds each step is a ten-thousandth shorter, and plans, which
    take rounds within a hundredth for equal, go on at the pace of the first ones.
    """
    narrow = network()
    narrow["wan"][0]["bandwidth"] = "300 kbit/s"
    planned, run = both(name, options, 24, narrow, protocol=protocol)
    assert_same(planned, run, rel=3e-3 if name == "AllReduce" else 1e-6)
    assert any("no two rounds" in remark for remark in planned.remarks) == (name == "AllReduce")


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
    planned, run = both(name, options, 16, topology, {"flops": {"utilisation": 1e-8}})
    assert_same(planned, run)
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


@pytest.mark.parametrize(
    ("name", "weather"),
    [
        *(("AllReduce", weather) for weather in WEATHER),
        ("StreamingDiLoCo", "a host that is away"),
    ],
)
def test_weather_is_planned_until_it_is_over(name: str, weather: str) -> None:
    """Days and utilisation are those of training through it, and a round is one after it."""
    options = {
        "AllReduce": {},
        "StreamingDiLoCo": {"H": 6, "tau": 1, "num_fragments": 2},
    }[name]
    planned, run = both(name, options, 60 if name == "AllReduce" else 120, network(**WEATHER[weather]))
    assert_same(planned, run)
    assert planned.compute_utilisation == pytest.approx(run.compute_utilisation, rel=1e-6)
    quiet = (planned.seconds_per_round - planned.exposed_seconds_per_round) / planned.steps_per_round
    assert quiet == pytest.approx(0.05)  # of a step, all of which are computed in a round after it
    assert planned.steady
    assert any("the network changes until" in remark for remark in planned.remarks)


CHANCE: dict[str, tuple[dict[str, Any], Any]] = {
    "jitter": ({}, {"fixed": "50 ms", "jitter": 0.2}),
    "stragglers": ({}, {"fixed": "50 ms", "stragglers": {"fraction": "20 %", "slowdown": 3}}),
    "drift": (
        {"drift": [{"link": ["a", "b"], "kind": "lognormal", "every": "200 ms", "sigma": 0.5, "seed": 1}]},
        "50 ms",
    ),
    "crashes": ({"events": [{"at": "710 ms", "host": "b.1", "crash": True, "for": "1 s"}]}, "50 ms"),
    "others": ({"background": [{"from": "a.0", "to": "b.0", "bytes": "20 kB", "every": "500 ms"}]}, "50 ms"),
}


@pytest.mark.parametrize(
    ("name", "chance"),
    [
        *(("AllReduce", chance) for chance in CHANCE if chance != "crashes"),
        ("StreamingDiLoCo", "others"),
        ("NoLoCo", "crashes"),
    ],
)
def test_a_short_budget_meets_the_draws_that_training_meets(name: str, chance: str) -> None:
    """All its rounds are simulated, with the same seeds; of pairs, a crash repeats one step of those without a call."""
    options: dict[str, Any] = {
        "AllReduce": {},
        "StreamingDiLoCo": {"H": 5, "tau": 1, "num_fragments": 2},
        "NoLoCo": {"H": 5},
    }[name]
    more, compute = CHANCE[chance]
    planned, run = both(name, options, 40, network(**more), compute)
    assert_same(planned, run, rounds=False)
    assert any("all rounds of the budget were simulated" in remark for remark in planned.remarks)


def test_weather_after_the_budget_is_named() -> None:
    late = network(events=[{"at": "1 h", "link": ["a", "b"], "bandwidth": "2 Mbit/s"}])
    budget = float(60 * RANKS * BATCH * LENGTH)
    where = Setting(tiny_model(), Topology.from_mapping(late), Compute.parse("50 ms"), RANKS, BATCH, budget)
    (remark, *_) = measure(build_strategy("AllReduce"), where).remarks
    assert remark.endswith("that training meets: it ends before event of link a-b at 1 h")


# --- crashes, an end, a lost site, batches by speed ---------------------------------------------------------

GOES_ON = {"averaging_timeout": 2, "all_reduce_strategy": "no_wait", "matchmaking_time": 1}
CRASHES = Crashes(40.0, 3.0)


def crashed(steps: int, **options: Any) -> Any:
    failures = {"mtbf": CRASHES.mean_seconds, "repair": CRASHES.repair_seconds}
    return trained("DiLoCo", {"H": 5, **options}, steps, failures=failures, until=3000, seed=42)


@pytest.mark.thorough
def test_crashes_cost_what_they_cost_in_training() -> None:
    """A real run with drawn crashes takes as much longer as the plan expects, within what twenty draws can tell."""
    quiet = measure(build_strategy("DiLoCo", H=5), setting())
    plan = measure(build_strategy("DiLoCo", H=5), setting(failures=CRASHES))
    steps = 1200
    took = crashed(steps).virtual_seconds / (steps * quiet.seconds_per_step)
    longer = plan.failures["times_as_long"]
    assert 1.3 < longer < 1.5
    assert took == pytest.approx(longer, rel=0.1)
    assert plan.tokens_per_second == pytest.approx(quiet.tokens_per_second / longer)
    assert plan.days == pytest.approx((quiet.days or 0) * longer)
    assert plan.seconds_per_round == quiet.seconds_per_round
    assert plan.failures["crashes_per_day"] == pytest.approx(4 / 43 * 86_400)


def test_rounds_that_go_on_without_a_crashed_host_lose_its_steps() -> None:
    """Where nobody is waited for, crashes take less time, and the tokens of those who are away."""
    waits = measure(build_strategy("DiLoCo", H=5), setting(failures=CRASHES))
    goes_on = measure(build_strategy("DiLoCo", H=5, **GOES_ON), setting(failures=CRASHES))
    assert waits.failures["tokens_lost_per_crash"] == 0
    assert goes_on.failures["tokens_lost_per_crash"] > 0
    assert 0 <= goes_on.failures["seconds_lost_per_crash"] < waits.failures["seconds_lost_per_crash"]
    assert waits.failures["seconds_lost_per_crash"] == pytest.approx(3.0, rel=0.05)


def test_crashes_that_never_let_a_run_end_are_reported() -> None:
    """Days were an OverflowError. Where rounds go on, the cost of a crash is tokens too."""
    where = setting(failures=Crashes(1e-80, 600.0))
    with pytest.raises(
        RefusedPlanError, match=r"plan: DiLoCo: it never ends: 576 crashes a day, each of which"
    ):
        measure(build_strategy("DiLoCo", H=5), where)
    with pytest.raises(RefusedPlanError, match=r"and a round takes more than a century"):
        measure(build_strategy("DiLoCo", H=5), replace(where, tokens=None))
    with pytest.raises(
        RefusedPlanError, match=r"takes 1\.2\d+ s and 80,240 tokens, leave 0\.0016 of the time"
    ):
        measure(build_strategy("DiLoCo", H=5, **GOES_ON), replace(where, tokens=1e12))


def test_batches_by_speed_keep_the_slow_from_holding_up_the_fast() -> None:
    """As many sequences in all; each worker's by its device, and steps take equally long but for rounding."""
    network = json.loads(json.dumps(NETWORK))
    network["regions"]["a"]["device"] = "h100"
    network["regions"]["b"]["device"] = "a100"
    where = replace(
        setting(), topology=Topology.from_mapping(network), compute=Compute.parse("flops"), batch_size=100
    )
    even, by_speed = where, replace(where, batch_by_speed=True)
    assert even.batches() == [100] * 4
    batches = by_speed.batches()
    assert sum(batches) == 400
    assert batches[0] == batches[1] > batches[2] == batches[3]
    seconds = [each.mean_seconds for each in by_speed.durations()]
    assert max(seconds) == pytest.approx(min(seconds), rel=0.03)
    slow, fast = (measure(build_strategy("DiLoCo", H=5), where) for where in (even, by_speed))
    assert fast.seconds_per_step < slow.seconds_per_step
    with pytest.raises(InputError, match="batches by speed need devices' speeds"):
        replace(setting(), batch_by_speed=True).durations()


def test_a_lost_site_is_planned_in_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """`--without` adds a row a site and one without them all; an unknown one is an error."""
    words = "plan --model llama-2m --sequence 64 --strategy DiLoCo --topology wan-4-regions --workers 4 --tokens 1B "
    words += "--device a100 "
    whole, *lost = json_of([*words.split(), "--without", "asia", "--without", "eu", "--json"], capsys)
    assert [row["name"] for row in lost] == [
        f"DiLoCo without {site}" for site in ("asia", "eu", "asia and eu")
    ]
    assert [row["without"] for row in (whole, *lost)] == [None, "asia", "eu", "asia and eu"]
    assert len({row["seconds_per_round"] for row in (whole, *lost)}) == 4
    assert [row["global_batch"] for row in (whole, *lost)] == [1024, 768, 768, 512]
    assert main([*words.split(), "--without", "mars"]) == 2
    assert "site with workers" in capsys.readouterr().err


def test_an_experiments_failures_and_end_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """What a file or --set says of them is not passed over."""
    words = "plan --model llama-2m --sequence 64 --strategy DiLoCo --topology wan-4-regions --workers 4 --tokens 1B "
    words += "--device a100 "
    sets = ["--set", "failures.mtbf=1 h", "--set", "until=1 s"]
    (row,) = json_of([*words.split(), *sets, "--json"], capsys)
    assert row["failures"]["times_as_long"] > 1.5
    assert row["days"] == pytest.approx(1 / 86_400)
    assert row["tokens"] < 1e9
    assert main([*words.split(), *sets]) == 0
    output = capsys.readouterr().out
    assert "crashes" in output
    assert "until = 1 s ends it" in output


SHARED = """\
name: shared
regions:
  a: {hosts: 1, nic: 10 Gbit/s, latency: 50 us, device: h100, devices: 1}
  b: {hosts: 1, nic: 10 Gbit/s, latency: 50 us, device: h100, devices: 1}
wan: [{between: [a, b], bandwidth: 1 Gbit/s, rtt: 50 ms}]
"""


def test_workers_that_share_a_hosts_devices_share_their_time_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training, four workers on two devices take twice the time of two: they were planned at full speed."""
    (tmp_path / "shared.yaml").write_text(SHARED)
    words = (
        f"plan --model llama-2m --strategy DiLoCo --topology {tmp_path / 'shared.yaml'} --tokens 2B --json"
    )
    rows = []
    for number in (2, 4):
        rows += json_of([*words.split(), "--workers", str(number)], capsys)
    two, four = rows
    computing = [row["seconds_per_round"] - row["exposed_seconds_per_round"] for row in rows]
    assert computing[1] == pytest.approx(2 * computing[0])
    assert four["memory_available"] == two["memory_available"] / 2
    assert any("up to 2 on one: those beyond a host's devices share them" in each for each in four["remarks"])
