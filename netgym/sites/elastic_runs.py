"""`fit` as a site that meets others at a rendezvous: every site monitors the run and stores the rows of all.

Rows of all sites come to every site by way of the rendezvous, so each keeps the whole run on its own disk. The lowest
of those present evaluates the models and sends the results to the others; when it fails, the next one takes over. Of a
site of several processes the first does all this; the others send it their rows and snapshots.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.events import (
    Absent,
    Announced,
    Finished,
    Grid,
    RepeatedStep,
    RoundPlace,
    Saved,
    SharedFinding,
    StepDone,
    step_of,
)
from exogym_core.meeting_place import MeetingPlace, processes_of_site, under_torchrun
from exogym_core.names import visible
from exogym_core.run.monitor import RunMonitor, planned_together
from exogym_core.run.resumption import (
    describe_last_checkpoint,
    go_on_after_restart,
    remember_checkpoints,
    run_mark,
)
from exogym_core.run.trainer import fill
from exogym_core.workers.failures import place_of_rank
from exogym_core.workers.host import RunResult, Sinks, untimed_row
from exogym_core.workers.rng import RandomStates, seed_process
from exogym_core.workers.torchrun.rank import TorchrunHost
from netgym.sites.communicator import SiteCommunicator
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from exogym_core.checkpoints.checkpoint import StoredCheckpoint
    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.events import EvaluationPoint, Finding, RankRow, SiteRow
    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.loop import RankOutcome
    from exogym_core.run.program import Program
    from netgym.sites.communicator import ElasticCommunicator
    from netsim.ranks import StampedRow

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["RowOrder", "SiteHost", "fit_elastic"]

T = TypeVar("T")


_LOST_ROUNDS = 2  # rows of a round still missing when one so much later is whole were lost with their site


class RowOrder:
    """Orders rows of sites by round: rows may be delayed, or lost with their site.

    Rows of a rank that was left out of a round's average are dropped, whether they arrived in time or
    not, since that differs between sites; only its absence is recorded.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, StepDone]]] = {}  # by round
        self._announced: dict[int, dict[int, StepDone]] = {}  # rows of a round's end before it, by rank
        self._num_over = 0

    def announce(self, rank: int, row: StepDone) -> None:
        """Keep the row of a rank that is about to end a round, in case it is lost before it marks one."""
        if row.place is not None and self.is_pending(row):
            self._announced.setdefault(row.place.round, {})[rank] = row

    def is_pending(self, row: StepDone) -> bool:
        """True while the rows of its round are not settled."""
        return row.place is not None and row.place.round > self._num_over

    def forget(self, rank: int, step: int) -> None:
        """Drop the pending rows of a rank from this step on: it was stopped, and takes these steps again."""
        for number, rows in self._waiting.items():
            self._waiting[number] = [each for each in rows if each[0] != rank or each[1].step < step]

    def add(self, rank: int, row: RankRow) -> Iterator[tuple[int, RankRow]]:
        """Add a row; yields the rows whose order is settled."""
        if not isinstance(row, StepDone) or row.place is None:
            yield rank, row
            return
        if row.place.round <= self._num_over:
            yield from _absence_of(rank, row)
            return
        self._waiting.setdefault(row.place.round, []).append((rank, row))
        while row.place.averaged_ranks is not None and (turn := self._next()) is not None:
            yield from self._given(turn)

    def _ends(self, number: int) -> dict[int, tuple[StepDone, list[int]]]:
        """Rows of a round's end with the members of its average, by rank."""
        return {
            rank: (row, row.place.averaged_ranks)
            for rank, row in self._waiting[number]
            if row.place is not None and row.place.averaged_ranks is not None
        }

    def _next(self) -> int | None:
        """The first pending round, if it is complete or can no longer become so."""
        first = min(self._waiting, default=0)
        if not first:
            return None
        is_lost = any(self._is_whole(number) for number in self._waiting if number >= first + _LOST_ROUNDS)
        return first if self._is_whole(first) or is_lost else None

    def _is_whole(self, number: int) -> bool:
        ends = self._ends(number)
        return any(all(rank in ends for rank in averaged) for _, averaged in ends.values())

    def _given(self, number: int) -> Iterator[tuple[int, RankRow]]:
        ends, rows = self._ends(number), self._waiting.pop(number)
        self._num_over = number
        announced = self._announced.pop(number, {})
        there = {rank for _, averaged in ends.values() for rank in averaged}
        for rank in sorted(there - set(ends)):  # it took part, and failed afterwards
            if rank in announced:
                ends[rank] = _averaged(announced[rank], sorted(there)), sorted(there)
                rows.append((rank, ends[rank][0]))
        known = sorted(ends)
        for rank, row in sorted(rows, key=lambda each: (each[1].step, each[0])):
            if there and rank not in there:
                yield from _absence_of(rank, row)
                continue
            end, averaged = ends.get(rank, (None, []))
            is_cut = row is end and any(other not in ends for other in averaged)
            yield rank, _averaged(row, known) if is_cut else row

    def rest(self) -> Iterator[tuple[int, RankRow]]:
        """Yield the remaining rows; no more will arrive."""
        for number in sorted(self._waiting):
            yield from self._given(number)


def _averaged(row: StepDone, ranks: list[int]) -> StepDone:
    """The row of a round's end with these ranks as members of its average."""
    assert row.place is not None
    return row._replace(place=row.place._replace(averaged_ranks=ranks))


def _absence_of(rank: int, row: StepDone) -> Iterator[tuple[int, Absent]]:
    """Reduce the row of a rank that was left out to its absence, without work or traffic."""
    if row.place is not None and row.place.missed_round is not None:
        yield rank, Absent(row.step, row.place._replace(averaged_ranks=None), row.wall_seconds)


_SECONDS_BETWEEN_CHECKS = 0.05


_LAST_ROWS_SECONDS = 60.0  # for the last rows of the others


class _SiteMonitor(RunMonitor):
    """Run monitor of a site: rows of all ranks, snapshots of its own."""

    def __init__(self, program: Program, result: FitResult, listeners: Sequence[_Listener]) -> None:
        if under_torchrun():
            go_on_after_restart(program)
        super().__init__(program, result, listeners)
        self._failure: Exception | None = None
        self._last_step: dict[int, int] = {}
        self._rounds = RowOrder()
        self._judged: set[EvaluationPoint] = set()  # of evaluations that have been taken in
        self._size, self._site = processes_of_site(), 0
        self._has_finished: set[int] = set()  # sites
        self._send: Callable[[int, SiteRow], None] = lambda rank, row: None
        self._send_rows: Callable[[], None] = lambda: None
        self._judged.update(found.point for found in self.journal.found)
        past = _without_repeated(self.journal.past_rows())
        self._past = sorted(past, key=lambda each: (step_of(each[1]) or 0, each[0]))
        for rank, row in self._past:
            self._take(rank, row)

    def connect(self, comm: ElasticCommunicator) -> None:
        """Exchange rows and evaluations with the other sites."""
        self._site, self._first = comm.rank // self._size, comm.rank
        self._send, self._send_rows = comm.link.rows.add, comm.link.send_rows
        comm.link.on_line = lambda line: print(
            f"rendezvous: {visible(line, 500)}", file=sys.stderr, flush=True
        )
        comm.link.place_in_code = place_of_rank
        comm.link.on_resend = self._resend
        comm.link.watch(self.hear)

    def _resend(self, since: int) -> None:
        """Send again the rows of all ranks after a step: other sites may have lost them with their processes."""
        for rank, row in self._past:
            if isinstance(row, StepDone) and row.step > since:
                self._send(rank, RepeatedStep(row))
        for found in self.journal.found:
            if found.point > (Grid.STEP, since):
                self._send(self._first, SharedFinding(found))

    def take_deposit(self, place: int, note: Any, tensors: Sequence[Tensor]) -> None:
        """Take a snapshot of the process in that place of this site."""
        self.evaluator.take(self._first + place, note, tensors)

    def mark(self, stamped: StampedRow) -> None:
        """Take a row of this site; its rank is the process's place there."""
        if self._failure is not None:
            raise self._failure
        rank, row = self._first + stamped.rank, stamped.row
        if isinstance(row, Saved):
            self._send_rows()  # a process resumed from it does not send earlier rows
        with self._lock:
            if isinstance(row, Saved):
                self.journal.mark(rank, row)
                own = row._replace(num_timed=0)  # evaluated by another site
                assert self.writer is not None
                self.writer.add(untimed_row(rank, own))
            else:
                self._take(rank, row)
                self._send(rank, row)
            self.settle()
        match row:  # sent before anything else can fail
            case Announced() | StepDone(place=RoundPlace(averaged_ranks=list())):
                self._send_rows()

    def hear(self, rank: int, row: SiteRow) -> None:
        """Take a row of a rank of another site, or of an earlier process of this one, in the link's thread."""
        try:
            with self._lock:
                match row:
                    case SharedFinding(finding=found):
                        self._take_in(found)
                    case Finished():
                        self._has_finished.add(rank // self._size)
                    case RepeatedStep(done=done):
                        self._take(rank, done, is_sent_again=True)
                    case _:
                        self._take(rank, row)
        except Exception as failure:  # raised at this site's next mark
            self._failure = failure

    def _take(self, rank: int, row: Any, is_sent_again: bool = False) -> None:
        """Record a row; of steps that were repeated after a stop, the rank's last counts until their round is over.

        Every site hears a rank's own rows in the order in which it marked them. Rows that sites send again are of
        steps before, and come in any order: they count where nothing later of their rank is known.
        """
        if isinstance(row, Announced):
            self._rounds.announce(rank, row.done._replace(wall_seconds=row.wall_seconds))
            return
        if isinstance(row, StepDone):
            if row.step <= self._last_step.get(rank, 0):
                if is_sent_again or not self._rounds.is_pending(row):
                    return
                self._rounds.forget(rank, row.step)
            self._last_step[rank] = row.step
        self.journal.mark(rank, row)
        for whose, each in self._rounds.add(rank, row):
            self.recorder.add(_stamped(whose, each))

    def observe(self, found: Finding) -> None:
        """Record an evaluation here, and send it to the other sites."""
        self._take_in(found)
        self._send(self._first, SharedFinding(found))

    def _take_in(self, found: Finding) -> None:
        if found.point not in self._judged:
            self._judged.add(found.point)
            super().observe(found)

    def finish(self, comm: ElasticCommunicator, present: Sequence[int]) -> None:
        """End of this site's rounds: wait for its evaluations, and for the last rows of the sites that were present."""
        self.take_final_models()
        with self._lock:
            self._send(self._first, Finished())
        comm.link.send_rows()
        comm.link.send("done")
        until = time.monotonic() + _LAST_ROWS_SECONDS
        sites = {rank // self._size for rank in present}
        while time.monotonic() < until and any(
            pulse.get("is_there", True) and not pulse.get("has_ended", False)
            for site in sites - self._has_finished - {self._site}
            for pulse in [comm.link.pulses.get(str(site), {})]
        ):
            time.sleep(_SECONDS_BETWEEN_CHECKS)

    def close(self, failed: bool) -> None:
        """Store the pending rows and release resources."""
        if failed:
            self.evaluator.close()
        with self._lock:
            self._send = lambda rank, row: None
            self.settle()
            for rank, row in self._rounds.rest():
                self.recorder.add(_stamped(rank, row))
            super().close(failed)


def _without_repeated(rows: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Rows, rank by rank, without those of steps that their rank has repeated."""
    kept: list[tuple[int, Any]] = []
    for rank, row in rows:
        while isinstance(row, StepDone) and kept and kept[-1][0] == rank:
            if (step_of(kept[-1][1]) or 0) < row.step:
                break
            kept.pop()
        kept.append((rank, row))
    return kept


def fit_elastic(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train as this site, or as one of its processes, and fill `result`; returns warnings.

    Of a site of several processes the first has the rows and the models of the run, the others their own model.

    Raises:
        InputError: the strategy waits for all ranks, or the rendezvous has another number of sites.
        RankError: the rendezvous stays away, or another process of this site has died.
    """
    request, before = program.request, RandomStates.of_process()
    MeetingPlace.from_environment().check(request.num_nodes)
    if request.strategy.patience.patience(request.strategy.where) is None:
        raise InputError(
            f"fit: {type(request.strategy).__name__} waits for every rank, and sites that meet at a rendezvous come "
            "and go; use one with time-outs, such as DiLoCo with averaging_timeout (NETGYM_RENDEZVOUS is set: "
            "unset it for ranks on this machine)"
        )
    if request.place:
        request.finds_minibatch = False  # the first one finds it
        program.prepare()
        return _train(program, result, None)
    try:
        watch = _SiteMonitor(program, result, listeners)
        with watch:
            remember_checkpoints(program)
            return _train(program, result, watch)
    finally:
        before.load()


@contextmanager
def _connected(
    program: Program,
    resumed: StoredCheckpoint | None,
    on_mark: Callable[[Any], None],
    processes: GlooCommunicator | None = None,
) -> Iterator[ElasticCommunicator]:
    """The rank's communicator, once the number of sites is checked."""
    count, (about, facts) = program.request.num_nodes, run_mark(program)
    with SiteCommunicator.from_environment(
        run=about,
        facts=facts,
        resumed=resumed is not None,
        past_step=resumed.step if resumed is not None else 0,
        on_mark=on_mark,
        processes=processes,
    ) as comm:
        if comm.world_size != count:
            size = processes_of_site()
            of = f" of {size} processes" if size > 1 else ""
            raise InputError(
                f"fit: num_nodes is {count}, but the rendezvous is for {comm.world_size // size} sites{of}; make "
                "them equal (NETGYM_RENDEZVOUS is set: unset it for ranks on this machine)"
            )
        seed_process(program.request.seed, comm.rank)
        yield comm


class SiteHost:
    """This process as a rank of a site: alone, or with the others that torchrun has started for the site.

    Args:
        program: of the run.
        result: of the run.
        watch: monitor of the site, in its first process.

    Attributes:
        resumed: the checkpoint from which the run resumes, once the ranks of the site have agreed on it.
    """

    def __init__(self, program: Program, result: FitResult, watch: _SiteMonitor | None) -> None:
        self._program, self._result, self._watch = program, result, watch
        self.resumed = None if watch is None else watch.resumed

    def run(self, body: Callable[[ElasticCommunicator], T], sinks: Sinks) -> RunResult[T]:
        """Run `body(comm)` as this rank; in the first process `sinks` receives rows and snapshots of the site.

        Rows and snapshots have the place in the site as their rank.
        """
        if processes_of_site() > 1:
            return self._run_beside(body, sinks)
        on_deposit = sinks.on_deposit
        assert on_deposit is not None
        with _connected(self._program, self.resumed, lambda row: sinks.on_row(untimed_row(0, row))) as comm:
            comm.observed_by(partial(on_deposit, 0))
            return RunResult.untimed([body(comm)], [comm.traffic])

    def _run_beside(self, body: Callable[[ElasticCommunicator], T], sinks: Sinks) -> RunResult[T]:
        request = self._program.request
        about = (request.seed, request.timeout_seconds, request.compare_calls)
        host = self._processes = TorchrunHost(partial(describe_last_checkpoint, self._program), *about)

        def bring_rows() -> None:
            """Send the rows of all processes to the first, and to the other sites, before those depend on them."""
            host.side.send_now()
            with host.comm.off_clock():
                host.comm.barrier()
            if host.comm.rank == 0:
                host.side.take_now()

        def in_site(inside: GlooCommunicator) -> T:
            planned_together(self._program, self._result, host, self._watch)
            self.resumed = self._program.checkpoints.resumed
            with _connected(self._program, self.resumed, host.mark, inside) as comm:
                comm.observed_by(inside.deposit)
                comm.before_meeting(bring_rows)
                return body(comm)

        return host.run(in_site, sinks)

    _processes: TorchrunHost | None = None

    def gather(self, value: Any) -> list[Any]:
        """Bring the remaining rows of the site to its first process; returns the `value` of every process."""
        return [value] if self._processes is None else self._processes.gather(value)


def _train(program: Program, result: FitResult, watch: _SiteMonitor | None) -> Sequence[str]:
    """Train as a rank of this site; the first process has the `watch`."""
    host = SiteHost(program, result, watch)

    def body(comm: ElasticCommunicator) -> RankOutcome:
        if watch is not None:
            watch.connect(comm)
        outcome = program(comm)
        remarks = host.gather(outcome.remarks)
        result.mean_state = result.judged_state = outcome.state
        if watch is not None:
            averaged = result.averaged_ranks
            watch.finish(comm, averaged[max(averaged)] if averaged else [])
        return replace(outcome, remarks=tuple(remark for own in remarks for remark in own))

    sinks = Sinks() if watch is None else Sinks(watch.mark, watch.take_deposit)
    return fill(result, program.request, host.run(body, sinks))


def _stamped(rank: int, row: RankRow) -> StampedRow:
    return untimed_row(rank, row)._replace(virtual_seconds=row.wall_seconds or 0.0)
