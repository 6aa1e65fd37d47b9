"""Rows of all ranks merged into one a step, rounds that continued without some ranks, and the target loss."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from exogym_core.events import (
    Absent,
    Correlated,
    Evaluated,
    EvaluationPoint,
    EvaluationTaken,
    Grid,
    Served,
    StepDone,
)
from exogym_core.results.schema import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.events import Finding
    from exogym_core.results.fit_result import FitResult
    from netsim.ranks import StampedRow


__all__ = [
    "LEAST_LATER",
    "Judged",
    "Reached",
    "Rounds",
    "RowRecorder",
    "mean_utilisation",
    "perplexity",
    "reach",
    "where_time_went",
]

LEAST_LATER = 2
"""Other models that must be judged after one at the target, for it to be held."""


class Judged(NamedTuple):
    """An evaluation of the judged model.

    Attributes:
        version: of the model; one that is judged again, because there is no newer one, counts once.
        seconds: the virtual time at which that model was made; None where there is no virtual time.
        loss: its loss.
    """

    version: int
    seconds: float | None
    loss: float


class Reached(NamedTuple):
    """State of a run's target.

    Attributes:
        target: `held`, `touched` (reached, and not seen to hold) or `missed`.
        seconds: the virtual time of the first model at or below the target; None if there was none, or no
            virtual time.
    """

    target: Literal["held", "touched", "missed"]
    seconds: float | None = None


def reach(evaluations: Sequence[Judged], target_loss: float) -> Reached:
    """Time to the target by MLPerf's rule, and whether the target was held.

    The time is that of the first evaluation at or below `target_loss`; nothing is interpolated. The target is held if
    at least two other models are judged after it and the median of their losses is at or below the target too: one
    noisy evaluation does not undo it, and a run that diverges misses it. A loss that is not finite is above every
    target.

    >>> seconds = (1.0, 2.0, 3.0, 4.0)
    >>> def run(*losses): return [Judged(n, s, loss) for n, (s, loss) in enumerate(zip(seconds, losses))]
    >>> reach(run(0.9, 0.5, 0.6, 0.4), 0.5)
    Reached(target='held', seconds=2.0)
    >>> reach(run(0.9, 0.5, 0.6, 0.7), 0.5).target, reach(run(0.9, 0.8, 0.5, 0.4), 0.5).target
    ('touched', 'touched')
    >>> reach(run(0.9, 0.8, 0.7, 0.6), 0.5)
    Reached(target='missed', seconds=None)
    """
    for position, (version, seconds, loss) in enumerate(evaluations):
        if -math.inf < loss <= target_loss:
            later = {other.version: other.loss for other in evaluations[position + 1 :]}
            later.pop(version, None)
            losses = [each if math.isfinite(each) else math.inf for each in later.values()]
            held = len(losses) >= LEAST_LATER and median(losses) <= target_loss
            return Reached("held" if held else "touched", seconds)
    return Reached("missed")


class _Return(NamedTuple):
    """End of an absence: the first round missed, the round that the rank continues in (infinity: never), and when."""

    missed: int
    back: float
    seconds: float


class Rounds:
    """Rows held back until their round has ended: only the ranks that took part in it have done its steps.

    It also counts the rounds: ranks that took part, and that were alive.

    Args:
        num_ranks: all ranks of the run.

    Attributes:
        num_alive: ranks that were alive when the last round was formed; None: not known.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_alive: int | None = None
        self._num_ranks = num_ranks
        self._held: dict[int, dict[int, dict[int, StampedRow]]] = {}  # round -> step -> rank -> row
        self._num_over = 0
        self._present: Sequence[int] = ()
        self._steps_a_round = 1
        self._ends = array("d", [0.0])  # when each round was over, the start being round 0
        # Rank -> first and last of rounds missed in a row.
        self._missed: dict[int, list[tuple[int, int]]] = {}
        self._returns: dict[int, list[_Return]] = {}
        self._members: list[int] = []  # of the last round that was counted
        self._num_counted = self._sum_members = self._sum_alive = 0

    def add(self, marked: StampedRow) -> Iterator[list[StampedRow]]:
        """Take a row; yields the steps that it completes, in order, as rows of the ranks that did them."""
        step, place = marked.row.step, marked.row.place
        number, present = place.round, place.averaged_ranks
        if place.missed_round is not None:
            back = math.inf if place.back_in_round is None else place.back_in_round
            returned = _Return(place.missed_round, back, marked.virtual_seconds)
            self._returns.setdefault(marked.rank, []).append(returned)
        if number <= self._num_over:
            return  # of a round that ended without this rank
        ranks = self._held.setdefault(number, {}).setdefault(step, {})
        ranks[marked.rank] = marked
        if present is not None:  # those that were behind have done other steps
            present = [rank for rank in present if rank not in (place.healed_ranks or ())]
        if present is not None and all(rank in ranks for rank in present):
            self.num_alive = place.num_alive
            seconds = max(ranks[rank].virtual_seconds for rank in present)
            self._end(number, step, present, seconds, are_drawn=place.are_drawn)
            yield from self._complete(number)

    def finish(self) -> Iterator[list[StampedRow]]:
        """Yield the steps after the last round that all its ranks have done, since no more rows will come."""
        for number in sorted(self._held):
            yield from self._complete(number)

    def _complete(self, number: int) -> Iterator[list[StampedRow]]:
        steps = self._held.pop(number)
        for step in sorted(steps):
            ranks = steps[step]
            are_drawn = next(iter(ranks.values())).row.place.are_drawn
            present = sorted(ranks) if are_drawn or not self._present else self._present
            if any(rank not in ranks for rank in present):
                return
            yield [ranks[rank] for rank in present]

    def count(self, result: FitResult, step: int, members: Sequence[int]) -> None:
        """Enter the round that `step` ended in `result`: its members, and means over rounds of numbers of ranks."""
        if members != self._members:  # else one list for all rounds
            self._members = list(members)
        result.averaged_ranks[step] = self._members
        self._num_counted += 1
        self._sum_members += len(members)
        self._sum_alive += self.num_alive or 0
        result.averaging_ranks = self._sum_members / self._num_counted
        if self.num_alive is not None:
            result.alive_ranks = self._sum_alive / self._num_counted

    # --- absences -------------------------------------------------------------------------------------------

    def _end(
        self, number: int, step: int, present: Sequence[int], seconds: float, *, are_drawn: bool
    ) -> None:
        """Note the absent ranks of a round that has ended, unless its members were drawn."""
        self._steps_a_round = step // number
        self._ends.extend([seconds] * (number + 1 - len(self._ends)))
        for rank in () if are_drawn else set(range(self._num_ranks)).difference(present):
            missed = self._missed.setdefault(rank, [])
            if missed and missed[-1][1] == self._num_over:
                missed[-1] = (missed[-1][0], number)
            else:
                missed.append((number, number))
        self._num_over, self._present = number, present

    def dropped_peers(self, clock: str = "virtual_seconds") -> list[dict[str, Any]]:
        """Absences in order of their first steps, whatever order rows have come in.

        Args:
            clock: name of the times.

        Returns:
            Of each `rank`; `step` and the `clock`'s time, the end of the first round without it; `back_step` and
            `back_` of the time, the step after which it continues, and when it has the state for that; None if never.
        """
        absences = [
            {
                "rank": rank,
                "step": first * self._steps_a_round,
                clock: self._ends[first],
                "back_step": None if back is None else (int(back.back) - 1) * self._steps_a_round,
                f"back_{clock}": None if back is None else back.seconds,
            }
            for rank, spans in self._missed.items()
            for span in spans
            for first, back in self._parts(rank, *span)
        ]
        return sorted(absences, key=lambda absence: (absence["step"], absence["rank"]))

    def _parts(self, rank: int, first: int, last: int) -> Iterator[tuple[int, _Return | None]]:
        """Absences within rounds missed in a row: the rank may have been back, and late for the next round."""
        while first <= last:
            returns = [
                each for each in self._returns.get(rank, ()) if each.missed <= first < each.back < math.inf
            ]
            back = min(returns, key=lambda each: each.back, default=None)
            yield first, back
            first = last + 1 if back is None else int(back.back)


Row = dict[str, Any]


def perplexity(loss: float | None) -> float | None:
    """exp(loss), infinite where that is beyond a float.

    >>> perplexity(0.0), perplexity(1e6), perplexity(None)
    (1.0, inf, None)
    """
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return math.inf


class RowRecorder:
    """Merges the rows of ranks into a result, step by step.

    Args:
        result: to fill.
        timed: whether rows have virtual seconds.
        listeners: called with every finished row and its `kind`: step, validation or correlation. The first step
            of a round in which other ranks took part than before also has `dropped_peers`, all absences so far.
        clock: "virtual_seconds", or "wall_seconds" of a real transport, which stand in the same place.
        num_ranks: ranks that mark a step; None: one a worker.

    Attributes:
        rounds: those in which ranks may be absent; None: there were none.
    """

    def __init__(
        self,
        result: FitResult,
        timed: bool,
        listeners: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        clock: str = "virtual_seconds",
        *,
        num_ranks: int | None = None,
    ) -> None:
        self._num_ranks = num_ranks or result.num_nodes
        self._result, self._timed, self._listeners, self._clock = result, timed, listeners, clock
        self._steps: dict[int, list[StampedRow]] = {}
        self._found: deque[Evaluated] = deque()  # whose steps have not been merged yet
        self._judged: list[Judged] = []
        self._examples = 0
        # Step of the rank that gives an evaluation's time, and that time, by evaluation until it is judged.
        self._own_times: dict[EvaluationPoint, tuple[int | None, float]] = {}
        self._here: set[int] = set()  # in the last step
        self._newest: dict[int, StepDone] = {}  # of each rank
        self._served: dict[int, int] = {}  # bytes that each server has sent to other regions
        self.rounds: Rounds | None = None

    def add(self, marked: StampedRow) -> None:
        """Take a rank's row; rows come in order of virtual time."""
        match marked.row:
            case StepDone(step=step, place=None) as row:
                self._newest[marked.rank] = row
                ranks = self._steps.setdefault(step, [])
                ranks.append(marked)
                if len(ranks) == self._num_ranks:
                    self._finish_step(self._steps.pop(step))
            case StepDone() | Absent() as row:
                if isinstance(row, StepDone):
                    self._newest[marked.rank] = row
                if self.rounds is None:
                    self.rounds = Rounds(self._num_ranks)
                for present in self.rounds.add(marked):
                    self._finish_step(present)
            case Served(wan_bytes=wan_bytes):
                self._served[marked.rank] = wan_bytes
            case EvaluationTaken(point=point, step=step):
                self._own_times[point] = step, marked.virtual_seconds
                self._take_evaluations()

    def _emit(self, kind: str, row: Row) -> None:
        for listener in self._listeners:
            listener({"kind": kind, **row})

    def _finish_step(self, ranks: list[StampedRow]) -> None:
        ranks.sort(key=lambda marked: marked.rank)
        rows: list[StepDone] = [marked.row for marked in ranks]
        samples = sum(row.samples for row in rows)
        weights = [row.samples if row.counted is None else row.counted for row in rows]
        # A sum in rank order, so that the order of arrival changes no bit.
        loss = sum(row.loss * weight for row, weight in zip(rows, weights, strict=True)) / sum(weights)
        self._examples += samples
        result, step, place = self._result, rows[0].step, rows[0].place
        if not all(math.isfinite(row.loss) for row in rows) and result.first_non_finite_step is None:
            result.first_non_finite_step = step
        merged: Row = {
            "step": step,
            "examples_trained": self._examples,
            "train_loss": loss,
            "train_perplexity": perplexity(loss),
            "lr": rows[0].lr,
            **self._seconds(ranks),
        }
        here = {marked.rank for marked in ranks}
        absent = [row for rank, row in self._newest.items() if rank not in here]
        merged |= self._traffic([*rows, *absent])
        merged["compute_utilisation"] = None
        if self._timed:
            last = max(marked.virtual_seconds for marked in ranks)
            merged["compute_utilisation"] = mean_utilisation([each.compute_seconds for each in ranks], last)
        absences: Row = {}
        if self.rounds is not None and place is not None:
            merged["num_peers"] = len(ranks)
            if self.rounds.num_alive is not None:
                merged["num_alive"] = self.rounds.num_alive
            if here != self._here:
                self._here, absences["dropped_peers"] = here, self.rounds.dropped_peers(self._clock)
            if place.averaged_ranks is not None:
                self.rounds.count(result, step, place.averaged_ranks)
        result.history.append(merged)
        result.virtual_seconds = merged.get("virtual_seconds")
        result.wall_seconds = merged.get("wall_seconds")
        result.compute_utilisation = merged["compute_utilisation"]
        self._emit("step", merged | absences)
        self._take_evaluations()

    def _seconds(self, ranks: Sequence[StampedRow]) -> Row:
        """Time at which the last rank was done, on the virtual clock or a real transport's."""
        if self._clock == "wall_seconds":
            return {self._clock: max(marked.row.wall_seconds for marked in ranks)}
        seconds = max(marked.virtual_seconds for marked in ranks) if self._timed else None
        return {self._clock: seconds}

    def _traffic(self, rows: Sequence[StepDone]) -> dict[str, int]:
        """Bytes sent by all workers, given a row of each, and by servers to other regions; kept in the result."""
        total = {name: sum(getattr(row, name) for row in rows) for name in COUNTERS}
        total["wan_bytes"] += sum(self._served.values())
        total["payload_bytes"] //= self._result.num_nodes  # once, not once a worker
        for name, value in total.items():
            setattr(self._result, name, value)
        return total

    def finish(self, *, is_complete: bool = True) -> None:
        """Take the rows held back for the end of a round that does not come.

        Where the run was interrupted, listeners get none of them: a resumed run gives them with the rows of all ranks.
        """
        if not is_complete:
            self._listeners = ()
        for present in () if self.rounds is None else self.rounds.finish():
            self._finish_step(present)
        for step in sorted(self._steps):  # that not all ranks have done
            self._finish_step(self._steps.pop(step))
        result = self._result
        if self._newest and (self.rounds is not None or self._served):
            self._traffic(list(self._newest.values()))
        if self.rounds is not None:
            result.dropped_peers = self.rounds.dropped_peers(self._clock)
        self._take_evaluations(at_end=True)
        if result.target_loss is not None and self._judged:
            reached = reach(self._judged, result.target_loss)
            result.target = reached.target
            if reached.target == "held":
                result.virtual_seconds_to_target = reached.seconds

    def observe(self, found: Finding) -> None:
        """Take an evaluation or a correlation of the models; they come in order of their points."""
        if isinstance(found, Correlated):
            row = {"step": found.point.number, "correlation": found.correlation}
            self._result.correlation.append(row)
            self._emit("correlation", dict(row))
        else:
            self._found.append(found)
            self._take_evaluations()

    def _take_evaluations(self, at_end: bool = False) -> None:
        """Append the evaluations whose steps have been merged; where the run ends, those of models made then."""
        history = self._result.history
        while self._found:
            found = self._found[0]
            steps: list[int | None] = [_step_at(found.point), found.judged_step]
            if found.point in self._own_times:
                steps = [found.judged_step] if self._result.judged == "outer" else []
            elif self._result.judged == "server" and not at_end:
                return  # its own time is still to come, however far workers are
            newest = history[-1]["step"] if history else 0
            if not at_end and any(step is None or step > newest for step in steps):
                return
            self._found.popleft()
            self._evaluated(found)

    def _seconds_at(self, step: int | None) -> float | None:
        """Time at which all ranks were done with a step; None: the end."""
        history, is_wall = self._result.history, self._clock == "wall_seconds"
        if step is None or not (self._timed or is_wall):
            return self._result.wall_seconds if is_wall else self._result.virtual_seconds
        if not step:
            return 0.0
        place = bisect_left(history, step, key=lambda merged: int(merged["step"]))
        return float(history[min(place, len(history) - 1)][self._clock]) if history else None

    def _evaluated(self, found: Evaluated) -> None:
        result, seconds = self._result, self._seconds_at(found.judged_step)
        step, at = self._own_times.pop(found.point, (_step_at(found.point), None))
        if at is not None and self._timed and (result.judged != "outer" or found.judged_step is None):
            seconds = at
        if step is None:  # the end, where ranks have done different numbers of steps
            last = [rows[-1]["step"] for rows in (result.history, result.validation) if rows]
            step = max(last, default=0)
            if self._judged and self._judged[-1].version == found.judged_version:
                result.mean_of_replicas_loss = found.global_loss
                return  # it has been evaluated already
        finished = {
            "step": step,
            "local_loss": found.local_loss,
            "local_perplexity": perplexity(found.local_loss),
            "global_loss": found.global_loss,
            "global_perplexity": perplexity(found.global_loss),
            self._clock: self._seconds_at(step) if at is None or not self._timed else at,
            "judged_loss": found.judged_loss,
            f"judged_{self._clock}": seconds,
            "judged_step": step if found.judged_step is None else found.judged_step,
            "accuracy": found.accuracy,
        }
        self._judged.append(Judged(found.judged_version, seconds, found.judged_loss))
        result.validation.append(finished)
        result.final_loss, result.accuracy = found.judged_loss, found.accuracy
        result.mean_of_replicas_loss = found.global_loss
        self._emit("validation", finished)


def _step_at(point: EvaluationPoint) -> int | None:
    """Step after which an evaluation is due; None where that differs between ranks."""
    return point.number if point.grid is Grid.STEP else None


def mean_utilisation(compute_seconds: Sequence[float], virtual_seconds: float) -> float:
    """Computing / the virtual seconds that all ranks had, mean over ranks; 1 for a clock that has not moved."""
    if not virtual_seconds:
        return 1.0
    return sum(compute_seconds) / len(compute_seconds) / virtual_seconds


def where_time_went(
    compute_seconds: Sequence[float], network_seconds: Sequence[float], virtual_seconds: float
) -> tuple[float, float, float]:
    """Seconds of computing, of the network and of waiting for others, means over ranks that sum to the run's.

    A rank that ends before the others waits from then on; what one does after the others' end does not count.
    """
    computing = [min(seconds, virtual_seconds) for seconds in compute_seconds]
    network = [
        min(seconds, virtual_seconds - busy) for seconds, busy in zip(network_seconds, computing, strict=True)
    ]
    num_ranks = len(computing)
    means = sum(computing) / num_ranks, sum(network) / num_ranks
    return *means, max(virtual_seconds - sum(means), 0.0)
