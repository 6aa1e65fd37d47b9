"""A run's results as the report needs them, read back from its folder alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netsim.files.documents import load_document
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.results.record import RunFolder

__all__ = ["BASELINE", "Results", "StrategyResult"]

BASELINE = "AllReduce"
"""The strategy that savings are told against."""

_NUMBERS = (
    "final_loss",
    "accuracy",
    "virtual_seconds",
    "virtual_seconds_to_target",
    "compute_utilisation",
    "bytes_sent_per_worker",
    "wan_bytes",
)


_ABSENCE = {"rank", "step", "virtual_seconds", "back_step", "back_virtual_seconds"}


@dataclass(frozen=True)
class StrategyResult:
    """One strategy's line of the summary and its metrics; None is 'not known' or 'never'.

    Attributes:
        name: its label.
        strategy: the strategy's own name.
        incomplete: it was stopped before its last step.
        dropped_peers: absences of ranks that it went on without.
        train: rows of training metrics.
        validation: rows of validation metrics.
        The others are the summary's, with the meanings of DESIGN's 'Columns'.
    """

    name: str
    strategy: str
    final_loss: float | None = None
    accuracy: float | None = None
    virtual_seconds: float | None = None
    virtual_seconds_to_target: float | None = None
    compute_utilisation: float | None = None
    bytes_sent_per_worker: float | None = None
    wan_bytes: float | None = None
    steps: int | None = None
    incomplete: bool = False
    dropped_peers: Sequence[Mapping[str, Any]] = ()
    train: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    validation: Sequence[Mapping[str, float]] = field(default=(), repr=False)

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(step, loss) of the averaged model where it was evaluated, else of training."""
        judged = [(row["step"], row["global_loss"]) for row in self.validation if "global_loss" in row]
        return judged or [(row["step"], row["train_loss"]) for row in self.train if "train_loss" in row]

    def at_steps(self, column: str) -> dict[float, float]:
        """A column of the training metrics by step; 0 at step 0, before anything has happened."""
        return {0.0: 0.0} | {row["step"]: row[column] for row in self.train if column in row}


@dataclass(frozen=True)
class Results:
    """All that a report shows.

    Attributes:
        settings: the resolved experiment as plain data.
        experiment_yaml: the same as text.
        strategies: in the order of the experiment.
    """

    settings: Mapping[str, Any]
    experiment_yaml: str
    strategies: Sequence[StrategyResult]

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
        entries = folder.read_summary()
        return cls(
            settings=document.data,
            experiment_yaml=path.read_text(encoding="utf-8"),
            strategies=[_strategy_result(folder, entry) for entry in entries],
        )

    @property
    def target_loss(self) -> float | None:
        """The loss to be reached, if one was set."""
        value = self.settings.get("target_loss")
        return float(value) if isinstance(value, int | float) else None

    @property
    def baseline(self) -> StrategyResult | None:
        """The strategy that savings are told against, if it ran to its end."""
        for result in self.strategies:
            if result.strategy == BASELINE and not result.incomplete:
                return result
        return None

    @property
    def incomplete(self) -> bool:
        """Whether a strategy was stopped, or never begun."""
        wanted = self.settings.get("strategies")
        num_wanted = len(wanted) if isinstance(wanted, list) else 0
        return len(self.strategies) < num_wanted or any(result.incomplete for result in self.strategies)


def _strategy_result(folder: RunFolder, entry: Mapping[str, Any]) -> StrategyResult:
    where = f"{folder.path / 'summary.json'}: {entry['name']}"
    return StrategyResult(
        name=entry["name"],
        strategy=str(entry.get("strategy", entry["name"])),
        steps=entry["steps"] if isinstance(entry.get("steps"), int) else None,
        incomplete=bool(entry.get("incomplete", False)),
        dropped_peers=_absences(entry.get("dropped_peers"), where),
        train=folder.read_metrics(entry["name"]),
        validation=folder.read_metrics(entry["name"], "validation"),
        **{key: _number(entry.get(key), f"{where}: {key}") for key in _NUMBERS},
    )


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: expected a number or null, got {value!r}")
    return float(value)


def _absences(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    rows = value if value is not None else []
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
