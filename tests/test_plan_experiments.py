"""Plans of experiment files and their sweeps: what would be trained, with what the file says and what it does not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from experiments import json_of

from netgym.cli.main import main
from netgym.planning import plan as plan_module
from netgym.planning.sweep import placed, step_ratio_lines
from netsim.errors import InputError

SITES = """
topology:
  regions:
    fra: {hosts: 1, nic: 1 Gbit/s, latency: 1 ms, device: h100}
    ore: {hosts: 1, nic: 1 Gbit/s, latency: 1 ms, device: a100}
  wan:
    - {between: [fra, ore], bandwidth: 10 Mbit/s, rtt: 40 ms}
workers: {count: 2}
batch_size: 2
steps: 4
evaluate: {samples: 2}
strategies: [AllReduce, {name: DiLoCo, H: 2}]
"""


def printed_rows(words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `netgym` prints as JSON."""
    return json_of([*words.split(), "--json"], capsys)


@pytest.mark.parametrize(
    "model",
    [
        "task: {name: text, num_bytes: 9000, block_size: 32}\nmodel: {name: gpt, num_layers: 1}\ncompute: 50 ms",
        "task: digits\nmodel: {name: mlp, hidden: [32]}\ncompute: {flops: {utilisation: 0.4}}",
    ],
)
def test_what_is_planned_is_what_is_trained(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file's plan has the bytes and the seconds that its run has: one model, one length, one batch."""
    path = tmp_path / "own.yaml"
    path.write_text(model + SITES)
    ran = printed_rows(f"compare {path} --out {tmp_path / 'run'}", capsys)["summary"]
    planned = printed_rows(f"plan {path}", capsys)
    for run, row in zip(ran, planned, strict=True):
        rounds = 4 / row["steps_per_round"]
        assert row["bytes_per_worker"] * rounds == run["bytes_sent_per_worker"]
        assert row["days"] * 86_400 == pytest.approx(run["virtual_seconds"], rel=1e-6)


def test_a_model_by_name_replaces_the_files_with_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("task: digits\nmodel: {name: mlp, hidden: [32]}\ncompute: 50 ms" + SITES)
    (row,) = printed_rows(f"plan {path} --model llama-150m --strategy AllReduce", capsys)
    assert (row["tokens_per_step"], row["bytes_per_worker"] > 1e8) == (4 * 2048, True)


@pytest.mark.parametrize("steps", [5, 6])
def test_a_short_last_batch_of_an_epoch_takes_as_long_as_in_a_run(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 1,438 digits two workers have 500 and 219 each in an epoch; it ends within a round or with it."""
    path = tmp_path / "short.yaml"
    sites = SITES.replace("batch_size: 2", "batch_size: 500").replace("steps: 4", f"steps: {steps}")
    path.write_text("task: digits\ncompute: {flops: {utilisation: 1.0e-7}}" + sites)
    ran = printed_rows(f"compare {path} --out {tmp_path / 'run'}", capsys)["summary"]
    for run, row in zip(ran, printed_rows(f"plan {path}", capsys), strict=True):
        assert row["days"] * 86_400 == pytest.approx(run["virtual_seconds"], rel=1e-6)
        assert row["tokens"] == 2 * (500 * steps - 281 * (steps // 2))


def test_a_strategy_that_fails_leaves_the_others_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "from exogym_core.strategy import DiLoCoStrategy\n\n\nclass Mine(DiLoCoStrategy):\n"
    own += "    def begin_step(self, context):\n        raise KeyError('absent')\n"
    (tmp_path / "own_plan.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own.yaml"
    path.write_text("task: digits\ncompute: 50 ms" + SITES.replace("[AllReduce", "[own_plan:Mine, AllReduce"))
    failed, *rows = printed_rows(f"plan {path}", capsys)
    assert failed["name"] == "own_plan:Mine"
    assert failed["refused"] == "own_plan:Mine: failed: KeyError: 'absent'; plan it alone, with --debug"
    assert [row["name"] for row in rows] == ["AllReduce", "DiLoCo"]
    out = tmp_path / "new" / "page"
    assert main(["plan", str(path), "--strategy", "own_plan:Mine", "--out", str(out)]) == 1
    assert not out.parent.exists()
    assert capsys.readouterr().err.startswith("error: KeyError: 'absent'")


def test_a_guessed_vocabulary_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the task's files a plan takes what tokens mostly have, and says so; an option settles it."""
    path = tmp_path / "own.yaml"
    path.write_text("task: {name: text, paths: gone.bin}\nmodel: {name: llama}\ncompute: 50 ms" + SITES)
    guessed = printed_rows(f"plan {path}", capsys)[0]
    assert any("GUESSED as 50,304" in remark for remark in guessed["remarks"])
    given = printed_rows(f"plan {path} --set task.vocab_size=50304", capsys)[0]
    assert not any("GUESSED" in remark for remark in given["remarks"])
    assert given["bytes_per_worker"] == guessed["bytes_per_worker"]


UNLIKE = """
task: {name: text, num_bytes: 40000}
topology:
  regions:
    fra: {hosts: 1, nic: 100 Gbit/s, latency: 1 ms, device: h100}
    mil: {hosts: 1, nic: 100 Gbit/s, latency: 1 ms, device: h100}
    ore: {hosts: 1, nic: 100 Gbit/s, latency: 1 ms, device: a100}
  wan:
    - {between: [fra, mil], bandwidth: 10 Gbit/s, rtt: 20 ms}
    - {between: [fra, ore], bandwidth: 10 Gbit/s, rtt: 90 ms}
    - {between: [mil, ore], bandwidth: 10 Gbit/s, rtt: 90 ms}
compute: {flops: {utilisation: 0.0001}}
workers: {count: 3}
batch_size: 8
steps: 100
strategies: [{name: DiLoCo, H: 50}]
"""


@pytest.mark.thorough
def test_a_measured_experiment_is_planned_by_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message has the whole line to type; the folder of a run has what was measured."""
    path = tmp_path / "own.yaml"
    measured = "task: digits\ncompute: {measured: {}, updates: measured, shared_cores: 1, jitter: 0.1}"
    path.write_text(measured + SITES)
    assert main(["plan", str(path)]) == 2
    line = capsys.readouterr().err
    words = "{fixed: 1 s, jitter: 0.1, shared_cores: 1}"
    assert f"add --set compute='{words}' with your seconds, or plan a run folder" in line
    assert main(["plan", str(path), "--set", f"compute={words}", "--json"]) == 0
    capsys.readouterr()
    ran = printed_rows(f"compare {path} --out {tmp_path / 'run'}", capsys)["summary"]
    rows = printed_rows(f"plan {tmp_path / 'run'}", capsys)
    assert [row["name"] for row in rows] == [each["name"] for each in ran]
    assert all(row["days"] * 86_400 < run["virtual_seconds"] for row, run in zip(rows, ran, strict=True))
    assert any("optimizers' steps are not charged" in remark for remark in rows[0]["remarks"])


def test_what_traffic_costs_has_a_cheaper_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` takes the fastest way though links charge for traffic: what is cheaper stands beside it."""
    network = tmp_path / "dear.yaml"
    network.write_text(
        "regions: {a: {hosts: 4, nic: 100 Gbit/s, latency: 20 ms}, b: {hosts: 4, nic: 100 Gbit/s, latency: 20 ms}}\n"
        "wan: [{between: [a, b], bandwidth: 100 Gbit/s, rtt: 40 ms, egress: 1 $/GB}]\n"
    )
    words = (
        f"plan --model llama-2m --sequence 64 --topology {network} --tokens 1B --set compute=1s --price 0.001"
    )
    words += " --strategy DiLoCo --set strategies.DiLoCo.H=10"
    (row,) = printed_rows(words, capsys)
    cheaper = row["cheaper"]
    assert cheaper["cost"] < row["cost"]
    assert cheaper["days"] > row["days"]
    ((op, name),) = cheaper["collectives"].items()
    (other,) = printed_rows(f"{words} --set collectives.{op}={name}", capsys)
    assert (other["cost"], other["days"]) == (cheaper["cost"], cheaper["days"])
    assert main(words.split()) == 0
    assert f"{op}={name} costs" in capsys.readouterr().out


def test_devices_and_prices_go_by_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen a100 keep up with one h100, and hours cost what each site's do; a site left out is reported."""
    path = tmp_path / "unlike.yaml"
    path.write_text(UNLIKE)
    (row,) = printed_rows(
        f"plan {path} --devices-per-worker fra=1,mil=1,ore=16 --price fra=8,mil=8,ore=0.5", capsys
    )
    assert row["limit"]["by"] != "compute of ore (a100)"
    assert row["cost"] == pytest.approx(row["days"] * 24 * 16.5)
    assert main(["plan", str(path), "--price", "fra=8,mil=8"]) == 2
    assert "add ore=" in capsys.readouterr().err
    assert main(["plan", str(path), "--price", "fra=8,mil=8,orr=1"]) == 2
    assert "did you mean 'ore'" in capsys.readouterr().err


def test_a_table_names_the_ends_of_many_slow_sites_and_marks_large_uncharged_coding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = {"hosts": 1, "nic": "100 Gbit/s", "device": "a100"}
    homes = {f"home{number}": site for number in range(5)}
    wan = [{"between": ["fra", home], "bandwidth": "100 Gbit/s", "rtt": "2 ms"} for home in homes]
    path = tmp_path / "homes.yaml"
    path.write_text(json.dumps({"regions": {"fra": {**site, "device": "h100"}, **homes}, "wan": wan}))
    words = f"plan --model llama-150m --topology {path} --tokens 1B --utilisation 0.4"
    assert main([*words.split(), "--strategy", "AllReduce", "--strategy", "DeMo"]) == 0
    printed = capsys.readouterr().out
    assert "compute of home0 ... home4 (a100)" in " ".join(printed.split())
    assert "not charged (+" in printed
    assert (
        "the order may change by coding that is not charged, at 2 GB/s more than 10% of a round: DeMo"
        in printed
    )


_REMEDIES = {
    "window": ("AllReduce", "two-datacenters --workers 2 --device h100", "--set protocol.streams=2"),
    "core": (
        "AllReduce",
        "net.yaml --protocol hivemind --set protocol.software=0s",
        "--set protocol.preset=linux-tcp",
    ),
    "software": (
        "AllReduce",
        "net.yaml --protocol hivemind --sequence 64",
        "--set protocol.preset=linux-tcp",
    ),
    "compute": ("DeMo", "net.yaml --sequence 64 --batch-size 100000", "--without a --without b"),
}


@pytest.mark.parametrize("name", _REMEDIES)
def test_options_of_a_limits_remedy_can_be_typed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {"a": "a100", "b": "a100", "c": "h100", "d": "h100"}
    regions = {each: {"hosts": 1, "nic": "100 Gbit/s", "device": device} for each, device in devices.items()}
    wan = [{"between": ["d", each], "bandwidth": "100 Gbit/s", "rtt": "1 ms"} for each in "abc"]
    (tmp_path / "net.yaml").write_text(json.dumps({"regions": regions, "wan": wan}))
    monkeypatch.chdir(tmp_path)
    strategy, network, option = _REMEDIES[name]
    words = f"plan --model llama-150m --strategy {strategy} --topology {network}".split()
    (row,) = json_of([*words, "--json"], capsys)
    assert row["limit"]["by"].startswith(name)
    assert f"{option} (" in row["limit"]["remedy"]
    assert main([*words, *option.split()]) == 0


def test_an_interrupted_plan_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that were made are printed; lines through points that are missing are not."""
    made: list[str] = []
    whole = plan_module.plan

    def cut(*given: Any) -> Any:
        if len(made) == 3:
            os.kill(os.getpid(), signal.SIGHUP)
        made.append(given[-1])
        return whole(*given)

    monkeypatch.setattr(plan_module, "plan", cut)
    words = (
        "plan --model llama-2m --strategy DiLoCo --strategy AllReduce --topology wan-4-regions --workers 4"
    )
    words += " --device a100 --sequence 64 --sweep wan.bandwidth=1Gbit/s,10Gbit/s,100Gbit/s --json"
    assert main(words.split()) == 129
    printed = capsys.readouterr()
    assert [row["name"] for row in json.loads(printed.out)["plans"]] == ["DiLoCo", "AllReduce", "DiLoCo"]
    assert json.loads(printed.out)["break_even"] == []
    assert "3 of 6 plans" in printed.err


def test_a_plan_interrupted_after_a_refusal_says_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended as if the refused strategy had been the only one."""
    outcomes = iter([InputError("plan: it never ends"), KeyboardInterrupt()])

    def refuse(*_: Any) -> Any:
        raise next(outcomes)

    monkeypatch.setattr(plan_module, "plan", refuse)
    assert main(LOCAL.replace("--workers", "--topology lan --workers").split()) == 130
    assert "interrupted: 0 of 2 plans were made; plan: it never ends" in capsys.readouterr().err


# --- sweeps of plans ----------------------------------------------------------------------------------------

TOPOLOGY = "name: near\nregions:\n  here: {hosts: 4, nic: 10 Gbit/s, latency: 50 us}\n"
LENGTH = "strategies.DiLoCo.H"


LOCAL = "plan --model llama-2m --sequence 64 --strategy DiLoCo --strategy AllReduce --workers 4 --device h100"
LOCAL += " --tokens 1B"


def planned(capsys: pytest.CaptureFixture[str], words: str, code: int = 0) -> Any:
    assert main(words.split()) == code
    printed = capsys.readouterr()
    return (json.loads(printed.out) if printed.out.startswith(("[", "{")) else printed.out), printed.err


def test_a_payload_is_planned_by_its_number_or_shapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """DiLoCo sends each parameter once: a ring of 8 sends 7/4 of its bytes; operations are 6 a parameter and token."""
    flags = "plan --strategy DiLoCo --topology lan --workers 8 --device h100 --set collectives=ring"
    (tmp_path / "shapes.txt").write_text("1024x4096  # embedding\n\n1000\n")
    safetensors.torch.save_file(
        {"a": torch.zeros(1024, 4096), "b": torch.zeros(1000)}, tmp_path / "m.safetensors"
    )
    rows = []
    for payload in (
        "--parameters 4195304",
        f"--shapes {tmp_path}/shapes.txt",
        f"--shapes {tmp_path}/m.safetensors",
    ):
        (row,), _ = planned(capsys, f"{flags} {payload} --json")
        assert row["bytes_per_worker"] == pytest.approx(4195304 * 4 * 7 / 4, rel=1e-6)
        assert any("operations are 6 a parameter and token" in remark for remark in row["remarks"])
        rows.append(row)
    peak = 256 * 2048 * 6 * 4195304 / rows[0]["seconds_per_step"]
    assert rows[0]["seconds_per_step"] == rows[1]["seconds_per_step"] == rows[2]["seconds_per_step"]
    assert 0.3 * 989e12 < peak < 0.41 * 989e12
    (tmp_path / "wrong.txt").write_text("10x10\n10*10\n")
    for mistake, line in {
        "--parameters many": "--parameters: 'many' is no number of parameters; write for example 51.2M",
        "--parameters 1M --model llama-1b": "--model and --parameters exclude each other",
        f"--shapes {tmp_path}/wrong.txt": "wrong.txt:2: expected a shape such as 1024x4096, got '10*10'",
        f"--shapes {tmp_path}/none.txt": "none.txt: cannot be read: No such file or directory",
    }.items():
        assert line in planned(capsys, f"{flags} {mistake}", 2)[1]


def test_flags_are_swept_and_sites_of_each_network_have_their_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One --price for two networks names sites of both; a price is a swept key; an unknown site is refused."""
    (tmp_path / "near.yaml").write_text(TOPOLOGY)
    networks = f"--sweep topology=wan-4-regions,{tmp_path / 'near.yaml'} --json"
    price = "--price here=3,us-east=2,us-west=2,eu=2,asia=2"
    rows = planned(capsys, f"{LOCAL} {networks} {price}")[0]["plans"]
    assert [row["cost"] / row["days"] / 24 for row in rows] == pytest.approx([8, 8, 12, 12])
    _, error = planned(capsys, f"{LOCAL} {networks} {price},moon=1", 2)
    assert "unknown site of --price 'moon'" in error
    rows = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,2 --json")[0]["plans"]
    assert [row["cost"] / row["days"] / 24 for row in rows] == pytest.approx([4, 4, 8, 8])
    _, error = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,2 --price 3", 2)
    assert "--sweep price: --price is given too: leave one of them out" in error
    _, error = planned(capsys, f"{LOCAL} --topology lan --sweep price=1,free", 2)
    assert "--price free: expected dollars of a worker's hour" in error


def test_places_count_each_plan_once_and_equal_rows_stay_behind_none() -> None:
    """AllReduce at two values of H is one plan; of rows whose bands overlap neither stays ahead."""

    def at(name: str, length: str, days: float) -> dict[str, Any]:
        band = {"days": days, "days_low": 0.9 * days, "days_high": 1.1 * days, "fits": True}
        return {
            "name": name,
            "strategy": name,
            "tokens_per_second": 1 / days,
            "point": {LENGTH: length},
            **band,
        }

    rows = [
        at("AllReduce", "5", 1.0),
        at("AllReduce", "10", 1.0),
        at("DiLoCo", "5", 9.0),
        at("DiLoCo", "10", 8.0),
    ]
    assert [row["place"] for row in placed(rows)] == [1, 1, 2, 2]
    ratios = {(line["faster"], line["slower"]) for line in step_ratio_lines(rows)}
    assert ratios == {("AllReduce", "DiLoCo")}
