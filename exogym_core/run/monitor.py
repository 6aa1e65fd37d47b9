"""Run monitor: history, loggers, evaluation and checkpoints, fed by the ranks' rows."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.config import OPTIONS
from exogym_core.events import Saved
from exogym_core.results.loggers import FolderLogger, Logger, WandbLogger, close_logger, flat
from exogym_core.results.recorder import RowRecorder
from exogym_core.run.record import PLAIN, plain_arguments
from exogym_core.run.resumption import begin_checkpoints, find_resumed, follow, plan
from exogym_core.run.retiming import RecordedEvaluator
from exogym_core.stages.split import Assembly
from exogym_core.workers.host import Sinks
from exogym_core.workers.journal import Journal
from exogym_core.workers.streams import Streams
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from exogym_core.checkpoints.checkpoint import StoredCheckpoint
    from exogym_core.checkpoints.writing import CheckpointWriter
    from exogym_core.events import Finding
    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.evaluator import Evaluator
    from exogym_core.run.program import Program
    from exogym_core.run.request import FitRequest
    from exogym_core.run.retiming import RecordedTraining
    from exogym_core.workers.torchrun.rank import TorchrunHost
    from netsim.ranks import Request, StampedRow

__all__ = [
    "RunMonitor",
    "StoppedError",
    "make_loggers",
    "note_settled",
    "planned_together",
    "run_config",
]


def run_config(request: FitRequest, model: nn.Module) -> dict[str, Any]:
    """Settings of a run for loggers, in plain values."""
    return {
        "model": type(model).__name__,
        "model_parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "strategy": type(request.strategy).__name__,
        "strategy_config": plain_arguments(request.strategy),
        "topology": request.topology.name if request.topology is not None else None,
        "hosts": list(request.hosts),
        "compute": request.compute.model_dump() if request.compute is not None else None,
        **{name: each for name in OPTIONS if isinstance(each := getattr(request, name), PLAIN)},
    }


def make_loggers(program: Program) -> list[Logger]:
    """The loggers that the request names; none where logging is disabled."""
    loggers: list[Logger] = []
    request = program.request
    if request.disable_logging or (request.wandb_project is None and request.run_name is None):
        return loggers
    config = run_config(request, program.model)
    if request.wandb_project is not None:
        checkpoints = program.checkpoints.home  # has the id of its wandb run too
        id_file = checkpoints / "wandb" if checkpoints is not None else None
        loggers.append(
            WandbLogger(
                request.wandb_project, request.run_name, dict(flat(config)), request.log_x_axis, id_file
            )
        )
    if request.run_name is not None:
        loggers.append(FolderLogger(request.run_name, config))
    return loggers


class StoppedError(NetsimError):
    """`on_event` has raised StopIteration: no further rows are wanted."""


def _tell(listener: Callable[[Mapping[str, Any]], None], row: Mapping[str, Any]) -> None:
    try:
        listener(row)
    except StopIteration:
        raise StoppedError(
            f"fit: on_event stopped the run at step {row['step']}; the trainer's `result` has what was done until then"
        ) from None


_COMPLETE = "newest complete checkpoint"


class RunMonitor(AbstractContextManager["RunMonitor"]):
    """Context manager that monitors a run: takes rows and snapshots of its ranks.

    Made before they start, since it prepares `program`.

    Args:
        program: of the ranks.
        result: filled as rows come.
        listeners: called with rows, besides those that the request names.
        recording: of a training that is retimed; None: it is trained.

    Attributes:
        resumed: the checkpoint that the run resumes from; None for a run from the start.
        journal: requests of ranks, before this run and since.
        writer: completes checkpoints; None where none are made.
        recorder: merges rows.
        sinks: receivers of rows, snapshots and the journal.
        streams: requests of ranks, where they have a clock.
        found: findings of the evaluator.
        evaluator: of the ranks' snapshots.
    """

    def __init__(
        self,
        program: Program,
        result: FitResult,
        listeners: Sequence[Callable[[Mapping[str, Any]], None]],
        recording: RecordedTraining | None = None,
    ) -> None:
        request = program.request
        self.resumed: StoredCheckpoint | None = None
        if request.resume_from is not None:
            self.resumed = find_resumed(program, Path(request.resume_from))
        if recording is None:
            program.prepare()
        else:
            recording.settle(program)
        self.journal = Journal()
        self.writer: CheckpointWriter | None = None
        if self.resumed is not None or request.checkpoint_interval is not None:
            self.journal, self.writer = begin_checkpoints(program, self.resumed)
        self._loggers = make_loggers(program)
        listening = [*listeners, *(logger.event for logger in self._loggers)]
        if request.on_event is not None:
            listening.append(partial(_tell, request.on_event))
        clock = "virtual_seconds" if request.carrier.has_clock else "wall_seconds"
        self.recorder = RowRecorder(
            result, request.topology is not None, listening, clock, num_ranks=request.num_training
        )
        self.evaluator: Evaluator | RecordedEvaluator = (
            program.evaluator(self.journal.found) if recording is None else RecordedEvaluator(recording)
        )
        take_snapshot, self._ranks_a_worker = self.evaluator.take, 1
        if request.stages is not None and recording is None:
            self._ranks_a_worker = request.stages.count
            take_snapshot = Assembly(self.evaluator.take, program.model, request.stages.count).take
        self.sinks = Sinks(self.take, take_snapshot, self.journal)
        self.streams = Streams(request.num_ranks)
        self.found = list(self.journal.found)
        self._is_recorded = recording is None and request.carrier.has_clock
        self.journal.on_request = self._requested
        self._result = result
        note_settled(result, program)
        for found in self.found:
            self.recorder.observe(found)
        self._lock = threading.RLock()  # rows may come in several threads

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def _requested(self, rank: int, request: Request) -> None:
        if self.writer is not None:
            self.writer.requested(rank, request)
        if self._is_recorded:
            self.streams.add(rank, request)

    def take(self, marked: StampedRow) -> None:
        """Record a row of a rank."""
        with self._lock:
            self.recorder.add(marked)
            if self.writer is not None and isinstance(marked.row, Saved):
                self.writer.add(marked)
            self.settle()

    def take_final_models(self) -> None:
        """Wait for the last evaluations, after all rows and snapshots, and keep the models in the result."""
        self._result.mean_state, self._result.judged_state = self.evaluator.result()
        with self._lock:
            self.settle()

    def observe(self, found: Finding) -> None:
        """Record a finding of the evaluator."""
        self.found.append(found)
        self.recorder.observe(found)
        if self.writer is not None:
            self.writer.add_found(found)

    def settle(self) -> None:
        """Record what the evaluator has found since the last call."""
        num_taken: Mapping[int, int] = {}
        if self.writer is not None:
            num_taken = dict(self.evaluator.num_taken)  # first: later findings do no harm
        while self.evaluator.found:
            self.observe(self.evaluator.found.popleft())
        if self.writer is None:
            return
        count = self._ranks_a_worker
        if count > 1:  # snapshots of a worker are those of its ranks
            num_taken = {worker * count + k: num for worker, num in num_taken.items() for k in range(count)}
        self.writer.settle(num_taken)

    def close(self, failed: bool) -> None:
        """Write what was recorded and release all resources."""
        with self._lock:
            self.evaluator.close()
            try:
                self.recorder.finish(is_complete=not failed)  # a listener may press Ctrl-C here too
            finally:
                if self.writer is not None:
                    self.writer.close()
                    self.writer.release()
                error = sys.exception() if failed else None
                for logger in self._loggers:
                    close_logger(logger, None if error is None else type(error))


def note_settled(result: FitResult, program: Program) -> None:
    """Note in `result` what is settled before the first step."""
    checkpoints, request = program.checkpoints, program.request
    result.checkpoint_folder = checkpoints.folder
    result.resumed_step = 0 if checkpoints.resumed is None else checkpoints.resumed.step
    result.minibatch_size, result.hosts = request.minibatch_size, list(request.hosts)
    result.compute = program.compute.model_dump() if program.compute is not None else None


def planned_together(
    program: Program, result: FitResult, host: TorchrunHost, monitor: RunMonitor | None
) -> None:
    """Share the monitoring process's preparations among processes that torchrun has started, off the clock.

    Raises:
        InputError: a rank's part of the checkpoint to resume from is missing; on all of them.
    """
    comm, side = host.comm, host.side

    def newest_complete() -> int:
        return int(side.posted(_COMPLETE) or -1)

    own, refused = None, ""
    with comm.off_clock():
        planned: Mapping[str, Any] = comm.broadcast_object(
            None if monitor is None else plan(program, monitor.resumed)
        )
        if monitor is None:
            try:
                own = follow(program, planned, (comm.rank, comm.world_size), newest_complete)
            except InputError as error:
                refused = str(error)
        refusals = [text for text in comm.all_gather_object(refused) if text]
    if monitor is not None:
        if planned["mark"]:
            (Path(planned["home"]) / planned["mark"]).unlink(missing_ok=True)
        if monitor.writer is not None:
            monitor.writer.on_complete = lambda step: side.post(_COMPLETE, str(step))
    if refusals:
        raise InputError("\n".join(refusals))
    if own is not None:
        own.keep_only(planned["resumed step"] or None)
    note_settled(result, program)
