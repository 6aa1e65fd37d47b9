"""The page for people who come from EXO Gym and OpenDiLoCo: complete, and naming nothing that is not there."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest

from exogym_core.app.cli import cli as netgym
from exogym_core.training.trainer import Trainer
from netsim.tools.cli import cli as netsim

ROOT = Path(__file__).parents[1]
# But the one that building the documentation writes.
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name != "cheat-sheet.md"
}
PAGE = PAGES["migrating.md"]
IDS = [
    f"{letter}{n}"
    for letter, last in (("E", 41), ("O", 20), ("S", 16), ("W", 11))
    for n in range(1, last + 1)
]
SPANS = sorted({span for text in PAGES.values() for span in re.findall(r"`([^`\n]+)`", text)})
NAMES = [span for span in SPANS if re.fullmatch(r"(netsim|exogym_core)(\.\w+)*:\w+(\.\w+)*", span)]
COMMANDS = [span for span in SPANS if re.match(r"(netgym|netsim) \w", span)]
FILES = [
    span
    for span in SPANS
    if re.fullmatch(r"(examples|topologies|tests|docs|netsim|exogym_core)/[\w./-]+", span)
]
ARGUMENTS = [match[1] for span in SPANS if (match := re.fullmatch(r"fit\((\w+)=\)", span))]


def test_every_id_has_one_row() -> None:
    assert re.findall(r"^\| ([A-Z]\d+) \|", PAGE, re.MULTILINE) == IDS
    assert all(PAGE.count(f"| {identifier} |") == 1 for identifier in IDS)


def test_no_row_is_empty() -> None:
    for row in re.findall(r"^\| [EOSW]\d+ \|.*", PAGE, re.MULTILINE):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 3
        assert all(cells), row


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name: str) -> None:
    module, _, attributes = name.partition(":")
    found = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)


def test_arguments_of_fit_exist() -> None:
    assert len(ARGUMENTS) > 20
    assert set(ARGUMENTS) <= set(inspect.signature(Trainer.fit).parameters)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    program, name, *arguments = shlex.split(command)
    group = {"netgym": netgym, "netsim": netsim}[program]
    found = group.get_command(click.Context(group), name)
    assert found is not None, name
    options = {option for parameter in found.params for option in parameter.opts}
    for argument in arguments:
        assert not argument.startswith("--") or argument in options, f"{command}: {argument}"


@pytest.mark.parametrize("file", FILES)
def test_files_exist(file: str) -> None:
    assert (ROOT / file).exists()


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGES[name]):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target


def test_the_index_links_every_page() -> None:
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", PAGES["index.md"])) == PAGES.keys() - {"index.md"}


@pytest.mark.parametrize("name", PAGES)
def test_python_snippets_run(name: str) -> None:
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE):
        exec(compile(snippet, name, "exec"), {"__name__": "__main__"})
