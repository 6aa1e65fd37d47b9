"""`netsim`: show and validate topologies, time flows and collectives on them.

Each command is imported when it is used, so that `netsim --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import click

from netsim.files.errors import InputError, NetsimError
from netsim.tools.usage import CommandGroup, plain_lines, usage_message

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

# Name -> (module, what it does). Each module has a click command named `command`.
_COMMANDS = {
    "show": ("netsim.tools.show", "Print hosts, links and the matrix of bandwidth and latency."),
    "validate": ("netsim.tools.validate", "Check a topology file; every mistake with its line."),
    "flows": ("netsim.tools.flows", "Time transfers from a CSV file."),
    "collective": ("netsim.tools.collective", "Time one collective."),
    "import": ("netsim.tools.importing", "Make a topology of measurements, or of another tool's file."),
    "probe": ("netsim.tools.probing", "Measure a real network from its hosts, and write it as a topology."),
    "export": ("netsim.tools.exporting", "Write a topology for SimGrid, ASTRA-sim or tc."),
    "plot": ("netsim.tools.plot", "Draw a topology and how its links are used."),
}


class _LazyGroup(CommandGroup):
    """A group that knows what its commands are called and where they are, and imports the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(metadata.version("netgym"), prog_name="netsim", message="%(prog)s %(version)s")
def cli() -> None:
    """Simulate networks and the collectives that run over them.

    TOPOLOGY is a YAML file, or the name of one that ships, such as wan-4-regions.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Mistakes are told in one line, without a traceback."""
    try:
        result = cli.main(
            args=None if args is None else list(args), prog_name="netsim", standalone_mode=False
        )
        sys.stdout.flush()
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(usage_message(error))
    except InputError as error:
        return _fail(str(error))
    except NetsimError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python must not complain of it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, click.Abort):
        return 130
    return result if isinstance(result, int) else 0


def _fail(message: str, exit_code: int = 2) -> int:
    click.echo(f"error: {plain_lines(message)}", err=True)
    return exit_code
