"""Options that commands of `netgym` have in common."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exogym_core.names import visible
from netsim.cli import terminal
from netsim.cli.terminal import given
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CommonOptions",
    "TrainingArguments",
    "confirm_seeds",
    "debug_flag",
    "first_line",
    "is_place",
    "not_empty",
    "takes",
]

_MOST_UNASKED = 20  # seeds


@dataclass
class CommonOptions:
    """Options of every command."""

    debug: bool = False


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(CommonOptions).debug = True


debug_flag = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show Python's traceback with an error.",
)


def not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty name, as an unset shell variable leaves behind: it would stand for the current folder."""
    if value == "":
        raise click.BadParameter("it is empty: give a name, or leave the option out", context, parameter)
    return value


_HELP = {
    "as_json": "Print one JSON document.",
    "edited_code": "With --resume: continue although your code was edited since; finished results are kept.",
    "jobs": "Runs at the same time on this machine; changes no result [as many as cores and memory allow].",
    "overrides": "Set a key, such as steps=20 or strategies.DiLoCo.H=50. May be repeated.",
    "scale": "Set the keys listed under `scales:` NAME in EXPERIMENT.",
    "topology": "Replace the topology: a shipped name or a file.",
    "trust": "With --resume: accept a folder that another user made or changed.",
    "yes": "Allow more than 20 seeds without asking.",
}
"""Help of options that several commands have."""


def takes(kind: type[Any] | None = None, **words: str) -> Callable[[Any], Any]:
    """As `netsim.cli.terminal.takes`, with the options that all commands have."""
    return lambda command: debug_flag(terminal.takes(kind, _HELP, **words)(command))


@dataclass(frozen=True)
class TrainingArguments:
    """Command-line arguments of all commands that train an experiment, or resume that."""

    experiment: Path | None = given(is_argument=True)
    resume: Path | None = given(metavar="DIR")
    trust: bool = given()
    edited_code: bool = given()
    topology: str | None = given(metavar="NAME", callback=not_empty)
    scale: str | None = given(metavar="NAME")
    overrides: tuple[str, ...] = given("--set", metavar="KEY=VALUE")
    out: str | None = given(metavar="DIR", callback=not_empty)
    jobs: int | None = given(type=click.IntRange(1))
    yes: bool = given()
    as_json: bool = given()

    def refuse_with_resume(self, hint: str = "", /, **others: object) -> None:
        """Raise InputError for options that what is resumed cannot change: those of the experiment, and `others`.

        `hint` ends the line.
        """
        asked = {
            "topology": self.topology,
            "set": self.overrides,
            "scale": self.scale,
            "out": self.out,
            **others,
        }
        for name, value in asked.items():
            if value:
                option = "EXPERIMENT" if name == "experiment" else f"--{name}"
                raise InputError(
                    f"--resume {visible(self.resume)}: continues with its own settings: leave out {option}{hint}"
                )

    def refuse_without_resume(self) -> None:
        """Raise InputError for options that only a resumed run or study takes."""
        for name in ("trust", "edited_code"):
            if getattr(self, name):
                raise InputError(f"--{name.replace('_', '-')}: goes with --resume: leave it out")

    def flags(self, **others: object) -> dict[str, object]:
        """Keys of the experiment that flags of their own replace: the topology, and `others` that are not None."""
        topology = self.topology  # a file is relative to the working directory, not to the experiment
        if topology is not None and is_place(topology):
            topology = str(Path(topology).resolve())
        return {key: value for key, value in {"topology": topology, **others}.items() if value is not None}


def is_place(topology: str | None) -> bool:
    """True if a topology's name is that of a file."""
    # Path.is_file raises for names that are too long.
    return topology is not None and os.path.isfile(topology)


def first_line(error: Exception) -> str:
    """First line of an error, with the class of one that is not NetGym's."""
    text = str(error) if isinstance(error, NetsimError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def confirm_seeds(seeds: object, *, yes: bool) -> None:
    """Ask before a large number of seeds, which may be a typing error.

    Raises:
        InputError: there are more than 20, and neither `--yes` nor a person at a terminal agrees.
    """
    number = seeds if isinstance(seeds, int) else len(seeds) if isinstance(seeds, list) else 0
    if number <= _MOST_UNASKED or yes:
        return
    problem = f"--seeds: {number} seeds are {number} runs of every strategy"
    if not (sys.stdin.isatty() and click.confirm(f"{problem}: start them?", err=True)):
        raise InputError(
            f"{problem}: add --yes, or a list such as --seeds {number - 1},{number} for two of them"
        )
