"""Several seeds: one object of the summary a strategy, and Student's intervals.

    tally = Tally(["AllReduce", "DiLoCo"], seeds=[0, 1, 2])
    tally.add("DiLoCo", 0, {"name": "DiLoCo", "final_loss": 0.2, ...})
    tally.summary()                  # one object a strategy: means, `<field>_std`, `seeds`, `by_seed`

With one seed the objects are the runs' own, unchanged, and there is no interval.

Student, The Probable Error of a Mean (1908): intervals that hold with few seeds too, if their values are about normal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from exogym_core.results.schema import SUMMARY, finite

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


__all__ = ["Tally", "mean_and_deviation", "merged", "paired_interval", "t_interval"]

Entry = dict[str, Any]

_COLUMNS = {column.name: column for column in SUMMARY}


class Tally:
    """Summaries of the runs of every strategy with every seed, as they come.

    Args:
        labels: the strategies, in their order.
        seeds: all that the experiment has.
    """

    def __init__(self, labels: Sequence[str], seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self._entries: dict[str, dict[int, Entry]] = {label: {} for label in labels}

    def take_finished(self, summary: Iterable[Mapping[str, Any]], seed: int) -> None:
        """Take the finished runs of an earlier summary, which has that `seed` where it has no several."""
        for entry in summary:
            for run in entry.get("by_seed") or [{**entry, "seed": seed}]:
                of_run, name = run.get("seed"), entry.get("name")
                if of_run not in self._seeds or name not in self._entries:
                    continue
                if not (run.get("incomplete") or run.get("failed")):
                    kept = {key: value for key, value in run.items() if key != "seed"}
                    self.add(str(name), of_run, {"name": name, **kept})

    def add(self, label: str, seed: int, entry: Entry) -> None:
        """Add a run's object of the summary."""
        # As it will be read back: JSON has no NaN.
        self._entries[label][seed] = {key: finite(value) for key, value in entry.items()}

    def entry(self, label: str, seed: int) -> Entry:
        """The object that was added for a run."""
        return self._entries[label][seed]

    def drop(self, label: str, seed: int) -> None:
        """Remove a run; does nothing where it has not been added."""
        self._entries[label].pop(seed, None)

    def has(self, label: str, seed: int) -> bool:
        """True if the run's object was added."""
        return seed in self._entries[label]

    def summary(self) -> list[Entry]:
        """An object for each strategy with a run that has ended, in their order."""
        if len(self._seeds) == 1:
            return [entry for runs in self._entries.values() for entry in runs.values()]
        return [merged(runs, self._seeds) for runs in self._entries.values() if runs]


def merged(runs: Mapping[int, Mapping[str, Any]], seeds: Sequence[int]) -> Entry:
    """Merge the objects of a strategy's runs by seed: means of numbers, `<field>_std`, `seeds` and `by_seed`.

    A number that is null with a seed (a target never reached) is null here. `target` is the worst of the seeds'.
    Values that are neither numbers nor the same with every seed are in `by_seed` only. `incomplete` marks a strategy
    that has not ended with each of `seeds`.
    """
    done = [seed for seed in seeds if seed in runs]
    entries = [runs[seed] for seed in done]
    whole: Entry = {}
    deviations: Entry = {}
    for key in dict.fromkeys(key for entry in entries for key in entry):
        values = [entry[key] for entry in entries if key in entry]
        column = _COLUMNS.get(key)
        rule = "mean" if column is None else column.over_seeds
        if rule == "worst" and column is not None:
            whole[key] = min(
                values, key=lambda value: column.choices.index(value) if value in column.choices else -1
            )
        elif rule == "least":
            whole[key] = min((value for value in values if value is not None), default=None)
        elif rule == "first":
            whole[key] = next(value for value in values if value)
        elif rule == "mean" and len(values) == len(entries) and _is_numeric(values):
            whole[key], deviations[f"{key}_std"] = mean_and_deviation(values)
        elif rule != "none" and all(value == values[0] for value in values):
            whole[key] = values[0]
    if len(done) < len(seeds) and not whole.get("failed"):
        whole["incomplete"] = True
    by_seed = [
        {"seed": seed} | {key: value for key, value in entry.items() if key != "name"}
        for seed, entry in zip(done, entries, strict=True)
    ]
    return whole | deviations | {"seeds": done, "by_seed": by_seed}


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None where a value is None, of one value no deviation. All are finite.

    >>> mean_and_deviation([1.0, 3.0]), mean_and_deviation([2]), mean_and_deviation([1.0, None])
    ((2.0, 1.4142135623730951), (2, None), (None, None))
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None, None
    mean = known[0] if all(value == known[0] for value in known) else math.fsum(known) / len(known)
    if all(isinstance(value, int) for value in known) and mean == int(mean):
        mean = int(mean)
    if len(known) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1))


def _is_numeric(values: Sequence[Any]) -> bool:
    """True if all are numbers or null, and one at least is a number."""
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    return any(numbers) and all(
        number or value is None for number, value in zip(numbers, values, strict=True)
    )


# --- intervals ----------------------------------------------------------------------------------------------

_Z = 1.959963984540054  # of the normal distribution: 95 % lie within
_FEW = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447)  # of Student's t with 1, 2, ... degrees of freedom
_SERIES = (
    (_Z**3 + _Z) / 4,
    (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
    (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
)
"""Of 1/n, 1/n^2, 1/n^3, for more degrees: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5."""


def t_interval(values: Collection[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean of `values`; None with fewer than two, or where one is not finite.

    Args:
        values: one a seed.

    >>> low, high = t_interval([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    >>> t_interval([2.0, 2.0]), t_interval([2.0])
    ((2.0, 2.0), None)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    mean, deviation = mean_and_deviation(list(values))
    assert mean is not None
    assert deviation is not None
    free = len(values) - 1
    if free <= len(_FEW):
        quantile = _FEW[free - 1]
    else:
        quantile = _Z + sum(term / free**power for power, term in enumerate(_SERIES, 1))
    half = quantile * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean of `first - second`, pair by pair: of two strategies with the same seeds.

    >>> paired_interval([5.0, 7.0, 8.0], [4.0, 6.0, 7.0])
    (1.0, 1.0)
    """
    return t_interval([a - b for a, b in zip(first, second, strict=True)])
