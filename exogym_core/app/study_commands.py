"""`netgym sweep`: an experiment at many points in one folder."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exogym_core.app.runs import stdout
from exogym_core.names import visible
from netsim.files.errors import InputError
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from exogym_core.app.studies.estimate import Estimate, Probe
    from exogym_core.app.studies.study import Study
    from netsim.files.documents import Document

__all__ = ["ON_HELP", "in_order", "sweep"]

ON_HELP = (
    "`ray`: points as Ray tasks, on the cluster of RAY_ADDRESS, else on one started on this machine for it; an address "
    "such as 10.0.0.1:6379: on that Ray cluster."
)
_ROWS = 40  # of the table on the terminal


@click.command()
@click.argument("experiment", type=click.Path(path_type=Path), required=False)
@click.option(
    "--resume", metavar="DIR", type=click.Path(path_type=Path), help="Go on with the sweep in this folder."
)
@click.option("--trust", is_flag=True, help="With --resume: though somebody else has made or changed it.")
@click.option(
    "--vary",
    metavar="KEY=[VALUE,...]",
    multiple=True,
    help="Another key of `sweep:`, such as 'strategies.*.lr=[0.01, 0.03]'. May be repeated.",
)
@click.option(
    "--search", type=click.Choice(["grid", "random", "optuna"]), help="How points are chosen [grid]."
)
@click.option("--trials", type=click.IntRange(1), help="How many points a search tries.")
@click.option("--minimise", metavar="FIELD", help="Of the summary: what a search wants small.")
@click.option("--seeds", metavar="N", help="Every point with N seeds, or with a list such as 0,3,4.")
@click.option("--topology", metavar="NAME", help="Another network: a shipped name or a file.")
@click.option("--scale", metavar="NAME", help="Change the keys that EXPERIMENT lists under scales: NAME.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Change one key. May be repeated."
)
@click.option("--out", metavar="DIR", help="The sweep's folder, new or empty [runs/<name>-sweep-<n>].")
@click.option("--on", "place", metavar="WHERE", help=ON_HELP)
@click.option("--estimate", "only_estimate", is_flag=True, help="Tell what it would take, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with run_folder and points.")
def sweep(
    experiment: Path | None,
    resume: Path | None,
    trust: bool,
    vary: tuple[str, ...],
    out: str | None,
    place: str | None,
    only_estimate: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train EXPERIMENT at every point of its `sweep:`, or go on with a sweep."""
    from exogym_core.app.studies.study import Study

    if (experiment is None) == (resume is None):
        raise InputError("sweep: give an EXPERIMENT, or --resume with a sweep's folder")
    if resume is not None:
        if vary or out or only_estimate or any(given.values()):
            raise InputError(
                f"--resume {visible(resume)}: goes on as it was begun: leave out the other options"
            )
        study = Study.open(resume, trust=trust)
        study.folder.owned().clean()
        study.folder.log("resumed")
    else:
        assert experiment is not None
        if only_estimate:
            from tempfile import TemporaryDirectory

            document = _document(experiment, vary, given)
            with TemporaryDirectory() as nowhere:
                study = Study.create(document, experiment.parent, nowhere, experiment.stem)
                _tell_estimate(study, as_json=as_json)
                study.folder.release()
            return
        study = Study.create(_document(experiment, vary, given), experiment.parent, out, experiment.stem)
    _run(study, place, is_new=resume is None, as_json=as_json)


def _document(path: Path, vary: Sequence[str], given: dict[str, Any]) -> Document:
    """The experiment's file with its `sweep` as the flags say."""
    from exogym_core.app.overrides import apply_overrides
    from netsim.files.documents import load_document, parse_document

    topology = given["topology"]
    if topology is not None and Path(topology).is_file():
        topology = str(Path(topology).resolve())
    options = {} if topology is None else {"topology": topology}
    document = apply_overrides(load_document(path), given["overrides"], options, given["scale"])
    if not isinstance(document.data, dict):
        return document
    sweep = dict(document.data.get("sweep") or {})
    for text in vary:
        key, separator, value = text.partition("=")
        values = parse_document(value, f"--vary {text}").data if separator and key.strip() else None
        if not isinstance(values, list | dict):
            raise InputError(f"--vary {text}: expected KEY=[VALUE, ...], such as 'steps=[100, 200]'")
        sweep[key.strip()] = values
    for key in ("search", "trials", "minimise"):
        if given[key] is not None:
            sweep[key] = given[key]
    if given["seeds"] is not None:
        sweep["seeds"] = parse_document(
            f"[{given['seeds']}]" if "," in given["seeds"] else given["seeds"], f"--seeds {given['seeds']}"
        ).data
    return replace(document, data={**document.data, "sweep": sweep} if sweep else document.data)


def _run(study: Study, place: str | None, *, is_new: bool, as_json: bool) -> None:
    from exogym_core.app.studies.on_ray import runner_at
    from exogym_core.app.studies.progress import SweepProgress
    from exogym_core.app.studies.sweep import run_sweep

    console = Console(stderr=True)

    def write(line: str) -> None:
        console.print(Text(line), soft_wrap=True)
        study.folder.log(line)

    with in_order(study, f"netgym sweep --resume {visible(study.folder.path)}"):
        measured = None
        if is_new:
            _load_own_code(study)
            line, measured, _ = _estimated(study)
            write(line)
        with runner_at(place, measured) as runner:
            failed = run_sweep(study, SweepProgress(write, study.sweep.num_points), runner)
            study.folder.log("done")
            _show(study, failed, as_json=as_json)
    if failed:
        click.echo(f"error: {failed} of {len(study.entries)} points failed (see above)", err=True)
        raise click.exceptions.Exit(1)


@contextmanager
def in_order(study: Study, again: str) -> Iterator[None]:
    """However what is inside ends, the study's folder is let go of; `again` goes on with it after Ctrl-C or SIGTERM."""
    from exogym_core.app.signals import Interruption

    with Interruption() as interruption:
        try:
            yield
        except KeyboardInterrupt:
            click.echo(f"interrupted: to go on: {again}", err=True)
            raise click.exceptions.Exit(interruption.exit_code or 130) from None
        except InputError:
            study.discard_if_empty()
            raise
        finally:
            study.folder.release()


def _load_own_code(study: Study) -> None:
    for code in study.experiment_at({}).own_code:
        click.echo(f"code: {code.what} {visible(code, 500)}", err=True)


def _estimated(study: Study) -> tuple[str, Probe | None, Estimate | None]:
    """One line: host time and memory, and which points are refused already; what was measured for it; its numbers."""
    from exogym_core.app.studies.estimate import estimate, probe
    from exogym_core.app.studies.search import source_of

    is_grid = study.sweep.search == "grid"
    points = study.sweep.grid() if is_grid else [source_of(study.sweep).ask() or {}]
    experiments, refused = [], []
    for point in points:
        try:
            experiments.append(study.experiment_at(point))
        except InputError as error:
            refused.append(error)
    if not experiments:
        raise refused[0]
    first = experiments[0]
    measured = found = None
    try:
        measured = probe(first)
        found = estimate(measured, experiments if is_grid else [first] * study.sweep.trials, first)
        told = str(found)
    except Exception as error:  # the sweep will mark the point, and may do the others
        told = f"no estimate: {visible(error, 200)}"
    num_points = study.sweep.num_points
    line = f"{num_points} point{'' if num_points == 1 else 's'}: {told}"
    if refused:
        line += f"; {len(refused)} of them will be marked as failed: {str(refused[0]).partition(chr(10))[0]}"
    return line, measured, found


def _tell_estimate(study: Study, *, as_json: bool) -> None:
    line, _, found = _estimated(study)
    numbers = {} if found is None else asdict(found)
    click.echo(
        json.dumps({"estimate": line, "num_points": study.sweep.num_points, **numbers}) if as_json else line
    )


def _show(study: Study, failed: int, *, as_json: bool) -> None:
    """Write the tables and the page, and print every point's strategies; or all as JSON."""
    from exogym_core.app.studies.points import point_text
    from exogym_core.results.report.study import study_report
    from exogym_core.results.tidy import find_runs, tidy_rows, write_tables

    folder = study.folder
    if any(entry.get("strategies") for entry in study.entries):
        write_tables(folder, tidy_rows(find_runs([folder.path])))
        folder.write_text("report.html", study_report([folder.path]).html())
    if as_json:
        document = {
            "run_folder": str(folder.path),
            "digest": study.digest(),
            "failed": failed,
            "points": study.entries,
        }
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("point", "strategy", "final loss", "to target", "wan"):
        table.add_column(heading, overflow="fold")
    for entry in study.entries[:_ROWS]:
        for cells in _cells(entry, visible(point_text(entry["point"]), 60)):
            table.add_row(*map(Text, cells))
    console = stdout()
    console.print(table)
    if len(study.entries) > _ROWS:
        console.print(Text(f"and {len(study.entries) - _ROWS} points more: see results.csv", style="dim"))
    console.print(Text(f"digest {study.digest()}"))
    click.echo(str(folder.path))


def _cells(entry: Mapping[str, Any], point: str) -> Iterator[tuple[str, ...]]:
    if entry.get("failed"):
        yield point, "failed", visible(entry.get("error", ""), 60), "", ""
        return
    for position, strategy in enumerate(entry.get("strategies", ())):
        loss, seconds = strategy.get("final_loss"), strategy.get("virtual_seconds_to_target")
        told = "" if seconds is None else format_seconds(seconds)
        if strategy.get("target") == "touched":
            told = "not held"
        yield (
            "" if position else point,
            visible(strategy["name"], 40),
            "" if loss is None else f"{loss:.4g}",
            told,
            "" if strategy.get("virtual_seconds") is None else format_bytes(strategy.get("wan_bytes") or 0),
        )
