"""The page for people who come from EXO Gym and OpenDiLoCo: complete, and naming nothing that is not there."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import netgym as api
from exogym_core.config import Settings
from exogym_core.run.trainer import Trainer
from netgym.cli.main import cli as netgym
from netgym.tasks import GPT_PRESETS, LLAMA_PRESETS
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


def experiment_of(table: str, flags: Mapping[str, str], strategy: str, processes: int = 1) -> dict[str, Any]:
    """The page followed by the letter: each flag's key, with the value given in place of the example's."""
    entry: dict[str, Any] = {"name": strategy}
    made: dict[str, Any] = {"strategies": [entry]}
    for flag, given in flags.items():
        here = row_of(table, flag)
        if (
            not here.startswith("`")
            or "`netgym" in here
            or here.startswith(("`--", "`loggers", "`fit", "`skip"))
        ):
            continue  # gone, or no key
        value = yaml.safe_load(given.replace("_", "")) if re.fullmatch(r"[\d._]+(e-?\d+)?", given) else given
        if re.fullmatch(r"[\d.]+e-?\d+", given):
            value = float(given)  # no float in YAML 1.1
        for span in re.findall(r"`([^`]+)`", here)[:1] + re.findall(r" and `(lr_scheduler: [^`]+)`", here):
            key, _, rest = span.partition(": ")
            if flag == "--total-batch-size":
                value //= processes  # "divide by"
            elif flag == "--epochs":
                value = 3  # "samples of the training set / ..." for one
            elif flag == "--path-model":
                rest = rest.replace("150m", given.split("-")[1])
            elif flag == "--precision":
                value = given.partition("-")[0]
            elif flag == "--lr":
                rest = ""
            elif isinstance(value, int | float):
                rest = re.sub(r"[\d.]+", str(value), rest, count=1)
            found = yaml.safe_load(rest) if rest and flag != "--precision" else value
            top = key.split(".")[0]
            place = made if top in Settings.model_fields and key != "strategy" else entry
            *groups, last = key.split(".")
            for group in groups:
                place = place.setdefault(group, {})
            if isinstance(place.get(last), dict) and isinstance(found, dict):
                found = place[last] | found
            place[last] = found
    if "--hv.galaxy-size" in flags:
        made["workers"] = {"count": int(flags["--hv.galaxy-size"]) * processes}
    if processes > 1 and strategy == "DiLoCo":
        entry["ranks_per_worker"] = processes
    return made


def trained(made: dict[str, Any], example: str, tmp_path: Path) -> dict[str, Any]:
    """Two steps of an experiment of the page's keys at the size of an example's scale `tiny`."""
    whole = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text(encoding="utf-8"))
    name = made["strategies"][0]["name"]
    small = {
        "task": {"name": "text", "block_size": 16, "num_bytes": 20_000},
        "compute": "50 ms",
        "device": "cpu",
    }
    small |= {"workers": {"count": 4, "kind": "threads"}, "topology": whole["topology"]}
    small |= {"steps": 2, "batch_size": 4, "evaluate": {"every": 1, "samples": 4}}
    model = dict(made.get("model", {}))
    assert model.pop("preset", "150m") in [*GPT_PRESETS, *LLAMA_PRESETS]
    small["model"] = whole["scales"]["tiny"]["model"] | model
    entry = {key: value for key, value in made["strategies"][0].items() if key != "ranks_per_worker"}
    entry |= {"H": 1} if "H" in entry else {}
    kept = {key: value for key, value in made.items() if key in ("autocast", "seed", "checkpoint")}
    found = api.run({**small, **kept, "strategies": [entry]}, out=tmp_path / "out", progress=False)
    (summary,) = found.summary
    assert (summary["strategy"], summary["steps"]) == (name, 2)
    return summary


@pytest.mark.parametrize("each", OPEN_DILOCO, ids=[each["example"] for each in OPEN_DILOCO])
def test_open_dilocos_commands_become_our_examples(each: dict[str, Any], tmp_path: Path) -> None:
    example = yaml.safe_load(
        (ROOT / f"examples/opendiloco/{each['example']}.yaml").read_text(encoding="utf-8")
    )
    (strategy,) = example["strategies"]
    made = experiment_of("OpenDiLoCo", flags_of(each["command"]), strategy["name"], each["processes"])
    (entry,) = made["strategies"]
    assert {key: made[key] for key in ("batch_size", "minibatch_size", "steps")} == {
        key: example[key] for key in ("batch_size", "minibatch_size", "steps")
    }
    assert made.get("model", example["model"]) == example["model"]
    assert float(entry["lr"]) == float(strategy["optim_spec"]["lr"])
    assert entry.get("H") == strategy.get("H")
    assert entry.get("ranks_per_worker", 1) == strategy.get("ranks_per_worker", 1)
    assert made.get("workers", example["workers"]) == example["workers"]
    if each is OPEN_DILOCO[-1]:
        trained(made, f"opendiloco/{each['example']}", tmp_path)


@pytest.mark.parametrize("each", NANOGPT[::3], ids=[each["strategy"] for each in NANOGPT[::3]])
def test_nanogpts_commands_train(each: dict[str, Any], tmp_path: Path) -> None:
    flags = flags_of(each["command"])
    flags.pop("--strategy")
    flags.pop("--dataset", None)
    made = experiment_of("Flags", flags, each["strategy"])
    trained(made, "gpt_text", tmp_path)
