"""Mistakes on a command line, told as those in files are: one line, the likeliest name first."""

from __future__ import annotations

import click

from netsim.files.errors import unknown_name

__all__ = ["CommandGroup", "plain_lines", "usage_message"]


class CommandGroup(click.Group):
    """A group that refuses a command it does not have in one line; see `netsim.files.errors.unknown_name`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begin with, and the rest of them."""
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise unknown_name("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def plain_lines(text: str) -> str:
    """`text` for a terminal: its lines, and what a user's names may hold to steer the terminal written out.

    >>> plain_lines("a\\n\\x1b[31mb")
    'a\\n\\\\x1b[31mb'
    """
    return "".join(
        part if part.isprintable() or part == "\n" else part.encode("unicode_escape").decode()
        for part in text
    )


def usage_message(error: click.ClickException) -> str:
    """One line for what click refuses: what is wrong, and what is accepted or where that is told."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        options = [name for parameter in context.command.params for name in parameter.opts if name[0] == "-"]
        return f"{context.command_path}: {unknown_name('option', error.option_name, [*options, '--help'])}"
    told = error.format_message().rstrip(".")
    return f"{context.command_path}: {told[:1].lower()}{told[1:]}: see {context.command_path} --help"
