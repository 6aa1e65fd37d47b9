"""`netgym report`: the page of a run made again, one page of several runs or a sweep, and figures for papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from exogym_core.app.common_options import debug_flag, results_json
from exogym_core.app.runs import show_report, stdout
from exogym_core.names import visible
from exogym_core.results.disk import write_whole
from netsim.files.errors import InputError
from netsim.files.plain_files import is_written_in_place, output_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.results.record import RunFolder
    from exogym_core.results.report.study import StudyReport

__all__ = ["report"]

# matplotlib and what imports it are imported inside functions: `netgym --help` answers at once.

_FORMATS = ("pdf", "svg", "png")
_ALIGNMENTS = ("time", "steps", "bytes")


def _formats(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    names = [name.strip().lower() for name in value.split(",")] if value is not None else []
    for name in names:
        if name not in _FORMATS:
            raise click.BadParameter(
                f"{name!r} is none: give one or several of pdf,svg,png", context, parameter
            )
    return list(dict.fromkeys(names))


@click.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--group-by",
    "--by",
    "by",
    metavar="KEY",
    multiple=True,
    help="Group runs by this key [all that differ]. May be repeated.",
)
@click.option("--where", metavar="KEY=VALUE", multiple=True, help="Only runs that have it. May be repeated.")
@click.option("--align", type=click.Choice(_ALIGNMENTS), help="By what curves are aligned at first [time].")
@click.option(
    "--format",
    "formats",
    metavar="NAME,...",
    callback=_formats,
    help="Write figures for papers too: pdf, svg and png, into plots/ beside the page.",
)
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="The page [report.html].")
@results_json
@debug_flag
def report(
    folders: tuple[Path, ...],
    by: tuple[str, ...],
    where: tuple[str, ...],
    align: str | None,
    formats: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Build the page of RUN again from its metrics, or one page of several runs or of a sweep."""
    from exogym_core.results.record import RunFolder

    if len(folders) == 1 and (folders[0] / "launch.json").is_file():
        if by or where or align or formats:
            raise InputError(
                f"{visible(folders[0])}: is a launched run, whose page has no curves: leave options out"
            )
        _show_launch(folders[0], out, as_json=as_json)
        return
    if _is_one_run(folders) and not (by or where or out):
        folder = RunFolder.open(folders[0])
        figures = _figures_of_run(folder, formats)
        show_report(folder, align=align, figures=figures, as_json=as_json)
        return
    _show_study(folders, by, where, align or "time", formats, out, as_json=as_json)


def _show_launch(path: Path, out: Path | None, *, as_json: bool) -> None:
    """Write the page of a launched run again, and print what it came to."""
    from exogym_core.torch_backend.summary import page_of_launch, read_launch, show_summary

    launched = read_launch(path)
    write_whole(out or path / "report.html", page_of_launch(path, launched))
    if as_json:
        click.echo(launched.model_dump_json())
        return
    show_summary(launched, stdout())
    click.echo(str(path))


def _is_one_run(folders: Sequence[Path]) -> bool:
    """Whether it is a single run, and no sweep or folder of runs."""
    from exogym_core.app.studies.study import is_study

    holds_runs = folders[0].is_dir() and any(folders[0].glob("*/experiment.yaml"))
    return len(folders) == 1 and not is_study(folders[0]) and not holds_runs


def _figures_of_run(folder: RunFolder, formats: Sequence[str]) -> list[Path]:
    from exogym_core.results.report.page import shown_of
    from exogym_core.results.report.pictures import OF_ONE_RUN, draw_figures
    from exogym_core.results.report.results import Results

    if not formats:
        return []
    shown = shown_of(Results.load(folder))
    # The page's own PNG files keep their names.
    return [
        folder.write_text(f"plots/{name}{'.paper' if form == 'png' else ''}.{form}", figure)
        for form in formats
        for name, figure in draw_figures(shown, OF_ONE_RUN, form).items()
    ]


def _show_study(
    folders: Sequence[Path],
    by: Sequence[str],
    where: Sequence[str],
    align: str,
    formats: Sequence[str],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Write one page of several runs or a sweep, and print its table; or all as JSON."""
    from exogym_core.app.studies.study import is_study
    from exogym_core.results.report.study import study_report

    study = study_report(folders, by, where)
    is_sweep = len(folders) == 1 and is_study(folders[0])
    page = out or (folders[0] / "report.html" if is_sweep else Path("report.html"))
    if not is_written_in_place(page):
        _make(page.parent)
    with output_file(page) as file:
        file.write(study.html(align).encode())
    figures = _figures_of_study(study, page.parent / "plots", formats)
    if as_json:
        groups = [dict(zip(study.headings(), cells, strict=True)) for _, cells in study.rows()]
        document = {
            "run_folder": str(folders[0]),
            "run_folders": [str(folder) for folder in folders],
            "report": str(page),
            "figures": [str(figure) for figure in figures],
            "verdict": study.verdict,
            "winner": study.winners[0].name if len(study.winners) == 1 else None,
            "winners": [group.name for group in study.winners],
            "groups": groups,
        }
        click.echo(json.dumps(document, indent=2))
        return
    table = Table(*study.headings(), box=None, pad_edge=False)
    for is_winner, cells in study.rows():
        table.add_row(*map(Text, cells), style="bold" if is_winner else "")
    console = stdout(200)
    console.print(table)
    console.print(Text(f"\n{study.verdict}\n"), soft_wrap=True)
    for figure in figures:
        click.echo(f"figure {visible(figure, 500)}")
    if is_sweep:
        click.echo(f"page {page}")
    click.echo(str(folders[0] if is_sweep else page))


def _figures_of_study(study: StudyReport, folder: Path, formats: Sequence[str]) -> list[Path]:
    from exogym_core.results.report.pictures import OF_SEVERAL, draw_figures
    from exogym_core.results.report.study import MOST_CURVES

    if formats and len(study.groups) > MOST_CURVES:
        raise InputError(
            f"--format {','.join(formats)}: a figure shows {MOST_CURVES} groups at most, and there are "
            f"{len(study.groups)}: choose with --where KEY=VALUE"
        )
    written = []
    for form in formats:
        _make(folder)
        for name, figure in draw_figures(study.few(), OF_SEVERAL, form).items():
            path = folder / f"{name}.{form}"
            write_whole(path, figure)
            written.append(path)
    return written


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{visible(folder)}: cannot be made: {error.strerror}") from error
