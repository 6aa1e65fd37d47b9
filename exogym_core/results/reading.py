"""Run folders read back: `Results` of one run, and several runs as one tidy table.

    frame = exogym_core.load_runs("runs/digits-sweep-1", "runs/digits-3")
    frame.groupby(["strategies.*.lr", "strategy"]).judged_loss.min()

The table has a row for each (point, strategy, seed, evaluation). Columns: `run`, `point`, the keys that a sweep
changes, `strategy`, `seed`; then of each evaluation `step`, `virtual_seconds`, `judged_loss` and the other validation
metrics, and the bytes sent until the judged model was made; then the run's outcome, the same in all of its rows.
docs/studies.md explains each column.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import seeded_name, visible
from exogym_core.results.fit_result import load_pandas
from exogym_core.results.progress import progress_elsewhere
from exogym_core.results.run_folder import RunFolder, require_folder
from exogym_core.results.schema import (
    COUNTERS,
    SUMMARY,
    VALIDATION,
    Summary,
    csv_text,
    parse_number,
    parse_summary,
    timed,
)
from netsim import Topology
from netsim.errors import InputError
from netsim.files.documents import load_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas


__all__ = [
    "BASELINE",
    "POINTS",
    "WALL_CLOCK",
    "Crossing",
    "FoundRun",
    "Results",
    "SeedResult",
    "StrategyResult",
    "comparison_of",
    "find_runs",
    "is_study",
    "load_runs",
    "setting",
    "tidy_rows",
    "value_key",
    "value_text",
    "value_texts",
    "write_tables",
]

BASELINE = "AllReduce"
"""Strategy that savings are relative to."""

WALL_CLOCK = "wall-clock time"
"""Name of the clock of real ranks."""


class Crossing(NamedTuple):
    """The first judged model at or below a target.

    Attributes:
        step: of its evaluation.
        seconds: virtual, when the model came to exist; None without a clock.
        gap: seconds since the judged model before it: the time to the target is known no better.
        num_later: other models judged after it.
    """

    step: float
    seconds: float | None
    gap: float
    num_later: int


@dataclass(frozen=True)
class SeedResult(Summary):
    """Run of a strategy with one seed: its figures and metrics.

    Attributes:
        seed: of the run.
        num_workers: workers of the run.
        train, validation: rows of metrics.
    """

    seed: int = 0
    num_workers: int = 1
    train: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    validation: Sequence[Mapping[str, float]] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """True if it ended, neither stopped nor failed."""
        return not (self.incomplete or self.failed)

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(step, loss) of the judged model where it was evaluated, else of training."""
        for column in ("judged_loss", "global_loss"):
            judged = [(row["step"], row[column]) for row in self.validation if column in row]
            if judged:
                return judged
        return self.measured("train_loss")

    def measured(self, column: str) -> list[tuple[float, float]]:
        """(step, value) of a column of either kind of metrics; of validation, where both have it."""
        rows = self.validation if any(column in row for row in self.validation) else self.train
        return [(row["step"], row[column]) for row in rows if column in row]

    def crossing(self, target_loss: float | None) -> Crossing | None:
        """The first judged model at or below a target; None where there is none."""
        places, losses = self.at_steps("virtual_seconds"), self.losses
        made = {row["step"]: row.get("judged_step", row["step"]) for row in self.validation}
        for position, (step, loss) in enumerate(losses):
            if target_loss is not None and -math.inf < loss <= target_loss:
                later = {made.get(each, each) for each, _ in losses[position + 1 :]} - {made.get(step, step)}
                before = places.get(losses[position - 1][0]) if position else None
                seconds = places.get(step)
                gap = 0.0 if seconds is None or before is None else seconds - before
                return Crossing(step, seconds, gap, len(later))
        return None

    def at_steps(self, column: str) -> dict[float, float]:
        """A column of the training metrics by step, with 0 at step 0.

        At the step of an evaluation it is the value at the instant when the judged model was made.
        """
        places = {0.0: 0.0} | {row["step"]: row[column] for row in self.train if column in row}
        if len(places) == 1:
            return places
        for row in self.validation:
            made = places.get(row.get("judged_step", row["step"]))
            if column == "virtual_seconds":
                made = row.get("judged_virtual_seconds", made)
            if made is not None:
                places[row["step"]] = made
        return places


@dataclass(frozen=True)
class StrategyResult(Summary):
    """Summary of a strategy, means over its seeds, and its runs.

    Attributes:
        deviations: `<field>` -> standard deviation over the seeds, where there are several.
        runs: one a seed that has begun, in the order of the seeds.
    """

    deviations: Mapping[str, float] = field(default_factory=dict)
    runs: Sequence[SeedResult] = ()

    @property
    def ended(self) -> bool:
        """True if it ended with every seed, neither stopped nor failed."""
        return not self.incomplete and self.error is None

    @property
    def is_wall(self) -> bool:
        """True if its seconds are those of a real transport's clock."""
        return self.wall_seconds is not None

    @property
    def state(self) -> str:
        """Words behind its name in figures, where it was stopped or failed."""
        return " (failed)" if self.error is not None else " (incomplete)" if self.incomplete else ""


@dataclass(frozen=True)
class Results:
    """Results of a run folder, as reports show them.

    Attributes:
        settings: the resolved experiment as plain data.
        experiment_yaml: the same as text.
        strategies: in the order of the experiment.
        running: progress of the process that works on it now; None where none does.
        trains_for_real: what is trained now has a real transport; no strategy may have ended yet.
    """

    settings: Mapping[str, Any]
    experiment_yaml: str
    strategies: Sequence[StrategyResult]
    running: str | None = None
    trains_for_real: bool = False

    @classmethod
    def load(cls, folder: RunFolder) -> Results:
        """Read a run folder.

        Raises:
            InputError: a file is missing or damaged; the line names it.
        """
        path = folder.path / "experiment.yaml"
        document = load_document(path)
        if not isinstance(document.data, dict):
            raise document.error((), "is not an experiment: expected a mapping")
        running, trains_for_real = progress_elsewhere(path.parent)
        results = cls(
            settings=document.data,
            experiment_yaml=path.read_text(encoding="utf-8"),
            strategies=[_strategy_result(folder, entry, document.data) for entry in folder.read_summary()],
            running=running,
            trains_for_real=trains_for_real,
        )
        folder.check_tables()
        return results

    def setting(self, path: str) -> Any:
        """Value of the experiment under a key path such as `evaluate.every`; None where it has nothing."""
        return setting(self.settings, path)

    @property
    def network(self) -> Any:
        """Topology, equal for equal networks: in canonical form, and named without the keys that were changed."""
        plain = self.settings.get("topology")
        return _canonical(json.dumps(plain)) if isinstance(plain, dict) else plain

    @property
    def clock(self) -> str:
        """Name of the clock of all seconds: virtual time, or wall-clock time of real ranks."""
        is_wall = self.trains_for_real or any(result.is_wall for result in self.strategies)
        return WALL_CLOCK if is_wall else "virtual time"

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds with which every strategy is run."""
        seeds = self.settings.get("seeds")
        return seeds if isinstance(seeds, list) else [self.settings.get("seed") or 0]

    @property
    def target_loss(self) -> float | None:
        """The loss to be reached, if one was set."""
        value = self.settings.get("target_loss")
        return float(value) if isinstance(value, int | float) else None

    @property
    def baseline(self) -> StrategyResult | None:
        """Strategy that savings are relative to, if it ran to its end."""
        for result in self.strategies:
            if result.strategy == BASELINE and result.ended:
                return result
        return None

    @property
    def incomplete(self) -> bool:
        """True if a strategy was stopped, or never begun."""
        wanted = self.settings.get("strategies")
        num_wanted = len(wanted) if isinstance(wanted, list) else 0
        return len(self.strategies) < num_wanted or any(result.incomplete for result in self.strategies)


@cache
def _canonical(topology: str) -> dict[str, Any]:
    plain = json.loads(topology)
    with suppress(InputError):  # the page will report it
        plain = Topology.from_mapping(plain, "experiment.yaml: topology").to_mapping()
    return {**plain, "name": str(plain.get("name")).partition(" with ")[0]}


def setting(settings: Any, path: str, strategy: str = "") -> Any:
    """Value of a resolved experiment under a key path; None where it has nothing.

    Entries of lists go by their label or name; `*` is the one called `strategy`.
    """
    for step in path.split("."):
        if isinstance(settings, list):
            names = [each.get("label") or each.get("name") for each in settings if isinstance(each, dict)]
            wanted = strategy if step == "*" else step
            settings = settings[names.index(wanted)] if wanted in names else None
        else:
            settings = settings.get(step) if isinstance(settings, dict) else None
    return settings


def is_study(folder: Path) -> bool:
    """Return True for a sweep's folder."""
    return (folder / POINTS).is_dir() and (folder / "experiment.yaml").is_file()


def comparison_of(folder: Path) -> Path | None:
    """The run in which `netgym tune` compares, where `folder` is its own; None for any other folder."""
    is_tuned = (folder / SEARCH).is_dir() and (folder / "experiment.yaml").is_file()
    return folder / COMPARISON if is_tuned else None


def runs_in(folder: Path) -> list[Path]:
    """Folders of the runs that a folder holds: points of a sweep or a tune, or runs in a folder such as `runs`.

    None in a run's own folder: what lies there is another's.
    """
    if (comparison := comparison_of(folder)) is not None:
        found = [
            *sorted(folder.glob(f"{SEARCH}/*/{POINTS}/*/experiment.yaml")),
            comparison / "experiment.yaml",
        ]
        return [each.parent for each in found if each.is_file()]
    if (folder / "experiment.yaml").is_file():
        return sorted(each.parent for each in folder.glob(f"{POINTS}/*/experiment.yaml"))
    inner = sorted(each.parent for each in folder.glob("*/experiment.yaml"))
    return [run for each in inner for run in runs_in(each) or [each]]


def _strategy_result(
    folder: RunFolder, entry: Mapping[str, Any], settings: Mapping[str, Any]
) -> StrategyResult:
    where = f"{folder.path / 'summary.json'}: {entry['name']}"
    has_seeds, seed = isinstance(settings.get("seeds"), list), settings.get("seed")
    runs = entry.get("by_seed") if has_seeds else [{**entry, "seed": seed if isinstance(seed, int) else 0}]
    if not isinstance(runs, list) or not all(
        isinstance(run, dict) and isinstance(run.get("seed"), int) for run in runs
    ):
        raise InputError(f"{where}: by_seed: expected a list of objects with a seed")
    count = setting(settings, "workers.count")

    def rows(kind: str, seed: int) -> Sequence[Mapping[str, float]]:
        return timed(folder.read_metrics(entry["name"], kind, seed if has_seeds else None))

    results = [
        SeedResult(
            **parse_summary(run, where),
            seed=run["seed"],
            num_workers=count if isinstance(count, int) and count else 1,
            train=rows("", run["seed"]),
            validation=rows("validation", run["seed"]),
        )
        for run in runs
    ]
    names = [f"{column.name}_std" for column in SUMMARY if column.is_number]
    deviations = {
        name.removesuffix("_std"): parse_number(entry.get(name), f"{where}: {name}") for name in names
    }
    values = parse_summary(entry, where)
    values["strategy"] = values["strategy"] or entry["name"]
    known = {name: value for name, value in deviations.items() if value is not None}
    return StrategyResult(**values, deviations=known, runs=results)


# --- the tidy table -----------------------------------------------------------------------------------------

POINTS = "points"
SEARCH, COMPARISON = "search", "comparison"
"""The folder of the points' run folders, inside a sweep's."""

_OF_ALL_MODELS = ("local_loss", "local_perplexity", "global_loss", "global_perplexity")
_EVALUATION = [column.name for column in VALIDATION if column.name not in _OF_ALL_MODELS]
_EVALUATION += [*COUNTERS, *_OF_ALL_MODELS]
_OUTCOME = [column.name for column in sorted(SUMMARY, key=lambda column: column.tidy) if column.tidy]
_COLUMNS = ["run", "point", "strategy", "seed", *_EVALUATION, *_OUTCOME, "complete", "failed", "retimed"]
"""Columns of a tidy table; the keys of sweeps follow the point."""
_LONGEST_TEXT = 80  # of a value with its options


@dataclass(frozen=True)
class FoundRun:
    """A run folder, and which point of which sweep it is.

    Attributes:
        folder: where it is.
        run: the name of the run's or the sweep's folder, or its path where another has that name.
        point: its number in a sweep, as text; "" for a run of its own.
        values: values that the sweep set, by key path.
        texts: of the values, distinct where they are, by key path.
    """

    folder: RunFolder
    run: str
    point: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """The run's or the sweep's folder."""
        return self.folder.path.parents[1] if self.point else self.folder.path


def find_runs(paths: Iterable[str | Path]) -> list[FoundRun]:
    """The runs in these folders: a run itself, the points of a sweep, or all that a folder such as `runs` holds.

    Points that have not begun are left out. A run that several of the paths hold is one run. Folders of one name in
    different places are distinguished by their paths.

    Raises:
        InputError: there is none in one of them.
    """
    found: dict[Path, FoundRun] = {}
    for path in map(Path, paths):
        require_folder(path)
        inside = list(_inside(path))
        if not inside:
            for folder in sorted(path.iterdir()) if path.is_dir() else []:
                inside += _inside(folder)
        if not inside:
            raise InputError(
                f"{visible(path)}: holds no run: give a run's folder, a sweep's, or one with such in it"
            )
        for run in inside:
            found.setdefault(run.folder.path.resolve(), run)
    places: dict[str, set[Path]] = {}
    texts: dict[str, dict[str, str]] = {}
    for run in found.values():
        places.setdefault(run.run, set()).add(run.place.resolve())
    for key in dict.fromkeys(key for run in found.values() for key in run.values):
        texts[key] = value_texts(run.values[key] for run in found.values() if key in run.values)
    return [
        replace(
            run,
            run=str(run.place) if len(places[run.run]) > 1 else run.run,
            texts={key: texts[key][value_key(value)] for key, value in run.values.items()},
        )
        for run in found.values()
    ]


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
        first: dict[str, Any] = {"run": run.run, "point": run.point}
        values = {key: run.values.get(key) for key in keys}
        is_plain = (int, float, str, type(None))
        first |= {key: each if isinstance(each, is_plain) else run.texts[key] for key, each in values.items()}
        retimed = run.folder.read_retimed()
        for strategy in Results.load(run.folder).strategies:
            for seed in strategy.runs:
                names = strategy.name, seeded_name(strategy.name, seed.seed)
                last = {"retimed": any(name in retimed for name in names)}
                rows += (first | row | last for row in _evaluations(strategy, seed))
    for key in keys:
        if len({type(row[key]) for row in rows} - {type(None), int, float}) > 0:  # one type a column
            for row in rows:
                row[key] = None if row[key] is None else value_text(row[key])
    return rows


def _evaluations(strategy: StrategyResult, run: SeedResult) -> Iterator[dict[str, Any]]:
    sent = {name: run.at_steps(name) for name in COUNTERS}
    outcome = {name: getattr(run, name) for name in _OUTCOME}
    outcome |= {"complete": run.complete, "failed": strategy.error is not None}
    for row in run.validation:
        counted = {**row} | {name: places.get(row["step"]) for name, places in sent.items()}
        known = {name: counted.get(name) for name in _EVALUATION}
        yield {"strategy": strategy.name, "seed": run.seed, **known, **outcome}


def value_text(value: Any) -> str:
    """Short text of a key's value: of a mapping its name, if it has one.

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


def value_key(value: Any) -> str:
    """Text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def value_texts(values: Iterable[Any]) -> dict[str, str]:
    """Short text of each of a key's values, by `value_key`; those that share one get the options in which they differ.

    >>> list(value_texts([{"name": "DiLoCo", "lr": 0.1, "H": 2}, {"name": "DiLoCo", "lr": 0.1}, "lan"]).values())
    ['DiLoCo(H=2)', 'DiLoCo', 'lan']
    """
    groups: dict[str, dict[str, Any]] = {}
    for value in values:
        groups.setdefault(value_text(value), {})[value_key(value)] = value
    found: dict[str, str] = {}
    for text, alike in groups.items():
        found |= _distinct_texts(text, alike) if len(alike) > 1 else dict.fromkeys(alike, text)
    return found


def _distinct_texts(text: str, alike: Mapping[str, Any]) -> dict[str, str]:
    """Texts of different values that share `text`, by key; with a digest where options do not distinguish them."""
    every, long = list(alike.values()), dict.fromkeys(alike, "")
    if all(isinstance(each, dict) for each in every):
        options = dict.fromkeys(
            name for each in every for name in each if any(each[name] != other.get(name) for other in every)
        )
        shown = {name: value_texts(each[name] for each in every if name in each) for name in options}
        for key, each in alike.items():
            own = ", ".join(
                f"{name}={shown[name][value_key(each[name])]}" for name in options if name in each
            )
            long[key] = f"{text}({own})" if own else text
    elif all(isinstance(each, list) for each in every) and len({len(each) for each in every}) == 1:
        columns = [value_texts(column) for column in zip(*every, strict=True)]
        for key, each in alike.items():
            parts = zip(columns, each, strict=True)
            long[key] = "+".join(texts[value_key(part)] for texts, part in parts)
    texts = list(long.values())
    return {
        key: each
        if each and len(each) <= _LONGEST_TEXT and texts.count(each) == 1
        else f"{text} ({hashlib.sha256(key.encode()).hexdigest()[:4]})"
        for key, each in long.items()
    }


def load_runs(*folders: str | Path) -> pandas.DataFrame:
    """Runs, sweeps, and folders of them as one tidy pandas table.

    Args:
        folders: of runs or sweeps, or such as `runs` that hold them.

    Raises:
        InputError: there is no run in one of them, or a file is damaged.
        ImportError: pandas is not installed.
    """
    pandas = load_pandas("load_runs")
    rows = tidy_rows(find_runs(folders))
    return pandas.DataFrame(rows, columns=list(rows[0]) if rows else _COLUMNS)


def write_tables(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write `results.csv`, and `results.parquet` where pyarrow is installed; returns what was written."""
    columns = list(rows[0]) if rows else _COLUMNS
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
