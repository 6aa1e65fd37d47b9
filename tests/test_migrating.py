"""The page for people who come from EXO Gym and OpenDiLoCo: complete, and naming nothing that is not there."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from exogym_core.run.trainer import Trainer
from netgym.cli.main import cli as netgym
from netsim.cli.main import cli as netsim

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


# Command lines of others, made into experiments by the tables of the page.
MIGRANTS = yaml.safe_load((ROOT / "tests" / "migrants.yaml").read_text(encoding="utf-8"))
OPEN_DILOCO, NANOGPT = MIGRANTS["open_diloco"], MIGRANTS["nanogpt_train"]
TABLES = {  # rows by flag, as cells (there, here)
    heading: [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in rows.splitlines()]
    for heading, rows in re.findall(
        r"^(\w+).*:\n\n\| there \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.M
    )
}


def flags_of(command: str) -> dict[str, str]:
    words = [*shlex.split(command), "--"]
    pairs = itertools.pairwise(words)
    named = {word.replace("_", "-"): value for word, value in pairs if word.startswith("--") and word != "--"}
    return {word: "" if value.startswith("--") else value for word, value in named.items()}


def all_flags(name: str, others: str) -> list[str]:
    return sorted(
        {flag for each in MIGRANTS[name] for flag in flags_of(each["command"])} | {*flags_of(others)}
    )


EVERY_FLAG = [
    *(("OpenDiLoCo", flag) for flag in all_flags("open_diloco", MIGRANTS["open_diloco_flags"])),
    *(("Flags", flag) for flag in all_flags("nanogpt_train", MIGRANTS["nanogpt_train_flags"])),
]


def row_of(table: str, flag: str) -> str:
    """What the page has for a flag; spelt with - or _, as it is there."""
    known = flag.replace("--no-", "--")
    (found,) = [
        here
        for there, here in TABLES[table]
        if re.search(rf"`{known}[ `]", there.replace("_", "-")) is not None
    ]
    return found


@pytest.mark.parametrize(("table", "flag"), EVERY_FLAG, ids=[" ".join(each) for each in EVERY_FLAG])
def test_every_flag_has_an_answer(table: str, flag: str) -> None:
    assert row_of(table, flag)


@pytest.mark.parametrize(
    "command", [*MIGRANTS["exo_gym"], "python example/nanogpt_train.py --dataset owt --strategy diloco"]
)
def test_every_command_of_exo_gyms_readme_has_an_answer(command: str) -> None:
    (answer,) = [here for there, here in TABLES["The"] if there == f"`{command}`"]
    program = shlex.split(re.findall(r"`([^`]+)`", answer)[0])
    if program[0] == "python":
        assert (ROOT / program[1]).is_file()
    else:
        assert netgym.get_command(click.Context(netgym), program[1]) is not None
