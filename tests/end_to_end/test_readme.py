"""Snippets of the README and of docs/, and the README's commands, run as they stand (training with fewer steps)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from netgym.cli.main import main as netgym
from netgym.experiment.experiment import Experiment
from netsim import Topology, parse_document
from netsim.cli.main import main as netsim

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
    exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})
    unnamed = [path.name for path in tmp_path.iterdir() if f'"{path.name}"' not in snippet]
    assert unnamed == [], "bare fit() writes nothing"


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
    code = {"netgym": netgym, "netsim": netsim}[program](arguments)
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
