"""`fit` as one of the ranks that torchrun has started: rank 0 looks on, and nobody gathers what all have."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.ranks.gloo.ranks import untimed_row
from exogym_core.ranks.torchrun.collecting import Collecting
from exogym_core.ranks.torchrun.rank import JoinedRank, torchrun_rank
from exogym_core.training.lookout import RunLookout, planned_together
from exogym_core.training.resumption import (
    go_on_after_restart,
    remember_checkpoints,
    there_is,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.results.fit_result import FitResult
    from exogym_core.training.observer import FinalModels
    from exogym_core.training.program import Program

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["fit_joined"]


class _Watcher(RunLookout):
    """What rank 0 does with what all ranks mark and deposit: history, loggers, judging, checkpoints.

    Rows come in one thread, deposits in a second, and are judged in a third.
    """

    def __init__(self, program: Program, result: FitResult, listeners: Sequence[_Listener]) -> None:
        super().__init__(program, result, listeners)
        self._num_deposited: Counter[int] = Counter()  # of all ranks, at the checkpoint of a step
        self._lock = threading.Lock()
        self.take_deposit = self.looking.take
        for rank, row in self.writer.journal.past_rows():
            self.writer.journal.mark(rank, row)
            self.recorder.add(untimed_row(rank, row))

    def take(self, rank: int, row: Mapping[str, Any]) -> None:
        """Take in a row of a rank."""
        with self._lock:
            self.writer.journal.mark(rank, row)
            marked = untimed_row(rank, row)
            self.recorder.add(marked)
            if "checkpoint" in row:
                self._num_deposited[row["step"]] += row["num_deposited"]
            self.writer.add(marked, self._num_deposited[row["step"]])
            self.settle()

    def finish(self) -> FinalModels:
        """All has come: wait for what is still being judged."""
        final = self.looking.finish()
        with self._lock:
            self.settle()
        return final

    def close(self, failed: bool) -> None:
        """Keep what was done, and let go of everything."""
        with self._lock:
            super().close(failed)


def fit_joined(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train as this rank and fill `result`; returns what the user should be warned of.

    On rank 0 `listeners` are told of rows, besides those that the request names.
    On rank 0 `result` has the rows of all ranks and the final models. On the others it has neither, and its models, as
    `rank_states` on all of them, are this rank's own.
    """
    if torchrun_rank() == 0:
        with _watching(program, result, listeners) as watcher:
            return _train(program, result, watcher)
    program.request = replace(program.request, finds_minibatch=False)  # rank 0 finds it
    program.prepare()  # at the same time as rank 0
    return _train(program, result, None)


@contextmanager
def _watching(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Iterator[_Watcher]:
    go_on_after_restart(program)
    watcher, failed = _Watcher(program, result, listeners), True
    try:
        remember_checkpoints(program)
        yield watcher
        failed = False
    finally:
        watcher.close(failed)


def _train(program: Program, result: FitResult, watcher: _Watcher | None) -> Sequence[str]:
    request = program.request

    def take(rank: int, row: Mapping[str, Any]) -> None:
        assert watcher is not None
        watcher.take(rank, row)

    about = (request.seed, request.timeout_seconds, request.compare_calls)
    with JoinedRank(take, partial(there_is, program), *about) as joined:
        comm = joined.comm
        planned = planned_together(program, joined, watcher)
        result.checkpoint_folder = program.checkpoints.folder
        result.resumed_step = planned["resumed step"]
        result.minibatch_size = program.request.minibatch_size
        if watcher is not None:
            about_run = {"strategy": type(request.strategy).__name__, "steps": request.max_steps}
            joined.beside.post("run", json.dumps(about_run))  # for `netgym status`
        collecting = Collecting(comm, watcher.take_deposit if watcher is not None else _nobody)
        comm.observed_by(collecting.put)
        joined.facts_at_checkpoint = lambda: {"num_deposited": collecting.num_put}
        outcome = program(comm)
        collecting.finish()
        parts = joined.beside.send_rest()
        with comm.off_clock():
            ends = comm.all_gather_object((parts, outcome.remarks))
        result.rank_states, result.max_steps = [outcome.state], outcome.max_steps
        result.mean_state = result.judged_state = outcome.state
        if watcher is not None:
            joined.beside.take_rest([number for number, _ in ends])
            final = watcher.finish()
            result.mean_state, result.judged_state = final.mean, final.judged
    return [remark for _, own in ends for remark in own]


def _nobody(rank: int, note: Mapping[str, Any], tensors: Sequence[Any]) -> None:
    """Deposits come to rank 0 alone."""
