"""What a plan makes of a budget: whole rounds of any length, through all weather, with figures that agree."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_planning import NETWORK, setting

from exogym_core.cli.main import main
from exogym_core.planning.measure import Measured, RefusedPlanError, measure
from exogym_core.planning.models import planned_model
from exogym_core.planning.rhythm import period_of, rhythm
from exogym_core.planning.setting import Crashes
from exogym_core.strategy import Strategy, build_strategy
from exogym_core.strategy.parts.selectors import RandomIndexSelector
from netsim import Topology
from netsim.errors import InputError

GOES_ON = {"averaging_timeout": 2, "all_reduce_strategy": "no_wait", "matchmaking_time": 1}


def stormy(crashes: list[str], away: str = "20 s") -> Topology:
    """The network with crashes of one host."""
    events = [{"at": at, "host": "b.1", "crash": True, "for": away} for at in crashes]
    return Topology.from_mapping({**NETWORK, "events": events})


@pytest.mark.parametrize(("name", "busy"), [("FedAvg", 1)])
def test_a_long_round_communicates(name: str, busy: int) -> None:
    """A round of 6,000 steps was planned as one of a step that sends nothing."""
    found = rhythm(build_strategy(name, H=6000), 2)
    assert found.period == 6000
    assert found.quiet.count(False) == busy


def test_a_round_that_is_too_long_to_try_is_refused() -> None:
    """One line names the option; nothing is planned as never communicating."""
    with pytest.raises(InputError, match="H = 200,000 is longer than the rounds that are planned"):
        rhythm(build_strategy("DiLoCo", H=200_000), 2)


def test_a_long_plan_sends_what_a_short_one_does() -> None:
    """Of H the bytes of a round do not depend, and its seconds by the steps' computing alone."""
    short, long = (measure(build_strategy("DiLoCo", H=H), setting()) for H in (10, 6000))
    assert long.bytes_per_worker == short.bytes_per_worker > 0
    assert long.seconds_per_round - short.seconds_per_round == pytest.approx(5990 * 0.05)


def test_periods_of_long_series_are_found_in_time() -> None:
    """Comparing each period with each place took hours for a round of 100,000 steps."""
    assert period_of([*[0] * 99_999, 5] * 3) == 100_000


def test_whole_rounds_are_charged() -> None:
    """Tokens for 48 steps at H = 100 take a round, and all its communication; a remark says so."""
    where = setting()
    few = replace(where, tokens=float(48 * where.tokens_a_round(1)))
    made = Measured(build_strategy("DiLoCo", H=100), few)
    assert made.plan.days == pytest.approx(made.figures.round_seconds[0] / 86_400)
    assert (made.plan.rounds, made.plan.steps, made.plan.tokens) == (1, 100, 100 * 4 * 2 * 4)
    assert any("the budget is 48 steps" in remark for remark in made.plan.remarks)
    even = measure(build_strategy("DiLoCo", H=100), replace(where, tokens=float(where.tokens_a_round(300))))
    assert (even.rounds, even.steps) == (3, 300)
    assert not even.remarks


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AllReduce", {}),
        ("DiLoCo", {"H": 5}),
        ("DiLoCo", {"H": 5, **GOES_ON}),
        ("NoLoCo", {"H": 2}),
        ("AsyncDiLoCo", {"H": 3}),
    ],
    ids=str,
)
def test_days_are_tokens_over_tokens_a_second(name: str, options: dict[str, Any], protocol: str) -> None:
    """Also where a network changed on the way."""
    where = setting(protocol=protocol, dollars_per_hour=2.0)
    is_alone = name in ("NoLoCo", "AsyncDiLoCo")  # which are planned in steady weather
    for there in (where, *([] if is_alone else [replace(where, topology=stormy(["3 s"]))])):
        made = measure(build_strategy(name, **options), there)
        assert made.days is not None
        assert made.tokens is not None
        assert made.tokens_per_second * made.days * 86_400 == pytest.approx(made.tokens)
        assert made.tokens >= 1e6
        assert made.cost == pytest.approx(made.days * 24 * 4 * 2.0)
        assert made.steps == (made.rounds or 0) * made.steps_per_round


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


@pytest.mark.parametrize("options", [{"H": 5}, {"H": 5, **GOES_ON}], ids=str)
def test_a_schedule_beyond_what_is_simulated_is_refused(options: dict[str, Any]) -> None:
    """Crashes every night, in rounds of half a second: no figure is better than one without them."""
    nightly = stormy([f"{24 * day} h" for day in range(1, 11)], "8 h")
    month = replace(setting(), topology=nightly, tokens=1e9)
    with pytest.raises(
        RefusedPlanError, match=r"changes of the network come after the .* --set failures.mtbf"
    ):
        measure(build_strategy("DiLoCo", **options), month)
    assert measure(build_strategy("DiLoCo", **options), replace(month, tokens=1e5)).days is not None


def test_a_refused_row_leaves_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """It has its reason in place of figures."""
    network = tmp_path / "nightly.yaml"
    network.write_text(
        "regions: {a: {hosts: 1, nic: 1 Gbit/s, latency: 1 ms}, b: {hosts: 1, nic: 1 Gbit/s, latency: 1 ms}}\n"
        "wan: [{between: [a, b], bandwidth: 1 Gbit/s, rtt: 1 ms}]\n"
        "events: [{at: 10 h, host: b.0, crash: true, for: 8 h}]\nprotocol: ideal\n"
    )
    words = (
        f"plan --model llama-2m --sequence 64 --topology {network} --tokens 300M --set compute=10s --json "
    )
    words += "--strategy AllReduce --strategy DiLoCo --set strategies.DiLoCo.H=1000"
    assert main(words.split()) == 0
    refused, planned = json.loads(capsys.readouterr().out)
    assert refused["name"] == "AllReduce"
    assert "changes of the network" in refused["refused"]
    assert planned["days"] > 8 / 24


def test_random_choices_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped strategies that choose at random are planned by how many they choose."""

    def draw(*_: Any) -> None:
        raise AssertionError("a plan drew indices")

    monkeypatch.setattr(RandomIndexSelector, "get_indices", draw)
    for name in ("SPARTA", "SPARTA+DiLoCo", "AsyncSPARTA"):
        made = measure(build_strategy(name, p_sparta=1e-6), setting())
        assert made.expected_bytes
        assert made.payload_bytes >= 4  # one value at least is chosen


class Warming(Strategy):
    """Sends much for the first tenth of a run, or for the first steps, then little."""

    def __init__(self, warm_steps: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.arguments["warm_steps"] = self.warm_steps = warm_steps

    def step(self) -> None:
        self.optimizer_step()
        warm = self.max_steps // 10 if self.warm_steps is None else self.warm_steps
        self.comm.all_reduce(torch.empty(99 if self.local_step < warm else 1, device="meta"))
        super().step()


def test_a_warm_up_that_grows_with_the_run_is_not_passed_over() -> None:
    """As OneBitAdam's, which sends 32 times as much in the first 15 % of a run: without a number there are no days."""
    with pytest.raises(RefusedPlanError, match="begins with steps that send other bytes"):
        measure(Warming(), setting())
    later = measure(Warming(), replace(setting(), tokens=None))
    assert any("figures are for later ones" in remark for remark in later.remarks)
    assert measure(Warming(2), setting()).days is not None
    for name in ("StreamingDiLoCo", "AsyncSPARTA", "DelayedDiLoCo"):
        assert not rhythm(
            build_strategy(name, **({} if name == "AsyncSPARTA" else {"H": 6})), 2
        ).begins_longer


def test_what_a_step_takes_is_what_the_devices_reach(capsys: pytest.CaptureFixture[str]) -> None:
    """MFU times the peak times the seconds of a step are the model's operations, at each site by its own share."""
    words = "plan --model llama-2m --sequence 64 --strategy AllReduce --topology wan-4-regions --workers 4 --tokens 1B"
    words += " --device h100 --utilisation asia=0.2,eu=0.4,us-east=0.4,us-west=0.4 --json"
    assert main(words.split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    flops = planned_model("llama-2m", 64).sequence_flops * 256
    assert set(row["mfu"]) == {"asia", "eu", "us-east", "us-west"}
    for share in row["mfu"].values():  # in every step each site computes the same
        assert share * 989.5e12 * row["seconds_per_step"] == pytest.approx(flops)
    slowest = flops / (989.5e12 * 0.2)
    assert row["seconds_per_step"] >= slowest
    assert (row["global_batch"], row["tokens_per_step"]) == (1024, 1024 * 64)
    assert row["steps"] == row["rounds"] == -(-1_000_000_000 // (1024 * 64))


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


def test_activations_of_a_layer_are_those_of_the_books() -> None:
    """About 34 bytes a token and width in half precision (Korthikanti et al. 2022) for gelu; scores are not kept."""
    one, two = (planned_model("gpt-base", 256, num_layers=layers).activation_bytes for layers in (1, 2))
    assert 15 < (two - one) / 2 / (256 * 768) < 45


def test_a_page_can_be_sent(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It names model, network and price, says each remark once, needs no other file and fits a narrow screen."""
    words = "plan --model llama-150m --sequence 64 --topology wan-4-regions --workers 4 --tokens 1B"
    words += " --device h100 --price 3 --strategy DiLoCo --sweep strategies.DiLoCo.H=100,200,300 --out"
    assert main([*words.split(), str(tmp_path / "page")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page" / "plan.html").read_text(encoding="utf-8")
    assert "<title>llama-150m on wan-4-regions: 4 workers</title>" in page
    for told in (page, printed):
        assert "a worker&#x27;s hour: 3 dollars" in told or "a worker's hour: 3 dollars" in told
        assert "1,024 sequences (256 a worker) of 64, 65,536 tokens" in told
        assert "215M parameters" in told
    items = page.split("<li>")[1:]
    texts = [text for item in items if (text := item.partition(":")[2])]
    assert len(texts) == len(set(texts))
    assert "src='data:image/png;base64," in page
    assert "name='viewport'" in page
    assert "@media(max-width:60em)" in page
    assert page.count("data-of='strategy'") == 3


def test_restarts_are_counted() -> None:
    """Crashes a day times days."""
    made = measure(build_strategy("DiLoCo", H=5), setting(failures=Crashes(4000.0, 3.0)))
    assert made.failures is not None
    assert made.failures["restarts"] == pytest.approx(made.failures["crashes_per_day"] * (made.days or 0))
