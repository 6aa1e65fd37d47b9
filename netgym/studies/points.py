"""Points of a sweep: the `sweep:` of an experiment, checked, and the sources that propose points.

    sweep:
      seeds: 3                          # of every point
      topology: [lan, wan-4-regions]    # a list: every combination of the lists
      strategies.*.lr: [0.004, 0.016]   # a key path as --set has it; * is every strategy
      points:                           # and each of these with every combination
        - {strategies.DiLoCo.H: 20}
        - {strategies.DiLoCo.H: 80}

    Sweep.parse(document).grid()        # 8 points, each {key path: value}

With `search: random` or `search: optuna` a key may have a range, `{low: 1e-4, high: 1e-1, log: true}`; `trials` is the
number of points, `minimise` the field of the summary that should be small, and `at_once` the number of points that
Optuna proposes before it gets results.

A source proposes points and receives their results. It proposes the same points for the same results, so a killed sweep
resumes without a database.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from exogym_core.results import schema
from exogym_core.results.reading import value_key, value_text, value_texts
from netsim.errors import InputError, unknown_name
from netsim.files.schemas import Schema, validate_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from netsim.files.documents import Document

__all__ = [
    "Point",
    "Range",
    "Sweep",
    "TuneSettings",
    "batches_of",
    "point_text",
    "sweep_schema",
    "tune_schema",
    "values_schema",
]

Point = dict[str, Any]
"""Key path -> value."""

MOST_POINTS = 100_000
_OWN_KEYS = ("points", "search", "trials", "minimise", "search_seed", "at_once", "seeds")
"""Keys of `sweep:` that are no key paths."""
_REDRAWS = 100  # before a space counts as used up


class Range(Schema):
    """Numbers from `low` to `high`, both included: for searches.

    Attributes:
        low, high: the bounds; where both are whole numbers, all are.
        log: drawn evenly over the logarithm.
        step: the distance of neighbouring numbers, counted from `low`; None: any number (whole ones: 1).
    """

    low: Annotated[int | float, Field(allow_inf_nan=False)]
    high: Annotated[int | float, Field(allow_inf_nan=False)]
    log: bool = False
    step: Annotated[int | float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Range:
        if self.high < self.low:
            raise InputError(f"high {self.high} is below low {self.low}")
        if self.log and self.low <= 0:
            raise InputError(f"low {self.low} has no logarithm: give a number above 0, or leave log out")
        if self.log and self.step is not None:
            raise InputError("log and step do not go together: leave one out")
        return self

    @property
    def is_whole(self) -> bool:
        """True if the range is of whole numbers."""
        return all(isinstance(bound, int) for bound in (self.low, self.high, self.step or 1))

    def at(self, fraction: float) -> float | int:
        """The number at `fraction` (0 to below 1) of the way.

        >>> Range(low=1, high=100, log=True).at(0.5), Range(low=0, high=4, step=2).at(0.99)
        (10, 4)
        """
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + fraction * (high - low))
            return min(max(round(value), int(self.low)), int(self.high)) if self.is_whole else value
        step = self.step or (1 if self.is_whole else None)
        if step is None:
            return self.low + fraction * (self.high - self.low)
        return self.low + step * int(fraction * (int((self.high - self.low) / step + 1e-9) + 1))


class Sweep(Schema):
    """A checked sweep: the keys of `sweep:` that are no key paths, and `axes`, those that are.

    Attributes:
        axes: key path -> values, or a range of numbers.
        points: by hand; every combination of the axes is tried with each.
        search: `grid` (all points), `random` or `optuna`.
        trials: number of points that a search tries.
        minimise: field of the summary that a search minimises.
        search_seed: of the search's own draws.
        at_once: points that an Optuna search proposes before it needs results, and so can run side by side.
        seeds: of every point, as `seeds` of an experiment; None: the experiment's.
    """

    axes: dict[str, list[Any] | Range] = {}  # noqa: RUF012 (pydantic copies it)
    points: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    search: Literal["grid", "random", "optuna"] = "grid"
    trials: Annotated[int, Field(ge=1, le=MOST_POINTS)] | None = None
    minimise: str | None = None
    search_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    at_once: Annotated[int, Field(ge=1, le=MOST_POINTS)] | None = None
    seeds: Any = None

    @classmethod
    def parse(cls, document: Document) -> Sweep:
        """Read the document's `sweep`.

        Raises:
            InputError: it has no sweep, or something in it is wrong; the line names the place.
        """
        data = document.data.get("sweep") if isinstance(document.data, dict) else None
        if data is None:
            remedy = (
                "add one, such as 'sweep: {strategies.*.lr: [0.01, 0.03]}', or use --vary (in Python: over=)"
            )
            raise document.error((), f"has no 'sweep': {remedy}")
        part = document.part(("sweep",))
        if not isinstance(data, dict) or not data:
            raise part.error((), "expected a mapping, such as {strategies.*.lr: [0.01, 0.03]}")
        own = {key: value for key, value in data.items() if key in _OWN_KEYS}
        settings = validate_document(cls, replace(part, data=own))
        axes = {key: _axis(part, key, value) for key, value in data.items() if key not in _OWN_KEYS}
        sweep = settings.model_copy(update={"axes": axes})
        for is_wrong, key, problem in sweep._rules():
            if is_wrong:
                raise part.error((key,) if key else (), problem)
        field = sweep.minimise
        if field is not None and field.removesuffix("_std") not in schema.NUMBERS:
            raise part.error(("minimise",), unknown_name("number of the summary", field, schema.NUMBERS))
        return sweep

    def _rules(self) -> list[tuple[object, str, str]]:
        """Mistakes of a sweep whose keys are right one by one: whether it has each, the key, and the words."""
        varied = {key for point in [self.axes, *self.listed] for key in point} & {"seed", "seeds"}
        ranges = [key for key, values in self.axes.items() if isinstance(values, Range)]
        of_range = ranges[0] if ranges else ""
        grid, optuna = self.search == "grid", self.search == "optuna"
        for_all = "a grid tries all points: leave"
        missing = "the number of points is missing: add trials, such as trials: 50"
        unused = f"the points' {min(varied, default='')} would go unused: leave one of them out"
        foreign = "is for search: optuna, whose points depend on earlier results; leave it out"
        aimless = "nothing to minimise: add minimise, such as minimise: virtual_seconds_to_target"
        both = min({key for point in self.listed for key in point} & self.axes.keys(), default="")
        nothing = "there is nothing to search: add a key, such as strategies.*.lr: [0.01, 0.03]"
        many = f"{self.num_points} points are too many: {MOST_POINTS} at most"
        return [
            (self.at_once is not None and not optuna, "at_once", foreign),
            (self.seeds is not None and varied, "seeds", unused),
            (both, both, "the points have this key too, and need one value of it: leave one of them out"),
            (grid and ranges, of_range, "a range is for a search: give a list, or add search: random"),
            (grid and self.trials, "trials", f"{for_all} trials out, or add search: random"),
            (grid and self.minimise is not None, "minimise", f"{for_all} it out, or add search: optuna"),
            (not grid and not self.trials, "search", missing),
            (optuna and self.minimise is None, "search", aimless),
            (not grid and not self.axes and self.listed == [{}], "", nothing),
            (grid and self.num_points > MOST_POINTS, "", many),
        ]

    @property
    def listed(self) -> list[Point]:
        """Points by hand; one without keys where there are none."""
        return self.points or [{}]

    @property
    def num_points(self) -> int:
        """Number of points; of a search, at most."""
        if self.trials is not None:
            return self.trials
        lengths = [len(values) for values in self.axes.values() if not isinstance(values, Range)]
        return math.prod(lengths) * len(self.listed)

    def texts(self) -> dict[str, dict[str, str]]:
        """Distinct text of each value in lists and points, by key path and `value_key`."""
        keys = dict.fromkeys(key for point in (self.axes, *self.listed) for key in point)
        lists = {key: [each[key] for each in self.listed if key in each] for key in keys}
        lists |= {key: values for key, values in self.axes.items() if isinstance(values, list)}
        return {key: value_texts(values) for key, values in lists.items()}

    def grid(self) -> list[Point]:
        """All combinations, the last key changing first."""
        lists = {key: values for key, values in self.axes.items() if not isinstance(values, Range)}
        axes = [[(key, value) for value in values] for key, values in lists.items()]
        return [
            {**dict(combination), **listed}
            for combination in itertools.product(*axes)
            for listed in self.listed
        ]


def values_schema() -> dict[str, Any]:
    """JSON Schema of the values of one key."""
    return {"anyOf": [{"type": "array", "minItems": 1}, {"$ref": "#/$defs/Range"}]}


def sweep_schema() -> dict[str, Any]:
    """JSON Schema of `sweep:`, with the definitions that it refers to."""
    own = Sweep.model_json_schema()["properties"]
    del own["axes"]
    return {
        "type": "object",
        "minProperties": 1,
        "properties": own,
        "additionalProperties": values_schema(),
        "$defs": {"Range": Range.model_json_schema()},
    }


class TuneSettings(Schema):
    """The keys of `tune:`."""

    over: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: Any = 2
    search: Literal["grid", "random", "optuna"] = "grid"
    trials: int | None = Field(default=None, ge=1)


def tune_schema() -> dict[str, Any]:
    """JSON Schema of `tune:`, with the definitions that it refers to."""
    space = {"type": "object", "additionalProperties": values_schema()}
    properties = TuneSettings.model_json_schema()["properties"]
    properties["over"] = {"type": "object", "additionalProperties": space}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {"Range": Range.model_json_schema()},
    }


def _axis(part: Document, key: str, value: Any) -> list[Any] | Range:
    if isinstance(value, dict):
        return validate_document(Range, part.part((key,)))
    if not isinstance(value, list) or not value:
        raise part.error((key,), "expected a list of values, or for a search {low: ..., high: ...}")
    texts = [json.dumps(each, sort_keys=True) for each in value]
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise part.error((key,), f"{twice} is there twice: give each value once")
    return value


def point_text(point: Mapping[str, Any], texts: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """A point on one line; of a mapping its name, if it has one.

    Args:
        point: value by key path.
        texts: of the sweep's values, see `Sweep.texts`; None: short ones.

    >>> point_text({"topology": {"name": "home", "links": []}, "strategies.*.lr": 0.01})
    'topology=home, strategies.*.lr=0.01'
    """
    known = texts or {}
    words = [
        f"{key}={known.get(key, {}).get(value_key(value)) or value_text(value)}"
        for key, value in point.items()
    ]
    return ", ".join(words) or "as it is"


def batches_of(sweep: Sweep) -> Iterator[tuple[list[Point], Callable[[Sequence[float | None]], None]]]:
    """Points of a sweep in batches, each with a function that takes its results before the next batch.

    A result is the number to minimise; None: the point failed. Points of a grid or of a random search depend on none,
    and are one batch.

    Raises:
        InputError: the search is Optuna's, which is not installed.
    """
    if sweep.search != "optuna":
        yield sweep.grid() if sweep.search == "grid" else list(_drawn(sweep)), lambda results: None
        return
    try:
        import optuna
    except ImportError:
        raise InputError("search optuna: Optuna is not installed: pip install 'netgym[ray]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=sweep.search_seed))
    space = {key: _distribution(optuna, values) for key, values in sweep.axes.items()}
    if len(sweep.listed) > 1:
        space["points"] = _distribution(optuna, sweep.listed)
    at_once = sweep.at_once or 1
    for first in range(0, sweep.num_points, at_once):
        trials = [study.ask(space) for _ in range(min(at_once, sweep.num_points - first))]

        def report(results: Sequence[float | None], trials: Sequence[Any] = trials) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for trial, result in zip(trials, results, strict=True):
                    if result is None:
                        study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    else:
                        study.tell(trial, result if math.isfinite(result) else math.inf)

        points = []
        for drawn in (trial.params for trial in trials):
            point: Point = {
                key: drawn[key] if isinstance(values, Range) else values[drawn[key]]
                for key, values in sweep.axes.items()
            }
            points.append({**point, **sweep.listed[drawn.get("points", 0)]})
        yield points, report


def _distribution(optuna: Any, values: Any) -> Any:
    """Values of a key for Optuna: lists by position, since they may hold mappings."""
    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution(range(len(values)))
    if values.is_whole:
        return optuna.distributions.IntDistribution(
            values.low, values.high, log=values.log, step=values.step or 1
        )
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _drawn(sweep: Sweep) -> Iterator[Point]:
    """Draw numbers evenly from their ranges and other values evenly from their lists, no point twice."""
    draw, seen = random.Random(sweep.search_seed), set()
    for _ in range(sweep.num_points):
        for _ in range(_REDRAWS):
            point: Point = {
                key: values.at(draw.random()) if isinstance(values, Range) else draw.choice(values)
                for key, values in sweep.axes.items()
            }
            point |= draw.choice(sweep.listed)
            text = json.dumps(point, sort_keys=True)
            if text not in seen:
                seen.add(text)
                yield point
                break
        else:
            return
