"""Options that commands of `netgym` have in common."""

from __future__ import annotations

from dataclasses import dataclass

import click

__all__ = ["CommonOptions", "debug_flag", "not_empty", "plain_json", "results_json"]


@dataclass
class CommonOptions:
    """What concerns every command."""

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
    """Such as an unset variable of a shell leaves behind: it would be taken for the folder one is in."""
    if value == "":
        raise click.BadParameter("it is empty: give a name, or leave the option out", context, parameter)
    return value


plain_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
results_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document with run_folder, summary and verdict."
)
