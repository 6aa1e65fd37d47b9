"""Which point comes next: every one of a grid, one drawn at random, or one that Optuna proposes.

A source is asked for a point and told what came of it. Asked and told the same again, it proposes the same again:
that is how a sweep that was killed goes on, without a database.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.app.studies.points import Range
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from exogym_core.app.studies.points import Point, Sweep

__all__ = ["TrialSource", "source_of"]

_REDRAWS = 100  # before a space counts as used up


class TrialSource(Protocol):
    """Proposes points, one after the other; several may be asked for before any is told of."""

    def ask(self) -> Point | None:
        """The next point; None: there are no more."""

    def tell(self, value: float | None) -> None:
        """What came of the first that was asked for and not told of: the number to be small; None: it failed."""


def source_of(sweep: Sweep) -> TrialSource:
    """The source that the sweep names.

    Raises:
        InputError: it is Optuna, which is not installed.
    """
    if sweep.search == "grid":
        return _Grid(sweep)
    return _Optuna(sweep) if sweep.search == "optuna" else _Random(sweep)


class _Grid:
    def __init__(self, sweep: Sweep) -> None:
        self._points = iter(sweep.grid())

    def ask(self) -> Point | None:
        return next(self._points, None)

    def tell(self, value: float | None) -> None:
        """A grid learns nothing."""


class _Random:
    """Each number evenly from its range, each other value evenly from its list; no point twice."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._random = random.Random(sweep.search_seed)
        self._seen: set[str] = set()

    def ask(self) -> Point | None:
        for _ in range(_REDRAWS if len(self._seen) < self._sweep.trials else 0):
            point = {
                key: values.at(self._random.random())
                if isinstance(values, Range)
                else self._random.choice(values)
                for key, values in self._sweep.axes.items()
            }
            point |= self._random.choice(self._sweep.listed)
            text = json.dumps(point, sort_keys=True)
            if text not in self._seen:
                self._seen.add(text)
                return point
        return None

    def tell(self, value: float | None) -> None:
        """Draws are independent."""


class _Optuna:
    """Optuna's tree-structured Parzen estimator, in memory."""

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ImportError:
            raise InputError("search optuna: Optuna is not installed: pip install 'netgym[ray]'") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._sweep, self._left = optuna, sweep, sweep.trials
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=sweep.search_seed))
        self._space = {key: self._distribution(values) for key, values in sweep.axes.items()}
        if len(sweep.listed) > 1:
            self._space["points"] = self._distribution(sweep.listed)
        self._asked: deque[Any] = deque()

    def _distribution(self, values: Any) -> Any:
        distributions = self._optuna.distributions
        if not isinstance(values, Range):  # by position, since values may be mappings
            return distributions.CategoricalDistribution(range(len(values)))
        low, high = values.low, values.high
        if values.is_whole:
            return distributions.IntDistribution(low, high, log=values.log, step=values.step or 1)
        return distributions.FloatDistribution(low, high, log=values.log, step=values.step)

    def ask(self) -> Point | None:
        if not self._left:
            return None
        self._left -= 1
        self._asked.append(self._study.ask(self._space))
        drawn = self._asked[-1].params
        axes = self._sweep.axes
        point: Point = {
            key: drawn[key] if isinstance(values, Range) else values[drawn[key]]
            for key, values in axes.items()
        }
        point |= self._sweep.listed[drawn.get("points", 0)]
        return point

    def tell(self, value: float | None) -> None:
        state, trial = self._optuna.trial.TrialState, self._asked.popleft()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if value is None:
                self._study.tell(trial, state=state.FAIL)
            else:
                self._study.tell(trial, value if math.isfinite(value) else math.inf)
