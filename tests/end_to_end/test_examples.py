"""The examples run as they stand, or at a small size, and print what lies beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Fork, ranks, run_script

from exogym_core.strategy import STRATEGIES
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


def test_digits_takes_mnists_files(script: Callable[..., str], tmp_path: Path) -> None:
    for prefix, count in (("train", 64), ("t10k", 16)):
        images = (
            b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28)) + bytes(count * 784)
        )
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        labels = b"\x00\x00\x08\x01" + count.to_bytes(4, "big") + bytes(count)
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    out = script("digits.py", "--mnist", str(tmp_path), "--steps", "2", "--batch-size", "2")
    assert table(out, "By loss")[0][2] == table(out, "By time")[0][2]


def test_scaling_has_equal_tokens_and_less_time_for_more_workers(
    script: Callable[..., str], tmp_path: Path
) -> None:
    small = ["--tokens", "4096", "--batch-tokens", "512", "--H", "4", "--workers", "1", "2", "4"]
    out = script("diloco_scaling.py", *small, "--save", "models")
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["DDP K=4", "DiLoCo K=1", "DiLoCo K=2", "DiLoCo K=4"]
    assert {(row[1], row[2]) for row in rows} == {("4,096", "8")}
    assert [float(row[5]) for row in rows][1] == 0
    assert float(rows[0][5]) == pytest.approx(4 * float(rows[3][5]), rel=0.01), "every step against every 4"
    assert (tmp_path / "models" / "DiLoCo-K=4.safetensors").stat().st_size > 4 * 8192


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


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
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


def test_opendilocos_runs_start_under_torchrun(tmp_path: Path) -> None:
    script = str(EXAMPLES / "opendiloco" / "train.py")
    options = ["--scale", "tiny", "--device", "cpu", "--save", "m.safetensors"]
    done, other = ranks(2, run_script, script, str(RUNS[1]), *options, folder=tmp_path)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr
    assert re.findall(r"^step (\d)", done.stdout, re.MULTILINE) == ["0", "4", "8"]
    assert (tmp_path / "m.safetensors").is_file()


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
