"""What a wheel takes along, and what is said where an extra is missing."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from exogym_core import load_runs
from exogym_core.app.cli import main

ROOT = Path(__file__).parents[1]
PACKAGES = ("exogym_core", "netsim", "topologies")
LEFT_OUT = {".py"}
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

EXPERIMENT = """\
name: small
task: {name: text, block_size: 8, num_bytes: 5000}
model: {name: gpt, preset: byte, num_layers: 1, width: 8, num_heads: 1}
workers: {count: 1, kind: threads}
device: cpu
steps: 1
batch_size: 1
evaluate: {samples: 0}
strategies: [AllReduce]
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_that_commands_read_is_in_the_wheel(package: str) -> None:
    """A page's script or a tier that is not declared is there in the repository, and nowhere else."""
    folder = ROOT / package
    declared = {
        path
        for pattern in CONFIG["tool"]["setuptools"]["package-data"][package]
        for path in folder.glob(pattern)
    }
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    there = {path for path in files if path.suffix not in LEFT_OUT}
    assert there - declared == set()


def test_every_folder_with_modules_is_a_package() -> None:
    """Else a wheel leaves it out."""
    for package in PACKAGES[:2]:
        for path in (ROOT / package).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path.parent


@pytest.mark.parametrize(
    ("missing", "change", "extra"),
    [
        ("sklearn.datasets", "--set task=digits --set model=mlp", "demo"),
        ("torch.utils.tensorboard", "--set loggers=[tensorboard]", "tracking"),
        ("wandb", "--set loggers=[wandb]", "tracking"),
        ("mlflow", "--set loggers=[mlflow]", "tracking"),
    ],
)
def test_an_extra_that_is_missing_is_told_with_the_line_that_installs_it(
    missing: str,
    change: str,
    extra: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    arguments = ["compare", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out"), *change.split()]
    assert main(arguments) == 2
    first = capsys.readouterr().err.partition("error: ")[2].splitlines()[0]
    assert "not installed" in first
    assert first.endswith(f"run: pip install 'netgym[{extra}]'")
    assert extra in CONFIG["project"]["optional-dependencies"]


def test_tables_of_runs_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pandas is not installed: .*pip install 'netgym\[pandas\]'"):
        load_runs(tmp_path)
