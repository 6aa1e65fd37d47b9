"""Terminal conventions of both command lines: one-line errors, new output files, progress on standard error."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import sys
import threading
import time
from dataclasses import Field, field, fields
from functools import wraps
from inspect import cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netsim.cli.signals import NOTHING_FINISHED, Interruption
from netsim.docstrings import documented_lines
from netsim.errors import InputError, NetsimError, unknown_name
from netsim.files.plain_files import is_written_in_place, output_file
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "PLAIN_WIDTH",
    "CommandGroup",
    "DelayedProgress",
    "OneLineCommand",
    "check_new",
    "drop_output",
    "given",
    "plain_console",
    "plain_lines",
    "takes",
    "usage_message",
    "write_new",
]


class CommandGroup(click.Group):
    """Click group whose declared commands are imported when they are called.

    It refuses an unknown command in one line; see `netsim.errors.unknown_name`. Signals end every command in order:
    its results so far, a line that says how far it came, and the signal's exit code.

    Args:
        declared: `module:function` by command, in the order of `--help`, which shows the first line of its docstring.
        settings: click's.
    """

    def __init__(self, *, declared: Mapping[str, str], **settings: Any) -> None:
        super().__init__(**settings)
        self._declared = declared

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands.

        Args:
            ctx: click's context of this group.
        """
        return list(self._declared)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if it does not exist.

        Args:
            ctx: click's context of this group.
            cmd_name: of the command.
        """
        if cmd_name not in self._declared:
            return None
        module, _, name = self._declared[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line of help for each command.

        Args:
            ctx: click's context of this group.
            formatter: of the help.
        """
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_line(place)) for name, place in self._declared.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; raises Exit with the signal's code where one ended it.

        Args:
            ctx: click's context of this group.
        """
        with Interruption() as interruption:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                line = str(error) or NOTHING_FINISHED
            except (NetsimError, click.ClickException, click.Abort, click.exceptions.Exit):
                raise
            except Exception as error:
                # Such as of a closed terminal, or of compiled code that the signal met.
                if interruption.exit_code is None:
                    raise
                line = f"{type(error).__name__}: {error}"
            # Else Python dies of SIGINT at its end if KeyboardInterrupt has passed an exec, as of dataclasses.
            exec("")
            with contextlib.suppress(OSError):
                click.echo(plain_lines(f"interrupted: {line}"), err=True)
            raise click.exceptions.Exit(interruption.exit_code or 130)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command that `args` begin with; return its name, itself and the remaining arguments.

        Args:
            ctx: click's context of this group.
            args: arguments after the group's own options.

        Raises:
            UnknownNameError: the group has no such command.
        """
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown_name("command", args[0], self.list_commands(ctx))
        name, command, others = super().resolve_command(ctx, args)
        if command is not None:
            _refuse_repeated(click.Context(command, ctx, name, **command.context_settings), others)
        return name, command, others


def _first_line(place: str) -> str:
    """First line of the docstring of a `module:function`, read from its file: importing some takes seconds."""
    module, _, name = place.partition(":")
    package, *rest = module.split(".")
    folder = Path(str(sys.modules[package].__file__)).parent
    text = folder.joinpath(*rest).with_suffix(".py").read_text(encoding="utf-8")
    found = re.search(rf'^def {name}\(.*?\n    """(.*?)(\n|""")', text, re.MULTILINE | re.DOTALL)
    assert found is not None, place
    return found[1]


def _refuse_repeated(ctx: click.Context, args: list[str]) -> None:
    """Refuse an option that a command takes once and was given several values, of which click would take the last."""
    try:
        given = ctx.command.make_parser(ctx).parse_args(args[:])[2]
    except click.UsageError:
        return  # to be raised when the command reads them
    options = [option for option in given if isinstance(option, click.Option)]
    for option in options:
        is_one = not (option.multiple or option.is_flag or option.count)
        if is_one and options.count(option) > 1:
            raise click.UsageError(f"{option.opts[0]} is given {options.count(option)} times: keep one", ctx)


def given(*flags: str, is_argument: bool = False, **settings: Any) -> Any:
    """An option of a command, as a parameter's default or a field of its arguments; or a positional argument.

    Args:
        flags: other than `--name`; of `as_json` that is `--json`.
        is_argument: positional, and optional unless click's `required` is set.
        settings: click's; type, flags and numbers follow from the annotation where they are not there.
    """
    return field(metadata={"flags": flags, "is_argument": is_argument, "settings": settings})


_HELP = {
    "as_json": "Print JSON.",
    "protocol": "ideal, linux-tcp, nccl-sockets, gloo or hivemind; default: the topology's, else linux-tcp.",
}


def takes(
    kind: type[Any] | None = None, lines: Mapping[str, str] = _HELP, **words: str
) -> Callable[[Any], Any]:
    """Decorator of a command whose parameters with a `given` default are its options; their help are lines of "Args".

    Args:
        kind: a dataclass, each field of which is an option too; one object of it is the command's first argument.
        lines: help of options that several commands have.
        words: for names in braces in the help.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        options = {} if kind is None else {each.name: (each.type, each) for each in fields(kind)}
        shared = list(options)
        options |= {
            name: (each.annotation, each.default)
            for name, each in signature(command).parameters.items()
            if isinstance(each.default, Field)
        }
        helps = dict(lines)
        for each in reversed(() if kind is None else kind.__mro__):
            helps |= documented_lines(each)
        helps |= documented_lines(command, "Args")

        @wraps(command)
        def called(**values: Any) -> Any:
            first = [] if kind is None else [kind(**{name: values.pop(name) for name in shared})]
            return command(*first, **values)

        called.__doc__ = cleandoc(command.__doc__ or "").partition("\n\nArgs:\n")[0]
        for name, (annotation, option) in reversed(options.items()):
            line = re.sub(r"\{(\w+)\}", lambda word: words.get(word[1], word[0]), helps.get(name, ""))
            called = _parameter(name, str(annotation), option.metadata, line)(called)
        return called

    return decorate


def _parameter(name: str, annotation: str, declared: Mapping[str, Any], line: str) -> Callable[[Any], Any]:
    """click's decorator of one option or argument."""
    settings, kind = dict(declared["settings"]), annotation.removesuffix(" | None")
    is_argument, is_many = declared["is_argument"], kind.startswith("tuple[")
    if "Path" in kind:
        settings.setdefault("type", click.Path(path_type=Path))
    if kind in ("int", "float"):
        settings.setdefault("type", int if kind == "int" else float)
    if is_argument:
        inferred: dict[str, Any] = {"required": False} | ({"nargs": -1} if is_many else {})
        return click.argument(name, **inferred | settings)
    if settings.get("default") not in (None, ""):
        settings.setdefault("show_default", True)
    inferred = {"is_flag": True} if kind == "bool" else {"multiple": True} if is_many else {}
    flags = declared["flags"] or ["--json" if name == "as_json" else f"--{name.replace('_', '-')}"]
    return click.option(*flags, name, help=line, **inferred | settings)


class OneLineCommand(click.Command):
    """Click command whose errors of netsim are reported in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; raises ClickException."""
        try:
            return super().invoke(ctx)
        except NetsimError as error:
            raise click.ClickException(str(error)) from None


PLAIN_WIDTH = 120
"""Characters a line of sentences that go to a file or a pipe."""


def plain_console(plain_width: int | None = None, **options: Any) -> Console:
    """Console that prints text as it is: markup and names of emoji in it, as in users' names, are text.

    Args:
        plain_width: characters a line where it is no terminal.
        options: rich's.
    """
    from rich.console import Console  # here, so that `--help` does not wait for it

    made = Console(markup=False, emoji=False, **options)
    if plain_width is not None and not made.is_terminal:
        made.width = plain_width
    return made


def plain_lines(text: str) -> str:
    """Text for a terminal: its lines, with control characters written out.

    >>> plain_lines("a\\n\\x1b[31mb")
    'a\\n\\\\x1b[31mb'
    """
    return "".join(
        part if part.isprintable() or part == "\n" else part.encode("unicode_escape").decode()
        for part in text
    )


def drop_output() -> None:
    """Let nothing more be written to the standard output, which failed: Python would report that again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def usage_message(error: click.ClickException) -> str:
    """Format click's `error` as one line: the command, what is wrong, and what it accepts or where that is listed."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        options = [name for parameter in context.command.params for name in parameter.opts if name[0] == "-"]
        return f"{context.command_path}: {unknown_name('option', error.option_name, [*options, '--help'])}"
    text = error.format_message().rstrip(".")
    return f"{context.command_path}: {text[:1].lower()}{text[1:]}: see {context.command_path} --help"


def check_new(path: Path | None) -> None:
    """Raise InputError unless `--out`, if given, names a new file in an existing folder, or a device."""
    if path is None or is_written_in_place(path):
        return
    if os.path.lexists(path):
        raise InputError(f"--out {path}: is there already: choose another name")
    if not os.path.isdir(path.parent):
        raise InputError(f"--out {path}: cannot be written: there is no folder {path.parent}")


def write_new(path: Path | None, text: str) -> None:
    """Write a new file for `--out`, or print the text if it is not given.

    Raises:
        InputError: the file exists, its folder does not, or it cannot be written.
    """
    if path is None:
        click.echo(text, nl=False)
        return
    check_new(path)
    with output_file(path) as out:
        out.write(text.encode())


class DelayedProgress:
    """Progress line on a terminal's standard error, shown while the block runs longer than two seconds.

    Elsewhere nothing is printed, or a plain line now and then.

    Args:
        what: is being done.
        total: number of items, each reported by `advance` when done; None: only the seconds so far are
            shown.
        seconds: how long nothing is shown.
        console: where; by default standard error.
        every_seconds: interval of plain lines if standard error is no terminal; None: nothing is printed.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        seconds: float = 2.0,
        console: Console | None = None,
        every_seconds: float | None = None,
    ) -> None:
        self._what = what
        self._total = total
        self._num_done = 0
        self._begun = self._part_begun = self._reported = time.monotonic()
        self._part: tuple[int, int, str] | None = None  # done of the present work, in all, and of what
        self._console = console
        self._file = sys.stderr
        self._every_seconds = every_seconds
        self._shown: Progress | None = None
        self._is_over = threading.Event()
        self._timer = threading.Timer(seconds, self._show)
        self._timer.daemon = True

    def __enter__(self) -> DelayedProgress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._timer.is_alive():
            self._timer.cancel()
            self._timer.join()
        if self._shown is not None:
            self._shown.stop()

    def advance(self) -> None:
        """Count one more as done."""
        self._num_done += 1
        self._part = None
        self._refresh()

    def part(self, done: int, total: int, unit: str) -> None:
        """Show how much of the present work is done, such as 20 of 500 rounds, and the time left for the rest."""
        if self._part is None or done <= self._part[0]:  # it has begun when the work before it ended
            self._part_begun = self._reported
        self._part = done, total, unit
        self._refresh()

    def now(self, what: str) -> None:
        """Set the description of the work, as the display shows it."""
        self._what, self._part = what, None
        self._refresh()

    def _description(self) -> str:
        part = self._part
        if part is None:
            return self._what
        done, total, unit = part
        seconds = (time.monotonic() - self._part_begun) * (total - done) / done if done else math.inf
        left = f", {format_seconds(math.ceil(seconds))} left" if seconds < math.inf else ""
        return f"{self._what}: {done} of {total} {unit}{left}"

    def _refresh(self) -> None:
        self._reported = time.monotonic()
        shown = self._shown
        if shown is not None:
            shown.update(shown.task_ids[0], completed=self._num_done, description=self._description())

    def _show(self) -> None:
        """Show the line, or print lines; rich is imported here, so that short work does not wait for it."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = self._console if self._console is not None else plain_console(file=self._file)
        if not console.is_terminal:
            if self._every_seconds is not None:
                self._print_lines(console, self._every_seconds)
            return
        counted = [] if self._total is None else [MofNCompleteColumn()]
        description = TextColumn("{task.description}", markup=False)
        shown = Progress(
            description, BarColumn(24), *counted, TimeElapsedColumn(), console=console, transient=True
        )
        shown.add_task(self._what, total=self._total, completed=self._num_done)
        shown.tasks[0].start_time = self._begun
        self._shown = shown
        self._refresh()  # of what was done in the meantime
        shown.start()

    def _print_lines(self, console: Console, every_seconds: float) -> None:
        printed, due = "", 0.0
        while not self._is_over.is_set():
            done = "" if self._total is None else f", {self._num_done} of {self._total} done"
            line, elapsed = f"{self._description()}{done}", time.monotonic() - self._begun
            if line != printed or elapsed >= due:  # an unchanged line comes at twice the time of the last one
                text = f"{line}, {format_seconds(round(elapsed))}"
                console.print(text, highlight=False, soft_wrap=True)
                printed, due = line, 2 * elapsed
            self._is_over.wait(every_seconds)
