"""The examples run as they stand, or at a small size, and print what lies beside them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Fork, ranks, run_script

from exogym_core.strategy import STRATEGIES
from exogym_core.strategy.parts.codecs import Int8Codec
from netgym.cli.main import main as netgym
from netgym.experiment.experiment import Experiment
from netgym.tasks import LLAMA_PRESETS

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = sorted((EXAMPLES / "opendiloco").glob("*.yaml"))
DECIMAL = re.compile(r"\d+\.\d+")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Runs an example in an empty folder, and returns what it prints; its memory goes with its process."""

    def script(name: str, *arguments: str) -> str:
        done = Fork(run_script, str(EXAMPLES / name), *arguments, folder=tmp_path).end()
        assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr
        return done.stdout

    return script


@pytest.mark.parametrize("name", ["ring_by_hand.py", "netsim_alone.py"])
def test_output_without_training_is_the_recorded_one(name: str, script: Callable[..., str]) -> None:
    assert script(name) == (EXAMPLES / name).with_suffix(".out").read_text()


def test_the_smallest_example_prints_the_recorded_steps_seconds_and_bytes(script: Callable[..., str]) -> None:
    recorded = (EXAMPLES / "smallest.out").read_text()
    first, loss = script("smallest.py").splitlines()
    assert first == recorded.splitlines()[0]
    # Losses differ between processors in their last digits.
    assert float(DECIMAL.findall(loss)[0]) == pytest.approx(float(DECIMAL.findall(recorded)[-1]), abs=0.05)


@pytest.mark.thorough
def test_strategies_are_ranked_by_loss_and_by_seconds(script: Callable[..., str], tmp_path: Path) -> None:
    out = script("digits.py", "--plot", "digits.png")
    assert table(out, "By time") == table((EXAMPLES / "digits.out").read_text(), "By time")
    # Losses differ between processors in their last digits, and with them the order of near ones.
    losses, recorded = (loss_of(text) for text in (out, (EXAMPLES / "digits.out").read_text()))
    assert losses == pytest.approx(recorded, abs=0.05)
    assert list(losses) == sorted(losses, key=losses.__getitem__)
    assert (tmp_path / "digits.png").read_bytes()[:4] == b"\x89PNG"


def table(text: str, title: str) -> list[list[str]]:
    """Names, seconds and bytes of a table: what does not depend on the processor."""
    rows = text[text.index(title) :].splitlines()[2:5]
    return [[row.split()[column] for column in (0, 3, 5)] for row in rows]


def loss_of(text: str) -> dict[str, float]:
    """Each strategy's loss, in the order of the table by loss."""
    rows = [row.split() for row in text[text.index("By loss") :].splitlines()[2:5]]
    return {row[0]: float(row[1]) for row in rows}


@pytest.mark.thorough
def test_scaling_has_equal_tokens_and_less_time_for_more_workers(
    script: Callable[..., str], tmp_path: Path
) -> None:
    small = ["--tokens", "1024", "--batch-tokens", "256", "--H", "2", "--workers", "1", "4"]
    out = script("diloco_scaling.py", *small, "--save", "models")
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["DDP K=4", "DiLoCo K=1", "DiLoCo K=4"]
    assert {(row[1], row[2]) for row in rows} == {("1,024", "4")}
    assert [float(row[5]) for row in rows][1] == 0
    assert float(rows[0][5]) == pytest.approx(2 * float(rows[2][5]), rel=0.01), "every step against every 2"
    assert (tmp_path / "models" / "DiLoCo-K=4.safetensors").stat().st_size > 4 * 8192


@pytest.mark.thorough
def test_gpt_on_text_with_several_strategies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(EXAMPLES / "gpt_text.yaml")
    names = [entry.name for entry in Experiment.load(path).strategies]
    assert set(names) <= set(STRATEGIES)
    Experiment.load(path, scale="small")
    assert netgym(["compare", path, "--scale", "tiny", "--out", "run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert [entry["steps"] for entry in summary] == [4] * len(names)
    capsys.readouterr()
    assert (
        netgym(["sample", "run", "--strategy", "DiLoCo", "--prompt", "def ", "--tokens", "5", "--seed", "0"])
        == 0
    )
    assert capsys.readouterr().out.startswith("def ")


def test_opendiloco_has_six_runs() -> None:
    assert len(RUNS) == 6
    loaded = {path.stem: Experiment.load(path) for path in RUNS}
    for name, experiment in loaded.items():
        settings, (entry,) = experiment.settings, experiment.strategies
        assert settings.steps == 88_000
        assert settings.autocast
        adamw = {"name": "adamw", "lr": 4e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}
        assert entry.options["optim_spec"] == adamw
        schedule = {"warmup_steps": 1000, "cosine_anneal": True, "floor": 0}
        assert entry.options["lr_scheduler_kwargs"] == schedule
        size, _, rounds = name.replace("-ddp", "").partition("-diloco-")
        assert settings.model.options["preset"] == size
        assert size in LLAMA_PRESETS
        assert entry.options.get("H") == (int(rounds) if rounds else None)
        hosts = experiment.topology.place(settings.workers.count)
        assert len(set(hosts)) == 8
        assert len({experiment.topology.region_of(host) for host in hosts}) == 4
        sharded = {
            name: entry.options.get(name) for name in ("ranks_per_worker", "sharding", "ranks_per_node")
        }
        as_run = {"150m": (None, None, None), "1b-d": (8, "SHARD_GRAD_OP", None)}
        baseline = (None, "_HYBRID_SHARD_ZERO2", 8)
        assert tuple(sharded.values()) == (baseline if name == "1b-ddp" else as_run[name[:4]])
    batches = {name: e.settings.workers.count * e.settings.batch_size for name, e in loaded.items()}
    assert batches == dict.fromkeys(("1b-ddp", "1b-diloco-125", "1b-diloco-500"), 8192) | {
        "150m-ddp": 512,
        "150m-diloco-50": 4096,
        "150m-diloco-500": 4096,
    }


@pytest.mark.parametrize("path", RUNS[:1], ids=lambda path: path.stem)
def test_opendilocos_runs_validate_as_they_are(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the data, which no machine has by itself, it says how to name and to make them."""
    monkeypatch.delenv("C4", raising=False)
    assert netgym(["validate", str(path)]) == 0
    assert "$C4 is not set: export C4=FILE, or --set task.paths=FILE; netgym tokens makes one" in (
        capsys.readouterr().out
    )
    assert netgym(["run", str(path), "--out", str(tmp_path / "run")]) == 2
    assert f"error: {path}:" in capsys.readouterr().err


@pytest.mark.parametrize("path", RUNS[1:2], ids=lambda path: path.stem)
def test_opendilocos_runs_have_small_twins(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert netgym(["run", str(path), "--scale", "tiny", "--out", "run"]) == 0
    (entry,) = json.loads(Path("run/summary.json").read_text())
    num_parameters = 8192 + 2 * 2592 + 16  # embedding and head, two blocks, the last norm
    count, rounds = (4 if path.stem.startswith("1b") else 8), {"ddp": 8, "500": 2, "50": 4, "125": 4}
    total = rounds[path.stem.rsplit("-", 1)[1]] * 2 * (count - 1) * 4 * num_parameters
    assert entry["bytes_sent"] == total
    assert f"{path.stem}" in (tmp_path / "run" / "experiment.yaml").read_text().splitlines()[0]


def test_opendilocos_runs_under_torchrun_leave_a_folder_that_goes_on(tmp_path: Path) -> None:
    """--set, --out, --seeds and --resume mean what they mean to netgym."""
    script = str(EXAMPLES / "opendiloco" / "train.py")
    begin = [str(RUNS[1]), "--scale", "tiny", "--device", "cpu", "--out", "run", "--set", "steps=4"]
    for arguments in ([*begin, "--seeds", "2"], ["--resume", "run"]):
        done, other = ranks(2, run_script, script, *arguments, folder=tmp_path)
        assert (done.returncode, other.returncode) == (0, 0), done.stderr
        assert done.stdout.splitlines()[-1] == "run"
    (entry,) = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (entry["steps"], len(entry["seeds"])) == (4, 2)
    assert "left as it is" in done.stdout


EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_strategy.py"


def test_output_is_the_recorded_one() -> None:
    done = Fork(run_script, str(EXAMPLE)).end()
    assert done.returncode == 0, done.stderr
    recorded = EXAMPLE.with_suffix(".out").read_text()
    loss = re.compile(r"loss (\d+\.\d+)")
    # Losses differ between processors in their last digits; times and bytes do not.
    assert loss.sub("", done.stdout) == loss.sub("", recorded)
    for got, expected in zip(loss.findall(done.stdout), loss.findall(recorded), strict=True):
        assert abs(float(got) - float(expected)) < 0.1


# --- a worker at home ---------------------------------------------------------------------------------------

HOME_WORKER = Path(__file__).parents[2] / "examples" / "home_worker.yaml"


@pytest.fixture(scope="module")
def home_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "out"
    small = [arg for key in ("steps=440", "evaluate.every=110") for arg in ("--set", key)]
    assert netgym(["compare", str(HOME_WORKER), *small, "--out", str(out)]) == 0
    return out


def entries(home_folder: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((home_folder / "summary.json").read_text())}


@pytest.mark.thorough
def test_the_run_goes_on_without_home_and_tells_when(home_folder: Path) -> None:
    waiting, going_on = entries(home_folder).values()
    assert "dropped_peers" not in waiting
    (absence,) = going_on["dropped_peers"]
    assert absence["rank"] == 3
    # The line is down from 25 s to 85 s; the round that ends then is the seventh, and the servers wait 2 s for home.
    assert absence["step"] == 140
    assert 29 < absence["virtual_seconds"] < 33
    assert 85 < absence["back_virtual_seconds"] < 86
    assert absence["back_step"] % 20 == 0
    assert waiting["virtual_seconds"] - going_on["virtual_seconds"] == pytest.approx(54, abs=2)


@pytest.mark.thorough
def test_metrics_tell_with_how_many_each_step_was_done(home_folder: Path) -> None:
    with open(home_folder / "metrics" / "time-outs.csv", newline="") as file:
        peers = [int(row["num_peers"]) for row in csv.DictReader(file)]
    back = entries(home_folder)["time-outs"]["dropped_peers"][0]["back_step"]
    assert peers == [4] * 120 + [3] * (back - 120) + [4] * (440 - back)


# --- sharded sites ------------------------------------------------------------------------------------------

SHARDED_SITES = Path(__file__).parents[2] / "examples" / "sharded_sites.yaml"
SHARDED_STEPS = 20  # a round of DiLoCo


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each strategy's entry of the summary."""
    out = tmp_path_factory.mktemp("runs") / "out"
    shorter = [arg for key in (f"steps={SHARDED_STEPS}", "collectives=ring") for arg in ("--set", key)]
    assert netgym(["compare", str(SHARDED_SITES), *shorter, "--out", str(out)]) == 0
    return {entry["name"]: entry for entry in json.loads((out / "summary.json").read_text())}


def num_values() -> int:
    experiment = Experiment.load(SHARDED_SITES)
    return sum(p.numel() for p in experiment.build_model(experiment.build_task()).parameters())


def test_bytes_are_those_of_the_formulas(sharded_run: dict[str, dict[str, Any]]) -> None:
    """The model has 50,826 values, which two ranks cut evenly and four with two of padding."""
    total = num_values()
    of_four, of_two = 4 * (-(-total // 4) * 4), 4 * (-(-total // 2) * 2)
    # The norm of all gradients, for clipping, is one number of 4 bytes that goes around all who share a model.
    assert sharded_run["FSDP"]["bytes_sent"] == SHARDED_STEPS * (3 * 3 * of_four + 2 * 3 * 4)
    in_sites = 3 * 2 * of_two + 2 * 2 * 4
    assert sharded_run["hybrid"]["bytes_sent"] == SHARDED_STEPS * (in_sites + 2 * of_two)
    assert sharded_run["hybrid"]["wan_bytes"] == SHARDED_STEPS * 2 * of_two
    rounds, shard = SHARDED_STEPS // 20, of_two // 8
    # Of each of the two shards, one of the two sites adds up one half and the other the other.
    encoded = 2 * sum(Int8Codec().encoded_bytes(half) for half in (shard // 2, shard - shard // 2))
    assert sharded_run["DiLoCo of sites"]["wan_bytes"] == rounds * 2 * encoded
    assert sharded_run["DiLoCo of sites"]["bytes_sent"] == SHARDED_STEPS * in_sites + rounds * 2 * encoded


def test_what_crosses_less_is_sooner_and_dividing_a_model_changes_no_loss(
    sharded_run: dict[str, dict[str, Any]],
) -> None:
    seconds = [sharded_run[name]["virtual_seconds"] for name in ("FSDP", "hybrid", "DiLoCo of sites")]
    assert seconds[0] > 1.5 * seconds[1] > 1.5**2 * seconds[2]
    assert sharded_run["FSDP"]["final_loss"] == pytest.approx(sharded_run["hybrid"]["final_loss"], rel=1e-3)


@pytest.mark.thorough
def test_stages_at_homes_with_codecs_at_boundaries(tmp_path: Path) -> None:
    """Four codecs: the boundaries' bytes shrink by what the codec saves, the strategy's stay."""
    out = tmp_path / "out"
    assert netgym(["sweep", str(EXAMPLES / "stages_homes.yaml"), "--scale", "tiny", "--out", str(out)]) == 0
    points = [json.loads(path.read_text()) for path in sorted(out.glob("points/*/summary.json"))]
    wan = [{entry["name"]: entry["wan_bytes"] for entry in point} for point in points]
    # Steps, workers, ways, samples, tokens, width; bytes of a value as it is and in bf16.
    values = 4 * 2 * 2 * 4 * 16 * 16
    for name in wan[0]:
        sizes = sorted((point[name] for point in wan), reverse=True)
        assert sizes[0] - sizes[1] == 2 * values
