"""`netgym`: run, compare, sweep, launch, report, sample, list, validate."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from exogym_core.app.bench_command import bench
from exogym_core.app.launch import command as launch
from exogym_core.app.plan_commands import advise, plan, reproduce
from exogym_core.app.runs import resume_run, show_report, stdout, train
from exogym_core.app.schema_command import schema
from exogym_core.app.study_commands import sweep
from exogym_core.names import visible, visible_text
from netsim.files.errors import InputError, NetsimError, unknown_name
from netsim.tools.usage import CommandGroup, usage_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from exogym_core.app.experiment import Experiment

__all__ = ["main"]

# torch, matplotlib and what imports them are imported inside commands: `netgym --help` answers at once.


@dataclass
class _Options:
    """What concerns every command."""

    debug: bool = False


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(_Options).debug = True


_debug = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show Python's traceback with an error.",
)


def _not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Such as an unset variable of a shell leaves behind: it would be taken for the folder one is in."""
    if value == "":
        raise click.BadParameter("it is empty: give a name, or leave the option out", context, parameter)
    return value


def _or_resume(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """EXPERIMENT is needed unless there is --resume."""
    if value is None and context.params.get("resume") is None:
        raise click.MissingParameter(ctx=context, param=parameter, param_hint="'EXPERIMENT'")
    return value


def _is_resumed(resume: Path | None, trust: bool, **others: object) -> bool:
    """Whether a run is to go on, which it does as it was begun: nothing else may be given."""
    if resume is None:
        if trust:
            raise InputError("--trust: goes with --resume: leave it out")
        return False
    for name, value in others.items():
        if value:
            told = "EXPERIMENT" if name == "experiment" else f"--{name}"
            raise InputError(f"--resume {visible(resume)}: goes on as it was begun: leave out {told}")
    return True


def _seeds(context: click.Context, parameter: click.Parameter, value: str | None) -> int | list[int] | None:
    """A number of seeds, or a list of them."""
    if value is None:
        return None
    numbers = [number.strip() for number in value.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        told = f"{value!r} is no number of seeds and no list of them: write 3, or 0,3,4"
        raise click.BadParameter(told, context, parameter)
    return [int(number) for number in numbers] if "," in value else int(value)


_plain_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document with run_folder, summary and verdict."
)


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `run` and `compare` have in common."""
    for option in reversed(
        [
            click.argument(
                "experiment", type=click.Path(path_type=Path), required=False, callback=_or_resume
            ),
            click.option(
                "--resume",
                metavar="DIR",
                type=click.Path(path_type=Path),
                is_eager=True,  # known when it is asked whether EXPERIMENT is missing
                help="Go on with the run in this folder, from its last checkpoint.",
            ),
            click.option(
                "--trust", is_flag=True, help="With --resume: though somebody else has made or changed it."
            ),
            click.option(
                "--topology",
                metavar="NAME",
                callback=_not_empty,
                help="Another network: a shipped name or a file.",
            ),
            click.option("--protocol", metavar="NAME", callback=_not_empty, help="Another protocol."),
            click.option(
                "--scale", metavar="NAME", help="Change the keys that EXPERIMENT lists under scales: NAME."
            ),
            click.option(
                "--set",
                "overrides",
                metavar="KEY=VALUE",
                multiple=True,
                help="Change one key, such as steps=20 or strategies.DiLoCo.H=50. May be repeated.",
            ),
            click.option(
                "--out",
                metavar="DIR",
                callback=_not_empty,
                help="The run's folder, new or empty [runs/<name>-<n>].",
            ),
            click.option(
                "--seeds",
                metavar="N",
                callback=_seeds,
                help="Each strategy with N seeds, counted up from the experiment's, or with a list such as 0,3,4.",
            ),
            _json,
            _debug,
        ]
    ):
        command = option(command)
    return command


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(metadata.version("netgym"), prog_name="netgym", message="%(prog)s %(version)s")
@_debug
def cli() -> None:
    """Train virtual workers for real over a simulated network; see loss and wall clock together."""


@cli.command()
@_run_options
@click.option("--strategy", metavar="NAME", help="Which of the experiment's strategies [the only one].")
@click.option("--trace", is_flag=True, help="Write trace.json.gz, to look at with Perfetto.")
def run(
    experiment: Path | None,
    resume: Path | None,
    trust: bool,
    topology: str | None,
    protocol: str | None,
    scale: str | None,
    overrides: tuple[str, ...],
    out: str | None,
    seeds: int | list[int] | None,
    as_json: bool,
    strategy: str | None,
    trace: bool,
) -> None:
    """Train with one strategy of EXPERIMENT, or go on with a run."""
    given = {"set": overrides, "scale": scale, "out": out, "seeds": seeds, "strategy": strategy}
    if _is_resumed(resume, trust, experiment=experiment, topology=topology, protocol=protocol, **given):
        assert resume is not None
        return resume_run(resume, trust=trust, trace=trace, as_json=as_json)
    assert experiment is not None
    loaded = _load(experiment, topology, protocol, seeds, overrides, scale)
    if strategy is not None:
        loaded = loaded.only(strategy)
    elif len(loaded.strategies) > 1:
        names = ", ".join(visible(entry.label, 40) for entry in loaded.strategies)
        raise InputError(
            f"{visible(experiment)}: has several strategies: add --strategy with one of {names}, "
            "or use: netgym compare"
        )
    return train(loaded, out, trace=trace, as_json=as_json)


@cli.command()
@_run_options
def compare(
    experiment: Path | None,
    resume: Path | None,
    trust: bool,
    topology: str | None,
    protocol: str | None,
    scale: str | None,
    overrides: tuple[str, ...],
    out: str | None,
    seeds: int | list[int] | None,
    as_json: bool,
) -> None:
    """Train with every strategy of EXPERIMENT and tell which wins, and why; or go on with a run."""
    given = {"set": overrides, "scale": scale, "out": out, "seeds": seeds}
    if _is_resumed(resume, trust, experiment=experiment, topology=topology, protocol=protocol, **given):
        assert resume is not None
        return resume_run(resume, trust=trust, as_json=as_json)
    assert experiment is not None
    return train(_load(experiment, topology, protocol, seeds, overrides, scale), out, as_json=as_json)


@cli.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--by", metavar="KEY", multiple=True, help="Group runs by this key [all that differ]. May be repeated."
)
@click.option("--where", metavar="KEY=VALUE", multiple=True, help="Only runs that have it. May be repeated.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="The page of several runs.")
@_json
@_debug
def report(
    folders: tuple[Path, ...], by: tuple[str, ...], where: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Build the page of RUN again from its metrics, or one page of several runs or of a sweep."""
    from exogym_core.app.study_commands import is_one_run, show_study
    from exogym_core.results.record import RunFolder

    if not is_one_run(folders):
        return show_study(folders, by, where, out, as_json=as_json)
    if by or where or out:
        raise InputError(
            f"{visible(folders[0])}: is one run: --by, --where and --out are for several or a sweep"
        )
    return show_report(RunFolder.open(folders[0]), as_json=as_json)


@cli.command()
@click.argument("model_or_run", metavar="MODEL_OR_RUN", type=click.Path(path_type=Path))
@click.option("--strategy", metavar="NAME", help="Whose model [the only one].")
@click.option("--prompt", required=True, help="What to go on from: text, or token numbers.")
@click.option("--tokens", default=200, show_default=True, help="How many to draw.")
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest each time.")
@click.option("--seed", type=int, help="Of the draws [another text each time].")
@click.option("--trust", is_flag=True, help="Run the code that RUN names, though somebody else has made it.")
@_plain_json
@_debug
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
@_plain_json
@_debug
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
@_plain_json
@_debug
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
    """Make task and model as far as no code of others runs; says what was left out."""
    foreign = {code.what for code in experiment.own_code}
    if "task" not in foreign:
        task = experiment.build_task()
        if "model" not in foreign:
            experiment.build_model(task)
    told = ", ".join(code.reference for code in experiment.own_code)
    return f"; not tried, since that would run its code: {visible(told)}" if told else ""


cli.add_command(plan)
cli.add_command(advise)
cli.add_command(bench)
cli.add_command(launch)
cli.add_command(reproduce)
cli.add_command(schema)
cli.add_command(sweep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake in the input, 1 for other errors.

    Errors are told in one line on stderr, without a traceback unless there is `--debug`.
    """
    options = _Options()
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


def _load(
    path: Path,
    topology: str | None,
    protocol: str | None,
    seeds: int | list[int] | None,
    overrides: Iterable[str],
    scale: str | None,
) -> Experiment:
    from exogym_core.app.experiment import Experiment

    if topology is not None and os.path.isfile(topology):
        # A path in the experiment is relative to its file, one on the command line to where we are.
        topology = str(Path(topology).resolve())
    given = {"topology": topology, "protocol": protocol, "seeds": seeds}
    options = {key: value for key, value in given.items() if value is not None}
    return Experiment.load(path, list(overrides), options, scale)
