"""Runs and sweeps as one tidy table: a row a (point, strategy, seed, evaluation).

    frame = exogym_core.load_runs("runs/digits-sweep-1", "runs/digits-3")
    frame.groupby(["strategies.*.lr", "strategy"]).judged_loss.min()

Columns: `run`, `point`, the keys that a sweep changes, `strategy`, `seed`; then of each evaluation `step`,
`virtual_seconds`, `judged_loss` and the other validation metrics, and the bytes sent until the judged model came to
exist; then what the run came to, the same in all of its rows. docs/studies.md tells what each column means.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.record import RunFolder, csv_text
from exogym_core.results.report.results import Results
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas

    from exogym_core.results.report.results import SeedResult, StrategyResult

__all__ = ["FoundRun", "find_runs", "load_runs", "tidy_rows", "value_text", "write_tables"]

POINTS = "points"
"""The folder of the points' run folders, inside a sweep's."""

_FIRST = ("run", "point")
_EVALUATION = (
    *("strategy", "seed", "step", "virtual_seconds", "judged_loss", "judged_virtual_seconds", "judged_step"),
    *("accuracy", "bytes_sent", "payload_bytes", "wan_bytes"),
    *("local_loss", "local_perplexity", "global_loss", "global_perplexity"),
)
_COUNTERS = ("bytes_sent", "payload_bytes", "wan_bytes")
_OUTCOME = (
    *("final_loss", "virtual_seconds_to_target", "target", "compute_utilisation"),
    *("computing_seconds", "network_seconds", "waiting_seconds"),
)


@dataclass(frozen=True)
class FoundRun:
    """A run folder, and which point of which sweep it is.

    Attributes:
        folder: where it is.
        run: the name of the run's or the sweep's folder.
        point: its number in a sweep, as text; "" for a run of its own.
        values: what the sweep changed, by key path.
    """

    folder: RunFolder
    run: str
    point: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def find_runs(paths: Iterable[str | Path]) -> list[FoundRun]:
    """The runs in these folders: a run itself, the points of a sweep, or all that a folder such as `runs` holds.

    Points of which nothing is known yet are left out.

    Raises:
        InputError: there is none in one of them.
    """
    found: list[FoundRun] = []
    for path in map(Path, paths):
        inside = list(_inside(path))
        if not inside:
            for folder in sorted(path.iterdir()) if path.is_dir() else []:
                inside += _inside(folder)
        if not inside:
            raise InputError(
                f"{visible(path)}: holds no run: give a run's folder, a sweep's, or one with such in it"
            )
        found += inside
    return found


def _inside(path: Path) -> Iterator[FoundRun]:
    if not (path / "experiment.yaml").is_file():
        return
    name = path.resolve().name
    if not (path / POINTS).is_dir():
        yield FoundRun(RunFolder(path), name)
        return
    for entry in RunFolder(path).read_summary():
        folder, values = path / POINTS / entry["name"], entry.get("point")
        if (folder / "experiment.yaml").is_file() and isinstance(values, dict):
            yield FoundRun(RunFolder(folder), name, entry["name"], values)


def tidy_rows(runs: Sequence[FoundRun]) -> list[dict[str, Any]]:
    """A row an evaluation of every strategy and seed of every run; numbers, text and None only.

    Raises:
        InputError: a run's file is damaged.
    """
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    rows: list[dict[str, Any]] = []
    for run in runs:
        first = {"run": run.run, "point": run.point}
        first |= {key: _plain(run.values.get(key)) for key in keys}
        for strategy in Results.load(run.folder).strategies:
            for seed in strategy.runs:
                rows += (first | row for row in _evaluations(strategy, seed))
    for key in keys:
        if len({type(row[key]) for row in rows} - {type(None), int, float}) > 0:  # one type a column
            for row in rows:
                row[key] = None if row[key] is None else value_text(row[key])
    return rows


def _evaluations(strategy: StrategyResult, run: SeedResult) -> Iterator[dict[str, Any]]:
    sent = {name: run.at_steps(name) for name in _COUNTERS}
    outcome = {name: getattr(run, name) for name in _OUTCOME}
    outcome |= {"complete": run.complete, "failed": strategy.error is not None}
    for row in run.validation:
        counters = {name: places.get(row["step"]) for name, places in sent.items()}
        known = {name: row.get(name) for name in _EVALUATION if name not in ("strategy", "seed")}
        yield {"strategy": strategy.name, "seed": run.seed, **known, **counters, **outcome}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else value_text(value)


def value_text(value: Any) -> str:
    """One value of a key, short: of a mapping its name, if it has one.

    >>> value_text({"name": "home", "links": []}), value_text(["AllReduce", {"name": "DiLoCo", "H": 4}])
    ('home', 'AllReduce+DiLoCo')
    """
    if isinstance(value, dict):
        if isinstance(value.get("name"), str):
            return str(value.get("label") or value["name"])
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list) and value:
        return "+".join(value_text(each) for each in value)
    return format(value, ".6g") if isinstance(value, float) else str(value)


def load_runs(*folders: str | Path) -> pandas.DataFrame:
    """Runs, sweeps, and folders of them as one tidy pandas table.

    Args:
        folders: of runs or sweeps, or such as `runs` that hold them.

    Raises:
        InputError: there is no run in one of them, or a file is damaged.
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("load_runs: pandas is not installed: pip install 'netgym[pandas]'") from error
    rows = tidy_rows(find_runs(folders))
    return pandas.DataFrame(rows, columns=_columns(rows))


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    empty = (*_FIRST, *_EVALUATION, *_OUTCOME, "complete", "failed")
    return list(rows[0]) if rows else list(empty)


def write_tables(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write `results.csv`, and `results.parquet` where pyarrow is installed; returns what was written."""
    columns = _columns(rows)
    written = [folder.write_text("results.csv", csv_text(rows, columns))]
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return written
    table = pyarrow.table({column: [row[column] for row in rows] for column in columns})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return [*written, folder.write_text("results.parquet", sink.getvalue().to_pybytes())]
