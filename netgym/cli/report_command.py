"""`netgym report`: the page of a run made again, one page of several runs or a sweep, and figures for papers."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from exogym_core.names import visible
from netgym.cli.run_commands import show_report
from netgym.command_options import takes
from netsim.cli.terminal import PLAIN_WIDTH, given, plain_console
from netsim.errors import InputError
from netsim.files.plain_files import check_output, is_written_in_place, output_file

__all__ = ["report"]

# matplotlib and what imports it are imported inside functions: `netgym --help` answers at once.

_FORMATS = ("pdf", "svg", "png", "latex")
_ALIGNMENTS = ("time", "steps", "bytes")


def _formats(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    names = [name.strip().lower() for name in value.split(",")] if value is not None else []
    for name in names:
        if name not in _FORMATS:
            raise click.BadParameter(
                f"{name!r} is no format: give one or several of {','.join(_FORMATS)}", context, parameter
            )
    return list(dict.fromkeys(names))


@click.command()
@takes()
def report(
    folders: tuple[Path, ...] = given(is_argument=True, metavar="RUN...", required=True),
    by: tuple[str, ...] = given("--group-by", "--by", metavar="KEY,..."),
    where: tuple[str, ...] = given(metavar="KEY=VALUE"),
    align: str | None = given(type=click.Choice(_ALIGNMENTS)),
    formats: list[str] = given("--format", metavar="NAME,...", callback=_formats),
    out: Path | None = given(metavar="FILE"),
    as_json: bool = given(),
) -> None:
    """Rebuild the page of RUN from its metrics, or build one page of several runs or of a sweep.

    Args:
        by: Group runs by these keys, such as topology [all that differ]. May be repeated.
        where: Select runs with this value, such as strategy=DiLoCo. May be repeated.
        align: Horizontal axis of the curves when the page opens [time].
        formats: Also write figures for a paper (pdf, svg, png) or tables (latex) into plots/ next to the page.
        out: File of the page [report.html in RUN].
        as_json: Print one JSON document with run_folder, summary and verdict.
    """
    from exogym_core.results.reading import is_study, runs_in
    from exogym_core.results.run_folder import RunFolder
    from netgym.studies.report import MOST_CURVES, StudyReport

    folders = tuple(map(_of_comparison, folders))
    if len(folders) == 1 and (folders[0] / "launch.json").is_file():
        from netgym.launch.report import report_launch

        if by or where or align or formats:
            raise InputError(
                f"{visible(folders[0])}: is a launched run, whose page has no curves: leave options out"
            )
        report_launch(folders[0], out, as_json=as_json)
        return
    is_sweep = len(folders) == 1 and is_study(folders[0])
    is_one_run = len(folders) == 1 and not is_sweep and not runs_in(folders[0])
    if is_one_run and not (by or where or out):
        show_report(RunFolder.open(folders[0]), align or "time", formats, as_json=as_json)
        return
    keys = [key.strip() for text in by for key in text.split(",")]
    study = StudyReport(folders, keys, where)
    page = out or (folders[0] / "report.html" if is_sweep else Path("report.html"))
    check_output(page, ".html")
    if not is_written_in_place(page):
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{visible(page.parent)}: cannot be made: {error.strerror}") from error
    with output_file(page) as file:
        file.write(study.html(align or "time").encode())
    drawn = [form for form in formats if form != "latex"]
    is_drawn = len(study.groups) <= MOST_CURVES
    tables = [form for form in formats if form == "latex"]
    figures = study.write_figures(RunFolder(page.parent), formats if is_drawn else tables)
    if drawn and not is_drawn:
        written = ", ".join(visible(each) for each in (page, *figures))
        raise InputError(
            f"--format {','.join(drawn)}: a figure shows {MOST_CURVES} groups at most, and there are "
            f"{len(study.groups)}: choose with --where KEY=VALUE; written are {written}"
        )
    if as_json:
        document = {
            "run_folder": str(folders[0]),
            "run_folders": list(map(str, folders)),
            "report": str(page),
            "figures": list(map(str, figures)),
            "verdict": study.verdict,
            "winner": study.winner,
            "winners": [group.name for group in study.winners],
            "decisions": [each.plain() for each in study.decisions],
            "groups": [dict(zip(study.table.headings, cells, strict=True)) for _, cells in study.table.rows],
        }
        click.echo(json.dumps(document, indent=2))
        return
    table = Table(*study.table.headings, box=None, pad_edge=False)
    for is_winner, cells in study.table.rows:
        table.add_row(*map(Text, cells), style="bold" if is_winner else "")
    plain_console(200).print(table)
    plain_console(PLAIN_WIDTH).print(Text(f"\n{study.verdict}\n"))
    for figure in figures:
        click.echo(f"figure {visible(figure, 500)}")
    if is_sweep:
        click.echo(f"page {page}")
    click.echo(str(folders[0] if is_sweep else page))


def _of_comparison(folder: Path) -> Path:
    """Folder of the comparison in a folder of `netgym tune`; any other folder unchanged.

    Raises:
        InputError: its search has not reached the comparison.
    """
    from exogym_core.results.reading import comparison_of

    found = comparison_of(folder)
    if found is not None and not found.is_dir():
        raise InputError(
            f"{visible(folder)}: the comparison has not begun; netgym status shows how far the search is"
        )
    return found or folder
