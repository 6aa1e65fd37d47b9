"""`netsim check`: a collective algorithm of your own, held to the laws and timed beside the shipped ones."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netsim.cli.terminal import DelayedProgress, OneLineCommand, given, takes
from netsim.collectives.operations import OPERATIONS
from netsim.errors import InputError, unknown_name
from netsim.testing.laws import LawError
from netsim.testing.schedules import NETWORKS, SIZES, check_schedule
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from netsim.testing.laws import Build

__all__ = ["check_command"]


@click.command("check", cls=OneLineCommand)
@takes()
def check_command(
    function: str = given(is_argument=True, required=True, metavar="MODULE:FUNCTION"),
    operation: str = given(required=True, metavar="|".join(OPERATIONS)),
    cases: int = given(default=1000, type=click.IntRange(1)),
    seed: int = given(default=0),
    ranks: int = given(default=9, type=click.IntRange(2)),
    topology: tuple[str, ...] = given(default=NETWORKS),
    size: tuple[str, ...] = given("--bytes", default=SIZES, metavar="SIZE"),
) -> int:
    """Play a collective algorithm of your own on drawn networks, and time it beside the shipped ones.

    FUNCTION takes a Problem and returns phases or a Schedule, or is an Algorithm. Its module is imported from the
    current folder, or as installed. If a case fails, a program that shows it is printed, and the exit status is 1.

    Args:
        operation: What it computes.
        cases: Number of calls played.
        seed: Seed of the draws.
        ranks: Largest number of ranks.
        topology: Networks of the table; several: give it again.
        size: Sizes of the table; several: give it again.
    """
    build = _load(function)
    networks = [Topology.load(name) for name in topology]
    try:
        with DelayedProgress(f"playing {operation}", every_seconds=10.0) as progress:
            played = itertools.count(1)
            report = check_schedule(
                build,
                operation,
                cases=cases,
                seed=seed,
                max_ranks=ranks,
                on_case=lambda: progress.now(f"playing {operation}, case {next(played)} of {cases}"),
            )
            progress.now("timing the table")
            table = report.compare(networks=networks, sizes=size)
    except LawError as error:
        click.echo(error.program, nl=False)
        click.echo(f"error: {error.problem}", err=True)
        return 1
    click.echo(f"{operation} by {function}: {report.num_cases} cases passed (seed {seed})\n\n{table}")
    return 0


def _load(reference: str) -> Build:
    """Schedule or algorithm that a `MODULE:FUNCTION` of the current folder or an installed package names."""
    name, _, attribute = reference.partition(":")
    if not (name and attribute):
        raise InputError(f"{reference}: expected MODULE:FUNCTION, such as mine:ring")
    if name.endswith(".py"):
        raise InputError(f"{reference}: is a file: write {Path(name).stem}:{attribute}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module that ends Python must not end the command silently
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise InputError(f"{reference}: cannot import '{name}' ({kind}{error})") from error
    if attribute not in vars(module):
        raise unknown_name(
            f"function of {name}", attribute, [each for each in vars(module) if each[0] != "_"]
        )
    build: Build = getattr(module, attribute)
    if not callable(getattr(build, "build", build)):
        raise InputError(f"{reference}: is {type(build).__name__}, neither a function nor an Algorithm")
    return build
