"""`netgym bench`: the benchmark for the shipped strategies or for somebody's file, and its table."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exogym_core.app.runs import stdout
from exogym_core.app.study_commands import ON_HELP
from exogym_core.names import file_name, visible
from netsim.files.documents import Document, load_document
from netsim.files.errors import InputError
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from exogym_core.app.bench.entry import Entry

__all__ = ["bench"]

_NOTE = (
    "Seconds are virtual: those of the simulated network and of a declared device, never of the machine that ran it. "
    "A time stands only where the target was held with every seed. Evaluation is free for all, coding is charged, and "
    "what is in flight at the end is applied and charged first."
)


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--tier", metavar="NAME", default="small", show_default=True, help="Or a sweep's file of one's own."
)
@click.option(
    "--resume", metavar="DIR", type=click.Path(path_type=Path), help="Go on with the one in this folder."
)
@click.option(
    "--table",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Make DIR/index.html of the entries in DIR.",
)
@click.option("--out", metavar="DIR", help="Its folder, new or empty [runs/<tier>-<n>].")
@click.option("--on", "place", metavar="WHERE", help=ON_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with run_folder and entries.")
def bench(
    file: Path | None,
    tier: str,
    resume: Path | None,
    table: Path | None,
    out: str | None,
    place: str | None,
    as_json: bool,
) -> None:
    """Score the shipped strategies, or the one in FILE: virtual seconds and bytes to the target."""
    if table is not None:
        if file or resume or out or place:
            raise InputError("--table: goes alone: leave out the other options")
        return _show_table(table, as_json=as_json)
    return _bench(file, tier, resume, out, place, as_json=as_json)


def _bench(
    file: Path | None, tier: str, resume: Path | None, out: str | None, place: str | None, *, as_json: bool
) -> None:
    from exogym_core.app.bench.entry import entries_of, strategy_reference
    from exogym_core.app.signals import Interruption
    from exogym_core.app.studies.on_ray import runner_at
    from exogym_core.app.studies.progress import SweepProgress
    from exogym_core.app.studies.study import Study
    from exogym_core.app.studies.sweep import run_sweep

    document = _tier(tier)
    facts: dict[str, Any] = {"tier": document.data["name"], "tier_digest": _digest(document.data)}  # type: ignore[index]
    source = Path()
    if file is not None:
        reference = strategy_reference(file)
        source, facts = file.parent, facts | {"source": file.read_text(encoding="utf-8")}
        click.echo(f"code: strategy {reference} of {visible(file)}", err=True)
        document = _with_strategy(document, reference)
    if resume is not None:
        study = Study.open(resume)
        study.folder.owned().clean()
    else:
        study = Study.create(document, source, out, "bench")
    console = Console(stderr=True)
    path = visible(study.folder.path)
    progress = SweepProgress(lambda line: console.print(Text(line), soft_wrap=True), study.sweep.num_points)
    with Interruption() as interruption:
        try:
            with runner_at(place, None) as runner:
                failed = run_sweep(study, progress, runner)
        except KeyboardInterrupt:
            again = f"netgym bench {visible(file) + ' ' if file else ''}--resume {path}"
            click.echo(f"interrupted: to go on: {again}", err=True)
            raise click.exceptions.Exit(interruption.exit_code or 130) from None
        finally:
            study.folder.release()
    entries = entries_of(study.folder.path, facts)
    for entry in entries:
        study.folder.write_text(
            f"entries/{file_name(entry['strategy'])}.json", json.dumps(entry, indent=2) + "\n"
        )
    if as_json:
        click.echo(json.dumps({"run_folder": str(study.folder.path), "entries": entries}, indent=2))
    else:
        stdout(200).print(_table(entries))
        click.echo(str(study.folder.path))
    if failed:
        raise click.exceptions.Exit(1)


def _tier(name: str) -> Document:
    """A shipped tier, or a file."""
    shipped = resources.files("exogym_core.app.bench")
    names = sorted(
        each.name.removesuffix(".yaml") for each in shipped.iterdir() if each.name.endswith(".yaml")
    )
    if name not in names and not Path(name).is_file():
        raise InputError(
            f"--tier {visible(name)}: there is no such tier: choose from {', '.join(names)}, or give a file"
        )
    document = load_document(str(shipped.joinpath(f"{name}.yaml")) if name in names else name)
    if not isinstance(document.data, dict) or not isinstance(document.data.get("name"), str):
        raise document.error((), "is no tier: expected an experiment with a name and a sweep")
    return document


def _digest(data: Any) -> str:
    """Of all that decides scores: the tier without its list of strategies."""
    plain = json.loads(json.dumps(_without_strategies(data)))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _without_strategies(data: Any) -> Any:
    if isinstance(data, dict):
        kept = {key: value for key, value in data.items() if str(key).partition(".")[0] != "strategies"}
        return {key: _without_strategies(value) for key, value in kept.items()}
    return [_without_strategies(each) for each in data] if isinstance(data, list) else data


def _with_strategy(document: Document, reference: str) -> Document:
    """The tier with that strategy alone, as its defaults are."""
    data = _without_strategies(document.data)
    label = reference.partition(":")[2]
    label = reference.partition(":")[0] if label == "Entry" else label
    return replace(document, data={**data, "strategies": [{"name": reference, "label": label}]})


def _table(entries: list[Entry]) -> Table:
    table = Table(*_headings(entries), box=None, pad_edge=False)
    for cells in _rows(entries):
        table.add_row(*map(Text, cells))
    return table


def _headings(entries: list[Entry]) -> list[str]:
    scores: list[dict[str, Any]] = max((entry["scores"] for entry in entries), key=len, default=[])
    return ["strategy", "held", "score", *(f"{each['task']}, {each['topology']}" for each in scores)]


def _rows(entries: list[Entry]) -> list[list[str]]:
    from exogym_core.app.bench.entry import board_rows

    rows = []
    for entry, held, mean in board_rows(entries):
        cells = [visible(entry["strategy"], 40), f"{held} of {len(entry['scores'])}"]
        cells.append("-" if mean is None else format_seconds(mean))
        cells += [_told(score) for score in entry["scores"]]
        rows.append(cells)
    return rows


def _told(score: dict[str, Any]) -> str:
    seconds, sent = score["virtual_seconds_to_target"], score["bytes_to_target"]
    if score.get("error"):
        return "failed"
    if seconds is None:
        return f"held {score['held']} of {score['runs']}"
    return f"{format_seconds(seconds)}, {format_bytes(sent)}"


def _show_table(folder: Path, *, as_json: bool) -> None:
    """Write the page of all entries in a folder."""
    from exogym_core.app.bench.entry import read_entries
    from exogym_core.results.record import write_whole
    from exogym_core.results.report.document import Listing, Page, TextTable, render_page

    entries, refused = read_entries(folder)
    rows = _rows(entries)
    failures = [(visible(which, 80), [visible(why, 500)]) for which, why in refused]
    page = Page(
        title="NetGym benchmark" + (f": {visible(entries[0]['tier'], 40)}" if entries else ""),
        facts=[("entries", len(entries)), ("left out", len(refused))],
        verdict=f"{rows[0][0]} leads: it holds {rows[0][1]} targets." if rows else "No entry is left.",
        headings=_headings(entries),
        rows=[(position == 0, cells) for position, cells in enumerate(rows)],
        note=f"{_NOTE} Score: geometric mean of the seconds; then bytes that all workers sent until the target.",
        tables=[TextTable("What was left out", ["which", "why"], failures)] if failures else [],
        experiments=[
            Listing(visible(each["strategy"], 80), each["source"]) for each in entries if each.get("source")
        ],
    )
    write_whole(folder / "index.html", render_page(page))
    for which, why in refused:
        click.echo(f"warning: {visible(which, 80)}: {why}", err=True)
    if as_json:
        told = [dict(zip(_headings(entries), cells, strict=True)) for cells in rows]
        click.echo(json.dumps({"run_folder": str(folder), "rows": told, "left_out": refused}, indent=2))
        return
    stdout(200).print(_table(entries))
    click.echo(str(folder / "index.html"))
