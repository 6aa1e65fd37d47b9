"""The documentation: its blocks run, or are parsed where they say so; Sphinx builds it without a warning."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from forks import Fork

import netgym
from netgym.cli.main import cli as netgym_cli
from netgym.cli.main import main as netgym_main
from netgym.experiment.experiment import Experiment
from netsim import Topology
from netsim.cli.main import cli as netsim_cli
from netsim.cli.main import main as netsim_main
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.files.documents import parse_document

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted(path for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index")
GUIDES = sorted(DOCS.glob("*.md"))
NOTEBOOKS = {"a-line-goes-down": [pytest.mark.thorough], "four-regions": []}  # notebooks that train; marks
BLOCK = re.compile(r"^```(\w+)( not-run)?\n(.*?)^```", re.S | re.M)
PROGRAMS: dict[str, click.Group] = {"netgym": netgym_cli, "netsim": netsim_cli}


def blocks(page: Path) -> list[tuple[str, bool, str]]:
    """Language, whether it is only parsed, and text."""
    return [(name, bool(mark), text) for name, mark, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def parse(command: list[str]) -> None:
    """Its options and arguments exist, and their values have the right form; nothing is run."""
    if command[0] not in PROGRAMS:
        return
    group = PROGRAMS[command[0]]
    if len(command) > 1 and not command[1].startswith("-"):
        found = group.get_command(click.Context(group), command[1])
        assert found is not None, command
        found.make_context(command[1], command[2:])


def run(command: list[str]) -> int:
    return {"netgym": netgym_main, "netsim": netsim_main}[command[0]](command[1:])


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.thorough] if page.stem == "strategy" else [])
        for page in TUTORIALS
    ],
)
def test_tutorials_work_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that begins with the name of a file is that file, for the commands and blocks below."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for language, is_parsed, text in blocks(page):
        named = re.match(r"# ([\w-]+\.(?:yaml|py))\n", text)
        if named:
            Path(named[1]).write_text(text)
        elif language == "sh":
            for command in commands(text):
                if is_parsed:
                    parse(command)
                else:
                    code = run(command)
                    assert code == 0, capsys.readouterr().err
        elif language == "python":
            code = compile(text, page.name, "exec")
            if not is_parsed:  # of packages that tests do not install
                exec(code, {"__name__": "__main__"})
        elif language == "yaml":
            document = parse_document(text, page.name)
            Experiment.from_document(document) if "task" in document.data else Topology.from_mapping(
                document.data, page.name
            )
    for own in ("halves", "my_task"):
        sys.modules.pop(own, None)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_is_not_run_is_parsed(page: Path) -> None:
    """Python of the guides is run by test_docs.py; other blocks are parsed, commands with their options."""
    for language, is_parsed, text in blocks(page):
        if language == "sh":
            assert is_parsed, f"{page.name}: run it in a tutorial, or mark it: ```sh not-run"
            for command in commands(text):
                parse(command)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language == "python" and is_parsed:
            compile(text, page.name, "exec")


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.stem)
def test_commands_in_indented_blocks_are_parsed(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^    (?:\w+=\S+ )*((?:netgym|netsim) [a-z].*)", text, re.M):
        if "--help" not in line:
            parse(shlex.split(line, comments=True))


@pytest.mark.docs
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    """Tutorials, an executed notebook, the Python interface from docstrings, commands from --help, schemas."""
    sphinx = pytest.importorskip("sphinx.application", reason="Sphinx is missing: pip install 'netgym[docs]'")
    pytest.importorskip("myst_nb")
    out = tmp_path / "html"

    def build() -> int:
        left_out = {"nb_execution_excludepatterns": [f"gallery/{name}.ipynb" for name in NOTEBOOKS]}
        pages = sphinx.Sphinx(
            DOCS, DOCS, out, tmp_path / "trees", "html", left_out, status=None, warningiserror=True
        )
        pages.build()
        return pages.statuscode

    # A process of its own: Sphinx and its extensions warn of their own future while they load.
    done = Fork(build, folder=ROOT).end()
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'class="sidebar-tree"' in (out / "index.html").read_text()
    assert "DiLoCoStrategy" in (out / "api/strategies.html").read_text()
    assert "netgym report" in (out / "cheat-sheet.html").read_text()
    assert (out / "experiment.json").read_bytes() == (ROOT / "schemas/experiment.json").read_bytes()
    assert (out / "gallery/which-collective.html").read_text().count('<img alt="../_images/') == 1
    assert "not-run" not in (out / "studies.html").read_text()


@pytest.mark.thorough
@pytest.mark.docs
@pytest.mark.pictures
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in NOTEBOOKS.items()])
def test_notebooks_of_runs_show_their_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells are executed here, where torch is imported already."""
    display = pytest.importorskip("IPython.display")
    shown: list[bytes] = []
    monkeypatch.setattr(display, "Image", lambda path: shown.append(Path(path).read_bytes()[:4]))
    cells = json.loads((DOCS / f"gallery/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert shown == [b"\x89PNG"] * 2


# --- the README ---------------------------------------------------------------------------------------------

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)


def readme_blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


COMMANDS = [shlex.split(line) for text in readme_blocks("sh") for line in text.splitlines()]


SNIPPETS = [
    pytest.param(
        snippet,
        id=f"{page.name}-{number}",
        marks=[pytest.mark.thorough] if re.search("check_(collective|communicator)|seeds=", snippet) else [],
    )
    for page in [ROOT / "README.md", *GUIDES]
    for number, snippet in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    )
]


def check_files(folder: Path, text: str) -> None:
    """Fail where code has written files that it does not name: `fit` writes nothing by itself."""
    named = re.findall(r'"([^"]+)"', text)
    assert {path.name for path in folder.iterdir()} - {"examples", *named} == set()


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps, and with three cases of each law: the laws themselves have tests of their own."""
    snippet = re.sub(r"\b(cases|max_examples)=\d+", r"\1=3", snippet)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(netgym, "compare", partial(netgym.compare, overrides={"steps": 2}, jobs=1))
    monkeypatch.setitem(ALGORITHMS, "all_reduce", dict(ALGORITHMS["all_reduce"]))
    exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})
    check_files(tmp_path, snippet)


# Modules of the extras that the README does not install.
EXTRAS = (
    "pandas pyarrow mlflow tensorboard wandb optuna ray datasets tokenizers sphinx myst_nb hypothesis torchft"
)
INSTALLED = f"""
import functools, sys
sys.modules |= dict.fromkeys("{EXTRAS}".split())  # importing one of them fails
import netgym
compare = functools.partial(netgym.compare, overrides={{"steps": 2}}, jobs=1)
netgym.compare = lambda *given, seeds: compare(*given, seeds=min(seeds, 2))
for snippet in sys.argv[1:]:
    exec(compile(snippet, "README.md", "exec"), {{"__name__": "__main__"}})
"""


@pytest.mark.thorough
def test_the_readme_runs_in_the_environment_that_it_installs(tmp_path: Path) -> None:
    """Without docstrings, a home, and packages of other extras: `result.table()` needed pandas."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    nowhere = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **nowhere}
    snippets = readme_blocks("python")
    command = [sys.executable, "-OO", "-c", INSTALLED, *snippets]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reach" in done.stdout
    assert (tmp_path / "page.html").is_file()
    check_files(tmp_path, "".join(snippets))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = command
    if arguments[0] in ("compare", "run"):
        few = ["steps=2" if each.startswith("steps=") else each for each in arguments]
        arguments = few if "steps=2" in few else [*few, "--set", "steps=2"]
        arguments += ["--set", "seeds=1"]
        arguments += ["--out", str(tmp_path / "out")]
    code = {"netgym": netgym_main, "netsim": netsim_main}[program](arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_first_table_is_what_the_demo_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for losses, accuracies and DeMo's time to the target, which depend on the processor, as the README says."""
    monkeypatch.chdir(ROOT)
    command, _, shown = readme_blocks("text")[0].partition("\n")
    assert run([*shlex.split(command.removeprefix("$ ")), "--out", str(tmp_path / "out")]) == 0
    tables = []
    for text in (capsys.readouterr().out, shown):
        rows = [re.split("  +", line.strip(" ─")) for line in text.splitlines()]
        kept = [[*row[: 1 if row[0] == "DeMo" else 2], *row[4:]] if len(row) == 10 else row for row in rows]
        tables.append([word for row in kept for cell in row for word in cell.split()])
    assert tables[0][: len(tables[1])] == tables[1]


def test_yaml_snippets_load(tmp_path: Path) -> None:
    experiment, network = readme_blocks("yaml")
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
