"""What a run leaves in memory: rows of all ranks merged to one a step, and the result."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exogym_core.results.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from netsim.ranks.kernel import StampedRow

__all__ = ["FitResult", "Recorder", "mean_utilisation", "perplexity"]

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


@dataclass
class FitResult:
    """All that a run of `fit` tells besides the model.

    Attributes:
        strategy: name of the strategy's class.
        num_nodes, max_steps: ranks, and steps asked for.
        history: a row a step: step, examples_trained, train_loss, train_perplexity, lr, virtual_seconds,
            bytes_sent, payload_bytes, wan_bytes, compute_utilisation. Losses are means over all samples of
            all ranks, bytes are sums over ranks from the start (payload_bytes: the mean, each encoded message
            once), seconds are when the last rank was through.
        validation: a row an evaluation: step, local_loss, local_perplexity (rank 0's model), global_loss,
            global_perplexity and accuracy (the mean of all ranks' models), virtual_seconds of that step.
        correlation: a row a comparison of the replicas: step, correlation.
        rank_states: every rank's final state_dict, on the CPU.
        virtual_seconds: when the last rank ended; None without a topology.
        bytes_sent, wan_bytes: sums over ranks. payload_bytes: a rank's encoded messages, their mean.
        compute_utilisation: computing / all virtual seconds, mean over ranks; None without a topology.
        collectives: the algorithms by which collectives went over the simulated network, by operation.
        compute_seconds, exposed_seconds: virtual seconds of each rank's computing, and of its waiting.
        target_loss, virtual_seconds_to_target: what was asked for, and when an evaluation of the mean model
            first reached it; None if never.
        final_loss, accuracy: the final mean model's, on the evaluation samples; None if there are none.
        minibatch_size: samples a forward pass, as it was settled.
        compute: the compute time as it was settled, in the form of an experiment; None where it is free.
        dropped_peers: absences of ranks that rounds went on without, see `exogym_core.results.rounds:Rounds`; None
            where all are waited for. Rows of `history` are then means over those who took part in the round (bytes:
            sums over all), `num_peers` is how many did, and `virtual_seconds` is when they ended.
        averaged_ranks: who took part in such rounds, by the step that ended them.
        first_non_finite_step: the first step with a loss that was nan or infinite on some rank; None if
            there was none. Training goes on after it.
        checkpoint_folder: where this run's checkpoints are; None where none are made.
        resumed_step: the step of the checkpoint that it went on from; 0 for a run from the start.
        complete: whether the run came to its end.
    """

    strategy: str = ""
    num_nodes: int = 1
    max_steps: int = 0
    history: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    correlation: list[Row] = field(default_factory=list)
    rank_states: list[dict[str, Tensor]] = field(default_factory=list)
    virtual_seconds: float | None = None
    bytes_sent: int = 0
    payload_bytes: int = 0
    wan_bytes: int = 0
    compute_utilisation: float | None = None
    collectives: dict[str, list[str]] = field(default_factory=dict)
    compute_seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    target_loss: float | None = None
    virtual_seconds_to_target: float | None = None
    final_loss: float | None = None
    accuracy: float | None = None
    minibatch_size: int | None = None
    compute: dict[str, Any] | None = None
    first_non_finite_step: int | None = None
    dropped_peers: list[Row] | None = None
    averaged_ranks: dict[int, list[int]] = field(default_factory=dict)
    checkpoint_folder: Path | None = None
    resumed_step: int = 0
    complete: bool = False

    def to_pandas(self) -> Any:
        """`history` as a DataFrame.

        Raises:
            ImportError: pandas is not installed (`pip install 'netgym[pandas]'`).
        """
        return importlib.import_module("pandas").DataFrame(self.history)


class Recorder:
    """Merges what ranks mark into a result, step by step.

    Args:
        result: to fill.
        timed: whether rows have virtual seconds.
        listeners: told of every finished row with a `kind` of step, validation or correlation.
    """

    def __init__(
        self, result: FitResult, timed: bool, listeners: Sequence[Callable[[Mapping[str, Any]], None]] = ()
    ) -> None:
        self._result, self._timed, self._listeners = result, timed, listeners
        self._steps: dict[int, list[StampedRow]] = {}
        self._validation: dict[int, Row] = {}
        self._examples = 0
        self._newest: dict[int, Mapping[str, Any]] = {}  # each rank's newest row with its counters
        self.rounds = Rounds(result.num_nodes)

    def add(self, marked: StampedRow) -> None:
        """Take in a rank's row; rows come in order of virtual time."""
        row = marked.row
        if "bytes_sent" in row:
            self._newest[marked.rank] = row
        if "round" in row:
            for present in self.rounds.add(marked):
                self._finish_step(present)
        elif "loss" in row:
            ranks = self._steps.setdefault(row["step"], [])
            ranks.append(marked)
            if len(ranks) == self._result.num_nodes:
                self._finish_step(self._steps.pop(row["step"]))
        elif "checkpoint" in row:
            return
        elif "correlation" in row:
            self._result.correlation.append(dict(row))
            self._tell("correlation", dict(row))
        else:
            self._evaluated(marked)

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
            "virtual_seconds": max(marked.virtual_seconds for marked in ranks) if self._timed else None,
        }
        absent = [row for rank, row in self._newest.items() if rank not in {marked.rank for marked in ranks}]
        merged |= self._traffic([*rows, *absent])
        merged["compute_utilisation"] = self._utilisation(ranks)
        if "round" in rows[0]:
            merged["num_peers"] = len(ranks)
        if "averaged_ranks" in rows[0]:
            result.averaged_ranks[step] = list(rows[0]["averaged_ranks"])
        result.history.append(merged)
        result.virtual_seconds = merged["virtual_seconds"]
        result.compute_utilisation = merged["compute_utilisation"]
        self._tell("step", merged)
        if step in self._validation:
            self._finish_validation(step)

    def _traffic(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """What all ranks have sent, one row each; noted in the result."""
        total = {name: sum(row[name] for row in rows) for name in _COUNTERS}
        total["payload_bytes"] //= len(rows)  # an encoded message once, not once a rank
        for name, value in total.items():
            setattr(self._result, name, value)
        return total

    def finish(self) -> None:
        """Take in what was kept back for the end of a round that does not come."""
        for present in self.rounds.finish():
            self._finish_step(present)
        result = self._result
        if self.rounds.has_any:
            self._traffic(list(self._newest.values()))
            result.dropped_peers = self.rounds.dropped_peers

    def _utilisation(self, ranks: list[StampedRow]) -> float | None:
        if not self._timed:
            return None
        return mean_utilisation(
            [marked.compute_seconds for marked in ranks], [marked.virtual_seconds for marked in ranks]
        )

    def _evaluated(self, marked: StampedRow) -> None:
        step = marked.row["step"]
        self._validation.setdefault(step, {}).update(marked.row)
        self._finish_validation(step)

    def _finish_validation(self, step: int) -> None:
        """Append the evaluation once both losses and the step's own row are there."""
        row, history = self._validation[step], self._result.history
        is_past = step == 0 or (bool(history) and history[-1]["step"] >= step)
        if not is_past or not {"local_loss", "global_loss"} <= row.keys():
            return
        seconds = None
        if self._timed:
            seconds = history[step - 1]["virtual_seconds"] if step else 0.0
        finished = {
            "step": step,
            "local_loss": row["local_loss"],
            "local_perplexity": perplexity(row["local_loss"]),
            "global_loss": row["global_loss"],
            "global_perplexity": perplexity(row["global_loss"]),
            "virtual_seconds": seconds,
            "accuracy": row["accuracy"],
        }
        del self._validation[step]
        result = self._result
        result.validation.append(finished)
        result.final_loss, result.accuracy = finished["global_loss"], finished["accuracy"]
        reached = result.target_loss is not None and finished["global_loss"] <= result.target_loss
        if reached and result.virtual_seconds_to_target is None:
            result.virtual_seconds_to_target = seconds
        self._tell("validation", finished)


def mean_utilisation(compute_seconds: list[float], virtual_seconds: list[float]) -> float:
    """Computing / all virtual seconds, mean over ranks; 1 for a rank whose clock has not moved."""
    shares = [
        computed / total if total else 1.0
        for computed, total in zip(compute_seconds, virtual_seconds, strict=True)
    ]
    return sum(shares) / len(shares)
