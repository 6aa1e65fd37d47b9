"""What `netgym run` and `compare` do with an experiment: a folder, training, the table and the page.

Also how that ends early, in order, and how it goes on.
"""

from __future__ import annotations

import json
import os
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from exogym_core.app.launched import under_torchrun
from exogym_core.meeting_place import MeetingPlace, is_at_rendezvous
from exogym_core.names import visible
from netsim.files.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.app.experiment import Experiment
    from exogym_core.results.record import RunFolder

__all__ = ["resume_run", "show_report", "stdout", "train"]

# torch, matplotlib and what imports them are imported inside functions: `netgym --help` answers at once.

_PLAIN_WIDTH = 120  # of sentences that go to a file or a pipe
_WIDEST_TABLE = 200  # there


def train(experiment: Experiment, out: str | None, *, trace: bool = False, as_json: bool = False) -> None:
    """Train with every strategy of the experiment, into the folder `out` or a new one of runs/.

    Raises:
        Exit: with code 1, after table and page, where a strategy failed and others did not.
    """
    from exogym_core.results.record import RunFolder

    _check_place(experiment)
    if _is_follower(experiment):
        _follow(experiment)
        return
    if (begun := _begun_before()) is not None:
        resume_run(begun, trace=trace, as_json=as_json)
        return
    if experiment.settings.sweep is not None:
        told = f"{experiment.document.where}: sweep: left aside, as netgym sweep alone runs its points"
        click.echo(f"warning: {visible(told, 500)}", err=True)
    with _interruptible(len(experiment.strategies)) as begin:
        _load_own_code(experiment)
        folder = begin(RunFolder.create(out, str(experiment.settings.name)))
        try:
            folder.write_text("experiment.yaml", experiment.to_yaml())
            folder.write_environment(next((code.folder for code in experiment.own_code if code.folder), None))
            _remember(folder)
            entries = _compare(experiment, folder, trace=trace)
            show_report(folder, as_json=as_json)
            _tell_failures(entries)
        except NetsimError as error:
            # Found before any training: such as data that are not where the task was told to look, or no rendezvous.
            is_alone = (
                is_at_rendezvous() and not under_torchrun()
            )  # else torchrun starts it again in this folder
            if (isinstance(error, InputError) or is_alone) and not folder.has_trained():
                folder.discard()
            raise


def resume_run(
    path: Path, *, trust: bool = False, edited_code: bool = False, trace: bool = False, as_json: bool = False
) -> None:
    """Go on with what was stopped, as its folder says; leave alone what is finished.

    Args:
        path: the run's folder.
        trust: go on although somebody else made it, or has changed it.
        edited_code: go on although code of one's own was edited since the checkpoint.
        trace: write what happens.
        as_json: print one document instead of table and sentence.

    Raises:
        InputError: there is no run, it needs `trust`, or another process works in it.
    """
    from exogym_core.app.experiment import Experiment
    from exogym_core.results.record import RunFolder
    from exogym_core.results.seal import is_own

    folder = RunFolder.open(path)
    if not trust and not is_own(path):
        raise InputError(
            f"{visible(path)}: you have not made this run, or its experiment.yaml was changed since: it may name "
            "code, which runs as you; look through it, then add --trust"
        )
    experiment = replace(Experiment.load(path / "experiment.yaml", trust=True), edited_code=edited_code)
    _check_place(experiment)
    is_follower = _is_follower(experiment)
    is_finished = len(folder.finished()) == len(experiment.strategies) and (path / "report.html").is_file()
    if is_follower:
        if not is_finished:  # else rank 0 says so, and needs nobody
            _follow(experiment)
        return
    if experiment.settings.sweep is not None:
        raise InputError(f"{visible(path)}: is a sweep: use: netgym sweep --resume {visible(path)}")
    if is_finished:
        if is_at_rendezvous():
            from exogym_core.app.comparison import tell_finished_runs

            for line in tell_finished_runs(experiment, folder):
                click.echo(f"warning: {line}", err=True)
        if as_json:
            click.echo(_json_document(folder))
            return
        click.echo(f"{visible(path)}: this run is finished and left as it is")
        click.echo(str(path))
        return
    with _interruptible(len(experiment.strategies)) as begin:
        begin(folder.owned()).clean()
        _load_own_code(experiment)
        folder.log("resumed")
        entries = _compare(experiment, folder, resume=True, trace=trace)
        show_report(folder, as_json=as_json)
        _tell_failures(entries)


def _check_place(experiment: Experiment) -> None:
    """See that what the environment says of a rendezvous can be, before anything is made."""
    if is_at_rendezvous():
        MeetingPlace.from_environment().check(experiment.settings.workers.count)


def _is_follower(experiment: Experiment) -> bool:
    """Whether this is one of the processes of torchrun besides rank 0, which has the folder.

    Raises:
        InputError: torchrun has started another number of processes than the experiment has workers.
    """
    if not under_torchrun():
        return False
    if is_at_rendezvous():  # it has started this site alone
        return os.environ["RANK"] != "0"
    started, count = int(os.environ["WORLD_SIZE"]), experiment.settings.workers.count
    if started != count:
        told = (
            f"count is {count}, but torchrun has started {started} processes: --set workers.count={started}"
        )
        raise experiment.document.error(("workers",), told)
    return os.environ["RANK"] != "0"


def _follow(experiment: Experiment) -> None:
    from exogym_core.app.comparison import follow

    with _interruptible(0):
        follow(experiment)


def _begun_before() -> Path | None:
    """The folder of the run that torchrun starts again after a failure."""
    if not under_torchrun():
        return None
    from exogym_core.ranks.torchrun.rank import recalled

    folder = recalled("run folder")
    return None if folder is None else Path(folder)


def _remember(folder: RunFolder) -> None:
    if under_torchrun():
        from exogym_core.ranks.torchrun.rank import remember

        remember("run folder", os.path.abspath(folder.path))


def _load_own_code(experiment: Experiment) -> None:
    """Say whose code will run, and run it before anything is trained."""
    for code in experiment.own_code:
        click.echo(f"code: {code.what} {visible(code, 500)}", err=True)
    if experiment.own_code:
        for entry in experiment.strategies:
            experiment.build_strategy(entry)


@contextmanager
def _interruptible(num_strategies: int) -> Iterator[Callable[[RunFolder], RunFolder]]:
    """Ctrl-C and SIGTERM end what is inside in order; the function takes the folder to speak of."""
    from exogym_core.app.signals import Interruption

    folders: list[RunFolder] = []

    def begin(folder: RunFolder) -> RunFolder:
        folders.append(folder)
        return folder

    with Interruption() as interruption:
        try:
            yield begin
        except KeyboardInterrupt:
            for folder in folders:
                if folder.has_trained():
                    folder.log("interrupted")
                    click.echo(_interrupted(folder, num_strategies), err=True)
                else:
                    folder.discard()
            if not any(folder.path.is_dir() for folder in folders):
                click.echo("interrupted: nothing was trained yet, and nothing is left", err=True)
            raise click.exceptions.Exit(interruption.exit_code or 130) from None
        except NetsimError as error:
            for folder in folders:
                if (folder.path / "summary.json").is_file() and "this run is over" not in str(error):
                    path = visible(folder.path)
                    error.add_note(f"What was done is in {path}; to go on: netgym compare --resume {path}")
            raise
        finally:
            for folder in folders:
                folder.release()


def _interrupted(folder: RunFolder, num_strategies: int) -> str:
    path = visible(folder.path)
    if len(folder.finished()) == num_strategies:
        return f"interrupted: training was over and is in {path}; its page: netgym report {path}"
    return (
        f"interrupted: what was done is in {path}, marked incomplete; its page: netgym report {path}; "
        f"to go on: netgym compare --resume {path}"
    )


def _compare(
    experiment: Experiment, folder: RunFolder, *, resume: bool = False, trace: bool = False
) -> list[dict[str, Any]]:
    from exogym_core.app.comparison import compare
    from exogym_core.results.progress import progress_for
    from exogym_core.results.standing import Standing

    def show(message: Warning | str, *_: object, **__: object) -> None:
        line = f"warning: {visible(message, 500)}"
        console.print(Text(line), soft_wrap=True)
        folder.log(line)

    console = Console(stderr=True)
    if experiment.shared_hosts is not None:
        console.print(Text(experiment.shared_hosts), soft_wrap=True)
        folder.log(experiment.shared_hosts)
    with warnings.catch_warnings(), progress_for(console, folder.log) as progress:
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        with Standing(folder.path, progress) as standing:
            return compare(experiment, folder, standing, resume=resume, trace=trace)


def _tell_failures(entries: Sequence[Mapping[str, Any]]) -> None:
    failed = [visible(entry["name"], 40) for entry in entries if entry.get("failed")]
    if failed:
        told = f"error: {len(failed)} of {len(entries)} strategies failed: {', '.join(failed)} (see above)"
        click.echo(told, err=True)
        raise click.exceptions.Exit(1)


def _json_document(folder: RunFolder, figures: Sequence[Path] = ()) -> str:
    """What `--json` prints: summary, verdict, digest and the folder."""
    from exogym_core.results.report import Results, verdict

    decision = verdict(Results.load(folder))
    document: dict[str, Any] = {
        "run_folder": str(folder.path),
        "digest": folder.digest(),
        "winner": decision.winner,
        "verdict": decision.text,
        "summary": folder.read_summary(),
    }
    if figures:
        document["figures"] = [str(figure) for figure in figures]
    return json.dumps(document, indent=2, allow_nan=False)


def show_report(
    folder: RunFolder, *, align: str | None = None, figures: Sequence[Path] = (), as_json: bool = False
) -> None:
    """Write the page, and print table, sentence, digest and, as the last line, the folder; or all as JSON.

    Args:
        folder: of the run.
        align: by what its curves are aligned at first; None: by time.
        figures: written for papers, to be told.
        as_json: print one document.
    """
    from exogym_core.results.report import Results, rich_table, verdict, write_report

    write_report(folder) if align is None else write_report(folder, align)
    if as_json:
        click.echo(_json_document(folder, figures))
        return
    results = Results.load(folder)
    decision = verdict(results)
    console = stdout(_WIDEST_TABLE)
    table, left_out = rich_table(results, winner=decision.winner, width=console.width)
    console.print(table)
    console = stdout()
    if left_out:
        console.print(Text(f"No room for {', '.join(left_out)}: see report.html.", style="dim"))
    console.print()
    console.print(Text(decision.text))
    console.print()
    console.print(Text(f"digest {folder.digest()}"))
    for figure in figures:
        click.echo(f"figure {visible(figure, 500)}")
    click.echo(str(folder.path))


def stdout(plain_width: int = _PLAIN_WIDTH) -> Console:
    """The terminal at its width, or what is no terminal at `plain_width`."""
    console = Console()
    return console if console.is_terminal else Console(width=plain_width)
