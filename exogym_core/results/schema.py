"""Schema of a result: each column declared once, with its meaning, unit, and how seeds and tables show it.

    accuracy: float | None = column("share", heading="accuracy")  # meaning: its line of documentation

`TRAIN` and `VALIDATION` are the columns of metrics, `Summary` the fields of an object of summary.json. Files, checks of
files, means over seeds, tables, trackers, pandas frames and the tables of docs/experiment.md follow from them.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence  # noqa: TC003 - fields of dataclasses
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from exogym_core.names import visible
from netsim.docstrings import documented_lines
from netsim.errors import InputError

__all__ = [
    "ABSENCE",
    "COUNTERS",
    "MOST",
    "NUMBERS",
    "SUMMARY",
    "TRAIN",
    "VALIDATION",
    "Column",
    "Summary",
    "can_hold",
    "csv_text",
    "finite",
    "header",
    "parse_number",
    "parse_summary",
    "summary_fields",
    "timed",
]

Unit = Literal["count", "number", "loss", "share", "s", "B", "text", "flag", "mapping", "list"]

MOST = 1e24
"""Limit of steps, bytes and seconds: no run has so many."""
_MOST_NUMBER = 1e300  # of a number in a summary
_NUMBERS = ("count", "number", "loss", "share", "s", "B")


@dataclass(frozen=True)
class Column:
    """Column of metrics, or field of a summary.

    Attributes:
        name: in files.
        meaning: one line for readers.
        unit: of a number (`share`: 0 to 1, shown in percent), or the kind of another value.
        over_seeds: of a strategy with several seeds: the `mean`, with `<name>_std`; the value if it is the `same` with
            every seed; the `worst` or the `least`; the `first` that is true; `none`: by seed only.
        heading: of its column in a table; empty: not shown there.
        optional: whether it is left out where it has no value.
        tidy: position among a run's results in a tidy table; 0: not there.
        choices: accepted texts, from the worst.
    """

    name: str
    meaning: str
    unit: Unit = "count"
    over_seeds: Literal["mean", "same", "worst", "least", "first", "none"] = "mean"
    heading: str = ""
    optional: bool = False
    tidy: int = 0
    choices: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.over_seeds == "worst" and not self.choices:
            raise ValueError(
                f"column {self.name}: over_seeds='worst' orders by choices: give them, from the worst"
            )

    @property
    def is_number(self) -> bool:
        """True unless it holds a text, a flag, a mapping or a list."""
        return self.unit in _NUMBERS


TRAIN = (
    Column("step", "steps done"),
    Column("examples_trained", "samples of all workers so far"),
    Column("train_loss", "mean over the samples of all workers in this step", "loss"),
    Column("train_perplexity", "exp(train_loss)", "number"),
    Column("lr", "learning rate", "number"),
    Column("virtual_seconds", "virtual time at which the last rank finished the step", "s"),
    Column("bytes_sent", "payload of the calls that workers have posted, headers not counted", "B"),
    Column("payload_bytes", "encoded messages of a worker once each, mean over workers", "B"),
    Column(
        "wan_bytes",
        "part of bytes_sent between regions, and what servers and stores sent between regions",
        "B",
    ),
    Column("compute_utilisation", "computing / virtual seconds, mean over ranks", "share"),
    Column(
        "num_peers", "ranks in the step's round, where rounds continue without absent ones", optional=True
    ),
    Column("num_alive", "ranks that were alive when the step's round was formed", optional=True),
)
"""A row of `metrics/<strategy>.csv` is a step."""

VALIDATION = (
    Column("step", "steps done"),
    Column("local_loss", "loss of the lowest present rank's model", "loss"),
    Column("local_perplexity", "exp(local_loss)", "number"),
    Column("global_loss", "loss of the mean of all present ranks' models", "loss"),
    Column("global_perplexity", "exp(global_loss)", "number"),
    Column("virtual_seconds", "virtual time of the step", "s"),
    Column("judged_loss", "loss of the judged model", "loss"),
    Column("judged_virtual_seconds", "virtual time at which the judged model was complete", "s"),
    Column("judged_step", "step after which it was complete"),
    Column("accuracy", "accuracy of the judged model, if the task has one", "number"),
)
"""A row of `metrics/<strategy>.validation.csv` is an evaluation."""

COUNTERS = tuple(column.name for column in TRAIN if column.unit == "B")
"""Columns that count bytes from the start of a run."""

ABSENCE = ("rank", "step", "virtual_seconds", "back_step", "back_virtual_seconds")
"""Keys of an object of `dropped_peers`."""

_UNITS = {column.name: column.unit for column in (*TRAIN, *VALIDATION)}


def csv_text(rows: Sequence[Mapping[str, Any]], first_columns: Iterable[str]) -> str:
    """Rows as CSV: `first_columns`, then whatever else the rows hold, in order of appearance.

    Floats are written so that they read back exactly; None is an empty field.

    >>> csv_text([{"loss": 0.1, "step": 1}], ["step"])
    'step,loss\\n1,0.1\\n'
    """
    first = list(first_columns)
    # A real transport's clock stands where the virtual one would.
    if any("wall_seconds" in row for row in rows):
        first = [column.replace("virtual_seconds", "wall_seconds") for column in first]
    columns = dict.fromkeys(first)
    for row in rows:
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    return text.getvalue()


def can_hold(column: str, value: float) -> bool:
    """True if `value` is possible in a column of metrics or links; losses may be infinite or no numbers.

    >>> can_hold("step", -1.0), can_hold("train_loss", float("inf")), can_hold("a->b", 8.0)
    (False, True, True)
    """
    unit = "B" if "->" in column else _UNITS.get(column.replace("wall_", "virtual_"), "number")
    return unit not in ("count", "s", "B") or 0 <= value <= MOST


def timed(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Rows with the seconds of a real transport's clock in the columns of virtual seconds."""
    if not any("wall_seconds" in row for row in rows):
        return rows
    return [
        {name.replace("wall_seconds", "virtual_seconds"): value for name, value in row.items()}
        for row in rows
    ]


def finite(value: Any) -> Any:
    """The value as JSON has it: None for a float that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def column(unit: Unit = "count", *, default: Any = None, **others: Any) -> Any:
    """A field of `Summary`; `others` are attributes of its `Column`, whose meaning is the line of documentation."""
    return field(default=default, metadata={"unit": unit, **others})


@dataclass(frozen=True)
class Summary:
    """An object of summary.json, in the order of its keys; None: not measured, or never.

    Attributes:
        name: label of the strategy
        final_loss: loss of the judged model at the end
        accuracy: accuracy of the judged model at the end
        virtual_seconds: virtual time at which the last rank ended its last step
        virtual_seconds_to_target: virtual time at which the first judged model at the target loss was
            complete; null if the target was not held
        compute_utilisation: computing / virtual seconds, mean over ranks
        bytes_sent_per_worker: payload of the calls that a worker posted, mean over workers
        wan_bytes: part of bytes_sent between regions, and what servers and stores sent between regions
        strategy: name of the strategy
        steps: steps done by each worker
        bytes_sent: payload of the calls that all workers posted, headers not counted
        payload_bytes: encoded messages of a worker once each, as papers count
        target_loss: target of the experiment
        collectives: algorithms of the simulated collectives, by operation
        target: `held`, `touched` or `missed`; null without a target
        judged: which model is judged: `replica`, `outer`, `server` or `own`
        window_limit: connection on which a sender's window limited collectives most
        later_weather: weather of the topology that would have begun after the run's end
        coding: `not charged` if encoding took no time although `compute.coding` has speeds
        mean_of_replicas_loss: loss of the mean of all ranks' models at the end
        computing_seconds: computing of a worker, mean over workers
        network_seconds: waiting for bytes under way, mean over workers
        waiting_seconds: waiting for other workers, mean over workers
        first_non_finite_step: first step with a loss that is nan or infinite
        alive_ranks: ranks that were alive when rounds were formed, mean over rounds
        averaging_ranks: ranks that took part in rounds, mean over rounds
        dropped_peers: absences of ranks that rounds continued without
        options: options that the strategy and its optimizers were run with, defaults included
        parameters: parameters of the model
        wall_seconds: seconds by the clock, over a real transport
        incomplete: true if it was stopped before its end
        failed: true if it failed
        error: line with which it failed
    """

    name: str = column("text", default="")
    final_loss: float | None = column("loss", heading="final loss", tidy=1)
    accuracy: float | None = column("share", heading="accuracy")
    virtual_seconds: float | None = column("s", heading="virtual time")
    virtual_seconds_to_target: float | None = column("s", tidy=2)
    compute_utilisation: float | None = column("share", heading="compute utilisation", tidy=4)
    bytes_sent_per_worker: float | None = column("B", heading="sent per worker")
    wan_bytes: float | None = column("B", heading="sent over WAN")
    strategy: str = column("text", default="")
    steps: float | None = column(over_seeds="same")
    bytes_sent: float | None = column("B")
    payload_bytes: float | None = column("B")
    target_loss: float | None = column("loss", over_seeds="same")
    collectives: Mapping[str, Any] = field(default_factory=dict, metadata={"unit": "mapping"})
    target: str | None = column("text", over_seeds="worst", choices=("missed", "touched", "held"), tidy=3)
    judged: str | None = column("text")
    window_limit: str | None = column("text", optional=True)
    later_weather: str | None = column("text", optional=True)
    coding: str | None = column("text", optional=True)
    mean_of_replicas_loss: float | None = column("loss")
    computing_seconds: float | None = column("s", tidy=5)
    network_seconds: float | None = column("s", tidy=6)
    waiting_seconds: float | None = column("s", tidy=7)
    first_non_finite_step: float | None = column(over_seeds="least", optional=True)
    alive_ranks: float | None = column("number", optional=True, heading="alive")
    averaging_ranks: float | None = column("number", optional=True, heading="took part")
    dropped_peers: Sequence[Mapping[str, Any]] = column("list", over_seeds="none", optional=True, default=())
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"unit": "mapping"})
    parameters: float | None = column(over_seeds="same")
    wall_seconds: float | None = column("s", optional=True)
    incomplete: bool = column("flag", over_seeds="first", optional=True, default=False)
    failed: bool = column("flag", over_seeds="first", optional=True, default=False)
    error: str | None = column("text", over_seeds="first", optional=True)

    @property
    def held_seconds(self) -> float | None:
        """Seconds to the target; None where it was not held."""
        return self.virtual_seconds_to_target if self.target == "held" else None


_MEANINGS = documented_lines(Summary)
SUMMARY = tuple(Column(each.name, _MEANINGS[each.name], **each.metadata) for each in fields(Summary))
"""Columns of `Summary`, in order."""
NUMBERS = tuple(each.name for each in SUMMARY if each.unit in _NUMBERS)
"""Those that are numbers, or none."""


def header(columns: Sequence[Column]) -> list[str]:
    """Names of the columns that a file has from its first row on."""
    return [column.name for column in columns if not column.optional]


def summary_fields(values: Mapping[str, Any], kept: Sequence[str] = ()) -> dict[str, Any]:
    """The object of summary.json with these `values` by name.

    Optional ones that are None or False are left out unless they are among `kept`.
    """
    return {
        column.name: values[column.name]
        for column in SUMMARY
        if not column.optional
        or column.name in kept
        or not (values.get(column.name) is None or values[column.name] is False)
    }


def parse_summary(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values of an object of summary.json by field of `Summary`, checked.

    Seconds of a real transport stand in the place of virtual ones.

    Raises:
        InputError: a value is of another kind; the line begins with `where`.
    """
    values = {column.name: _parsed(column, entry.get(column.name), where) for column in SUMMARY}
    if values["target"] is None and values["virtual_seconds_to_target"] is not None:
        values["target"] = "held"  # written before there was the word
    if values["virtual_seconds"] is None:
        values["wan_bytes"] = values["wan_bytes"] or None  # without a network there are no regions
        values["virtual_seconds"] = values["wall_seconds"]
    values["error"] = (values["error"] or "it failed") if values["failed"] else None
    return values


def _parsed(column: Column, value: Any, where: str) -> Any:
    if column.unit == "flag":
        return bool(value)
    if column.unit == "mapping":
        return value if isinstance(value, dict) else {}
    if column.unit == "list":
        return _absences(value, where)
    if value is None:
        return "" if column.name in ("name", "strategy") else None
    if column.is_number:
        return parse_number(value, f"{where}: {column.name}")
    if column.choices and value not in column.choices:
        raise InputError(
            f"{where}: {column.name}: expected one of {', '.join(column.choices)}, got {value!r}"
        )
    return str(value)


def parse_number(value: Any, where: str) -> float | None:
    """A number as a float, or None.

    Raises:
        InputError: it is neither; the line begins with `where`.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_NUMBER:
        raise InputError(f"{where}: expected a number or null, got {visible(repr(value), 100)}")
    return float(value)


def _absences(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    rows = [] if value is None else value
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        rows = timed(rows)
    if not isinstance(rows, list) or any(
        not isinstance(row, dict) or not row.keys() >= set(ABSENCE) for row in rows
    ):
        raise InputError(
            f"{where}: dropped_peers: expected a list of objects with {', '.join(sorted(ABSENCE))}"
        )
    for row in rows:
        for key in ABSENCE:
            parse_number(row[key], f"{where}: dropped_peers: {key}")
    return rows
