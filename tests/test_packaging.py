"""What a wheel takes along, and what is said where an extra is missing."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from experiments import experiment

from exogym_core import load_runs
from exogym_core.cli.main import main

ROOT = Path(__file__).parents[1]
PACKAGES = ("exogym_core", "netgym", "netsim", "topologies")
LEFT_OUT = {".py", ".so"}
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

EXPERIMENT = experiment(
    task="{name: text, block_size: 8, num_bytes: 5000}",
    model="{name: gpt, preset: byte, num_layers: 1, width: 8, num_heads: 1}",
    workers="{count: 1, kind: threads}",
    steps=1,
    batch_size=1,
    evaluate="{samples: 0}",
    strategies="[AllReduce]",
)


@pytest.mark.parametrize("package", ["netgym", "netsim"])
def test_commands_are_modules_too(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [package, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(package, run_name="__main__")
    assert (end.value.code, capsys.readouterr().out.split()[0]) == (0, "Usage:")


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
    for package in PACKAGES[:3]:
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
def test_an_extra_that_is_missing_is_reported_with_the_line_that_installs_it(
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


def _build_wheel(folder: Path, **environment: str) -> Path:
    """A wheel of this checkout's packages, from a copy of what it is built of."""
    source = folder / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.sha256")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _engine_of(wheel: Path, folder: Path) -> str:
    """How the engine of an unpacked wheel runs, and what it computes."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    program = (
        "import netsim; from netsim.network.build import engine_state; import netsim.network.engine as engine;"
        f"print(engine_state().partition(':')[0], engine.__file__.startswith({str(folder)!r}),"
        "netsim.collective('lan', 'all_reduce', num_bytes=10**6, protocol='linux-tcp').seconds)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_wheels_are_built_compiled_and_pure(tmp_path: Path) -> None:
    """With a compiler the engine is compiled; where compiling fails the wheel is pure; both compute the same."""
    answers = {}
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # a third of the time, and the same bits
    compiler.chmod(0o755)
    for name, environment in {"compiled": {"CC": str(compiler)}, "interpreted": {"CC": "/bin/false"}}.items():
        folder = tmp_path / name
        folder.mkdir()
        answers[name] = _engine_of(_build_wheel(folder, **environment), folder / "unpacked").split()
    assert [each[:2] for each in answers.values()] == [["compiled", "True"], ["interpreted", "True"]]
    assert answers["compiled"][2] == answers["interpreted"][2]


FILES = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that imports what has moved would be found broken only when its figures are needed."""
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
