"""The command `netgym`: each subcommand is imported when it is called."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import click

from exogym_core.names import visible, visible_text
from netgym.command_options import CommonOptions, debug_flag, takes
from netsim.cli.terminal import (
    PLAIN_WIDTH,
    CommandGroup,
    drop_output,
    given,
    plain_console,
    usage_message,
)
from netsim.errors import InputError, NetsimError, unknown_name
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from netgym.experiment.experiment import Experiment

__all__ = ["main"]

# Commands are imported when they are called, and torch and matplotlib inside them: `netgym --help` answers at once.


_COMMANDS = {
    "advise": "netgym.planning.commands:advise",
    "check": "netgym.cli.inspect_commands:check",
    "compare": "netgym.studies.commands:compare",
    "doctor": "netgym.cli.inspect_commands:doctor",
    "launch": "netgym.launch.command:command",
    "list": "netgym.cli.main:list_names",
    "plan": "netgym.planning.commands:plan",
    "rendezvous": "netgym.sites.service:rendezvous",
    "report": "netgym.cli.report_command:report",
    "reproduce": "netgym.planning.commands:reproduce",
    "retime": "netgym.cli.run_commands:retime",
    "run": "netgym.cli.run_commands:run",
    "sample": "netgym.cli.main:sample",
    "schema": "netgym.cli.inspect_commands:schema",
    "status": "netgym.cli.status_command:status",
    "sweep": "netgym.studies.commands:sweep",
    "tokens": "netgym.cli.main:tokens",
    "tune": "netgym.studies.commands:tune",
    "validate": "netgym.cli.main:validate",
}


@click.group(
    cls=CommandGroup,
    declared=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="netgym", prog_name="netgym", message="%(prog)s %(version)s")
@debug_flag
def cli() -> None:
    """Train virtual workers for real over a simulated network: loss against virtual time."""


@click.command()
@takes()
def sample(
    model_or_run: Path = given(is_argument=True, required=True, metavar="MODEL_OR_RUN"),
    strategy: str | None = given(metavar="NAME"),
    prompt: str = given(required=True),
    num_tokens: int = given("--tokens", default=200),
    temperature: float = given(default=0.8),
    seed: int | None = given(),
    trust: bool = given(),
    as_json: bool = given(),
) -> None:
    """Generate text with a language model of a run.

    Args:
        strategy: Strategy of the model [the only one].
        prompt: Text, or token numbers.
        num_tokens: Tokens to generate.
        temperature: Divides logits; 0 takes the likeliest token.
        seed: Seed of the sampling [random].
        trust: Run the code that RUN names, even if another user has made RUN.
    """
    from netgym.cli.sampling import model_of_run, sampled_text

    model = model_of_run(model_or_run, strategy, trust=trust)
    text = sampled_text(model, prompt, num_tokens, temperature, seed)
    document = {"run_folder": str(model_or_run), "prompt": prompt, "text": text}
    click.echo(json.dumps(document, indent=2) if as_json else visible_text(text))


@click.command()
@takes()
def tokens(
    corpus: tuple[str, ...] = given(is_argument=True, required=True),
    tokenizer: str = given(metavar="NAME", required=True),
    out: str = given(metavar="FILE", required=True),
    config: str | None = given(metavar="NAME"),
    split: str = given(metavar="NAME", default="train"),
    column: str = given(metavar="NAME", default="text"),
    end: str | None = given(metavar="TOKEN"),
    most_tokens: int | None = given("--most", metavar="N", type=click.IntRange(1)),
    as_json: bool = given(),
) -> None:
    """Tokenize a CORPUS, streaming: files (.txt, .jsonl, .csv, .parquet), a folder, or a data set of Hugging Face.

    It needs the extra: pip install 'netgym[text]'.

    Args:
        tokenizer: A tokenizer.json, a model of the Hugging Face hub, or bytes.
        out: File of tokens to write, such as c4.bin.
        config: Configuration of a data set of the hub, such as en.
        split: Split of a data set of the hub.
        column: Column of the documents' text.
        end: Token after each document [the tokenizer's own].
        most_tokens: Number of tokens at which to stop.
    """
    from netgym.tasks.tokens import print_progress, write_tokens

    source = corpus[0] if len(corpus) == 1 else corpus
    part: dict[str, Any] = {"config": config, "split": split, "column": column, "end": end}
    written = write_tokens(source, out, tokenizer, most_tokens=most_tokens, progress=print_progress, **part)
    if sys.stderr.isatty():
        click.echo("", err=True)
    if as_json:
        click.echo(json.dumps({"file": out, **dataclasses.asdict(written)}, indent=2))
        return
    ends = f", each with {written.end} at its end" if written.end else ", with nothing between them"
    click.echo(
        f"{format_count(written.num_documents, 'document')}{ends}; "
        f"{format_count(written.num_tokens, 'token')} of {written.vocab_size}"
    )
    dtype = "" if written.dtype == "uint16" else f", dtype: {written.dtype}"
    click.echo(f"task: {{name: text, paths: {out}, vocab_size: {written.vocab_size}{dtype}}}")
    click.echo(out)


@click.command("list")
@takes()
def list_names(
    what: str | None = given(is_argument=True, metavar="[KIND]"),
    every: bool = given("--all"),
    as_json: bool = given(),
) -> None:
    """List strategies, tasks, models, topologies, devices and protocols, or one of these kinds.

    Args:
        every: List experimental strategies too, whose rules could not be read in papers or their authors' code.
    """
    from rich.text import Text

    from netgym.cli.inspect_commands import sections

    makers = sections(every=every)
    if what is not None and what not in makers:
        raise unknown_name("list", what, makers)
    chosen = [what] if what is not None else list(makers)
    if as_json:
        click.echo(json.dumps({section: dict(makers[section]()) for section in chosen}, indent=2))
        return
    console = plain_console(PLAIN_WIDTH)
    for section in chosen:
        console.print(Text(section, style="bold"))
        for name, description in makers[section]():
            console.print(Text(f"  {name:<22} {visible(description)}".rstrip()), soft_wrap=True)


@click.command()
@takes()
def validate(file: Path = given(is_argument=True, required=True), as_json: bool = given()) -> None:
    """Check an experiment or a topology FILE."""
    from netsim.files.documents import load_document

    document = load_document(file)
    keys = document.data.keys() if isinstance(document.data, dict) else set()
    if keys & {"hosts", "links", "regions", "routers", "wan"}:
        from netsim import Topology
        from netsim.topology.devices import device_problems

        network = Topology.load(file)
        if problems := list(device_problems(document.data)):
            raise document.errors(problems)
        line = f"topology of {format_count(len(network.hosts), 'host')} and {format_count(len(network.links), 'link')}"
    else:
        from netgym.experiment.experiment import Experiment

        experiment = Experiment.load(file)
        missing = experiment.check_runs(elsewhere=True)
        for scale in experiment.settings.scales:
            Experiment.load(file, scale=scale).check_runs(elsewhere=True)
        unseen = _build_shipped(experiment)
        names = ", ".join(visible(entry.label) for entry in experiment.strategies)
        line = (
            f"experiment of {format_count(experiment.settings.workers.count, 'worker')} with {names}{unseen}"
        )
        if experiment.settings.sweep is not None:
            from netgym.studies.study import check_sweep

            line += f"; {check_sweep(file)}"
        if experiment.settings.tune is not None:
            from netgym.studies.tuning import check_tune

            line += f"; {check_tune(file)}"
        if missing is not None:
            line += f"; {missing}"
        if experiment.shared_hosts is not None:
            line += f"; {experiment.shared_hosts}"
    found = {"file": str(file), "valid": True, "summary": line}
    click.echo(json.dumps(found, indent=2) if as_json else f"{visible(file)}: valid: {line}")


def _build_shipped(experiment: Experiment) -> str:
    """Build task and model unless that runs the user's code or lacks data; returns a note on the parts left out."""
    from netgym.tasks.task import MissingDataError

    foreign = {code.what for code in experiment.own_code}
    if "task" not in foreign:
        try:
            task = experiment.build_task()
        except MissingDataError as error:
            return f"; {visible(error, 300)}"
        if "model" not in foreign:
            experiment.build_model(task)
    line = ", ".join(code.reference for code in experiment.own_code)
    return f"; not tried, since that would run its code: {visible(line)}" if line else ""


_REMEDIES = {
    os.strerror(errno.EMFILE): "raise the limit of open files (ulimit -n 4096), or use fewer ranks",
    os.strerror(errno.EFBIG): "raise the limit of a file's size (ulimit -f unlimited)",
    os.strerror(errno.ENOSPC): "free some of the disk, or set TMPDIR to a folder on another",
    "No usable temporary directory": "free some of the disk, raise ulimit -f, or set TMPDIR to another folder",
}
"""By words of an error of the system that any part of a run may meet: what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake in the input, 1 for other errors.

    Errors are printed in one line on stderr, without a traceback unless there is `--debug`.
    """
    options = CommonOptions()
    try:
        code = cli.main(arguments, prog_name="netgym", standalone_mode=False, obj=options)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(usage_message(error), 2)
    except click.Abort:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        if isinstance(error, NetsimError):
            line = "\n".join([str(error), *getattr(error, "__notes__", [])])
            return _fail(line, 2 if isinstance(error, InputError) else 1)
        if getattr(error, "errno", None) == errno.ENOSPC and (failure := _failure_of_output()):
            drop_output()
            return _fail(f"the output could not be written: {failure}", 1)
        for reason, remedy in _REMEDIES.items():
            if isinstance(error, OSError) and reason in str(error):
                return _fail(f"{visible(error.strerror or error, 500)}: {remedy} (--debug shows where)", 1)
        return _fail(f"{visible(f'{type(error).__name__}: {error}', 500)} (--debug shows where)", 1)
    return code if isinstance(code, int) else 0


def _failure_of_output() -> str:
    """Error of the standard output, such as that its disk is full; "" where it takes an empty line."""
    try:
        os.write(1, b"\n")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _fail(message: str, code: int) -> int:
    lines = [visible(line, 2000) for line in message.splitlines()] or ["failed"]
    click.echo("\n".join([f"error: {lines[0]}", *lines[1:]]), err=True)
    return code
