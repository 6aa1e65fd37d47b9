"""Who looks on at a run: its history, loggers, judging and checkpoints take what ranks mark and deposit."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.results.history import RowRecorder
from exogym_core.training.background import BackgroundObserver, InlineObserver
from exogym_core.training.logs import make_loggers
from exogym_core.training.resumption import begin_checkpoints, find_resumed, follow, plan
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.ranks.torchrun.rank import JoinedRank
    from exogym_core.results.fit_result import FitResult
    from exogym_core.training.program import Program

__all__ = ["RunLookout", "planned_together"]

_COMPLETE = "newest complete checkpoint"


class RunLookout:
    """What is done with what ranks mark and deposit, wherever they run. Made before they start: it prepares `program`.

    Args:
        program: what they run.
        result: filled as rows come.
        listeners: told of rows, besides those that the request names.

    Attributes:
        resumed: the checkpoint that the run goes on from, if it does.
        writer: completes checkpoints.
        recorder: merges rows.
        looking: takes deposits and judges, beside everything else or in the depositing rank's turn.
    """

    def __init__(
        self, program: Program, result: FitResult, listeners: Sequence[Callable[[Mapping[str, Any]], None]]
    ) -> None:
        self.resumed = find_resumed(program)
        program.prepare()
        request = program.request
        self.writer = begin_checkpoints(program, self.resumed)
        self._loggers = make_loggers(request, program.model, program.checkpoints.home)
        told = [*listeners, *(logger.event for logger in self._loggers)]
        if request.on_event is not None:
            told.append(request.on_event)
        has_clock, workers = request.carrier.has_clock, program.workers()
        clock = "virtual_seconds" if has_clock else "wall_seconds"
        self.recorder = RowRecorder(result, request.topology is not None, told, clock)
        self._observed: deque[Mapping[str, Any]] = deque()  # perhaps in another thread
        self._observer = program.observer(self._observed.append, self.writer.observed)
        # Threads take turns with whoever judges; elsewhere judging goes on beside everything else.
        is_inline = has_clock and workers.kind == "threads"
        self.looking: InlineObserver | BackgroundObserver = (
            InlineObserver(self._observer)
            if is_inline
            else BackgroundObserver(self._observer, workers.intra_op_threads)
        )
        for row in self.writer.observed:
            self.recorder.observe(row)

    def observe(self, row: Mapping[str, Any]) -> None:
        """Tell of what has been observed here."""
        self.recorder.observe(row)
        self.writer.add_observed(row)

    def settle(self) -> None:
        """Pass on what has been observed meanwhile."""
        num_taken = self.looking.num_taken  # first: what is told after it is of no harm
        while self._observed:
            self.observe(self._observed.popleft())
        self.writer.settle(num_taken)

    def close(self, failed: bool) -> None:
        """Keep what was done, and let go of everything."""
        if failed:
            self.looking.abandon()
        try:
            self.recorder.finish()  # a listener may press Ctrl-C here too
        finally:
            self.writer.close()
            self.writer.release()
            self._observer.close()
            for logger in self._loggers:
                logger.close()


def planned_together(program: Program, joined: JoinedRank, lookout: RunLookout | None) -> Mapping[str, Any]:
    """Have processes that torchrun has started go on from what the one that looks on has prepared, off the clock.

    Raises:
        InputError: a rank's part of the checkpoint to go on from is missing; on all of them.
    """
    comm, beside = joined.comm, joined.beside

    def newest_complete() -> int:
        return int(beside.posted(_COMPLETE) or -1)

    own, refused = None, ""
    with comm.off_clock():
        planned: Mapping[str, Any] = comm.broadcast_object(
            None if lookout is None else plan(program, lookout.resumed)
        )
        if lookout is None:
            try:
                own = follow(program, planned, (comm.rank, comm.world_size), newest_complete)
            except InputError as error:
                refused = str(error)
        said = [text for text in comm.all_gather_object(refused) if text]
    if lookout is not None:
        if planned["mark"]:
            (Path(planned["home"]) / planned["mark"]).unlink(missing_ok=True)
        lookout.writer.on_complete = lambda step: beside.post(_COMPLETE, str(step))
    if said:
        raise InputError("\n".join(said))
    if own is not None:
        own.keep_only(planned["resumed step"] or None)
    program.request = replace(program.request, on_event=None)
    return planned
