"""`fit` with ranks that are started here: threads, processes, a Ray cluster, or gloo on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exogym_core.communicator import run_ranks
from exogym_core.results.history import mean_utilisation, where_time_went
from exogym_core.training.lookout import RunLookout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.ranks.run import RunResult
    from exogym_core.results.fit_result import FitResult
    from exogym_core.training.loop import RankOutcome
    from exogym_core.training.observer import FinalModels
    from exogym_core.training.program import Program
    from netsim.ranks.kernel import StampedRow

__all__ = ["fit_here"]

_UNCHARGED = (
    "{}: coding not charged: it sends encoded values, and compute.coding has a speed; encode with self.charged(codec), "
    "or call self.charge(name, 'encode' or 'decode', num_values)"
)


def fit_here(
    program: Program, result: FitResult, listeners: Sequence[Callable[[Mapping[str, Any]], None]]
) -> Sequence[str]:
    """Train with all ranks and fill `result`; returns what the user should be warned of."""
    lookout, failed = RunLookout(program, result, listeners), True
    request = program.request
    result.checkpoint_folder = program.checkpoints.folder
    result.resumed_step = lookout.resumed.step if lookout.resumed is not None else 0
    result.minibatch_size = request.minibatch_size
    result.hosts = request.hosts
    result.compute = program.compute.to_mapping() if program.compute is not None else None
    # Rows are told here, not in the ranks: a listener (a terminal, an open file) need not travel to processes.
    program.request = replace(request, on_event=None)
    try:
        run, final = _carry(program, lookout)
        failed = False
    finally:
        lookout.close(failed)
    _account(run, result, lookout.recorder.rounds.has_any, request.num_nodes)
    workers = run.results[: request.num_nodes]
    result.rank_states = [outcome.state for outcome in workers]
    result.max_steps = run.results[0].max_steps
    told = {outcome.coding for outcome in workers}
    result.coding = next((each for each in ("not charged", "charged") if each in told), None)
    result.mean_state, result.judged_state = final.mean, final.judged
    remarks = [remark for outcome in workers for remark in outcome.remarks]
    return [*remarks, _UNCHARGED.format(result.strategy)] if result.coding == "not charged" else remarks


def _carry(program: Program, lookout: RunLookout) -> tuple[RunResult[RankOutcome], FinalModels]:
    """Run the ranks, and pass on what they mark and deposit."""
    request, looking = program.request, lookout.looking

    def take(row: StampedRow) -> None:
        lookout.recorder.add(row)
        lookout.writer.add(row, looking.num_given)
        lookout.settle()

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
        on_deposit=looking.take,
        keep_rows=False,
        journal=lookout.writer.journal,
        timeout_seconds=request.timeout_seconds,
        compare_calls=request.compare_calls,
    )
    final = looking.finish()
    lookout.settle()
    return run, final


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
