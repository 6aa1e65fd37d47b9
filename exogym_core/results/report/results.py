"""A run's results as the report needs them, read back from its folder alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.standing import progress_elsewhere
from netsim.files.documents import load_document
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.results.record import RunFolder

__all__ = ["BASELINE", "WALL_CLOCK", "Results", "SeedResult", "StrategyResult"]

BASELINE = "AllReduce"
"""The strategy that savings are told against."""

WALL_CLOCK = "wall-clock time"
"""What seconds of real ranks are of."""

_MOST = 1e300  # of a number in a summary
_NUMBERS = (
    "final_loss",
    "accuracy",
    "virtual_seconds",
    "virtual_seconds_to_target",
    "compute_utilisation",
    "bytes_sent_per_worker",
    "wan_bytes",
    "computing_seconds",
    "network_seconds",
    "waiting_seconds",
)
_TARGETS = ("held", "touched", "missed")
_ABSENCE = {"rank", "step", "virtual_seconds", "back_step", "back_virtual_seconds"}


@dataclass(frozen=True)
class _Figures:
    """What a run came to; None is 'not known' or 'never'. docs/experiment.md tells meanings."""

    final_loss: float | None = None
    accuracy: float | None = None
    virtual_seconds: float | None = None
    virtual_seconds_to_target: float | None = None
    compute_utilisation: float | None = None
    bytes_sent_per_worker: float | None = None
    wan_bytes: float | None = None
    computing_seconds: float | None = None
    network_seconds: float | None = None
    waiting_seconds: float | None = None
    target: str | None = None


@dataclass(frozen=True)
class SeedResult(_Figures):
    """One strategy's run with one seed, and its metrics.

    Attributes:
        seed: which.
        complete: it came to its end.
        dropped_peers: absences of ranks that it went on without.
        num_workers: which share what was sent.
        train, validation: rows of metrics.
    """

    seed: int = 0
    complete: bool = True
    dropped_peers: Sequence[Mapping[str, Any]] = ()
    num_workers: int = 1
    train: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    validation: Sequence[Mapping[str, float]] = field(default=(), repr=False)

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

    def at_steps(self, column: str) -> dict[float, float]:
        """A column of the training metrics by step; 0 at step 0, before anything has happened.

        At the step of an evaluation it is what held when the judged model came to exist.
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
class StrategyResult(_Figures):
    """One strategy's object of the summary, means over seeds, and its runs.

    Attributes:
        name: its label.
        strategy: the strategy's own name.
        deviations: `<field>` -> standard deviation over the seeds, where there are several.
        steps: done by each worker; a mean over the seeds.
        judged: which model is judged; None in runs that do not say.
        collectives: operation -> algorithms that it used.
        incomplete: it was stopped before its last step, or its last seed.
        error: the line it failed with; None where it did not.
        coding: "not charged" where it sent encoded values and took no time for encoding; else None.
        is_wall: its seconds are those of a real transport's clock.
        runs: one a seed that has been begun, in the order of the seeds.
    """

    name: str = ""
    strategy: str = ""
    deviations: Mapping[str, float] = field(default_factory=dict)
    steps: float | None = None
    judged: str | None = None
    collectives: Mapping[str, Any] = field(default_factory=dict)
    incomplete: bool = False
    error: str | None = None
    coding: str | None = None
    is_wall: bool = False
    runs: Sequence[SeedResult] = ()

    @property
    def ended(self) -> bool:
        """Whether it came to its end, with every seed."""
        return not self.incomplete and self.error is None


@dataclass(frozen=True)
class Results:
    """All that a report shows.

    Attributes:
        settings: the resolved experiment as plain data.
        experiment_yaml: the same as text.
        strategies: in the order of the experiment.
        running: how far another process is that works on it now; None where none does.
    """

    settings: Mapping[str, Any]
    experiment_yaml: str
    strategies: Sequence[StrategyResult]
    running: str | None = None

    @classmethod
    def load(cls, folder: RunFolder) -> Results:
        """Read a run folder.

        Raises:
            InputError: a file is missing or damaged; the line names it.
        """
        path = folder.path / "experiment.yaml"
        document = load_document(path)
        if not isinstance(document.data, dict):
            raise document.error((), "is no experiment: expected a mapping")
        seeds, workers = document.data.get("seeds"), document.data.get("workers")
        count = workers.get("count") if isinstance(workers, dict) else None
        told = _Told(
            document.data.get("seed"),
            isinstance(seeds, list),
            count if isinstance(count, int) and count else 1,
        )
        return cls(
            settings=document.data,
            experiment_yaml=path.read_text(encoding="utf-8"),
            strategies=[_strategy_result(folder, entry, told) for entry in folder.read_summary()],
            running=progress_elsewhere(path.parent),
        )

    @property
    def clock(self) -> str:
        """What seconds are of, in words: real ranks have no virtual time, and theirs stand in its place."""
        return WALL_CLOCK if any(result.is_wall for result in self.strategies) else "virtual time"

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
        """The strategy that savings are told against, if it ran to its end."""
        for result in self.strategies:
            if result.strategy == BASELINE and result.ended:
                return result
        return None

    @property
    def incomplete(self) -> bool:
        """Whether a strategy was stopped, or never begun."""
        wanted = self.settings.get("strategies")
        num_wanted = len(wanted) if isinstance(wanted, list) else 0
        return len(self.strategies) < num_wanted or any(result.incomplete for result in self.strategies)


class _Told(NamedTuple):
    """What the experiment says of all its runs."""

    seed: Any
    has_seeds: bool
    num_workers: int


def _strategy_result(folder: RunFolder, entry: Mapping[str, Any], told: _Told) -> StrategyResult:
    where = f"{folder.path / 'summary.json'}: {entry['name']}"
    seed = told.seed if isinstance(told.seed, int) else 0
    runs = entry.get("by_seed") if told.has_seeds else [{**entry, "seed": seed}]
    if not isinstance(runs, list) or not all(
        isinstance(run, dict) and isinstance(run.get("seed"), int) for run in runs
    ):
        raise InputError(f"{where}: by_seed: expected a list of objects with a seed")
    deviations = {key: _number(entry.get(f"{key}_std"), f"{where}: {key}_std") for key in _NUMBERS}
    collectives, error = entry.get("collectives"), entry.get("error")
    return StrategyResult(
        name=entry["name"],
        strategy=str(entry.get("strategy", entry["name"])),
        deviations={key: value for key, value in deviations.items() if value is not None},
        steps=_number(entry.get("steps"), f"{where}: steps"),
        judged=str(entry["judged"]) if entry.get("judged") is not None else None,
        collectives=collectives if isinstance(collectives, dict) else {},
        incomplete=bool(entry.get("incomplete", False)),
        error=str(error or "it failed") if entry.get("failed") else None,
        coding="not charged" if entry.get("coding") == "not charged" else None,
        is_wall=_is_wall(entry),
        runs=[_seed_result(folder, str(entry["name"]), run, told, where) for run in runs],
        **_figures(entry, where),
    )


def _seed_result(folder: RunFolder, name: str, run: Mapping[str, Any], told: _Told, where: str) -> SeedResult:
    seed = run["seed"] if told.has_seeds else None
    return SeedResult(
        seed=run["seed"],
        complete=not (run.get("incomplete") or run.get("failed")),
        dropped_peers=_absences(run.get("dropped_peers"), where),
        num_workers=told.num_workers,
        train=_timed(folder.read_metrics(name, seed=seed)),
        validation=_timed(folder.read_metrics(name, "validation", seed=seed)),
        **_figures(run, where),
    )


def _figures(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    target = entry.get("target")
    if target is not None and target not in _TARGETS:
        raise InputError(f"{where}: target: expected one of {', '.join(_TARGETS)}, got {target!r}")
    if target is None and entry.get("virtual_seconds_to_target") is not None:
        target = "held"  # written before there was the word
    figures: dict[str, Any] = {key: _number(entry.get(key), f"{where}: {key}") for key in _NUMBERS}
    if entry.get("virtual_seconds") is None and not figures["wan_bytes"]:
        figures["wan_bytes"] = None  # no simulated network: the 0 that is stored is of regions nobody knows
    if _is_wall(entry):
        figures["virtual_seconds"] = _number(entry["wall_seconds"], f"{where}: wall_seconds")
    return {"target": target} | figures


def _is_wall(entry: Mapping[str, Any]) -> bool:
    return entry.get("virtual_seconds") is None and entry.get("wall_seconds") is not None


def _timed(rows: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Metrics with the seconds of a real transport's clock where virtual ones would be."""
    if not any("wall_seconds" in row for row in rows):
        return rows
    return [
        {name.replace("wall_seconds", "virtual_seconds"): value for name, value in row.items()}
        for row in rows
    ]


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST <= value <= _MOST:
        raise InputError(f"{where}: expected a number or null, got {visible(repr(value), 100)}")
    return float(value)


def _absences(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    rows = value if value is not None else []
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        rows = _timed(rows)  # of a real transport
    if not isinstance(rows, list) or any(
        not isinstance(row, dict) or not _ABSENCE.issubset(row) for row in rows
    ):
        raise InputError(
            f"{where}: dropped_peers: expected a list of objects with {', '.join(sorted(_ABSENCE))}"
        )
    for row in rows:
        for key in _ABSENCE:
            _number(row[key], f"{where}: dropped_peers: {key}")
    return rows
