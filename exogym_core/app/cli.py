"""`netgym`: run, compare, sweep, launch, rendezvous, status, report, sample, list, validate, doctor."""

from __future__ import annotations

import json
import traceback
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from exogym_core.app.bench_command import bench
from exogym_core.app.common_options import CommonOptions, debug_flag, plain_json
from exogym_core.app.doctor_command import doctor
from exogym_core.app.launch import command as launch
from exogym_core.app.plan_commands import advise, plan, reproduce
from exogym_core.app.rendezvous_command import rendezvous
from exogym_core.app.report_command import report
from exogym_core.app.run_commands import compare, run
from exogym_core.app.runs import stdout
from exogym_core.app.schema_command import schema
from exogym_core.app.status_command import status
from exogym_core.app.study_commands import sweep
from exogym_core.app.tokens_command import tokens
from exogym_core.names import visible, visible_text
from netsim.files.errors import InputError, NetsimError, unknown_name
from netsim.tools.usage import CommandGroup, usage_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.app.experiment import Experiment

__all__ = ["main"]

# torch, matplotlib and what imports them are imported inside commands: `netgym --help` answers at once.


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(metadata.version("netgym"), prog_name="netgym", message="%(prog)s %(version)s")
@debug_flag
def cli() -> None:
    """Train virtual workers for real over a simulated network; see loss and wall clock together."""


@cli.command()
@click.argument("model_or_run", metavar="MODEL_OR_RUN", type=click.Path(path_type=Path))
@click.option("--strategy", metavar="NAME", help="Whose model [the only one].")
@click.option("--prompt", required=True, help="What to go on from: text, or token numbers.")
@click.option("--tokens", default=200, show_default=True, help="How many to draw.")
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest each time.")
@click.option("--seed", type=int, help="Of the draws [another text each time].")
@click.option("--trust", is_flag=True, help="Run the code that RUN names, though somebody else has made it.")
@plain_json
@debug_flag
def sample(
    model_or_run: Path,
    strategy: str | None,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Let the language model of a run write on from a prompt."""
    from exogym_core.app.sampling import Sampler

    sampler = Sampler.of_run(model_or_run, strategy, trust=trust)
    text = sampler.text(prompt, tokens, temperature, seed)
    if as_json:
        click.echo(json.dumps({"run_folder": str(model_or_run), "prompt": prompt, "text": text}, indent=2))
        return
    click.echo(visible_text(text))


@cli.command("list")
@click.argument("what", required=False)
@plain_json
@debug_flag
def list_names(what: str | None, as_json: bool) -> None:
    """Show what can be named: strategies, tasks, models, topologies, devices, protocols."""
    from exogym_core.app.catalogue import SECTIONS

    if what is not None and what not in SECTIONS:
        raise unknown_name("list", what, SECTIONS)
    sections = [what] if what is not None else list(SECTIONS)
    if as_json:
        click.echo(json.dumps({section: dict(SECTIONS[section]()) for section in sections}, indent=2))
        return
    console = stdout()
    for section in sections:
        console.print(Text(section, style="bold"))
        for name, description in SECTIONS[section]():
            console.print(Text(f"  {name:<22} {visible(description)}".rstrip()), soft_wrap=True)


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@plain_json
@debug_flag
def validate(file: Path, as_json: bool) -> None:
    """Check an experiment or a topology FILE."""
    from netsim.files.documents import load_document

    document = load_document(file)
    keys = document.data.keys() if isinstance(document.data, dict) else set()
    if keys & {"hosts", "links", "regions", "routers", "wan"}:
        from netsim.topology.devices import device_problems
        from netsim.topology.topology import Topology

        network = Topology.load(file)
        if problems := list(device_problems(document.data)):
            raise document.errors(problems)
        told = f"topology of {len(network.hosts)} hosts and {len(network.links)} links"
    else:
        from exogym_core.app.experiment import Experiment

        experiment = Experiment.load(file)
        for scale in experiment.settings.scales:
            Experiment.load(file, scale=scale)
        unseen = _build_shipped(experiment)
        names = ", ".join(visible(entry.label, 40) for entry in experiment.strategies)
        told = f"experiment of {experiment.settings.workers.count} workers with {names}{unseen}"
        if experiment.settings.sweep is not None:
            told += f"; a sweep of {_check_sweep(file)} points"
        if experiment.shared_hosts is not None:
            told += f"; {experiment.shared_hosts}"
    if as_json:
        click.echo(json.dumps({"file": str(file), "valid": True, "told": told}, indent=2))
        return
    click.echo(f"{visible(file)}: valid: {told}")


def _check_sweep(file: Path) -> int:
    """Read the sweep, and check every point of a grid; returns how many points there are."""
    from exogym_core.app.studies.study import Study

    study = Study.of_file(file)
    for point in study.sweep.grid() if study.sweep.search == "grid" else ():
        study.experiment_at(point)
    return study.sweep.num_points


def _build_shipped(experiment: Experiment) -> str:
    """Make task and model as far as no code of others runs and the data are here; says what was left out."""
    from exogym_core.tasks.task import MissingDataError

    foreign = {code.what for code in experiment.own_code}
    if "task" not in foreign:
        try:
            task = experiment.build_task()
        except MissingDataError as error:
            return f"; {visible(error, 300)}"
        if "model" not in foreign:
            experiment.build_model(task)
    told = ", ".join(code.reference for code in experiment.own_code)
    return f"; not tried, since that would run its code: {visible(told)}" if told else ""


cli.add_command(plan)
cli.add_command(advise)
cli.add_command(bench)
cli.add_command(compare)
cli.add_command(doctor)
cli.add_command(launch)
cli.add_command(rendezvous)
cli.add_command(report)
cli.add_command(reproduce)
cli.add_command(run)
cli.add_command(schema)
cli.add_command(status)
cli.add_command(sweep)
cli.add_command(tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake in the input, 1 for other errors.

    Errors are told in one line on stderr, without a traceback unless there is `--debug`.
    """
    options = CommonOptions()
    try:
        code = cli.main(arguments, prog_name="netgym", standalone_mode=False, obj=options)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(usage_message(error), 2)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        if isinstance(error, NetsimError):
            told = "\n".join([str(error), *getattr(error, "__notes__", [])])
            return _fail(told, 2 if isinstance(error, InputError) else 1)
        told = visible(f"{type(error).__name__}: {error}", 500)
        return _fail(f"{told} (--debug shows where)", 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    lines = [visible(line, 2000) for line in message.splitlines()] or ["failed"]
    click.echo("\n".join([f"error: {lines[0]}", *lines[1:]]), err=True)
    return code
