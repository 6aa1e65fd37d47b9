"""What a plan says of mishaps and of unlike workers: crashes, an end, a lost site, batches by speed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from experiments import json_of
from test_planning import NETWORK, setting, trained

from exogym_core.cost.compute import Compute
from exogym_core.strategy import build_strategy
from netgym.cli.main import main
from netgym.planning.advise import advise
from netgym.planning.measure import RefusedPlanError, measure
from netgym.planning.setting import Crashes
from netsim import Topology
from netsim.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

GOES_ON = {"averaging_timeout": 2, "all_reduce_strategy": "no_wait", "matchmaking_time": 1}
CRASHES = Crashes(40.0, 3.0)


def crashed(steps: int, **options: Any) -> Any:
    failures = {"mtbf": CRASHES.mean_seconds, "repair": CRASHES.repair_seconds}
    return trained("DiLoCo", {"H": 5, **options}, steps, failures=failures, until=3000, seed=42)


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


def test_crashes_that_end_a_run_are_reported() -> None:
    """Under TCP a connection is given up after a quarter of an hour, so where a round hangs on it the run ends."""
    plan = measure(
        build_strategy("DiLoCo", H=2), setting("10 ms", failures=Crashes(1e6, 1800.0), protocol="linux-tcp")
    )
    assert any("of crashes end the run" in remark for remark in plan.remarks)
    assert plan.failures["seconds_lost_per_crash"] == pytest.approx(1800, rel=0.01)


@pytest.mark.parametrize("mean_seconds", [0.01, 1e-80], ids=str)
def test_crashes_that_never_let_a_run_end_are_reported(mean_seconds: float) -> None:
    """Days were 1e19, or an OverflowError; advice names such rows and plans the others."""
    where = setting(failures=Crashes(mean_seconds, 600.0))
    with pytest.raises(
        RefusedPlanError, match=r"DiLoCoStrategy: it never ends: 576 crashes a day, each of which"
    ):
        measure(build_strategy("DiLoCo", H=5), where)
    with pytest.raises(RefusedPlanError, match=r"and a round takes more than a century"):
        measure(build_strategy("DiLoCo", H=5), replace(where, tokens=None))


def test_advice_names_strategies_that_crashes_never_let_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netgym.planning.advise.CANDIDATES", (("DiLoCo", {"H": 5}),))
    found = advise(setting(failures=Crashes(0.01, 600.0)))
    assert found["ranked"] == []
    assert {
        row["strategy"] for row in found["not_simulated"] if row["reason"].startswith("it never ends")
    } == {"DiLoCo"}


def test_a_network_may_change_late_in_a_long_plan() -> None:
    """Times were limited to twelve days, and plans take months."""
    event = {"at": "2000000 s", "link": ["a", "b"], "bandwidth": "1 Mbit/s"}
    long = setting("20000 s", protocol="ideal")
    late = replace(long, topology=Topology.from_mapping({**NETWORK, "events": [event]}), tokens=32 * 150)
    plan = measure(build_strategy("DiLoCo", H=5), late)
    assert plan.days == pytest.approx(150 * 20000 / 86_400, rel=1e-3)
    assert any("the network changes until 2e+06 s, which was simulated" in each for each in plan.remarks)


def test_a_run_that_ends_before_its_budget_is_reported() -> None:
    """`until` cuts days, tokens and money alike; where it comes later nothing changes."""
    whole = measure(build_strategy("DiLoCo", H=5), setting(dollars_per_hour=2.0))
    cut = measure(build_strategy("DiLoCo", H=5), setting(dollars_per_hour=2.0, until=600.0))
    assert cut.days == pytest.approx(1 / 144)
    assert cut.tokens == pytest.approx(1e6 / 144 / (whole.days or 0))
    assert cut.cost == pytest.approx(2.0 * 4 / 6)
    assert any("until = 10 min ends it" in remark for remark in cut.remarks), cut.remarks
    assert measure(build_strategy("DiLoCo", H=5), setting(dollars_per_hour=2.0, until=1e9)) == whole


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


def test_a_batch_that_devices_cannot_share_in_whole_sequences_is_remarked() -> None:
    """Five sequences on eight devices; four on two are shared."""
    where = replace(setting(), batch_size=5, devices_per_worker=8)
    plan = measure(build_strategy("DiLoCo", H=5), where)
    assert any("in whole sequences computing takes 1.6 times as long" in remark for remark in plan.remarks)
    even = measure(build_strategy("DiLoCo", H=5), replace(where, batch_size=4, devices_per_worker=2))
    assert not any("whole sequences" in remark for remark in even.remarks)


def test_a_network_that_stays_dead_ends_its_row_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others are planned; it was an error of the whole command."""
    events = "events: [{at: 1 s, link: [a, b], down: true, for: 10 h}]\n"
    (tmp_path / "dead.yaml").write_text(SHARED + events)
    words = "plan --model llama-2m --strategy DiLoCo --without b --tokens 2B --json --topology"
    code = main([*words.split(), str(tmp_path / "dead.yaml")])
    rows = json.loads(capsys.readouterr().out) if code == 0 else []
    assert [("refused" in row, row["name"]) for row in rows] == [
        (True, "DiLoCo"),
        (False, "DiLoCo without b"),
    ]
    assert "went dead at 1 s and stayed so" in rows[0]["refused"]
