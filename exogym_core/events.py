"""Events of a run: what ranks mark, what the evaluator finds, what sites send each other; and their records.

    comm.mark(StepDone(...))  ->  kernel, pipe or side channel  ->  run monitor  ->  recorder, checkpoints

A record is an event in plain values, for logs, stores and sockets: the name of its class and its values in a list. Own
programs may mark any mapping of plain values, which is its own record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = [
    "Absent",
    "Announced",
    "Correlated",
    "Evaluated",
    "EvaluationPoint",
    "EvaluationTaken",
    "Finding",
    "Finished",
    "Grid",
    "Marked",
    "RankRow",
    "RepeatedStep",
    "RoundPlace",
    "Saved",
    "Served",
    "SharedFinding",
    "SiteRow",
    "Snapshot",
    "StepDone",
    "from_record",
    "step_of",
    "to_record",
]


class Grid(IntEnum):
    """Unit in which evaluations are counted. The end comes last."""

    STEP = 0
    CLOCK = 1
    END = 2


class EvaluationPoint(NamedTuple):
    """One evaluation of a run; points sort in the order in which evaluations are reported.

    Attributes:
        grid: what it is counted by.
        number: steps, or the multiple of the seconds between evaluations; 0 at the end.
    """

    grid: Grid
    number: int = 0


class RoundPlace(NamedTuple):
    """Place of a step among rounds that continue without absent ranks.

    Attributes:
        round: counted from 1.
        averaged_ranks: members of the round's average, in the row of the step that ends it.
        healed_ranks: those of them that have taken over the others' state in it.
        missed_round: first round that the rank missed, in its first row after it has caught up.
        back_in_round: the round that it continues in; None: never.
        are_drawn: the members were drawn for the round, and may begin it later than others; nobody is absent.
        num_alive: ranks that were alive when the round was formed, alongside `averaged_ranks`; None: not known.
    """

    round: int
    averaged_ranks: list[int] | None = None
    healed_ranks: list[int] | None = None
    missed_round: int | None = None
    back_in_round: int | None = None
    are_drawn: bool = False
    num_alive: int | None = None


# --- from ranks --------------------------------------------------------------------------------------------


class StepDone(NamedTuple):
    """A worker has done a step.

    Attributes:
        step: its number, from 1.
        loss: mean over what is `counted`, or over its `samples` where the model counts nothing else.
        samples: of the step.
        lr: learning rate of the step.
        bytes_sent, payload_bytes, wan_bytes: by the rank since the run began.
        counted: what the loss is a mean over; None: the samples.
        place: in the rounds; None where all ranks take part in all.
        wall_seconds: when it was marked, on a real transport.
    """

    step: int
    loss: float
    samples: int
    lr: float
    bytes_sent: int
    payload_bytes: int
    wan_bytes: int
    counted: float | None = None
    place: RoundPlace | None = None
    wall_seconds: float | None = None


class Announced(NamedTuple):
    """A worker is about to end a round, in which it may fail before it marks the step."""

    done: StepDone
    wall_seconds: float | None = None


class Saved(NamedTuple):
    """A rank has written its part of the checkpoint of `step`.

    Attributes:
        step: of the checkpoint.
        files: facts of the files of the part.
        num_timed: evaluations by the clock that the rank had reached.
        num_deposited: snapshots that the rank had deposited since the run began or was resumed.
        wall_seconds: as above.
    """

    step: int
    files: dict[str, dict[str, Any]]
    num_timed: int = 0
    num_deposited: int = 0
    wall_seconds: float | None = None


class Served(NamedTuple):
    """Bytes that a server has sent to other regions."""

    wan_bytes: int
    wall_seconds: float | None = None


class EvaluationTaken(NamedTuple):
    """Time of an evaluation that has its own, marked by the rank that gives it.

    Attributes:
        point: the evaluation.
        step: of the rank; None: the last.
        wall_seconds: as above.
    """

    point: EvaluationPoint
    step: int | None
    wall_seconds: float | None = None


class Snapshot(NamedTuple):
    """A copy of a rank's model, and of the judged one, whose tensors travel alongside.

    Attributes:
        point: evaluation that it is for.
        what: `evaluate`, `correlate`, `final`.
        present: ranks that deposit one.
        is_worker: the rank trains.
        is_replica: the model counts among those that are averaged.
        num_steps: that the rank has done.
        version, born: of the judged model, and the step that brought it about; None: the end.
        layouts: names and shapes of tensors, by section.
        extra: entries of the model's state that are no tensors.
    """

    point: EvaluationPoint
    what: list[str]
    present: Sequence[int]
    is_worker: bool
    is_replica: bool
    num_steps: int
    version: int
    born: int | None
    layouts: dict[str, Any]
    extra: dict[str, Any]


Marked = StepDone | Announced | Saved | Served | EvaluationTaken
"""Events that ranks of a run mark."""


# --- from the evaluator ------------------------------------------------------------------------------------


class Evaluated(NamedTuple):
    """Losses of an evaluation.

    Attributes:
        point: the evaluation.
        local_loss, global_loss: of the lowest rank's model, and of the mean of all; None where a server alone is
            evaluated.
        judged_loss, accuracy: of the judged model.
        judged_version, judged_step: of the judged model, and the step that brought it about; None: the end.
    """

    point: EvaluationPoint
    local_loss: float | None
    global_loss: float | None
    judged_loss: float
    accuracy: float | None
    judged_version: int
    judged_step: int | None


class Correlated(NamedTuple):
    """Mean correlation of the replicas."""

    point: EvaluationPoint
    correlation: float


Finding = Evaluated | Correlated
"""Events that the evaluator reports."""


# --- between sites -----------------------------------------------------------------------------------------


class Absent(NamedTuple):
    """Step of a rank that a round continued without: only its return counts."""

    step: int
    place: RoundPlace
    wall_seconds: float | None = None


class RepeatedStep(NamedTuple):
    """A step from a checkpoint, sent to sites that may have lost it."""

    done: StepDone


class SharedFinding(NamedTuple):
    """A finding of the site that evaluates."""

    finding: Evaluated | Correlated


class Finished(NamedTuple):
    """A site has marked its last row."""


RankRow = StepDone | Absent | Served | EvaluationTaken
"""Recorded events of a rank."""

SiteRow = Marked | RepeatedStep | SharedFinding | Finished
"""Events that a site sends to the others."""


# --- records -----------------------------------------------------------------------------------------------


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(EvaluationPoint, RoundPlace, StepDone, Announced, Saved, Served, EvaluationTaken, Snapshot),
        *(Evaluated, Correlated, Absent, RepeatedStep, SharedFinding, Finished),
    )
}


def to_record(event: Any) -> Any:
    """Record of an event in plain values.

    >>> to_record(EvaluationTaken(EvaluationPoint(Grid.STEP, 4), 4))
    ['EvaluationTaken', ['EvaluationPoint', <Grid.STEP: 0>, 4], 4, None]
    """
    if _KINDS.get(type(event).__name__) is not type(event):
        return event
    return [type(event).__name__, *map(to_record, event)]


def from_record(record: Any) -> Any:
    """Event of a record.

    Raises:
        TypeError, ValueError: its values are not those of its class.

    >>> from_record(["Served", 7, None])
    Served(wan_bytes=7, wall_seconds=None)
    """
    if not (isinstance(record, list) and record and record[0] in _KINDS):
        return record
    kind, values = _KINDS[record[0]], map(from_record, record[1:])
    return EvaluationPoint(Grid(next(values)), *values) if kind is EvaluationPoint else kind(*values)


def step_of(row: Any) -> int | None:
    """Step of an event or of a program's row; None where it has none."""
    if isinstance(row, Mapping):
        return row.get("step")
    return row.step if isinstance(row, StepDone | Absent | Saved | EvaluationTaken) else None
