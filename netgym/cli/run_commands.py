"""`netgym run` and `retime`: train as an experiment file says, resume a run, or time it on another network.

torch and matplotlib are imported inside functions: `netgym --help` is fast.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from exogym_core.meeting_place import (
    MeetingPlace,
    is_at_rendezvous,
    torchrun_rank,
    under_torchrun,
    whole_number_of,
)
from exogym_core.names import visible
from exogym_core.results.disk import DamagedError, RecordError, RefusedError
from netgym.command_options import (
    TrainingArguments,
    confirm_seeds,
    not_empty,
    takes,
)
from netsim.cli.signals import Stoppable
from netsim.cli.terminal import PLAIN_WIDTH, given, plain_console
from netsim.errors import InputError, NetsimError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from exogym_core.results.progress import AnyProgress
    from exogym_core.results.report import RunReport
    from exogym_core.results.run_folder import RunFolder
    from netgym.experiment.comparison import TrainedRun
    from netgym.experiment.experiment import Experiment
    from netgym.experiment.own_code import OwnCode
    from netsim.files.documents import Document

__all__ = [
    "RunArguments",
    "echo_code",
    "exit_if_failed",
    "reported",
    "retime",
    "retimed_experiment",
    "run",
    "show_report",
    "train_new",
]


# torch, matplotlib and what imports them are imported inside functions: `netgym --help` answers at once.

_WIDEST_TABLE = 200  # in a file or a pipe


def train_new(
    experiment: Experiment,
    folder: RunFolder,
    *,
    jobs: int | None = None,
    trace: bool = False,
    progress: bool = True,
    source: RunFolder | None = None,
) -> list[dict[str, Any]]:
    """Train with every strategy in a new folder, which is removed after a mistake found before any training.

    Args:
        experiment: written into the folder first.
        folder: new and owned by this process.
        jobs: runs at once; None: as many as cores and memory allow.
        trace: write trace.json.gz.
        progress: print progress to stderr; warnings are printed in any case.
        source: folder of the same experiment on another network, whose runs are retimed.

    Returns:
        The summary: one object a strategy.
    """
    from netgym.experiment.comparison import compare as compare_runs
    from netgym.experiment.comparison import settle_code

    sources = {} if source is None else _sources(experiment, source.path)
    try:
        folder.write_text("experiment.yaml", experiment.to_yaml())
        folder.write_environment(experiment.code_folder)
        if source is not None:
            folder.note_source(os.path.relpath(source.path.resolve(), folder.path.resolve()))
        settle_code(folder, experiment.own_code)
        if under_torchrun():
            from exogym_core.workers.torchrun.rank import remember

            remember("run folder", os.path.abspath(folder.path))
        with _shown(experiment, folder, progress=progress) as listener:
            return compare_runs(experiment, folder, listener, jobs=jobs, trace=trace, sources=sources)
    except NetsimError as error:
        # Such as missing data, or no rendezvous.
        is_alone = is_at_rendezvous() and not under_torchrun()  # else torchrun starts it again in this folder
        if isinstance(error, InputError | RecordError) or is_alone:
            folder.discard_if_untrained()
        raise


def _sources(experiment: Experiment, folder: Path) -> dict[str, TrainedRun]:
    """Runs of `folder` that have each strategy's training, by label."""
    from netgym.experiment.comparison import TrainedRun

    labels = [str(entry.label) for entry in experiment.strategies]
    return {label: TrainedRun(folder, label) for label in labels}


def _is_follower(experiment: Experiment) -> bool:
    """Check the environment; return True for a process of torchrun other than rank 0, which has the folder.

    Raises:
        InputError: torchrun has started another number of processes than the experiment has workers, or the settings of
            a rendezvous are wrong.
    """
    count = experiment.settings.workers.count
    if is_at_rendezvous():
        MeetingPlace.from_environment().check(count)
    if not under_torchrun():
        return False
    started = whole_number_of("WORLD_SIZE")
    if started != count and not is_at_rendezvous():  # where it has started this site alone
        processes = format_count(started, "process")
        problem = f"count is {count}, but torchrun has started {processes}: --set workers.count={started}"
        raise experiment.document.error(("workers",), problem)
    return torchrun_rank() != 0


def _follow(experiment: Experiment) -> None:
    from netgym.experiment.comparison import follow

    with Stoppable() as work:
        follow(experiment)
    work.end("rank 0 writes what was trained")


def echo_code(codes: Iterable[OwnCode]) -> None:
    """Print the user's code that will run."""
    for code in codes:
        click.echo(f"code: {code.what} {visible(code, 500)}", err=True)


def _load_own_code(experiment: Experiment) -> None:
    """Print the user's code that will run, and run it before anything is trained."""
    echo_code(experiment.own_code)
    if experiment.own_code:
        for entry in experiment.strategies:
            experiment.build_strategy(entry)


@contextmanager
def reported(
    folder: RunFolder, show: Callable[[], None], again: str, discard: Callable[[], bool]
) -> Iterator[None]:
    """Show what the block trains in the folder, also where a signal ends it; then release the folder.

    Args:
        folder: owned by this process.
        show: writes and prints all results that are there.
        again: the command that resumes.
        discard: removes a new folder if nothing was trained in it, and returns whether nothing was; called after a
            signal.
    """
    path = visible(folder.path)
    try:
        with Stoppable() as work:
            yield
        if work.is_stopped:
            if discard():
                left = "nothing is left" if folder.is_new else f"{path} is as it was; to continue: {again}"
                work.end(f"nothing was trained yet, and {left}")
            folder.log("interrupted")
            folder.release()  # else its page would say that it trains
        with Stoppable() as showing:
            show()
        if showing.is_stopped:  # all is trained: show it from the beginning; a second signal ends the process
            show()
        work.end(f"results so far are in {path}, marked incomplete; to continue: {again}")
        showing.end(f"results are in {path}")
    except (DamagedError, RefusedError):
        raise
    except NetsimError as error:
        if (folder.path / "summary.json").is_file():
            error.add_note(f"Results so far are in {path}; to continue: {again}")
        raise
    finally:
        folder.release()


@contextmanager
def _shown(experiment: Experiment, folder: RunFolder, *, progress: bool = True) -> Iterator[AnyProgress]:
    """Print progress and warnings of the runs in the block, and log them; yields their listener."""
    from exogym_core.results.progress import progress_for, warnings_to

    def write(line: str) -> None:
        console.print(Text(line), soft_wrap=True)
        folder.log(line)

    console = plain_console(stderr=True)
    if experiment.shared_hosts is not None:
        write(experiment.shared_hosts)
    shown_on = console if progress else plain_console(stderr=True, quiet=True)
    with warnings_to(write), progress_for(shown_on, folder.log, folder.path) as listener:
        yield listener


def exit_if_failed(entries: Sequence[Mapping[str, Any]]) -> None:
    """End with exit code 1 where a strategy failed, and name it."""
    failed = [visible(entry["name"]) for entry in entries if entry.get("failed")]
    if failed:
        count = f"{len(failed)} of {format_count(len(entries), 'strategy')}"
        click.echo(f"error: {count} failed: {', '.join(failed)} (see above)", err=True)
        raise click.exceptions.Exit(1)


def _json_document(folder: RunFolder, report: RunReport, figures: Sequence[Path] = ()) -> str:
    """JSON document of a run: summary, verdict, digest and the folder."""
    document: dict[str, Any] = {
        "run_folder": str(folder.path),
        "digest": folder.digest(),
        "winner": report.winner,
        "verdict": report.verdict,
        "network": report.basis,
        "summary": folder.read_summary(),
    }
    if figures:
        document["figures"] = list(map(str, figures))
    return json.dumps(document, indent=2, allow_nan=False)


def show_report(
    folder: RunFolder,
    align: str = "time",
    formats: Sequence[str] = (),
    *,
    as_json: bool = False,
    jobs: int | None = 1,
) -> None:
    """Write the page, and print table, sentence, digest and, as the last line, the folder; or all as JSON.

    Args:
        folder: of the run.
        align: alignment of curves when the page opens.
        formats: of files for papers, which are listed.
        as_json: print one document.
        jobs: processes that draw; None: one a core.
    """
    from exogym_core.results.report import RunReport
    from exogym_core.results.report.facts import origins

    report = RunReport(folder)
    figures = report.write_figures(folder, formats)
    each: Callable[..., Any] = map
    if jobs != 1:
        from exogym_core.workers.processes.jobs import call_each

        each = partial(call_each, num_jobs=jobs)
    report.write(align, each)
    if as_json:
        click.echo(_json_document(folder, report, figures))
        return
    console = plain_console(_WIDEST_TABLE)
    table, left_out = report.table.rich(console.width)
    if report.results.strategies:  # none has ended yet in a run that still trains
        console.print(table)
    console = plain_console(PLAIN_WIDTH)
    basis = "; ".join(f"{name} {value}" for name, value in report.basis.items())
    console.print(Text(basis, style="dim"))
    if left_out:
        console.print(Text(f"No room for {', '.join(left_out)}: see report.html.", style="dim"))
    if (line := origins([(folder, report.results)])) is not None:
        console.print(Text(line))
    console.print()
    console.print(Text(report.verdict))
    console.print()
    console.print(Text(f"digest {folder.digest()}"))
    for figure in figures:
        click.echo(f"figure {visible(figure, 500)}")
    click.echo(str(folder.path))


def _or_resume(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Require EXPERIMENT unless there is --resume."""
    if value is None and context.params.get("resume") is None:
        raise click.MissingParameter(ctx=context, param=parameter, param_hint="'EXPERIMENT'")
    return value


def _seeds(context: click.Context, parameter: click.Parameter, value: str | None) -> int | list[int] | None:
    """Parse a number of seeds, or a list of them."""
    if value is None:
        return None
    numbers = [number.strip() for number in value.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        problem = f"{value!r} is no number of seeds and no list of them: write 3, or 0,3,4"
        raise click.BadParameter(problem, context, parameter)
    return list(map(int, numbers)) if "," in value else int(value)


@dataclass(frozen=True)
class RunArguments(TrainingArguments):
    """Command-line arguments that `run` and `compare` share.

    Attributes:
        resume: Resume the run in this folder from its last checkpoint.
        protocol: Replace the protocol: ideal, linux-tcp, nccl-sockets, gloo or hivemind.
        out: The run's folder, new or empty [runs/<name>-<n>].
        seeds: Train every strategy with N seeds, counted up from the experiment's, or with a list such as 0,3,4; with
            --resume those it has, and more.
        as_json: Print one JSON document with run_folder, summary and verdict.
    """

    experiment: Path | None = given(is_argument=True, callback=_or_resume)
    # Parsed before the check whether EXPERIMENT is missing.
    resume: Path | None = given(metavar="DIR", is_eager=True)
    protocol: str | None = given(metavar="NAME", callback=not_empty)
    seeds: int | list[int] | None = given(metavar="N", callback=_seeds)

    def resumed(self, **others: object) -> Path | None:
        """Folder of the run to resume; raises InputError for options that a resumed run cannot change."""
        if self.resume is None:
            self.refuse_without_resume()
            return None
        self.refuse_with_resume(experiment=self.experiment, protocol=self.protocol, **others)
        return self.resume

    def load(self) -> Experiment:
        """Load the experiment with its options and overrides."""
        from netgym.experiment.experiment import Experiment

        assert self.experiment is not None
        confirm_seeds(self.seeds, yes=self.yes)
        flags = self.flags(protocol=self.protocol, seeds=self.seeds)
        return Experiment.load(self.experiment, self.overrides, flags, self.scale)

    def train(self, experiment: Experiment, *, trace: bool = False) -> None:
        """Train with every strategy of the experiment, into the folder `out` or a new one of runs/.

        Raises:
            Exit: with code 1, after table and page, where a strategy failed and others did not.
        """
        from exogym_core.results.run_folder import RunFolder

        if _is_follower(experiment):
            _follow(experiment)
            return
        if under_torchrun():
            from exogym_core.workers.torchrun.rank import recalled

            if (begun := recalled("run folder")) is not None:  # torchrun restarts it after a failure
                self.resume_run(Path(begun), trace=trace)
                return
        if experiment.settings.sweep is not None:
            line = f"{experiment.document.where}: sweep: ignored: only netgym sweep runs its points"
            click.echo(f"warning: {visible(line, 500)}", err=True)
        _load_own_code(experiment)
        experiment.check_runs()  # before there is a folder
        folder = RunFolder.create(self.out, str(experiment.settings.name))
        with self._reported(folder):
            train_new(experiment, folder, jobs=self.jobs, trace=trace)
        exit_if_failed(folder.read_summary())

    def resume_run(self, path: Path, *, trace: bool = False) -> None:
        """Resume a stopped run from its folder; a finished one is left as it is.

        Raises:
            InputError: there is no run, it needs `--trust`, or another process works in it.
        """
        from exogym_core.results.report import RunReport
        from exogym_core.results.run_folder import RunFolder, require_own
        from netgym.experiment.comparison import add_seeds, report_finished_runs, settle_code
        from netgym.experiment.comparison import compare as compare_runs
        from netgym.experiment.experiment import Experiment, differing_training, more_seeds

        folder = RunFolder.open(path)
        if not self.trust:
            require_own(path, "run")
        stored = Experiment.load(path / "experiment.yaml", trust=True)
        confirm_seeds(self.seeds, yes=self.yes)
        asked = {} if self.seeds is None else {"seeds": more_seeds(stored.seeds, self.seeds, path)}
        loaded = Experiment.load(path / "experiment.yaml", options=asked, trust=True)
        experiment = replace(loaded, edited_code=self.edited_code)
        is_finished = (
            len(folder.finished()) == len(experiment.strategies)
            and (path / "report.html").is_file()
            and experiment.seeds == stored.seeds
        )
        if _is_follower(experiment):
            if not is_finished:  # else rank 0 reports that, alone
                _follow(experiment)
            return
        if experiment.settings.sweep is not None:
            raise InputError(f"{visible(path)}: is a sweep: use: netgym sweep --resume {visible(path)}")
        if is_finished:
            if is_at_rendezvous():
                for line in report_finished_runs(experiment, folder):
                    click.echo(f"warning: {line}", err=True)
            if self.as_json:
                click.echo(_json_document(folder, RunReport(folder)))
                return
            click.echo(f"{visible(folder.path)}: this run is finished and left as it is")
            click.echo(str(folder.path))
            return
        folder.owned().clean()
        with self._reported(folder):
            _load_own_code(experiment)
            folder.log("resumed")
            if experiment.seeds != stored.seeds:
                add_seeds(folder, stored, experiment.seeds)
            sources = {}
            if (place := folder.read_source()) is not None and (path / place / "experiment.yaml").is_file():
                trained = Experiment.load(path / place / "experiment.yaml", trust=True)
                if differing_training(trained, experiment) is None:
                    sources = _sources(experiment, path / place)
            with _shown(experiment, folder) as listener:
                settle_code(folder, experiment.own_code, accepted=self.edited_code)
                compare_runs(
                    experiment, folder, listener, jobs=self.jobs, resume=True, trace=trace, sources=sources
                )
        exit_if_failed(folder.read_summary())

    def _reported(self, folder: RunFolder) -> AbstractContextManager[None]:
        jobs = 1 if under_torchrun() or is_at_rendezvous() else self.jobs
        show = partial(show_report, folder, as_json=self.as_json, jobs=jobs)
        again = f"netgym compare --resume {visible(folder.path)}"
        return reported(folder, show, again, folder.discard_if_untrained)


@click.command()
@takes(RunArguments)
def run(asked: RunArguments, strategy: str | None = given(metavar="NAME"), trace: bool = given()) -> None:
    """Train with one strategy of EXPERIMENT, or resume a run.

    Args:
        strategy: Strategy to train [the only one].
        trace: Write trace.json.gz, for Perfetto.
    """
    resumed = asked.resumed(strategy=strategy)
    if resumed is not None:
        return asked.resume_run(resumed, trace=trace)
    loaded = asked.load()
    if strategy is not None:
        loaded = loaded.only(strategy)
    elif len(loaded.strategies) > 1:
        names = ", ".join(visible(entry.label) for entry in loaded.strategies)
        raise InputError(
            f"{visible(asked.experiment)}: has several strategies: add --strategy with one of {names}, "
            "or use: netgym compare"
        )
    if trace and loaded.topology is None:
        raise InputError(
            "--trace: without a topology every call takes 0 s: add --topology, or leave --trace out"
        )
    return asked.train(loaded, trace=trace)


def retimed_experiment(
    folder: Path, topology: Any, protocol: Any, apply: Callable[[Document, Mapping[str, Any]], Document]
) -> Experiment:
    """Experiment of the finished run in `folder` with another network.

    Args:
        folder: of the run.
        topology, protocol: in place of the run's; None: its own.
        apply: changes a document by top-level options, and further values.

    Raises:
        InputError: there is no run, the change is wrong or none, or it changes the training.
    """
    from exogym_core.config import resolved_protocol
    from exogym_core.results.reading import comparison_of, is_study, runs_in
    from exogym_core.results.run_folder import RunFolder, code_folder_of
    from netgym.experiment.experiment import Experiment, differing_key, differing_training, opened_topology

    if is_study(folder):
        points = [visible(each) for each in runs_in(folder)[:1]] or ["none has begun"]
        raise InputError(
            f"{visible(folder)}: is a sweep: retime one of its points, such as {points[0]}; or add the network to "
            "`sweep: topology`, which retimes all"
        )
    if (comparison := comparison_of(folder)) is not None:
        raise InputError(f"{visible(folder)}: is a tuning: use: netgym retime {visible(comparison)}")
    RunFolder.open(folder)
    flags = {"topology": topology, "protocol": protocol}
    changed: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    stored = Experiment.load(folder / "experiment.yaml", trust=True)
    document = apply(stored.document, changed)
    is_networks_own = stored.settings.protocol == resolved_protocol(None, stored.topology)
    if topology is not None and protocol is None and is_networks_own:
        # The stored form names it even where the experiment did not; another network has a protocol of its own.
        there = opened_topology(document, topology, folder)
        document = apply(stored.document, changed | {"protocol": resolved_protocol(None, there)})
    experiment = Experiment.from_document(document, folder, "experiment", code_folder_of(folder))
    if (key := differing_training(stored, experiment)) is not None:
        raise InputError(
            f"retime: {key} is another than in {visible(folder)}, which changes the training: use: netgym compare"
        )
    if differing_key(stored, experiment) is None:
        raise InputError(
            f"retime: {visible(folder)} is timed as asked: give another network, such as --topology home-tiers"
        )
    return experiment


@click.command()
@takes()
def retime(
    folder: Path = given("run", is_argument=True, required=True, metavar="RUN"),
    topology: str | None = given(metavar="NAME", callback=not_empty),
    protocol: str | None = given(metavar="NAME", callback=not_empty),
    overrides: tuple[str, ...] = given("--set", metavar="KEY=VALUE"),
    out: str | None = given(metavar="DIR", callback=not_empty),
    trust: bool = given(),
    jobs: int | None = given(type=click.IntRange(1)),
    as_json: bool = given(),
) -> None:
    """Time the finished RUN on another network, to the bit as if trained there; what depends on times is trained again.

    RUN may be a program's (netgym launch --out): its calls and computing are replayed, and the script does not run.

    Args:
        overrides: Set a key of the network, such as placement, collectives, compute.jitter or protocol.streams.
        protocol: Replace the protocol: ideal, linux-tcp, nccl-sockets, gloo or hivemind.
        out: The new run's folder, new or empty [runs/<name>-retimed-<n>].
        trust: Accept a RUN that another user made or changed.
    """
    from exogym_core.results.run_folder import RunFolder, require_own
    from netgym.experiment.comparison import edited_code_of
    from netgym.experiment.experiment import apply_overrides

    if (folder / "launch.json").is_file():  # it names no code
        from netgym.launch.retiming import retime_launch

        retime_launch(folder, topology, protocol, overrides, out, as_json=as_json)
        return
    if not trust:
        require_own(folder, "run")

    def apply(document: Document, options: Mapping[str, Any]) -> Document:
        return apply_overrides(document, overrides, options, folder=folder)

    experiment = retimed_experiment(folder, topology, protocol, apply)
    source = RunFolder.open(folder)
    made = RunFolder.create(out, f"{experiment.settings.name}-retimed")
    show = partial(show_report, made, as_json=as_json, jobs=jobs)
    again = f"netgym compare --resume {visible(made.path)}"
    with reported(made, show, again, made.discard_if_untrained):
        echo_code(experiment.own_code)
        if edited := edited_code_of(source, experiment.own_code):
            line = (
                f"{visible(edited[0], 100)} was edited since: rows that are retimed are of the recorded code"
            )
            click.echo(f"{visible(folder)}: {line}", err=True)
        train_new(experiment, made, jobs=jobs, source=source)
    exit_if_failed(made.read_summary())
