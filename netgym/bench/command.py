"""`netgym bench`: the benchmark for the shipped strategies or your own file, and its table."""

from __future__ import annotations

import copy
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

from exogym_core.names import file_name, visible
from netgym.bench import UNCHARGED
from netgym.cli.run_commands import stdout
from netgym.command_options import takes
from netgym.studies.commands import ON_HELP, in_order
from netsim import Document, given, load_document, output_file
from netsim.errors import InputError, unknown_name, unknown_names
from netsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from netgym.bench.entry import Entry
    from netgym.studies.study import Study

__all__ = ["bench"]

_NOTE = (
    "Seconds are virtual: those of the simulated network and of a declared device, never of the machine that ran it. "
    "A time is given only if the target was held with every seed. Evaluation is free for all, coding is charged, and "
    "what is in flight at the end is applied and charged first."
)


@click.command()
@takes(place=ON_HELP)
def bench(
    what: str | None = given(is_argument=True, metavar="[FILE|STRATEGY|all]"),
    tier: str = given(metavar="NAME", default="small"),
    resume: Path | None = given(metavar="DIR"),
    table: Path | None = given(metavar="DIR"),
    out: str | None = given(metavar="DIR"),
    place: str | None = given("--on", metavar="WHERE"),
    jobs: int | None = given(type=click.IntRange(1)),
    as_json: bool = given(),
) -> None:
    """Score strategies: virtual seconds and bytes to the target.

    Without an argument: the strategies that the tier names. `all`: every shipped one.

    Args:
        tier: Tier, or your own sweep file.
        resume: Resume the benchmark in this folder.
        table: Make DIR/index.html of the entries in DIR.
        out: The folder, new or empty [runs/<tier>-<n>].
        place: {place}
        as_json: Print one JSON document with run_folder and entries.
    """
    from netgym.studies.study import Study

    if table is not None:
        if what or resume or out or place or jobs:
            raise InputError("--table: does not combine with other options: leave them out")
        return _show_table(table, as_json=as_json)
    if resume is not None and (out or (what and not what.endswith(".py"))):
        raise InputError(
            f"--resume {visible(resume)}: continues with its own settings: leave out the other options"
        )
    file = Path(what) if what is not None and what.endswith(".py") else None
    if resume is not None:
        study = Study.open(resume)
        study.folder.owned().clean()
    elif file is not None:
        document = _with_file(_tier(tier), file)
        study = Study.create(document, file.parent, out, "bench")
    else:
        study = Study.create(_with_named(_tier(tier), what), Path(), out, "bench")
    return _bench(study, file, place, jobs, as_json=as_json)


def _bench(study: Study, file: Path | None, place: str | None, jobs: int | None, *, as_json: bool) -> None:
    from netgym.bench.entry import entries_of
    from netgym.studies.runners import runner_at
    from netgym.studies.sweep import SweepProgress, run_sweep

    data: Any = study.document.data
    facts: dict[str, Any] = {"tier": data["name"], "tier_digest": _digest(data)}
    if file is not None:
        facts["source"] = file.read_text(encoding="utf-8")
    console = Console(stderr=True)
    path = visible(study.folder.path)
    progress = SweepProgress(
        lambda line, *_: console.print(Text(line), soft_wrap=True), study.sweep.num_points
    )
    again = f"netgym bench {visible(file) + ' ' if file else ''}--resume {path}"
    entries: list[Entry] = []

    def show() -> None:
        is_whole = sum(not each.get("incomplete") for each in study.entries) == study.sweep.num_points
        entries.extend(entries_of(study.folder.path, facts if is_whole else {**facts, "incomplete": True}))
        for entry in entries:
            study.folder.write_text(
                f"entries/{file_name(entry['strategy'])}.json", json.dumps(entry, indent=2) + "\n"
            )
        if as_json:
            click.echo(json.dumps({"run_folder": str(study.folder.path), "entries": entries}, indent=2))
        else:
            stdout(200).print(_table(entries))
            click.echo(str(study.folder.path))

    with (
        in_order(study.folder, show, again, study.discard_if_empty),
        runner_at(place, None, jobs) as runner,
    ):
        failed = run_sweep(study, progress, runner)
    if refused := [entry["strategy"] for entry in entries if _is_uncharged(entry)]:
        raise InputError(
            f"{', '.join(visible(name, 40) for name in refused)}: no score: coding not charged: encode with "
            "self.charged(codec), or call self.charge(name, 'encode' or 'decode', num_values)"
        )
    if failed:
        raise click.exceptions.Exit(1)


def _is_uncharged(entry: Entry) -> bool:
    return any(score.get("error") == UNCHARGED for score in entry["scores"])


def _tier(name: str) -> Document:
    """A shipped tier, or a file."""
    shipped = resources.files("netgym.bench")
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
    """Digest of the tier without its lists of strategies."""
    plain = json.loads(json.dumps(_without_strategies(data)))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _without_strategies(data: Any) -> Any:
    if isinstance(data, dict):
        kept = {key: value for key, value in data.items() if str(key).partition(".")[0] != "strategies"}
        return {key: _without_strategies(value) for key, value in kept.items()}
    return [_without_strategies(each) for each in data] if isinstance(data, list) else data


def _with_named(document: Document, what: str | None) -> Document:
    """The tier with the strategy of that name, with `all` that its tasks list, or with those that it names itself."""
    data: Any = copy.deepcopy(document.data)
    points = [point for point in _points(data) if isinstance(point.get("strategies"), list)]
    listed = [_label(each) for each in (points[0] if points else data).get("strategies") or []]
    if what is None:
        listed = [_label(each) for each in data.get("strategies") or []]
    elif what != "all":
        if what not in listed:
            raise unknown_name(
                "strategy of the tier", what, ["all", *listed, "a file such as my_strategy.py"]
            )
        listed = [what]
    for place in [*points, data]:
        place["strategies"] = [each for each in place["strategies"] if _label(each) in listed]
    data["strategies"] = data["strategies"] or listed
    return replace(document, data=data)


def _with_file(document: Document, file: Path) -> Document:
    """The tier with the strategy in that file alone, on each task with the options that the file has for it."""
    from netgym.bench.entry import own_entry

    reference, options = own_entry(file)
    click.echo(f"code: strategy {reference} of {visible(file)}", err=True)
    data = _without_strategies(document.data)
    label = reference.partition(":")[2]
    label = reference.partition(":")[0] if label == "Entry" else label
    entry = {"name": reference, "label": label}
    known = {_label(place["task"]) for place in [data, *_points(data)] if "task" in place}
    if unknown := [task for task in options if task not in known]:
        raise unknown_names(f"task in OPTIONS of {visible(file)}", unknown, sorted(known))
    for place in [data, *_points(data)]:
        if "task" in place:
            place["strategies"] = [entry | options.get(_label(place["task"]), {})]
    return replace(document, data=data)


def _points(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    sweep = data.get("sweep")
    points = sweep.get("points") if isinstance(sweep, dict) else None
    return [point for point in points or () if isinstance(point, dict)]


def _label(named: Any) -> str:
    return str(named.get("label") or named.get("name")) if isinstance(named, dict) else str(named)


def _table(entries: list[Entry]) -> Table:
    table = Table(*_headings(entries), box=None, pad_edge=False)
    for cells in _rows(entries):
        table.add_row(*map(Text, cells))
    return table


def _headings(entries: list[Entry]) -> list[str]:
    scores: list[dict[str, Any]] = max((entry["scores"] for entry in entries), key=len, default=[])
    tasks = [f"{each['task']} to {each['target_loss']:g}, {each['topology']}" for each in scores]
    return ["strategy", "held", "score", *tasks]


def _rows(entries: list[Entry]) -> list[list[str]]:
    from netgym.bench.entry import board_rows

    rows = []
    for entry, held, mean in board_rows(entries):
        cells = [visible(entry["strategy"], 40), f"{held} of {len(entry['scores'])}"]
        cells.append("-" if mean is None else format_seconds(mean))
        rows.append([*cells, *map(_score_text, entry["scores"])])
    return rows


def _score_text(score: dict[str, Any]) -> str:
    seconds, sent = score["virtual_seconds_to_target"], score["bytes_to_target"]
    if score.get("error"):
        return "coding not charged" if score["error"] == UNCHARGED else "failed"
    if seconds is None:
        return f"held {score['held']} of {score['runs']}"
    return f"{format_seconds(seconds)}, {'bytes not known' if sent is None else format_bytes(sent)}"


def _show_table(folder: Path, *, as_json: bool) -> None:
    """Write the page of all entries in a folder."""
    from exogym_core.results.report.page import Listing, Page, TextTable, render_page
    from netgym.bench.entry import read_entries

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
        tables=[TextTable("Left out", ["entry", "reason"], failures)] if failures else [],
        experiments=[
            Listing(visible(each["strategy"], 80), each["source"]) for each in entries if each.get("source")
        ],
    )
    with output_file(folder / "index.html") as file:
        file.write(render_page(page).encode())
    for which, why in refused:
        click.echo(f"warning: {visible(which, 80)}: {why}", err=True)
    if as_json:
        listed = [dict(zip(_headings(entries), cells, strict=True)) for cells in rows]
        click.echo(json.dumps({"run_folder": str(folder), "rows": listed, "left_out": refused}, indent=2))
        return
    stdout(200).print(_table(entries))
    click.echo(str(folder / "index.html"))
