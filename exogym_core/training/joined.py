"""`fit` as one of the ranks that torchrun has started: rank 0 looks on, and nobody gathers what all have."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.checkpoint import StoredCheckpoint, find_checkpoint
from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.ranks.gloo.ranks import untimed_row
from exogym_core.ranks.torchrun.collecting import Collecting
from exogym_core.ranks.torchrun.rank import JoinedRank, recalled, remember, torchrun_rank
from exogym_core.results.history import RowRecorder
from exogym_core.training.background import BackgroundObserver
from exogym_core.training.logs import make_loggers
from exogym_core.training.resumption import begin_checkpoints, find_resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.results.fit_result import FitResult
    from exogym_core.training.observer import FinalModels
    from exogym_core.training.program import Program

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["fit_joined"]


class _Watcher:
    """What rank 0 does with what all ranks mark and deposit: history, loggers, judging, checkpoints.

    Rows come in one thread, deposits in a second, and are judged in a third.
    """

    def __init__(self, program: Program, result: FitResult, listeners: Sequence[_Listener]) -> None:
        self.resumed = find_resumed(program)
        program.prepare()
        request = program.request
        self._writer = begin_checkpoints(program, self.resumed)
        self._loggers = make_loggers(request, program.model, program.checkpoints.home)
        listeners = [*listeners, *(logger.event for logger in self._loggers)]
        if request.on_event is not None:
            listeners.append(request.on_event)
        self._recorder = RowRecorder(result, False, listeners, "wall_seconds")
        self._observed: deque[Mapping[str, Any]] = deque()
        self._num_deposited: Counter[int] = Counter()  # of all ranks, at the checkpoint of a step
        self._lock = threading.Lock()
        self._observer = program.observer(self._observed.append, self._writer.observed)
        self._looking = BackgroundObserver(self._observer, request.workers.intra_op_threads)
        self.take_deposit = self._looking.take
        for seen in self._writer.observed:
            self._recorder.observe(seen)
        for rank, row in self._writer.journal.past_rows():
            self._writer.journal.mark(rank, row)
            self._recorder.add(untimed_row(rank, row))

    def take(self, rank: int, row: Mapping[str, Any]) -> None:
        """Take in a row of a rank."""
        with self._lock:
            self._writer.journal.mark(rank, row)
            marked = untimed_row(rank, row)
            self._recorder.add(marked)
            if "checkpoint" in row:
                self._num_deposited[row["step"]] += row["num_deposited"]
            self._writer.add(marked, self._num_deposited[row["step"]])
            self._settle()

    def finish(self) -> FinalModels:
        """All has come: wait for what is still being judged."""
        final = self._looking.finish()
        with self._lock:
            self._settle()
        return final

    def _settle(self) -> None:
        num_taken = self._looking.num_taken  # first: what is told after it is of no harm
        while self._observed:
            row = self._observed.popleft()
            self._recorder.observe(row)
            self._writer.add_observed(row)
        self._writer.settle(num_taken)

    def close(self, failed: bool) -> None:
        """Keep what was done, and let go of everything."""
        if failed:
            self._looking.abandon()
        with self._lock:
            self._recorder.finish()
            self._writer.close()
        self._writer.release()
        self._observer.close()
        for logger in self._loggers:
            logger.close()


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
    request = program.request
    if request.checkpoint_interval is not None and request.resume_from is None:
        # torchrun has started us anew after a failure: go on from what was there.
        before = recalled(_memory(program))
        if before is not None and Path(before).is_dir():
            program.request = replace(request, resume_from=before)
    watcher, failed = _Watcher(program, result, listeners), True
    folder = program.checkpoints.folder
    try:
        if folder is not None:
            remember(_memory(program), os.fspath(folder.absolute()))
        yield watcher
        failed = False
    finally:
        watcher.close(failed)


def _memory(program: Program) -> str:
    request = program.request
    return f"checkpoints {request.save_dir} {request.run_name or type(request.strategy).__name__}"


def _train(program: Program, result: FitResult, watcher: _Watcher | None) -> Sequence[str]:
    request = program.request

    def there_is() -> str:
        folder = program.checkpoints.folder
        last = find_checkpoint(folder) if folder is not None and folder.is_dir() else None
        if last is None:
            return "there is no checkpoint to go on from (checkpoint_interval= makes some)"
        return f"the last checkpoint is of step {last.step}, in {folder}"

    def take(rank: int, row: Mapping[str, Any]) -> None:
        assert watcher is not None
        watcher.take(rank, row)

    with JoinedRank(take, there_is, request.seed, request.timeout_seconds, request.compare_calls) as joined:
        comm = joined.comm
        with comm.off_clock():
            plan = comm.broadcast_object(_plan(program, watcher))
        if watcher is None:
            _follow(program, plan)
        program.request = replace(program.request, on_event=None)
        result.checkpoint_folder = program.checkpoints.folder
        result.resumed_step = plan["resumed step"]
        result.minibatch_size = program.request.minibatch_size
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


def _plan(program: Program, watcher: _Watcher | None) -> dict[str, Any] | None:
    """What the others take over from rank 0."""
    if watcher is None:
        return None
    folder, resumed = program.checkpoints.folder, watcher.resumed
    return {
        "folder": None if folder is None else os.fspath(folder.absolute()),
        "resumed": None if resumed is None else os.fspath(resumed.path.absolute()),
        "resumed step": 0 if resumed is None else resumed.step,
        "minibatch size": program.request.minibatch_size,
    }


def _follow(program: Program, plan: Mapping[str, Any]) -> None:
    program.request = replace(program.request, minibatch_size=plan["minibatch size"], finds_minibatch=False)
    resumed = None if plan["resumed"] is None else StoredCheckpoint.open(Path(plan["resumed"]))
    folder = None if plan["folder"] is None else Path(plan["folder"])
    program.checkpoints = RankCheckpoints(folder, program.request.checkpoint_interval, resumed)
