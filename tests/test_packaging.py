"""What a wheel takes along, and what is said where an extra is missing."""

from __future__ import annotations

import itertools
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from experiments import experiment
from forks import benchmark
from packaging.requirements import Requirement

import netsim
from netgym.cli.main import main

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


def test_the_citation_has_the_package_s_version_and_licence() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [cited[key] for key in ("version", "license")] == [
        CONFIG["project"][key] for key in ("version", "license")
    ]


def test_every_folder_with_modules_is_a_package() -> None:
    """Else a wheel leaves it out."""
    for package in PACKAGES[:3]:
        for path in (ROOT / package).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path.parent


@pytest.mark.parametrize(
    ("missing", "change", "extra"),
    [
        ("sklearn", "--set task=digits --set model=mlp", "demo"),
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


def test_what_extras_ask_for_is_installed_together() -> None:
    """`make test-browser` installs the browser's, and `make wheels` resolves the soaks'."""
    extras = CONFIG["project"]["optional-dependencies"]
    for line in itertools.chain(*(extras[name] for name in extras.keys() - {"browser", "soak"})):
        asked = Requirement(line)
        if asked.name == "netgym":
            assert asked.extras <= extras.keys()
        elif asked.marker is None or asked.marker.evaluate():
            assert metadata.version(asked.name) in asked.specifier, line


@pytest.mark.thorough
def test_a_wheel_built_without_a_compiler_is_pure_and_computes_the_same(tmp_path: Path) -> None:
    """A copy of the checkout is built; wheels with a compiler are built and used by `make wheels`."""
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.sha256")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "CC": "/bin/false"}, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(unpacked)
    program = (
        "import netsim; from netsim.network.build import engine_state; import netsim.network.engine as engine;"
        f"print(engine_state().partition(':')[0], engine.__file__.startswith({str(unpacked)!r}),"
        "netsim.collective('lan', 'all_reduce', num_bytes=10**6, protocol='linux-tcp').seconds)"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    printed = subprocess.check_output(
        [sys.executable, "-c", program], env=environment, cwd=unpacked, text=True
    )
    seconds = netsim.collective("lan", "all_reduce", num_bytes=10**6, protocol="linux-tcp").seconds
    assert printed.split() == ["interpreted", "True", str(seconds)]


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py"))])
def test_what_a_benchmark_imports_is_there(name: str) -> None:
    """One that imports what has moved would be found broken only when its figures are needed."""
    assert benchmark(name)
