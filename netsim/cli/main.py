"""`netsim`: show and validate topologies, time flows and collectives on them.

Each command is imported when it is used, so that `netsim --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from netsim.cli.terminal import CommandGroup, drop_output, plain_lines, usage_message
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = {
    "show": "netsim.cli.show:show_command",
    "validate": "netsim.cli.show:validate_command",
    "flows": "netsim.cli.flows:flows_command",
    "collective": "netsim.cli.timing:collective_command",
    "check": "netsim.cli.check:check_command",
    "plot": "netsim.cli.plot:command",
    "import": "netsim.formats.commands:import_command",
    "export": "netsim.formats.commands:export_command",
    "probe": "netsim.probe.command:command",
}


@click.group(
    cls=CommandGroup,
    declared=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="netgym", prog_name="netsim", message="%(prog)s %(version)s")
def cli() -> None:
    """Simulate networks and the collectives that run over them.

    TOPOLOGY is a YAML file, or the name of one that ships, such as wan-4-regions.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Mistakes are reported in one line, without a traceback."""
    # Else pydantic reads the metadata of every installed package to find its plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        result = cli.main(
            args=None if args is None else list(args), prog_name="netsim", standalone_mode=False
        )
        if sys.stdout is not None:  # closed by the caller
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
        drop_output()  # the reader closed the pipe
        return 0
    except OSError as error:
        drop_output()
        return _fail(f"the output could not be written: {error.strerror or error}", 1)
    except click.Abort:
        return 130
    return result if isinstance(result, int) else 0


def _fail(message: str, exit_code: int = 2) -> int:
    click.echo(f"error: {plain_lines(message)}", err=True)
    return exit_code
