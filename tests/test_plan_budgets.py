"""What a plan makes of a budget: whole rounds of any length, through all weather, with figures that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from experiments import json_of
from test_planning import NETWORK, setting, trained

from exogym_core.strategy import build_strategy
from netgym.cli.main import main
from netgym.planning.measure import NETWORK_RANGE, Measured, RefusedPlanError, measure
from netgym.planning.models import planned_model
from netgym.planning.setting import Crashes
from netsim import Topology
from netsim.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

GOES_ON = {"averaging_timeout": 2, "all_reduce_strategy": "no_wait", "matchmaking_time": 1}


def stormy(crashes: list[str], away: str = "20 s") -> Topology:
    """The network with crashes of one host."""
    events = [{"at": at, "host": "b.1", "crash": True, "for": away} for at in crashes]
    return Topology.from_mapping({**NETWORK, "events": events})


def test_a_round_that_is_too_long_is_refused() -> None:
    """One line says so; nothing is planned as never communicating."""
    with pytest.raises(InputError, match="rounds of 200,000 steps are longer than those that are planned"):
        measure(build_strategy("DiLoCo", H=200_000), setting())


@pytest.mark.parametrize(
    ("name", "options", "protocol"),
    [
        ("AllReduce", {}, "linux-tcp"),
        ("DiLoCo", {"H": 50, **GOES_ON}, "ideal"),
        ("NoLoCo", {"H": 2}, "ideal"),
        ("AsyncDiLoCo", {"H": 3}, "ideal"),
    ],
    ids=str,
)
def test_days_are_tokens_over_tokens_a_second(name: str, options: dict[str, Any], protocol: str) -> None:
    """Also where a network changed on the way."""
    where = setting(protocol=protocol, dollars_per_hour=2.0)
    is_alone = name in ("NoLoCo", "AsyncDiLoCo")  # which are planned in steady weather
    for there in (where, *([] if is_alone else [replace(where, topology=stormy(["3 s"]))])):
        made = measure(build_strategy(name, **options), there)
        assert made.tokens_per_second * made.days * 86_400 == pytest.approx(made.tokens)
        assert made.tokens >= 1e6
        assert made.cost == pytest.approx(made.days * 24 * 4 * 2.0)
        assert made.rounds == made.steps // made.steps_per_round


def test_a_schedule_of_absences_is_applied() -> None:
    """Rounds that go on without a host lose what it computes while it is away; those that wait lose the time."""
    options = {"H": 5, **GOES_ON}
    where = replace(setting(), tokens=20_000.0)
    quiet = measure(build_strategy("DiLoCo", **options), where)
    crashed = replace(where, topology=stormy(["3 s"]))
    goes_on = measure(build_strategy("DiLoCo", **options), crashed)
    waits = measure(build_strategy("DiLoCo", H=5), crashed)
    assert any("was away" in remark for remark in goes_on.remarks)
    assert (goes_on.rounds or 0) > (quiet.rounds or 0)
    assert goes_on.tokens == pytest.approx(20_000, rel=0.01)
    calm = measure(build_strategy("DiLoCo", H=5), where)
    assert (waits.days or 0) * 86_400 == pytest.approx((calm.days or 0) * 86_400 + 20, abs=1.0)


LATE = {"H": 5, "averaging_timeout": 0.5, "timeout_waiting_for_peers": 1}


UP = {"h0": "19 kbit/s", "h1": "190 kbit/s", "h2": "190 kbit/s", "h3": "190 kbit/s"}
SLOW_HOST = {
    "hosts": list(UP),
    "routers": ["exchange"],
    "links": [
        {"between": [name, "exchange"], "up": rate, "down": "750 kbit/s", "latency": "10 ms"}
        for name, rate in UP.items()
    ],
}


@pytest.mark.parametrize(("options", "steps"), [(LATE, 25), ({"H": 5, "clients_per_round": 2}, 75)], ids=str)
def test_a_late_rank_and_drawn_clients_are_planned_as_trained(options: dict[str, Any], steps: int) -> None:
    """Later rounds do not wait as the second does; steps of a file are planned, not those that make up for absences."""
    run = trained("DiLoCo", options, steps, topology=SLOW_HOST, protocol="ideal")
    where = setting(protocol="ideal")
    where = replace(where, topology=Topology.from_mapping(SLOW_HOST))
    where = replace(where, tokens=float(where.tokens_a_round(steps)), is_of_steps=True)
    measured = Measured(build_strategy("DiLoCo", **options), where)
    made, figures = measured.plan, measured.figures
    assert made.days * 86_400 == pytest.approx(run.virtual_seconds, abs=1e-9)
    ends = [row["virtual_seconds"] for row in run.history if row["step"] % 5 == 0]
    assert figures.round_seconds == pytest.approx(ends, abs=1e-9)
    assert (made.steps, made.tokens) == (steps, where.tokens - sum(figures.absences) * 5 * 2 * 4)
    sent = [own[-1] - own[0] for own in figures.counts["bytes_sent"]]
    assert made.bytes_per_worker == pytest.approx(sum(sent) / 4 / (steps // 5 - 1))


def test_a_schedule_beyond_what_is_simulated_is_refused() -> None:
    """Crashes every night, in rounds of seconds: no figure is better than one without them."""
    nightly = stormy([f"{24 * day} h" for day in range(1, 11)], "8 h")
    month, options = replace(setting(), topology=nightly, tokens=1e9), {"H": 500, **GOES_ON}
    with pytest.raises(
        RefusedPlanError, match=r"the network changes [0-9]+ times? after the .* --set failures.mtbf"
    ):
        measure(build_strategy("DiLoCo", **options), month)
    assert measure(build_strategy("DiLoCo", **options), replace(month, tokens=1e5)).days is not None


def test_a_warm_up_that_grows_with_the_run_is_not_passed_over() -> None:
    """OneBitAdam sends 32 times as much in the first 15 % of a run: there are no days; a short one is simulated."""
    where = setting()
    with pytest.raises(RefusedPlanError, match=r"begins with 4,687 steps that send otherwise"):
        measure(build_strategy("OneBitAdam"), where)
    later = measure(build_strategy("OneBitAdam", freeze_step=2000), replace(where, tokens=None))
    assert any("figures are for later ones" in remark for remark in later.remarks)
    of_steps = replace(where, is_of_steps=True)
    with pytest.raises(RefusedPlanError, match=r"set 1,250 at most \(such as freeze_step\)$"):
        measure(build_strategy("OneBitAdam"), of_steps)
    short = measure(build_strategy("OneBitAdam", freeze_step=20), where)
    assert short.bytes_per_worker == later.bytes_per_worker
    assert short.payload_bytes < 4 * short.memory["weights"] / 32


def test_what_a_step_takes_is_what_the_devices_reach(capsys: pytest.CaptureFixture[str]) -> None:
    """MFU times the peak times the seconds of a step are the model's operations, at each site by its own share."""
    words = "plan --model llama-2m --sequence 64 --strategy AllReduce --topology wan-4-regions --workers 4 --tokens 1B"
    words += " --device h100 --utilisation asia=0.2,eu=0.4,us-east=0.4,us-west=0.4 --json"
    (row,) = json_of(words.split(), capsys)
    flops = planned_model("llama-2m", 64).sequence_flops * 256
    assert set(row["mfu"]) == {"asia", "eu", "us-east", "us-west"}
    for share in row["mfu"].values():  # in every step each site computes the same
        assert share * 989.5e12 * row["seconds_per_step"] == pytest.approx(flops)
    slowest = flops / (989.5e12 * 0.2)
    assert row["seconds_per_step"] >= slowest
    assert (row["global_batch"], row["tokens_per_step"]) == (1024, 1024 * 64)
    assert row["steps"] == row["rounds"] == -(-1_000_000_000 // (1024 * 64))


SITES = """\
hosts: {a-home: {device: h100}, b: {device: h100}, c: {device: h100}}
routers: [x]
links:
  - {between: [a-home, x], bandwidth: 10 Mbit/s}
  - {between: [b, x], bandwidth: 1 Gbit/s}
  - {between: [c, x], bandwidth: 1 Gbit/s}
"""


def test_workers_at_their_own_pace_reach_what_their_links_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each site had the mean of all, and nothing told that the server's host, the first, had the narrow link."""
    (tmp_path / "home.yaml").write_text(SITES)
    words = f"plan --model llama-2m --sequence 64 --strategy AsyncDiLoCo --topology {tmp_path / 'home.yaml'} --json"
    (row,) = json_of(words.split(), capsys)
    shares = row["mfu"]
    assert shares["a-home"] == pytest.approx(0.4, rel=0.01)
    assert shares["b"] < 0.1 * shares["a-home"]
    assert sum(shares.values()) / 3 == pytest.approx(0.4 * row["compute_utilisation"], rel=0.01)
    assert any("1 server on a-home:" in remark for remark in row["remarks"])


def test_hosts_of_servers_are_named_after_those_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server was on the first host, here a home of 10 Mbit/s, whatever the placement; others leave its host out."""
    (tmp_path / "sites.yaml").write_text(SITES)
    (tmp_path / "study.yaml").write_text(
        "task: digits\nmodel: llama-2m\nworkers: {count: 2}\nsteps: 40\ncompute: 50 ms\nprotocol: ideal\n"
        "topology: sites.yaml\nplacement: [b, c, b]\nstrategies: [{name: AsyncDiLoCo, H: 4}, {name: DiLoCo, H: 4}]\n"
    )
    served, alone = json_of(["plan", str(tmp_path / "study.yaml"), "--json"], capsys)
    assert any(remark == "1 server on b" for remark in served["remarks"])
    assert served["placement"] == alone["placement"] == {"b": 1, "c": 1}


def test_memory_is_the_sum_of_its_parts() -> None:
    """In bytes a parameter: half of them in bf16, optimizer states in one byte a number, or elsewhere."""
    where = replace(setting(), model=planned_model("llama-2m", 64), half=True)
    plain = measure(build_strategy("DiLoCo", H=2), where)
    parts = {name: size for name, size in plain.memory.items() if name != "total"}
    assert plain.memory_per_worker == plain.memory["total"] == sum(parts.values())
    assert plain.memory["activations"] == where.model.activation_bytes // 2
    saved = {
        "bf16": (parts["weights"] + parts["gradients"] + parts["optimizer"]) // 2,
        "8bit": parts["optimizer"] * 3 // 4,
        "offload": parts["optimizer"] + parts["outer"],
        "checkpointing": (where.model.activation_bytes - where.model.checkpointed_bytes) // 2,
    }
    for name, less in saved.items():
        assert plain.memory_with[name] == pytest.approx(plain.memory_per_worker - less, abs=4), name
        chosen = measure(build_strategy("DiLoCo", H=2), replace(where, memory=(name,)))
        assert chosen.memory_per_worker == plain.memory_with[name]
    two = measure(build_strategy("DiLoCo", H=2), replace(where, micro_batch=2))
    assert two.memory["activations"] == pytest.approx(2 * plain.memory["activations"], abs=1)


def test_a_page_can_be_sent(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It names model, network and price, says each remark once, needs no other file and fits a narrow screen."""
    words = "plan --model llama-2m --sequence 64 --topology wan-4-regions --workers 4 --tokens 1B"
    words += " --device h100 --price 3 --strategy DiLoCo --sweep strategies.DiLoCo.H=100,200 --out"
    assert main([*words.split(), str(tmp_path / "page")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page" / "plan.html").read_text(encoding="utf-8")
    assert "<title>llama-2m on wan-4-regions: 4 workers - NetGym</title>" in page
    for name, value in (
        ("a worker's hour", "3 dollars"),
        ("a step", "1,024 sequences (256 a worker) of 64, 65,536 tokens"),
        ("parameters", "0.262M"),
    ):
        assert f"{name}: {value}" in printed
        assert f"<dt>{name.replace(chr(39), '&#39;')}</dt><dd>{value}</dd>" in page
    items = page.split("<li>")[1:]
    texts = [text for item in items if (text := item.partition(":")[2])]
    assert len(texts) == len(set(texts))
    assert 'src="data:image/png;base64,' in page
    assert 'name="viewport"' in page
    assert "@media (max-width: 40rem)" in page
    assert page.count('<th scope="row">') == 2


@pytest.mark.parametrize("until", [None, 600.0])
def test_restarts_are_counted(until: float | None) -> None:
    """Crashes a day times days, of which `until` leaves fewer."""
    made = measure(build_strategy("DiLoCo", H=5), setting(failures=Crashes(4000.0, 3.0), until=until))
    assert until is None or made.days == pytest.approx(until / 86_400)
    assert made.failures["restarts"] == pytest.approx(made.failures["crashes_per_day"] * (made.days or 0))


SMALL = "plan --model llama-2m --sequence 64 --topology wan-4-regions --workers 4 --strategy DiLoCo --json "


def planned(words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Output of `netgym plan` for the small model."""
    return json_of([*SMALL.split(), *words.split()], capsys)


def test_a_given_utilisation_has_no_band(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it equals the default, whose band is that of published trainings."""
    where = "--device h100 --tokens 1B --protocol ideal "
    given = ("", "--utilisation 0.4", "--set compute.flops.utilisation=0.4")
    (default,), (exact,), (same,) = (planned(where + more, capsys) for more in given)
    assert same == exact
    assert exact["days"] == default["days"]
    share = exact["compute_utilisation"]
    less, more = (1 - share) * (1 - NETWORK_RANGE[0]), (1 - share) * (NETWORK_RANGE[1] - 1)
    assert exact["days_high"] == pytest.approx(exact["days"] * (1 + more))
    assert default["days_high"] == pytest.approx(default["days"] * (1 + more + share * (0.4 / 0.38 - 1)))
    assert default["days_low"] == pytest.approx(default["days"] * (1 - less - share * (1 - 0.4 / 0.46)))


@pytest.mark.parametrize(
    ("flags", "sweep", "name"),
    [
        ("--device h100", "model.name=llama-2m,gpt-byte", "memory_per_worker"),
        ("--device h100", "compute.flops.device=h100,a100", "seconds_per_step"),
        ("--device h100 --tokens 20M", "compute.jitter=0,0.5", "seconds_per_round"),
    ],
)
def test_a_sweep_goes_beyond_flags(
    flags: str, sweep: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both points showed what the flag says, with exit code 0."""
    first, second = planned(f"{flags} --sweep {sweep}", capsys)["plans"]
    assert first[name] != second[name]


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("DiLoCo", {"H": 5}, {}),
        ("DiLoCo", {"H": 5}, {"failures": Crashes(4000.0, 3.0)}),
        ("AsyncDiLoCo", {"H": 3}, {}),
        ("DiLoCo", {"H": 5}, {"topology": stormy(["3 s"])}),
    ],
    ids=["plain", "crashes", "own pace", "an outage"],
)
def test_dollars_buy_whole_rounds(name: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    """One round more would cost more than the budget, and the tokens, planned as such, cost what the plan says."""
    where = replace(setting(dollars_per_hour=2.0), tokens=None, dollars=5.0, **more)
    made = Measured(build_strategy(name, **options), where)
    plan = made.plan
    assert plan.cost <= 5.0 < plan.cost * (plan.rounds + 1) / plan.rounds
    same = measure(build_strategy(name, **options), replace(where, dollars=None, tokens=made.setting.tokens))
    assert (same.rounds, same.days, same.cost) == (plan.rounds, plan.days, plan.cost)
    assert plan.tokens == same.tokens
    # The money is spent either way, and so are the workers' hours; what the network leaves open is the tokens.
    assert plan.cost_low == plan.cost_high == plan.cost
    assert plan.days_low == pytest.approx(plan.days)
    assert plan.tokens_low == pytest.approx(plan.tokens * plan.cost / same.cost_high)
    assert plan.tokens_low < plan.tokens < plan.tokens_high


def test_a_table_of_a_budget_has_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """With tokens a parameter, by which a model's size is judged; rows of one place have overlapping tokens."""
    words = SMALL.replace("--json", "") + "--device h100 --price 20 --budget 1,000"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "budget: 1,000 dollars; tokens are those that it pays for" in printed
    assert "about 20 tokens a parameter" in printed
    rows = planned("--strategy AllReduce --device h100 --price 20 --budget 1000", capsys)
    assert [row["place"] for row in rows] == [1, 2]
    for row in rows:
        assert row["tokens_per_parameter"] == pytest.approx(
            row["tokens"] / sum(each.numel() for each in planned_model("llama-2m", 64).model.parameters())
        )
