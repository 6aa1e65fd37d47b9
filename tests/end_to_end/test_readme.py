"""Snippets of the README and of docs/, and the README's commands, run as they stand (training with fewer steps)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import netgym
from netgym.cli.main import main as netgym_main
from netgym.experiment.experiment import Experiment
from netsim import Topology
from netsim.cli.main import main as netsim_main
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.files.documents import parse_document

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


COMMANDS = [shlex.split(line) for text in blocks("sh") for line in text.splitlines()]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.name}-{number}")
    for page in PAGES
    for number, snippet in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    )
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(netgym, "compare", partial(netgym.compare, overrides={"steps": 2}))
    monkeypatch.setitem(ALGORITHMS, "all_reduce", dict(ALGORITHMS["all_reduce"]))
    exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})
    named = re.findall(r'"([^"]+)"', snippet)
    unnamed = {path.name for path in tmp_path.iterdir()} - {"examples", *named}
    assert unnamed == set(), "bare fit() writes nothing"


# Modules of the extras that the README does not install.
EXTRAS = (
    "pandas pyarrow mlflow tensorboard wandb optuna ray datasets tokenizers sphinx myst_nb hypothesis torchft"
)
INSTALLED = f"""
import functools, sys
sys.modules |= dict.fromkeys("{EXTRAS}".split())  # importing one of them fails
import netgym
netgym.compare = functools.partial(netgym.compare, overrides={{"steps": 2}}, jobs=1)
for snippet in sys.argv[1:]:
    exec(compile(snippet, "README.md", "exec"), {{"__name__": "__main__"}})
"""


def test_the_readme_runs_in_the_environment_that_it_installs(tmp_path: Path) -> None:
    """`result.table()` needed pandas, which `.[demo]` does not bring."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INSTALLED, *blocks("python")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reach" in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = command
    if arguments[0] in ("compare", "run"):
        few = ["steps=2" if each.startswith("steps=") else each for each in arguments]
        arguments = few if "steps=2" in few else [*few, "--set", "steps=2"]
        arguments += ["--out", str(tmp_path / "out")]
    code = {"netgym": netgym_main, "netsim": netsim_main}[program](arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out


def test_yaml_snippets_load(tmp_path: Path) -> None:
    experiment, network = blocks("yaml")
    loaded = Experiment.from_document(parse_document(experiment, "README.md"))
    assert loaded.settings.workers.count == 8
    path = tmp_path / "network.yaml"
    path.write_text(network)
    assert len(Topology.load(path).hosts) == 9


def test_the_first_lines_are_the_two_commands() -> None:
    first = [
        line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    assert [line.split("  ")[0] for line in first[1:3]] == ["make demo", "make test"]
