"""Rows of all ranks merged to one a step, as they come."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Any

from exogym_core.results.rounds import Rounds
from exogym_core.results.target import Judged, reach

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.results.fit_result import FitResult
    from netsim.ranks.kernel import StampedRow

__all__ = ["RowRecorder", "mean_utilisation", "perplexity", "where_time_went"]

Row = dict[str, Any]

_COUNTERS = ("bytes_sent", "payload_bytes", "wan_bytes")


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is beyond a float.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


_MOST_STEPS = 1 << 60  # steps beyond stand for the end


class RowRecorder:
    """Merges what ranks mark into a result, step by step.

    Args:
        result: to fill.
        timed: whether rows have virtual seconds.
        listeners: told of every finished row with a `kind` of step, validation or correlation.
        clock: "virtual_seconds", or "wall_seconds" of a real transport, which stand in the same place.
    """

    def __init__(
        self,
        result: FitResult,
        timed: bool,
        listeners: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        clock: str = "virtual_seconds",
    ) -> None:
        self._result, self._timed, self._listeners, self._clock = result, timed, listeners, clock
        self._steps: dict[int, list[StampedRow]] = {}
        self._observed: deque[Mapping[str, Any]] = deque()  # evaluations whose steps have not been merged yet
        self._judged: list[Judged] = []
        self._examples = 0
        self._step_at: dict[
            int, int
        ] = {}  # the step of whoever tells the time, by look, until that is judged
        self._looked: dict[int, float] = {}  # when a server's model was looked at, likewise
        self._present: list[int] = []  # at the end of the last round
        self._newest: dict[int, Mapping[str, Any]] = {}  # each rank's newest row with its counters
        self._served: dict[int, int] = {}  # what each server has sent to other regions
        self.rounds = Rounds(result.num_nodes)

    def add(self, marked: StampedRow) -> None:
        """Take in a rank's row; rows come in order of virtual time."""
        row = marked.row
        if "bytes_sent" in row:
            self._newest[marked.rank] = row
        if "served_wan_bytes" in row:
            self._served[marked.rank] = row["served_wan_bytes"]
        elif "looked" in row:
            self._looked[row["looked"]] = marked.virtual_seconds
            self._step_at[row["looked"]] = row.get("at_step", row["looked"])
            self._take_evaluations()
        elif "round" in row:
            for present in self.rounds.add(marked):
                self._finish_step(present)
        elif "loss" in row:
            ranks = self._steps.setdefault(row["step"], [])
            ranks.append(marked)
            if len(ranks) == self._result.num_nodes:
                self._finish_step(self._steps.pop(row["step"]))

    def _tell(self, kind: str, row: Row) -> None:
        for listener in self._listeners:
            listener({"kind": kind, **row})

    def _finish_step(self, ranks: list[StampedRow]) -> None:
        ranks.sort(key=lambda marked: marked.rank)
        rows = [marked.row for marked in ranks]
        samples = sum(row["samples"] for row in rows)
        # A sum in rank order, so that the order of arrival changes no bit.
        loss = sum(row["loss"] * row["samples"] for row in rows) / samples
        self._examples += samples
        result, step = self._result, rows[0]["step"]
        if not all(math.isfinite(row["loss"]) for row in rows) and result.first_non_finite_step is None:
            result.first_non_finite_step = step
        merged: Row = {
            "step": step,
            "examples_trained": self._examples,
            "train_loss": loss,
            "train_perplexity": perplexity(loss),
            "lr": rows[0]["lr"],
            **self._seconds(ranks),
        }
        absent = [row for rank, row in self._newest.items() if rank not in {marked.rank for marked in ranks}]
        merged |= self._traffic([*rows, *absent])
        merged["compute_utilisation"] = self._utilisation(ranks)
        if "round" in rows[0]:
            merged["num_peers"] = len(ranks)
        if "averaged_ranks" in rows[0]:
            present = list(rows[0]["averaged_ranks"])  # often the same: one list then, not one a round
            result.averaged_ranks[step] = self._present = (
                self._present if present == self._present else present
            )
        result.history.append(merged)
        result.virtual_seconds, result.wall_seconds = (
            merged.get("virtual_seconds"),
            merged.get("wall_seconds"),
        )
        result.compute_utilisation = merged["compute_utilisation"]
        self._tell("step", merged)
        self._take_evaluations()

    def _seconds(self, ranks: Sequence[StampedRow]) -> Row:
        """When the last rank was through: by the virtual clock, or by a real transport's own."""
        if self._clock == "wall_seconds":
            return {self._clock: max(marked.row[self._clock] for marked in ranks)}
        seconds = max(marked.virtual_seconds for marked in ranks) if self._timed else None
        return {self._clock: seconds}

    def _traffic(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """What all workers have sent, one row each, and servers to other regions; noted in the result."""
        total = {name: sum(row[name] for row in rows) for name in _COUNTERS}
        total["wan_bytes"] += sum(self._served.values())
        total["payload_bytes"] //= len(rows)  # an encoded message once, not once a rank
        for name, value in total.items():
            setattr(self._result, name, value)
        return total

    def finish(self) -> None:
        """Take in what was kept back for the end of a round that does not come."""
        for present in self.rounds.finish():
            self._finish_step(present)
        for step in sorted(self._steps):  # that not all ranks have done
            self._finish_step(self._steps.pop(step))
        result = self._result
        if self._newest and (self.rounds.has_any or self._served):
            self._traffic(list(self._newest.values()))
        if self.rounds.has_any:
            result.dropped_peers = self.rounds.dropped_peers(self._clock)
        self._take_evaluations(at_end=True)
        if result.target_loss is not None and self._judged:
            reached = reach(self._judged, result.target_loss)
            result.target = reached.target
            if reached.target == "held":
                result.virtual_seconds_to_target = reached.seconds

    def _utilisation(self, ranks: list[StampedRow]) -> float | None:
        if not self._timed:
            return None
        return mean_utilisation(
            [marked.compute_seconds for marked in ranks], max(marked.virtual_seconds for marked in ranks)
        )

    def observe(self, row: Mapping[str, Any]) -> None:
        """Take in what was seen of the models; rows come in order of steps."""
        if "correlation" in row:
            self._result.correlation.append(dict(row))
            self._tell("correlation", dict(row))
        else:
            self._observed.append(row)
            self._take_evaluations()

    def _take_evaluations(self, at_end: bool = False) -> None:
        """Append the evaluations whose steps have been merged; where the run ends, those of models made then."""
        while self._observed:
            row = self._observed[0]
            steps = [row["step"], row["judged_step"]]
            if row["step"] in self._looked:  # at a time of its own
                steps = [row["judged_step"]] if self._result.judged == "outer" else []
            elif self._result.judged == "server" and not at_end:
                return  # its own time is still to come, however far workers are
            if not at_end and (None in steps or not all(self._is_past(step) for step in steps)):
                return
            self._observed.popleft()
            self._evaluated(row)

    def _is_past(self, step: int) -> bool:
        history = self._result.history
        return step == 0 or (bool(history) and history[-1]["step"] >= step)

    def _seconds_at(self, step: int | None) -> float | None:
        """When all were through with a step; None stands for the end."""
        history, is_wall = self._result.history, self._clock == "wall_seconds"
        if step is None or not (self._timed or is_wall):
            return self._result.wall_seconds if is_wall else self._result.virtual_seconds
        if not step:
            return 0.0
        place = bisect_left(history, step, key=lambda merged: int(merged["step"]))
        return float(history[min(place, len(history) - 1)][self._clock]) if history else None

    def _evaluated(self, row: Mapping[str, Any]) -> None:
        result, seconds = self._result, self._seconds_at(row["judged_step"])
        at = self._looked.pop(row["step"], None)
        step = self._step_at.pop(row["step"], row["step"])
        if at is not None and self._timed and (result.judged != "outer" or row["judged_step"] is None):
            seconds = at
        if step > _MOST_STEPS:  # the end, where ranks have done different numbers of steps
            step = max(
                (row["step"] for rows in (result.history, result.validation) for row in rows[-1:]), default=0
            )
            if self._judged and self._judged[-1].version == row["judged_version"]:
                result.mean_of_replicas_loss = row["global_loss"]
                return  # it has been looked at already
        finished = {
            "step": step,
            "local_loss": row["local_loss"],
            "local_perplexity": _perplexity(row["local_loss"]),
            "global_loss": row["global_loss"],
            "global_perplexity": _perplexity(row["global_loss"]),
            self._clock: self._seconds_at(row["step"]) if at is None or not self._timed else at,
            "judged_loss": row["judged_loss"],
            f"judged_{self._clock}": seconds,
            "judged_step": step if row["judged_step"] is None else row["judged_step"],
            "accuracy": row["accuracy"],
        }
        self._judged.append(Judged(row["judged_version"], seconds, row["judged_loss"]))
        result.validation.append(finished)
        result.final_loss, result.accuracy = row["judged_loss"], row["accuracy"]
        result.mean_of_replicas_loss = row["global_loss"]
        self._tell("validation", finished)


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else perplexity(loss)


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
