"""Annexes: what they declare is there, and the core works with their folders deleted."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from experiments import experiment

import exogym_core
from exogym_core import annexes
from exogym_core.cli.main import cli
from netsim.cli.main import cli as netsim_cli
from netsim.errors import InputError

PACKAGE = Path(exogym_core.__file__).parent
ROOT = PACKAGE.parent
NETSIM = ROOT / "netsim"
FILES = sorted([*PACKAGE.glob("*/annex.toml"), *NETSIM.glob("*/annex.toml")])

# Of the core alone; between them they train, simulate, compare and read files.
CORE_TESTS = ("tests/test_judged.py", "tests/test_minibatch.py", "tests/test_experiment.py")

EXPERIMENT = experiment(
    task="{name: text, block_size: 8, num_bytes: 5000}",
    model="{name: gpt, preset: byte, num_layers: 1, width: 8, num_heads: 1}",
    topology="lan",
    compute="10 ms",
    steps=2,
    batch_size=1,
    evaluate="{samples: 2}",
)


def references(table: object) -> list[str]:
    if isinstance(table, dict):
        return [each for value in table.values() for each in references(value)]
    return [table] if isinstance(table, str) and table.partition(".")[0] in ("exogym_core", "netsim") else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_what_an_annex_declares_is_there(path: Path) -> None:
    declared = tomllib.loads(path.read_text())
    found = references(declared)
    package = path.parent.parent.name
    assert found
    for reference in found:
        assert reference.startswith(f"{package}.{path.parent.name}.")
        assert annexes.load(reference) is not None
    for name, command in declared.get("commands", {}).items():
        group = cli if package == "exogym_core" else netsim_cli
        loaded = group.get_command(click.Context(group), name)
        assert loaded.name == name
        assert package == "netsim" or loaded.get_short_help_str(300) == command["help"]
    for name in declared.get("names", {}):
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is not None


def test_an_annex_that_is_missing_is_reported() -> None:
    with pytest.raises(InputError, match="NETGYM_RENDEZVOUS is set: this installation of netgym has no part"):
        annexes.required("elastic", "nothing", "NETGYM_RENDEZVOUS is set")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both packages without the annexes' folders."""
    folder = tmp_path_factory.mktemp("core")
    left_out = {path.parent for path in FILES}
    for package in (PACKAGE, NETSIM):
        shutil.copytree(
            package,
            folder / package.name,
            ignore=lambda at, names: [each for each in names if Path(at) / each in left_out],
        )
    for shared in ROOT.glob("*__mypyc*.so"):  # of the compiled engine
        (folder / shared.name).symlink_to(shared)
    (folder / "topologies").symlink_to(ROOT / "topologies")
    (folder / "small.yaml").write_text(EXPERIMENT)
    return folder


def test_the_core_works_without_annexes(core: Path) -> None:
    """All its modules are imported; an experiment is compared, reported and fitted; tests of the core pass."""
    code = (
        "import importlib, pkgutil, exogym_core, netsim\n"
        "for package in (exogym_core, netsim):\n"
        "    for info in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):\n"
        "        if not info.name.endswith('__main__'):\n"
        "            importlib.import_module(info.name)\n"
        "print(exogym_core.__file__)\n"
        "import torch\n"
        "from exogym_core import LocalTrainer\n"
        "from exogym_core.cli.main import main\n"
        "from exogym_core.strategy import AllReduceStrategy\n"
        "class Line(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, batch):\n"
        "        return ((batch[0] * self.weight - 1) ** 2).mean()\n"
        "data = torch.utils.data.TensorDataset(torch.arange(8.0))\n"
        "fitted = LocalTrainer(Line(), data).fit(\n"
        "    strategy=AllReduceStrategy(), num_nodes=2, max_steps=2, batch_size=1, progress=False)\n"
        "print(len(fitted.fit_result.history))\n"
        "from netsim.cli.main import main as netsim_main\n"
        "from exogym_core.results.report import page\n"
        "page.draw_pictures = lambda *_: {}\n"
        "for command in (['show', 'lan'], ['collective', 'lan', 'barrier'], ['--help']):\n"
        "    assert netsim_main(command) == 0, command\n"
        "for command in (['list'], ['schema', 'experiment'], ['validate', 'small.yaml'],\n"
        "                ['compare', 'small.yaml', '--out', 'out'], ['report', 'out'], ['status', 'out'],\n"
        "                ['--help']):\n"
        "    assert main(command) == 0, command\n"
        "import pytest\n"
        f"files = {[str(ROOT / name) for name in CORE_TESTS]}\n"
        f"assert pytest.main(['-q', '-x', '-p', 'no:cacheprovider', '--rootdir={ROOT}', *files]) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    printed = done.stdout
    assert printed.startswith(f"{core / 'exogym_core' / '__init__.py'}\n2\n")
    assert "planned models" not in printed
    assert "Time one collective." in printed
    assert "\n  probe " not in printed
    assert " sweep " not in printed.rpartition("Commands:")[2]
    assert (core / "out" / "report.html").is_file()
