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

from exogym_core.app.cli import cli as netgym
from exogym_core.strategy import DiLoCoStrategy
from exogym_core.strategy.absence.patience import Patience
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


# The flags of OpenDiLoCo's README, of its test command and of its configuration classes, and the experiment that stands
# for each of its runs: (file, processes of a worker, flags).
OPEN_DILOCO = [
    (
        "150m-ddp",
        8,
        "--sharding-strategy NO_SHARD --per-device-train-batch-size 32 --precision bf16-mixed --total-batch-size 512 "
        "--total-steps 88_000 --project OpenDiLoCo --lr 4e-4 --path_model PrimeIntellect/llama-150m-fresh "
        "--log-activations-steps 200 --ckpt.interval 8000 --ckpt.path 150_ckpt",
    ),
    (
        "150m-diloco-500",
        1,
        "--sharding-strategy NO_SHARD --per-device-train-batch-size 8 --precision bf16-mixed --total-batch-size 512 "
        "--hv.local-steps 500 --total-steps 88_000 --project OpenDiLoCo --hv.skip_load_from_peers --lr 4e-4 "
        "--path-model PrimeIntellect/llama-150m-fresh --log-activations-steps 250 --ckpt.interval 4975",
    ),
    (
        "150m-diloco-50",
        1,
        "--per-device-train-batch-size 8 --total-batch-size 512 --precision bf16-mixed --hv.local-steps 50 "
        "--total-steps 88_000 --lr 4e-4",
    ),
    (
        "1b-diloco-500",
        8,
        "--per-device-train-batch-size 16 --total-batch-size 2048 --precision bf16-mixed --total-steps 88_000 "
        "--hv.local_steps 500 --lr 4e-4 --path_model PrimeIntellect/llama-1b-fresh --warmup-steps 1000 "
        "--hv.averaging_timeout 1800 --hv.initial-peers $PEER --hv.galaxy-size 4 --hv.world-rank $WORLD_RANK "
        "--checkpoint_interval 500 --ckpt.path 1b_diloco_ckpt",
    ),
    (
        "1b-diloco-125",
        8,
        "--per-device-train-batch-size 16 --total-batch-size 2048 --total-steps 88_000 --hv.local_steps 125 --lr 4e-4",
    ),
]
OTHER_FLAGS = (
    "--no-torch-compile --fake-data --max-steps --attn-implementation --dataset-name-or-path --seq-length --c4-tiny "
    "--num-workers --metric-logger-type --resume-from-checkpoint --checkpoint-path --ckpt.resume --ckpt.topk "
    "--hv.outer-lr --hv.host-maddrs --hv.announce-maddrs --hv.matchmaking-time --hv.hivemind-compression "
    "--hv.all-reduce-strategy --hv.timeout-waiting-for-peers --hv.fail-rank-drop"
)


def flags_of(command: str) -> dict[str, str]:
    words = [*shlex.split(command), "--"]
    pairs = itertools.pairwise(words)
    named = {word.replace("_", "-"): value for word, value in pairs if word.startswith("--") and word != "--"}
    return {word: "" if value.startswith("--") else value for word, value in named.items()}


ALL_FLAGS = sorted({*flags_of(OTHER_FLAGS), *(flag for *_, line in OPEN_DILOCO for flag in flags_of(line))})


@pytest.mark.parametrize("flag", ALL_FLAGS)
def test_every_flag_of_open_diloco_has_an_answer(flag: str) -> None:
    flag = flag.replace("--no-", "--")
    rows = [row for row in PAGE.splitlines() if row.startswith("| `--") and f"`{flag}" in row.split(" | ")[0]]
    assert len(rows) == 1, rows


@pytest.mark.parametrize(("name", "processes", "command"), OPEN_DILOCO, ids=[each[0] for each in OPEN_DILOCO])
def test_the_examples_are_what_open_dilocos_own_commands_say(name: str, processes: int, command: str) -> None:
    flags = flags_of(command)
    experiment = yaml.safe_load((ROOT / f"examples/opendiloco/{name}.yaml").read_text(encoding="utf-8"))
    (strategy,) = experiment["strategies"]
    assert experiment["batch_size"] * processes == int(flags["--total-batch-size"])
    assert experiment["minibatch_size"] == int(flags["--per-device-train-batch-size"])
    assert experiment["steps"] == int(flags["--total-steps"])
    assert float(strategy["optim_spec"]["lr"]) == float(flags["--lr"])
    assert strategy.get("H") == (int(flags["--hv.local-steps"]) if "--hv.local-steps" in flags else None)
    assert strategy.get("ranks_per_worker", 1) == (processes if "diloco" in name else 1)


def test_open_dilocos_time_outs_are_taken_together() -> None:
    """Its DiLoCoOptimizer takes a matchmaking time with either strategy."""
    taken = DiLoCoStrategy(averaging_timeout=1800, matchmaking_time=15, all_reduce_strategy="WAIT_FOR_ALL")
    assert isinstance(taken, DiLoCoStrategy)
    patience = Patience.of("here", averaging_timeout=1800, matchmaking_time=15)
    assert patience is not None
    assert (patience.waiting_seconds, patience.averaging_seconds) == (615.0, 1800.0)
