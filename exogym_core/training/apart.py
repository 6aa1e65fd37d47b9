"""`fit` as a site that meets others at a rendezvous: every site looks on for itself, and has what all have told.

Rows of all sites come to every site by way of the rendezvous, so each keeps the whole run on its own disk. The lowest
of those present has the models judged and tells the others what came of it: when it dies, the next one does so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.elastic.communicator import SiteCommunicator
from exogym_core.names import visible
from exogym_core.ranks.gloo.ranks import untimed_row
from exogym_core.ranks.rng import RandomStates
from exogym_core.results.history import RowRecorder
from exogym_core.training.background import BackgroundObserver
from exogym_core.training.logs import make_loggers
from exogym_core.training.resumption import begin_checkpoints, find_resumed, run_mark
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.communicator.elastic.contract import ElasticCommunicator
    from exogym_core.results.fit_result import FitResult
    from exogym_core.training.program import Program
    from netsim.ranks.kernel import StampedRow

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["fit_apart"]

_SECONDS_BETWEEN_LOOKS = 0.05
_LOST_ROUNDS = (
    2  # rows of a round that are not here when one so much later is whole were lost with their site
)
_LAST_ROWS_SECONDS = 60.0  # for the last rows of the others


class _SiteWatch:
    """What a site does with what all sites mark, and with what it deposits itself."""

    def __init__(self, program: Program, result: FitResult, listeners: Sequence[_Listener]) -> None:
        resumed = find_resumed(program)
        program.prepare()
        request = program.request
        self._writer = begin_checkpoints(program, resumed)
        self._loggers = make_loggers(request, program.model, program.checkpoints.home)
        told = [*listeners, *(logger.event for logger in self._loggers)]
        if request.on_event is not None:
            told.append(request.on_event)
        self._result, self._recorder = result, RowRecorder(result, False, told, "wall_seconds")
        self._observed: deque[Mapping[str, Any]] = deque()  # by this site, in its observer's thread
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._observer = program.observer(self._observed.append, self._writer.observed)
        self._looking = BackgroundObserver(self._observer, request.workers.intra_op_threads)
        self._last_step: dict[int, int] = {}
        self._rounds = _RoundsInOrder()
        self._judged: set[int] = set()  # the steps of evaluations that have been taken in
        self._is_through: set[int] = set()
        self._tell: Callable[[Mapping[str, Any]], None] = lambda row: None
        self._send_rows: Callable[[], None] = lambda: None
        for seen in self._writer.observed:
            self._judged.add(seen["step"])
            self._recorder.observe(seen)
        past = self._writer.journal.past_rows()
        for site, row in sorted(past, key=lambda each: (each[1].get("step", 0), each[0])):
            self._take(site, row)

    def connect(self, comm: ElasticCommunicator) -> None:
        """Hear what the others tell, and tell them what is seen here."""
        self._tell, self._send_rows = comm.link.mark, comm.link.send_rows
        self.site = comm.rank
        comm.observed_by(lambda note, tensors: self._looking.take(self.site, note, tensors))
        comm.link.on_told = lambda line: print(
            f"rendezvous: {visible(line, 500)}", file=sys.stderr, flush=True
        )
        comm.link.watch(self.hear)

    def mark(self, row: Mapping[str, Any]) -> None:
        """A row of this site."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            if "checkpoint" in row:
                self._writer.journal.mark(self.site, row)
                own = {
                    name: value for name, value in row.items() if name != "looks"
                }  # what others judge is theirs
                self._writer.add(_stamped(self.site, own), self._looking.num_given)
            else:
                self._take(self.site, row)
                self._tell(row)
            self._settle()
        if "averaged_ranks" in row:  # a round that is over is known to all, whatever happens next
            self._send_rows()

    def hear(self, site: int, row: Mapping[str, Any]) -> None:
        """A row of another process, in the link's thread."""
        try:
            with self._lock:
                if "observed" in row:
                    self._observe(row["observed"])
                elif "through" in row:
                    self._is_through.add(site)
                else:
                    self._take(site, row)
        except Exception as failure:  # told where this site marks next
            self._failure = failure

    def _take(self, site: int, row: Mapping[str, Any]) -> None:
        """Of steps that were done again after a stop, the first time counts."""
        if "loss" in row:
            if row["step"] <= self._last_step.get(site, 0):
                return
            self._last_step[site] = row["step"]
        self._writer.journal.mark(site, row)
        for whose, each in self._rounds.add(site, row):
            self._recorder.add(_stamped(whose, each))

    def _observe(self, row: Mapping[str, Any]) -> None:
        if row["step"] not in self._judged:
            self._judged.add(row["step"])
            self._recorder.observe(row)
            self._writer.add_observed(row)

    def _settle(self) -> None:
        num_taken = self._looking.num_taken  # first: what is told after it is of no harm
        while self._observed:
            row = self._observed.popleft()
            self._observe(row)
            self._tell({"observed": row})
        self._writer.settle(num_taken)

    def finish(self, comm: ElasticCommunicator, present: Sequence[int]) -> None:
        """This site has done its rounds: wait for what it judges, and for the last rows of those who were there."""
        final = self._looking.finish()
        with self._lock:
            self._settle()
            self._tell({"through": True})
        comm.link.send_rows()
        until = time.monotonic() + _LAST_ROWS_SECONDS
        while time.monotonic() < until and any(self._is_awaited(comm, site) for site in present):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._result.mean_state, self._result.judged_state = final.mean, final.judged

    def _is_awaited(self, comm: ElasticCommunicator, site: int) -> bool:
        if site == self.site or site in self._is_through:
            return False
        pulse = comm.link.pulses.get(str(site), {})
        return bool(pulse.get("is_there", True)) and not pulse.get("has_ended", False)

    def close(self, failed: bool) -> None:
        """Keep what was done, and let go of everything."""
        if failed:
            self._looking.abandon()
        with self._lock:
            self._tell = lambda row: None
            self._settle()
            for site, row in self._rounds.rest():
                self._recorder.add(_stamped(site, row))
            self._recorder.finish()
            self._writer.close()
        self._writer.release()
        self._observer.close()
        for logger in self._loggers:
            logger.close()


class _RoundsInOrder:
    """Rows of sites come one round after the other, whole: they may be late on their way, or lost with their site."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}  # by round
        self._ends: dict[int, dict[int, Mapping[str, Any]]] = {}  # rows of a round's end, by round and site
        self._num_over = 0

    def add(self, site: int, row: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Take in a row; gives those whose turn it is."""
        number = row.get("round")
        if number is None:
            yield site, row
            return
        if number <= self._num_over:
            return
        self._waiting.setdefault(number, []).append((site, row))
        if "averaged_ranks" in row:
            self._ends.setdefault(number, {})[site] = row
        while (turn := self._next()) is not None:
            yield from self._given(turn)

    def _next(self) -> int | None:
        """The first round that waits, if all of it is here, or if it will never be."""
        first = min(self._waiting, default=0)
        if not first:
            return None
        is_lost = any(self._is_whole(number) for number in self._ends if number >= first + _LOST_ROUNDS)
        return first if self._is_whole(first) or is_lost else None

    def _is_whole(self, number: int) -> bool:
        ends = self._ends.get(number, {})
        return any(all(site in ends for site in row["averaged_ranks"]) for row in ends.values())

    def _given(self, number: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows, ends = self._waiting.pop(number), self._ends.pop(number, {})
        self._num_over = number
        known = sorted(ends)
        for site, row in sorted(rows, key=lambda each: (each[1]["step"], each[0])):
            is_cut = "averaged_ranks" in row and any(other not in ends for other in row["averaged_ranks"])
            yield site, {**row, "averaged_ranks": known} if is_cut else row

    def rest(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """No more rows will come: gives what is here."""
        for number in sorted(self._waiting):
            yield from self._given(number)


def fit_apart(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train as this site and fill `result`; returns what the user should be warned of.

    Raises:
        InputError: the strategy waits for everybody, or the rendezvous has another number of sites.
        RankError: the rendezvous stays away.
    """
    request, before = program.request, RandomStates.of_process()
    if request.strategy.absence is None:
        raise InputError(
            f"fit: {type(request.strategy).__name__} waits for every rank, and sites that meet at a rendezvous come "
            "and go; use one with time-outs, such as DiLoCo with averaging_timeout"
        )
    watch, failed = _SiteWatch(program, result, listeners), True
    resumed = program.checkpoints.resumed
    result.resumed_step = 0 if resumed is None else resumed.step
    result.checkpoint_folder = program.checkpoints.folder
    result.minibatch_size = program.request.minibatch_size
    try:
        where: Any = {"run": run_mark(program), "resumed": resumed is not None}
        with SiteCommunicator.from_environment(**where, on_mark=watch.mark) as comm:
            if comm.world_size != request.num_nodes:
                raise InputError(
                    f"fit: num_nodes is {request.num_nodes}, but the rendezvous is for {comm.world_size} sites; make "
                    "them equal"
                )
            watch.connect(comm)
            RandomStates(request.seed, comm.rank).load()
            outcome = program(comm)
            result.rank_states, result.max_steps = [outcome.state], outcome.max_steps
            watch.finish(
                comm, result.averaged_ranks[max(result.averaged_ranks)] if result.averaged_ranks else []
            )
        failed = False
    finally:
        before.load()
        watch.close(failed)
    return outcome.remarks


def _stamped(site: int, row: Mapping[str, Any]) -> StampedRow:
    return untimed_row(site, row)._replace(virtual_seconds=float(row.get("wall_seconds", 0.0)))
