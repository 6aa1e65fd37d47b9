"""`netgym sweep` and `netgym tune`: an experiment at many points, in one folder that resumes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.progress import format_loss
from netgym.cli.run_commands import RunArguments, echo_code, reported, show_report
from netgym.command_options import TrainingArguments, confirm_seeds, is_place, takes
from netsim.cli.terminal import PLAIN_WIDTH, given, plain_console
from netsim.errors import InputError
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.results.run_folder import RunFolder
    from netgym.studies.study import Study
    from netgym.studies.tuning import Tuning
    from netsim.files.documents import Document

__all__ = ["ON_HELP", "compare", "in_order", "sweep", "tune"]

# The rest of this room, which brings torch, is imported inside functions: `netgym sweep --help` answers at once.

ON_HELP = (
    "Run points on a cluster: `ray` is that of RAY_ADDRESS, or one started on this machine for this command; an "
    "address such as 10.0.0.1:6379 is that Ray cluster; slurm:partition=cpu,time=2:00:00 is an array of Slurm jobs."
)
_TUNING_SEEDS = "Tuning seeds (of the comparison: --set seeds=N)"
_ROWS = 40  # of the table on the terminal


@dataclass(frozen=True)
class _Asked(TrainingArguments):
    """Command-line arguments that `sweep` and `tune` share.

    Attributes:
        resume: Resume the stopped {command} in this folder.
        search: Choice of the points [grid].
        trials: Number of points that a random or Optuna search tries.
        seeds: {seeds}: a number, or a list such as 0,3,4.
        out: The folder, new or empty [runs/<name>-{command}-<n>].
        place: {place}
        as_json: Print one JSON document with run_folder and results.
    """

    search: str | None = given(type=click.Choice(["grid", "random", "optuna"]))
    trials: int | None = given(type=click.IntRange(1))
    seeds: str | None = given(metavar="N")
    place: str | None = given("--on", metavar="WHERE")

    def resumed(self, command: str, what: str, **others: object) -> Path | None:
        """The folder to resume, which takes no other options; None: begin with the experiment.

        Raises:
            InputError: neither is given, or both, or options with a folder.
        """
        if self.experiment is not None and self.resume is not None:
            raise InputError(
                f"{command}: --resume takes no EXPERIMENT, as {what} has its own: leave one of them out"
            )
        if self.experiment is None and self.resume is None:
            raise InputError(f"{command}: give an EXPERIMENT, or --resume with {what}")
        if self.resume is not None:
            hint = "; to change what it runs, edit its experiment.yaml and add --trust"
            self.refuse_with_resume(hint, search=self.search, trials=self.trials, **others)
        else:
            self.refuse_without_resume()
        return self.resume

    def document(self) -> Document:
        """The experiment's file with --set, --topology (a path from here) and --scale."""
        from netgym.experiment.experiment import apply_overrides
        from netsim.files.documents import load_document

        assert self.experiment is not None
        document, folder = load_document(self.experiment), self.experiment.parent
        return apply_overrides(document, self.overrides, self.flags(), self.scale, folder)

    def searched(self, **others: Any) -> dict[str, Any]:
        """Keys of `sweep:` and `tune:` that are given: the search, and seeds (more than 20 are confirmed)."""
        from netsim.files.documents import parse_document

        text, seeds = self.seeds, None
        if text is not None:
            seeds = parse_document(f"[{text}]" if "," in text else text, f"--seeds {text}").data
            confirm_seeds(seeds, yes=self.yes)
        asked = {"search": self.search, "trials": self.trials, **others, "seeds": seeds}
        return {key: value for key, value in asked.items() if value is not None}


@contextmanager
def in_order(
    folder: RunFolder, show: Callable[[], None], again: str, discard: Callable[[], bool]
) -> Iterator[None]:
    """`reported`, with no folder left behind after a mistake that is found before any training."""
    with reported(folder, show, again, discard):
        try:
            yield
        except InputError:
            discard()
            raise


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells))
    plain_console(PLAIN_WIDTH).print(table)


# --- compare ------------------------------------------------------------------------------------------------


@click.command()
@takes(RunArguments)
def compare(asked: RunArguments, strategies: tuple[str, ...] = given("--strategy", metavar="NAME")) -> None:
    """Train with every strategy of EXPERIMENT and name the winner, with reasons; or resume a run.

    On several topologies each training is done once, and timed on the others: results are in the form of a sweep's.

    Args:
        strategies: Strategy to train [all]. May be repeated.
        topology: Replace the topology: a shipped name or a file, or several with commas between.
    """
    resumed = asked.resumed(strategy=strategies)
    if resumed is not None:
        return asked.resume_run(resumed)
    names = [name.strip() for name in (asked.topology or "").split(",")]
    if len(names) > 1 and "" in names and not is_place(asked.topology):
        raise InputError(
            f"--topology {visible(asked.topology)}: entry {names.index('') + 1} is empty: give a name, or leave the "
            "comma out"
        )
    if len(names) < 2 or is_place(asked.topology):
        loaded = asked.load()
        return asked.train(loaded.only(*strategies) if strategies else loaded)
    return _run(_on_networks(asked, names, strategies), asked)


def _on_networks(asked: RunArguments, names: Sequence[str], strategies: Sequence[str]) -> Study:
    """Sweep of the experiment over several topologies."""
    from netgym.experiment.experiment import Experiment, apply_overrides
    from netgym.studies.study import Study, over_networks
    from netsim.files.documents import load_document

    path = asked.experiment
    assert path is not None
    if inside := next((text for text in asked.overrides if text.startswith("topology.")), None):
        raise InputError(
            f"--set {inside}: changes one topology, and --topology names several: leave one of them out"
        )
    confirm_seeds(asked.seeds, yes=asked.yes)
    flags = {"protocol": asked.protocol, "seeds": asked.seeds, "topology": names[0]}
    given_flags = {key: value for key, value in flags.items() if value is not None}
    document = apply_overrides(load_document(path), asked.overrides, given_flags, asked.scale, path.parent)
    loaded = (
        Experiment.from_document(document, path.parent, path.stem).only(*strategies) if strategies else None
    )
    places = [str(Path(name).resolve()) if is_place(name) else name for name in names]
    return Study.create(
        over_networks(document, places, loaded, f"--topology {asked.topology}"),
        path.parent,
        asked.out,
        path.stem,
    )


# --- sweep --------------------------------------------------------------------------------------------------


@click.command()
@takes(
    _Asked,
    command="sweep",
    seeds="Seeds of every point (with --resume those it has, and more)",
    place=ON_HELP,
)
def sweep(
    asked: _Asked,
    vary: tuple[str, ...] = given(metavar="KEY=[VALUE,...]"),
    minimise: str | None = given(metavar="FIELD"),
    only_estimate: bool = given("--estimate"),
) -> None:
    """Train EXPERIMENT at every point of its `sweep:`, or resume a sweep.

    Args:
        vary: Add a key to `sweep:`, such as 'strategies.*.lr=[0.01, 0.03]'. May be repeated.
        minimise: Field of the summary that the search minimises, such as final_loss.
        only_estimate: Print the estimated time and memory, and run nothing.
    """
    from netgym.studies.study import Study
    from netgym.studies.sweep import estimated

    resumed = asked.resumed("sweep", "a sweep's folder", vary=vary, minimise=minimise, estimate=only_estimate)
    if resumed is not None:
        study = Study.open(resumed, trust=asked.trust, edited_code=asked.edited_code)
        study.folder.owned().clean()
        if asked.seeds is not None:
            study = study.with_seeds(asked.searched()["seeds"])
        study.folder.log("resumed")
    else:
        assert asked.experiment is not None
        folder, stem, document = asked.experiment.parent, asked.experiment.stem, _swept(asked, vary, minimise)
        if only_estimate:
            with TemporaryDirectory() as nowhere:
                study = Study.create(document, folder, nowhere, stem)
                line, _, found = estimated(study)
                numbers = {} if found is None else asdict(found)
                numbers.pop("of_points", None)
                estimate = {"estimate": line, "num_points": study.sweep.num_points, **numbers}
                click.echo(json.dumps(estimate) if asked.as_json else line)
                study.folder.release()
            return
        study = Study.create(document, folder, asked.out, stem)
    _run(study, asked, asked.place)


def _run(study: Study, asked: TrainingArguments, place: str | None = None) -> None:
    """Run a sweep's points, and show their results.

    Raises:
        Exit: with code 1, where points failed.
    """
    from netgym.studies.runners import run_points
    from netgym.studies.study import LineWriter

    again = f"netgym sweep --resume {visible(study.folder.path)}"
    show = partial(_show_sweep, study, as_json=asked.as_json)
    with in_order(study.folder, show, again, study.discard_if_empty):
        if not study.entries:
            echo_code(study.own_code())
        run_points(study, LineWriter(study.folder), place, asked.jobs)
    if failed := _num_failed(study):
        total = format_count(len(study.entries), "point")
        click.echo(f"error: {failed} of {total} failed (see above)", err=True)
        raise click.exceptions.Exit(1)


def _swept(asked: _Asked, vary: Sequence[str], minimise: str | None) -> Document:
    """The experiment's file with its `sweep` as the options say."""
    from netgym.studies.study import with_sweep
    from netsim.files.documents import parse_document

    added, origins = {}, {}
    for text in vary:
        key, separator, value = text.partition("=")
        values = parse_document(value, f"--vary {text}").data if separator and key.strip() else None
        if not isinstance(values, list | dict):
            raise InputError(f"--vary {text}: expected KEY=[VALUE, ...], such as 'steps=[100, 200]'")
        if key.strip() in added:
            raise InputError(f"--vary {text}: '{key.strip()}' is varied twice: give all values in one list")
        added[key.strip()], origins[key.strip()] = values, f"--vary {text}"
    searched = asked.searched(minimise=minimise)
    if both := sorted(added.keys() & searched.keys()):
        raise InputError(f"--vary {both[0]}: --{both[0]} is given too: leave one of them out")
    origins |= {} if minimise is None else {"minimise": f"--minimise {minimise}"}
    return with_sweep(asked.document(), {**added, **searched}, origins)


def _num_failed(study: Study) -> int:
    return sum(bool(entry.get("failed")) for entry in study.entries)


def _show_sweep(study: Study, *, as_json: bool) -> None:
    """Write tables and page, and print every point's strategies; or all as JSON."""
    from netgym.studies.runners import write_results

    report = write_results(study)
    path, digest = str(study.folder.path), study.digest()
    if as_json:
        failed = _num_failed(study)
        document = {"run_folder": path, "digest": digest, "failed": failed, "points": study.entries}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    rows: list[Sequence[str]] = []
    for entry in study.entries[:_ROWS]:
        rows += _cells(entry, visible(study.point_text(entry["point"])))
    _print_table(("point", "strategy", "final loss", "to target", "virtual time", "wan"), rows)
    console = plain_console(PLAIN_WIDTH)
    if len(study.entries) > _ROWS:
        more = format_count(len(study.entries) - _ROWS, "more point")
        console.print(Text(f"and {more}: see results.csv", style="dim"))
    if report is not None and report.origins is not None:
        console.print(Text(report.origins))
    for line in report.placements if report is not None else ():
        console.print(Text(f"placement on {line}", style="dim"))
    if report is not None:
        lines = report.verdict.splitlines()
        more = format_count(len(lines) - _ROWS, "more line")
        console.print(
            Text("\n".join(["", *lines[:_ROWS], *[f"and {more}: see report.html"][: len(lines) > _ROWS], ""]))
        )
    console.print(Text(f"digest {digest}"))
    click.echo(path)


def _cells(entry: Mapping[str, Any], point: str) -> Iterator[tuple[str, ...]]:
    if entry.get("failed"):
        yield point, "failed", visible(entry.get("error", ""), 60), "", "", ""
        return
    if entry.get("incomplete"):
        yield point, "not finished", "", "", "", ""
    for position, strategy in enumerate(entry.get("strategies", ())):
        seconds = strategy.get("virtual_seconds")
        to_target = _time(strategy.get("virtual_seconds_to_target"))
        targets = [run.get("target") for run in strategy.get("by_seed") or [strategy]]
        if "missed" in targets or "touched" in targets:  # in the words of the comparison's table
            held = targets.count("held")
            missed = "not held" if "touched" in targets else "never"
            to_target = f"with {held} of {len(targets)} seeds" if held else missed
        yield (
            "" if position else point,
            visible(strategy["name"]),
            _loss(strategy.get("final_loss")),
            to_target,
            _time(seconds),
            format_bytes(strategy.get("wan_bytes") or 0) if seconds is not None else "",
        )


def _loss(loss: float | None) -> str:
    return "" if loss is None else format_loss(loss)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


# --- tune ---------------------------------------------------------------------------------------------------


@click.command()
@takes(_Asked, command="tune", seeds=_TUNING_SEEDS, place=ON_HELP)
def tune(asked: _Asked, over: tuple[str, ...] = given(metavar="[STRATEGY.]KEY=VALUES")) -> None:
    """Search each strategy's best settings on tuning seeds, then compare all at their best on other seeds.

    Args:
        over: Search an option over values, such as lr=1e-3,3e-3, or DiLoCo.H=20,40, or 'lr={low: 1e-4, high: 0.1}'.
            May be repeated [the lr of the file x 1/4, 1/2, 1, 2, 4].
    """
    from netgym.studies.study import LineWriter
    from netgym.studies.tuning import Tuning, with_tune

    resumed = asked.resumed("tune", "a folder of netgym tune", over=over, seeds=asked.resume and asked.seeds)
    if resumed is not None:
        tuning = Tuning.open(resumed, trust=asked.trust, edited_code=asked.edited_code)
    else:
        assert asked.experiment is not None
        document = asked.document()
        document = with_tune(document, _spaces(document, asked.experiment, over), asked.searched())
        tuning = Tuning.create(document, asked.experiment.parent, asked.experiment.stem, asked.out)
    show = partial(_show_tuning, tuning, as_json=asked.as_json)
    again = f"netgym tune --resume {visible(tuning.folder.path)}"
    with in_order(tuning.folder, show, again, tuning.discard_if_empty):
        if resumed is None:
            echo_code(tuning.own_code())
        tuning.run(LineWriter(tuning.folder), asked.place, asked.jobs)
    if any(not each.point for each in tuning.chosen):
        raise click.exceptions.Exit(1)


def _spaces(document: Document, path: Path, over: Sequence[str]) -> dict[str, Any]:
    """Values of `--over` by option, or by strategy and option."""
    from netgym.experiment.experiment import Experiment
    from netsim.files.documents import parse_document

    strategies = Experiment.from_document(document, path.parent, path.stem).strategies
    labels = sorted((str(entry.label) for entry in strategies), key=len, reverse=True)
    spaces: dict[str, Any] = {}
    for text in over:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not key or not value:
            raise InputError(f"--over {visible(text)}: expected KEY=VALUE,VALUE,..., such as lr=1e-3,3e-3")
        values = parse_document(value if value[0] in "[{" else f"[{value}]", f"--over {text}").data
        owner = next((label for label in labels if key.startswith(f"{label}.")), None)
        options = spaces if owner is None else spaces.setdefault(owner, {})
        option = key if owner is None else key.removeprefix(f"{owner}.")
        if option in options:
            raise InputError(f"--over {visible(text)}: '{key}' is given twice: give all values at once")
        options[option] = values
    return spaces


def _show_tuning(tuning: Tuning, *, as_json: bool) -> None:
    """Print the chosen points, then the comparison; or all as JSON."""
    from exogym_core.results.run_folder import RunFolder

    path = str(tuning.folder.path)
    comparison = RunFolder(tuning.folder.path / "comparison")
    if as_json:
        document = {
            "run_folder": path,
            "incomplete": True,
            "chosen": [asdict(each) for each in tuning.chosen],
            "summary": comparison.read_summary(),
        }
        if tuning.result is not None:
            document = tuning.result.to_mapping()
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    so_far = "" if tuning.result is not None else " so far"
    click.echo(f"Best of each strategy{so_far} on tuning seeds {', '.join(map(str, tuning.tuning_seeds))}:")
    failed = ("none finished", "all failed")
    rows = [
        (
            visible(each.strategy),
            tuning.point_text(each) if each.point else failed[each.num_failed == each.num_points],
            _time(each.virtual_seconds_to_target),
            _loss(each.final_loss),
            str(each.num_points),
            "; ".join(each.edges),
        )
        for each in tuning.chosen
    ]
    _print_table(("strategy", "best", "to target", "final loss", "points", "at an edge"), rows)
    if comparison.has_trained():
        seeds = ", ".join(map(str, tuning.experiment.seeds))
        click.echo(f"\nAll at their best on seed{'s' * (len(tuning.experiment.seeds) > 1)} {seeds}:")
        show_report(comparison)
    click.echo(path)
