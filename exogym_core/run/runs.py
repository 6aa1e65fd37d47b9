"""Runs of `fit`: ranks that are started here, or this process as one of torchrun's ranks.

Rank 0 monitors a run under torchrun, and no rank gathers all models.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.communicator import run_ranks
from exogym_core.results.recorder import mean_utilisation, where_time_went
from exogym_core.run.monitor import RunMonitor, planned_together
from exogym_core.run.resumption import go_on_after_restart, remember_checkpoints, there_is
from exogym_core.workers.host import Sinks, untimed_row
from exogym_core.workers.torchrun.rank import TorchrunHost, torchrun_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.loop import RankOutcome
    from exogym_core.run.observer import FinalModels
    from exogym_core.run.program import Program
    from exogym_core.workers.run import RunResult
    from netsim.ranks import StampedRow

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["fit_local", "fit_torchrun"]


_UNCHARGED = (
    "{}: coding not charged: it sends encoded values, and compute.coding has a speed; encode with self.charged(codec), "
    "or call self.charge(name, 'encode' or 'decode', num_values)"
)


def fit_local(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train with all ranks and fill `result`; returns warnings for the user."""
    monitor, failed = RunMonitor(program, result, listeners), True
    request = program.request
    result.checkpoint_folder = program.checkpoints.folder
    result.resumed_step = monitor.resumed.step if monitor.resumed is not None else 0
    result.minibatch_size = request.minibatch_size
    result.hosts = request.hosts
    result.compute = program.compute.to_mapping() if program.compute is not None else None
    # Listeners are called here, not in the ranks: a terminal or an open file need not travel to processes.
    program.request = replace(request, on_event=None)
    try:
        run, final = _carry(program, monitor)
        failed = False
    finally:
        monitor.close(failed)
    _account(run, result, monitor.recorder.rounds.has_any, request.num_nodes)
    workers = run.results[: request.num_nodes]
    result.rank_states = [outcome.state for outcome in workers]
    result.max_steps = run.results[0].max_steps
    coding = {outcome.coding for outcome in workers}
    result.coding = next((each for each in ("not charged", "charged") if each in coding), None)
    result.mean_state, result.judged_state = final.mean, final.judged
    remarks = [remark for outcome in workers for remark in outcome.remarks]
    return [*remarks, _UNCHARGED.format(result.strategy)] if result.coding == "not charged" else remarks


def _carry(program: Program, monitor: RunMonitor) -> tuple[RunResult[RankOutcome], FinalModels]:
    """Run the ranks; pass their rows and snapshots to the monitor."""
    request, evaluations = program.request, monitor.evaluations

    def take(row: StampedRow) -> None:
        monitor.recorder.add(row)
        monitor.writer.add(row, evaluations.num_given)
        monitor.settle()

    run = run_ranks(
        program,
        request.num_ranks,
        request.topology,
        request.transport,
        program.workers(),
        placement=request.placement,
        protocol=request.protocol,
        collectives=request.collectives,
        seed=request.seed,
        trace=request.trace,
        on_row=take,
        on_deposit=evaluations.take,
        keep_rows=False,
        journal=monitor.writer.journal,
        timeout_seconds=request.timeout_seconds,
        compare_calls=request.compare_calls,
    )
    final = evaluations.finish()
    monitor.settle()
    return run, final


def _account(run: RunResult[RankOutcome], result: FitResult, has_absences: bool, num_nodes: int) -> None:
    """Fill in times, utilisation and collective algorithms."""
    result.collectives, result.window_limit = run.collectives, run.window_limit
    result.link_history = run.link_history
    result.compute_seconds = run.compute_seconds[:num_nodes]
    result.exposed_seconds = run.exposed_seconds[:num_nodes]
    if not has_absences:  # else it ended without the ranks that were left behind
        result.virtual_seconds = run.virtual_seconds
    if run.virtual_seconds is None or result.virtual_seconds is None:
        return
    total = result.virtual_seconds
    times = where_time_went(result.compute_seconds, run.network_seconds[:num_nodes], total)
    result.computing_seconds, result.network_seconds, result.waiting_seconds = times
    result.compute_utilisation = mean_utilisation(
        [min(each, total) for each in result.compute_seconds], total
    )


class _Watcher(RunMonitor):
    """Run monitor of rank 0, for the rows and snapshots of all ranks.

    Rows arrive in one thread, snapshots in a second, and are evaluated in a third.
    """

    def __init__(self, program: Program, result: FitResult, listeners: Sequence[_Listener]) -> None:
        super().__init__(program, result, listeners)
        self._num_deposited: Counter[int] = Counter()  # of all ranks, at the checkpoint of a step
        self._lock = threading.Lock()
        for rank, row in self.writer.journal.past_rows():
            self.writer.journal.mark(rank, row)
            self.recorder.add(untimed_row(rank, row))

    def take(self, marked: StampedRow) -> None:
        """Record a row of a rank."""
        row = marked.row
        with self._lock:
            self.recorder.add(marked)
            if "checkpoint" in row:
                self._num_deposited[row["step"]] += row["num_deposited"]
            self.writer.add(marked, self._num_deposited[row["step"]])
            self.settle()

    @property
    def sinks(self) -> Sinks:
        """Receivers of rows, snapshots and the journal."""
        return Sinks(self.take, self.evaluations.take, self.writer.journal)

    def finish(self) -> FinalModels:
        """Wait for the last evaluations, after all rows and snapshots."""
        final = self.evaluations.finish()
        with self._lock:
            self.settle()
        return final

    def close(self, failed: bool) -> None:
        """Write what was recorded and release all resources."""
        with self._lock:
            super().close(failed)


def fit_torchrun(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train as this rank and fill `result`; returns warnings for the user.

    On rank 0 `listeners` are called with rows, besides those that the request names.
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
    host = TorchrunHost(
        partial(there_is, program), request.seed, request.timeout_seconds, request.compare_calls
    )

    def body(comm: GlooCommunicator) -> tuple[RankOutcome, FinalModels | None, list[str]]:
        planned = planned_together(program, host, watcher)
        result.checkpoint_folder = program.checkpoints.folder
        result.resumed_step = planned["resumed step"]
        result.minibatch_size = program.request.minibatch_size
        if watcher is not None:
            about_run = {"strategy": type(request.strategy).__name__, "steps": request.max_steps}
            host.side.post("run", json.dumps(about_run))  # for `netgym status`
        outcome = program(comm)
        remarks = host.gather(outcome.remarks)
        final = None if watcher is None else watcher.finish()
        return outcome, final, [remark for own in remarks for remark in own]

    sinks = Sinks(_ignore) if watcher is None else watcher.sinks
    ((outcome, final, remarks),) = host.run(body, sinks).results
    result.rank_states, result.max_steps = [outcome.state], outcome.max_steps
    result.mean_state = outcome.state if final is None else final.mean
    result.judged_state = outcome.state if final is None else final.judged
    return remarks


def _ignore(row: StampedRow) -> None:
    """Drop a row: rank 0 alone receives them."""
