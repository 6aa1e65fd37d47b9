"""A page of all commands and options, as `--help` prints them, for conf.py."""

from __future__ import annotations

import click

from netgym.cli.main import cli as netgym
from netsim.cli.main import cli as netsim

HEAD = """# The command line on a page

Commands and options, as `--help` prints them. Promises to scripts (`--json`, exit codes) are in
[The command line for scripts](commands.md).
"""


def text() -> str:
    """The page."""
    return "\n".join(
        [HEAD, *(_program(name, group) for name, group in (("netgym", netgym), ("netsim", netsim)))]
    )


def _program(name: str, group: click.Group) -> str:
    context = click.Context(group, info_name=name)
    commands = [(each, group.get_command(context, each)) for each in group.list_commands(context)]
    rows = [
        f"| `{name} {each}` | {_cell(command.get_short_help_str(300))} |"
        for each, command in commands
        if command
    ]
    parts = [f"## {name}\n\n{_cell(group.help or '')}\n\n| command | |\n|---|---|\n" + "\n".join(rows) + "\n"]
    parts += [_command(name, each, command, context) for each, command in commands if command]
    return "\n".join(parts)


def _command(program: str, name: str, command: click.Command, parent: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None and "--help" not in parameter.opts:
            rows.append(f"| `{_cell(record[0])}` | {_cell(record[1])} |")
    table = "\n| option | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return f"### {program} {name}\n\n`{program} {name} {usage}`\n{table}"


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")
