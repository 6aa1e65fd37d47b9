"""One strategy under several seeds: what each run came to, and the object of the summary that stands for all.

    tally = Tally(["AllReduce", "DiLoCo"], seeds=[0, 1, 2])
    tally.add("DiLoCo", 0, {"name": "DiLoCo", "final_loss": 0.2, ...})
    tally.summary()                  # one object a strategy: means, `<field>_std`, `seeds`, `by_seed`

With one seed the objects are the runs' own, unchanged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Tally", "mean_and_deviation", "merged"]

Entry = dict[str, Any]

_NOT_AVERAGED = ("target_loss", "steps", "first_non_finite_step")
_TARGETS = ("missed", "touched", "held")  # from the worst
_OF_EACH = ("dropped_peers",)  # told by seed only


class Tally:
    """The runs of every strategy with every seed, as far as they are known.

    Args:
        labels: the strategies, in their order.
        seeds: all that the experiment has.
    """

    def __init__(self, labels: Sequence[str], seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self._entries: dict[str, dict[int, Entry]] = {label: {} for label in labels}

    def take_finished(self, summary: Iterable[Mapping[str, Any]]) -> None:
        """Take over from an earlier summary what came to its end."""
        for entry in summary:
            runs = entry.get("by_seed") if len(self._seeds) > 1 else [{**entry, "seed": self._seeds[0]}]
            for run in runs or ():
                seed, name = run.get("seed"), entry.get("name")
                if seed not in self._seeds or name not in self._entries:
                    continue
                if not (run.get("incomplete") or run.get("failed")):
                    kept = {key: value for key, value in run.items() if key != "seed"}
                    self.add(str(name), seed, {"name": name, **kept})

    def add(self, label: str, seed: int, entry: Entry) -> None:
        """What one run came to, as its object of a summary."""
        # As it will be read back: JSON has no NaN.
        self._entries[label][seed] = {key: _finite(value) for key, value in entry.items()}

    def entry(self, label: str, seed: int) -> Entry:
        """What was added."""
        return self._entries[label][seed]

    def knows(self, label: str, seed: int) -> bool:
        """Whether this run is done with."""
        return seed in self._entries[label]

    def has_failed(self, label: str) -> bool:
        """Whether a run of this strategy failed: its others are not tried."""
        return any(entry.get("failed") for entry in self._entries[label].values())

    def summary(self) -> list[Entry]:
        """One object for each strategy of which something is known, in their order."""
        if len(self._seeds) == 1:
            return [entry for runs in self._entries.values() for entry in runs.values()]
        return [merged(runs, self._seeds) for runs in self._entries.values() if runs]


def merged(runs: Mapping[int, Mapping[str, Any]], seeds: Sequence[int]) -> Entry:
    """The one object of a strategy's runs by seed: means of numbers, `<field>_std`, `seeds` and `by_seed`.

    A number that is null with a seed (a target never reached) is null here. `target` is the worst of the seeds'.
    What is neither a number nor the same with every seed stands in `by_seed` only. `incomplete` marks a strategy
    that has not come to its end with every one of `seeds`.
    """
    done = [seed for seed in seeds if seed in runs]
    entries = [runs[seed] for seed in done]
    whole: Entry = {}
    deviations: Entry = {}
    for key in dict.fromkeys(key for entry in entries for key in entry):
        values = [entry[key] for entry in entries if key in entry]
        if key == "target":
            whole[key] = min(values, key=lambda value: _TARGETS.index(value) if value in _TARGETS else -1)
        elif key == "first_non_finite_step":
            whole[key] = min((value for value in values if value is not None), default=None)
        elif key in ("incomplete", "failed", "error"):
            whole[key] = next(value for value in values if value)
        elif key not in _NOT_AVERAGED and len(values) == len(entries) and _is_numeric(values):
            whole[key], deviations[f"{key}_std"] = mean_and_deviation(values)
        elif key not in _OF_EACH and all(value == values[0] for value in values):
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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_numeric(values: Sequence[Any]) -> bool:
    """Whether all are numbers or null, and one at least is a number."""
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    return any(numbers) and all(
        number or value is None for number, value in zip(numbers, values, strict=True)
    )
