"""Ranks as torchrun starts them: rows as they come, and a rank that is killed is named and loses nothing."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from experiments import experiment
from forks import Fork, agent_store, ranks, run_script
from leaks import leaks

from netgym.cli.main import main

SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import TensorDataset
from exogym_core import Trainer
from exogym_core.strategy import DiLoCoStrategy
from netgym.tasks import build_model

inputs = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
# An own, different start on every process: rank 0's is the one that counts.
model = build_model("mlp", inputs=6, hidden=[5], classes=3, seed=int(os.environ.get("RANK", 0)))
restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
is_real = "RANK" in os.environ


class Killed(DiLoCoStrategy):
    def step(self):
        super().step()
        if is_real and restarted == "0" and self.rank == 1 and self.local_step == 12:
            # Rows come, and checkpoints are completed, while training goes on.
            while not all(map(os.path.exists, ("row-11", "saved/Killed/step-00000010/manifest.json"))):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)


def tell(row):
    if row["kind"] == "step":
        open(f"row-{row['step']}", "w").close()


options = {"transport": "gloo", "checkpoint_interval": 5, "save_dir": "saved"} if is_real else {"num_nodes": 2}
trained = Trainer(model, data, data).fit(
    strategy=Killed(H=5), device="cpu", max_steps=20, batch_size=4, val_interval=5, on_event=tell, **options
)
if os.environ.get("RANK", "0") == "0":
    result = trained.fit_result
    print(json.dumps({
        "resumed": result.resumed_step,
        "losses": [row["train_loss"] for row in result.history],
        "seconds": [row.get("wall_seconds") for row in result.history],
        "validation": [row["global_loss"] for row in result.validation],
        "weight": trained.state_dict()["layers.0.weight"].sum().item(),
    }))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of the simulated run, which is not killed."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "script.py").write_text(SCRIPT)
    own = {"XDG_CONFIG_HOME": str(folder)}
    done = Fork(run_script, "script.py", folder=folder, environment=own).end()
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_killed_rank_is_named_and_the_restarted_run_loses_nothing(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """Rank 1 keeps its parts of checkpoints on a disk that rank 0 does not see."""
    (tmp_path / "script.py").write_text(SCRIPT)
    own = {"NETGYM_CHECKPOINTS": str(tmp_path / "scratch")}
    where: Any = {"folder": tmp_path, "store": agent_store(), "XDG_CONFIG_HOME": str(tmp_path), **own}
    start = partial(ranks, 2, run_script, "script.py", **where)
    ends, again = start(), start(TORCHELASTIC_RESTART_COUNT="1")
    assert [end.returncode for end in (*ends, *again)] == [1, -signal.SIGKILL, 0, 0], again[0].stderr
    told, printed = ends[0].stderr, again[0].stdout
    (line,) = {line.partition("rank 1 on host ")[2] for line in told.splitlines() if "was lost after" in line}
    assert line.endswith(" was lost after step 11; the last checkpoint is of step 10, in saved/Killed")
    found = json.loads(printed.splitlines()[-1])
    assert found["resumed"] == 10
    for name in ("losses", "validation", "weight"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
    assert found["seconds"] == sorted(found["seconds"])
    (last,) = (tmp_path / "saved" / "Killed").iterdir()
    assert last.name == "step-00000020"
    assert {path.stem for path in last.glob("rank-*.json")} == {"rank-0000"}
    parts = {path.parent.name: path.stem for path in (tmp_path / "scratch").rglob("rank-*.json")}
    assert parts["part-00000020"] == "rank-0001"
    assert "part-00000005" not in parts, "what is older than the newest complete one was removed"


EXPERIMENT = experiment(
    name="real",
    topology="two-datacenters",
    compute="50 ms",
    steps=6,
    batch_size=4,
    evaluate="{every: 3, samples: 32}",
    checkpoint="{every: 2}",
    strategies="[AllReduce, {name: DiLoCo, H: 3}]",
)


CANARY = "canary-b1946ac92492d2347c6235b4d2611184"


def test_an_experiment_of_real_ranks_leaves_the_folder_that_a_simulated_one_does(tmp_path: Path) -> None:
    """And nothing in it, in temporary files or in what is printed tells the secret that its ranks share."""
    (tmp_path / "real.yaml").write_text(EXPERIMENT)
    (tmp_path / "temporary").mkdir()
    own = {"NETGYM_SECRET": CANARY, "TMPDIR": str(tmp_path / "temporary"), "XDG_CONFIG_HOME": str(tmp_path)}
    done, other = ranks(2, main, ["compare", "real.yaml", "--out", "out"], folder=tmp_path, **own)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr
    assert done.stdout.splitlines()[-1] == "out"
    assert leaks(tmp_path, CANARY, stdout=done.stdout, stderr=done.stderr + other.stderr) == []
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(entry["name"], entry["steps"]) for entry in summary] == [("AllReduce", 6), ("DiLoCo", 6)]
    assert all(entry["wall_seconds"] > 0 for entry in summary)
    header, *rows = (tmp_path / "out" / "metrics" / "DiLoCo.csv").read_text().splitlines()
    assert header.startswith("step,examples_trained,train_loss,train_perplexity,lr,wall_seconds,bytes_sent")
    assert len(rows) == 6
    assert "virtual_seconds" not in (tmp_path / "out" / "metrics" / "DiLoCo.validation.csv").read_text()
    assert (tmp_path / "out" / "report.html").is_file()
    assert [path.name for path in (tmp_path / "out" / "checkpoints" / "DiLoCo").iterdir()] == [
        "step-00000006"
    ]


def test_the_number_of_workers_must_be_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real.yaml").write_text(EXPERIMENT)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert main(["compare", str(tmp_path / "real.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
