"""One run of a program: its ranks, who observes them, and who is told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.communicator import run_ranks
from exogym_core.results.history import mean_utilisation, where_time_went
from exogym_core.training.background import BackgroundObserver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from exogym_core.checkpoints.writing import CheckpointWriter
    from exogym_core.ranks.run import RunResult
    from exogym_core.results.fit_result import FitResult
    from exogym_core.results.history import RowRecorder
    from exogym_core.training.loop import RankOutcome
    from exogym_core.training.observer import FinalModels, Observer
    from exogym_core.training.program import Program
    from netsim.ranks.kernel import StampedRow

__all__ = ["Session"]


@dataclass
class _Inline:
    """An observer that works in the turn of the rank that deposits."""

    observer: Observer
    num_given: int = 0

    def take(self, rank: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        self.num_given += 1
        self.observer.take(rank, note, tensors)

    @property
    def num_taken(self) -> int:
        return self.num_given

    def finish(self) -> FinalModels:
        return self.observer.finish()

    def abandon(self) -> None:
        """There is nothing to end."""


class Session:
    """Runs the ranks of a prepared program and fills its result.

    Args:
        program: what ranks run.
        recorder: merges what they mark.
        checkpoints: completed as it goes.
    """

    def __init__(self, program: Program, recorder: RowRecorder, checkpoints: CheckpointWriter) -> None:
        self._program, self._recorder, self._checkpoints = program, recorder, checkpoints
        self._rows: deque[Mapping[str, Any]] = deque()  # observed, perhaps in another thread
        self._workers = program.workers()
        self._observer = program.observer(self._rows.append, checkpoints.observed)
        # Threads take turns with whoever judges; elsewhere judging goes on beside everything else.
        apart = not program.request.carrier.has_clock or self._workers.kind != "threads"
        self._looking = (
            BackgroundObserver(self._observer, self._workers.intra_op_threads)
            if apart
            else _Inline(self._observer)
        )

    def run(self, result: FitResult) -> Sequence[RankOutcome]:
        """Run to the end; returns what ranks ended with."""
        for row in self._checkpoints.observed:
            self._recorder.observe(row)
        try:
            run, final = self._carry()
        except BaseException:
            self._looking.abandon()
            raise
        finally:
            self._observer.close()
        num_nodes = self._program.request.num_nodes
        _account(run, result, self._recorder.rounds.has_any, num_nodes)
        workers = run.results[:num_nodes]
        result.rank_states = [outcome.state for outcome in workers]
        result.max_steps = run.results[0].max_steps
        result.mean_state, result.judged_state = final.mean, final.judged
        return workers

    def _carry(self) -> tuple[RunResult[RankOutcome], FinalModels]:
        program, request = self._program, self._program.request
        run = run_ranks(
            program,
            request.num_ranks,
            request.topology,
            request.transport,
            self._workers,
            placement=request.placement,
            protocol=request.protocol,
            collectives=request.collectives,
            seed=request.seed,
            trace=request.trace,
            on_row=self._take,
            on_deposit=self._looking.take,
            keep_rows=False,
            journal=self._checkpoints.journal,
            timeout_seconds=request.timeout_seconds,
            compare_calls=request.compare_calls,
        )
        final = self._looking.finish()
        self._settle()
        return run, final

    def _take(self, row: StampedRow) -> None:
        self._recorder.add(row)
        self._checkpoints.add(row, self._looking.num_given)
        self._settle()

    def _settle(self) -> None:
        """Pass on what has been observed meanwhile."""
        num_taken = self._looking.num_taken  # first: what is told after it is of no harm
        while self._rows:
            row = self._rows.popleft()
            self._recorder.observe(row)
            self._checkpoints.add_observed(row)
        self._checkpoints.settle(num_taken)


def _account(run: RunResult[RankOutcome], result: FitResult, has_absences: bool, num_nodes: int) -> None:
    """Where the workers' time went, and by which algorithms."""
    result.collectives, result.window_limit = run.collectives, run.window_limit
    result.link_history = run.link_history
    result.compute_seconds = run.compute_seconds[:num_nodes]
    result.exposed_seconds = run.exposed_seconds[:num_nodes]
    if not has_absences:  # else it ended without those who were left behind
        result.virtual_seconds = run.virtual_seconds
    if run.virtual_seconds is None or result.virtual_seconds is None:
        return
    total = result.virtual_seconds
    times = where_time_went(result.compute_seconds, run.network_seconds[:num_nodes], total)
    result.computing_seconds, result.network_seconds, result.waiting_seconds = times
    result.compute_utilisation = mean_utilisation(
        [min(each, total) for each in result.compute_seconds], total
    )
