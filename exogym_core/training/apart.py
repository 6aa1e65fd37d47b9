"""`fit` as a site that meets others at a rendezvous: every site looks on for itself, and has what all have told.

Rows of all sites come to every site by way of the rendezvous, so each keeps the whole run on its own disk. The lowest
of those present has the models judged and tells the others what came of it: when it dies, the next one does so. Of a
site of several processes the first does all this; the others bring it their rows and what they deposit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.elastic.communicator import SiteCommunicator
from exogym_core.meeting_place import MeetingPlace, processes_of_site
from exogym_core.names import visible
from exogym_core.ranks.gloo.ranks import untimed_row
from exogym_core.ranks.rng import RandomStates
from exogym_core.ranks.torchrun.collecting import Collecting
from exogym_core.ranks.torchrun.rank import JoinedRank, torchrun_rank
from exogym_core.ranks.watch import place_of_rank
from exogym_core.training.in_rounds import RoundsInOrder
from exogym_core.training.lookout import RunLookout, planned_together
from exogym_core.training.resumption import (
    go_on_after_restart,
    remember_checkpoints,
    run_mark,
    there_is,
)
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from exogym_core.checkpoints.checkpoint import StoredCheckpoint
    from exogym_core.communicator.elastic.contract import ElasticCommunicator
    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.results.fit_result import FitResult
    from exogym_core.training.loop import RankOutcome
    from exogym_core.training.program import Program
    from netsim.ranks.kernel import StampedRow

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["fit_apart"]

_SECONDS_BETWEEN_LOOKS = 0.05
_LAST_ROWS_SECONDS = 60.0  # for the last rows of the others


class _SiteWatch(RunLookout):
    """What a site does with what all ranks mark, and with what its own deposit."""

    def __init__(self, program: Program, result: FitResult, listeners: Sequence[_Listener]) -> None:
        if torchrun_rank() is not None:
            go_on_after_restart(program)
        super().__init__(program, result, listeners)
        self._result = result
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._last_step: dict[int, int] = {}
        self._rounds = RoundsInOrder()
        self._judged: set[int] = set()  # the steps of evaluations that have been taken in
        self._num_deposited: Counter[int] = Counter()  # by this site's ranks, at the checkpoint of a step
        self._size, self._site = processes_of_site(), 0
        self._is_through: set[int] = set()  # sites
        self._tell: Callable[[int, Mapping[str, Any]], None] = lambda rank, row: None
        self._send_rows: Callable[[], None] = lambda: None
        self._judged.update(seen["step"] for seen in self.writer.observed)
        past = self.writer.journal.past_rows()
        self._past = sorted(past, key=lambda each: (each[1].get("step", 0), each[0]))
        for rank, row in self._past:
            self._take(rank, row)

    def connect(self, comm: ElasticCommunicator) -> None:
        """Hear what the others tell, and tell them what is seen here."""
        self._site, self._first = comm.rank // self._size, comm.rank
        self._tell, self._send_rows = comm.link.mark, comm.link.send_rows
        comm.link.on_told = lambda line: print(
            f"rendezvous: {visible(line, 500)}", file=sys.stderr, flush=True
        )
        comm.link.place_in_code = place_of_rank
        comm.link.on_retell = self._retell
        comm.link.watch(self.hear)

    def _retell(self, since: int) -> None:
        """Tell what is known of all ranks after a step: it is lost elsewhere where all processes had died."""
        for rank, row in self._past:
            if "loss" in row and row["step"] > since:
                self._tell(rank, row)
        for row in self.writer.observed:
            if row["step"] > since:
                self._tell(self._first, {"observed": row})

    @property
    def num_deposited(self) -> int:
        """How much has been deposited here."""
        return self.looking.num_given

    def take_deposit(self, place: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take what the process in that place of this site deposits."""
        self.looking.take(self._first + place, note, tensors)

    def mark(self, place: int, row: Mapping[str, Any]) -> None:
        """A row of the process in that place of this site."""
        if self._failure is not None:
            raise self._failure
        rank = self._first + place
        if "checkpoint" in row:
            self._send_rows()  # a process that goes on from it does not tell what was before
        with self._lock:
            if "checkpoint" in row:
                self._num_deposited[row["step"]] += row["num_deposited"]
                self.writer.journal.mark(rank, row)
                own = {
                    name: value for name, value in row.items() if name != "looks"
                }  # what others judge is theirs
                self.writer.add(_stamped(rank, own), self._num_deposited[row["step"]])
            else:
                self._take(rank, row)
                self._tell(rank, row)
            self.settle()
        if "averaged_ranks" in row or "announced" in row:  # known to all, whatever happens next
            self._send_rows()

    def hear(self, rank: int, row: Mapping[str, Any]) -> None:
        """A row of a rank of another site, or of an earlier process of this one, in the link's thread."""
        try:
            with self._lock:
                if "observed" in row:
                    self._take_in(row["observed"])
                elif "through" in row:
                    self._is_through.add(rank // self._size)
                else:
                    self._take(rank, row)
        except Exception as failure:  # told where this site marks next
            self._failure = failure

    def _take(self, rank: int, row: Mapping[str, Any]) -> None:
        """Of steps that were done again after a stop, the first time counts."""
        if "announced" in row:
            self._rounds.announce(rank, {**row["announced"], "wall_seconds": row["wall_seconds"]})
            return
        if "loss" in row:
            if row["step"] <= self._last_step.get(rank, 0):
                return
            self._last_step[rank] = row["step"]
        self.writer.journal.mark(rank, row)
        for whose, each in self._rounds.add(rank, row):
            self.recorder.add(_stamped(whose, each))

    def observe(self, row: Mapping[str, Any]) -> None:
        """Tell of what has been observed, here and to the other sites."""
        self._take_in(row)
        self._tell(self._first, {"observed": row})

    def _take_in(self, row: Mapping[str, Any]) -> None:
        if row["step"] not in self._judged:
            self._judged.add(row["step"])
            super().observe(row)

    def finish(self, comm: ElasticCommunicator, present: Sequence[int]) -> None:
        """This site has done its rounds: wait for what it judges, and for the last rows of those who were there."""
        final = self.looking.finish()
        with self._lock:
            self.settle()
            self._tell(self._first, {"through": True})
        comm.link.send_rows()
        comm.link.tell("done")
        until = time.monotonic() + _LAST_ROWS_SECONDS
        sites = {rank // self._size for rank in present}
        while time.monotonic() < until and any(self._is_awaited(comm, site) for site in sites):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._result.mean_state, self._result.judged_state = final.mean, final.judged

    def _is_awaited(self, comm: ElasticCommunicator, site: int) -> bool:
        if site == self._site or site in self._is_through:
            return False
        pulse = comm.link.pulses.get(str(site), {})
        return bool(pulse.get("is_there", True)) and not pulse.get("has_ended", False)

    def close(self, failed: bool) -> None:
        """Keep what was done, and let go of everything."""
        if failed:
            self.looking.abandon()
        with self._lock:
            self._tell = lambda rank, row: None
            self.settle()
            for rank, row in self._rounds.rest():
                self.recorder.add(_stamped(rank, row))
            super().close(failed)


def fit_apart(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train as this site, or as one of its processes, and fill `result`; returns what the user should be warned of.

    Of a site of several processes the first has the rows and the models of the run, the others their own model.

    Raises:
        InputError: the strategy waits for everybody, or the rendezvous has another number of sites.
        RankError: the rendezvous stays away, or another process of this site has died.
    """
    request, before = program.request, RandomStates.of_process()
    MeetingPlace.from_environment().check(request.num_nodes)
    if request.strategy.absence is None:
        raise InputError(
            f"fit: {type(request.strategy).__name__} waits for every rank, and sites that meet at a rendezvous come "
            "and go; use one with time-outs, such as DiLoCo with averaging_timeout (NETGYM_RENDEZVOUS is set: "
            "unset it for ranks on this machine)"
        )
    if torchrun_rank():
        program.request = replace(request, finds_minibatch=False)  # the first one finds it
        program.prepare()
        return _train_beside(program, result, None)
    watch, failed = _SiteWatch(program, result, listeners), True
    try:
        remember_checkpoints(program)
        remarks = (_train_beside if processes_of_site() > 1 else _train_alone)(program, result, watch)
        failed = False
    finally:
        before.load()
        watch.close(failed)
    return remarks


@contextmanager
def _connected(
    program: Program,
    resumed: StoredCheckpoint | None,
    on_mark: Callable[[Mapping[str, Any]], None],
    processes: GlooCommunicator | None = None,
) -> Iterator[ElasticCommunicator]:
    """This rank's way to the others, when it has been seen that they do the same."""
    count, (about, facts) = program.request.num_nodes, run_mark(program)
    connected = SiteCommunicator.from_environment(
        run=about,
        facts=facts,
        resumed=resumed is not None,
        past_step=resumed.step if resumed is not None else 0,
        on_mark=on_mark,
        processes=processes,
    )
    with connected as comm:
        if comm.world_size != count:
            size = processes_of_site()
            of = f" of {size} processes" if size > 1 else ""
            raise InputError(
                f"fit: num_nodes is {count}, but the rendezvous is for {comm.world_size // size} sites{of}; make "
                "them equal (NETGYM_RENDEZVOUS is set: unset it for ranks on this machine)"
            )
        RandomStates(program.request.seed, comm.rank).load()
        yield comm


def _train_alone(program: Program, result: FitResult, watch: _SiteWatch | None) -> Sequence[str]:
    """As the one process of this site."""
    assert watch is not None
    _begin(program, result, watch.resumed)

    def mark(row: Mapping[str, Any]) -> None:
        watch.mark(0, {**row, "num_deposited": watch.num_deposited} if "checkpoint" in row else row)

    with _connected(program, watch.resumed, mark) as comm:
        watch.connect(comm)
        comm.observed_by(lambda note, tensors: watch.take_deposit(0, note, tensors))
        outcome = program(comm)
        _end(result, outcome)
        watch.finish(comm, _last_present(result))
    return outcome.remarks


def _train_beside(program: Program, result: FitResult, watch: _SiteWatch | None) -> Sequence[str]:
    """As one of the processes of this site; the first has the `watch`."""

    def take(place: int, row: Mapping[str, Any]) -> None:
        assert watch is not None
        watch.mark(place, row)

    request = program.request
    about = (request.seed, request.timeout_seconds, request.compare_calls)
    with JoinedRank(take, partial(there_is, program), *about) as joined:
        inside = joined.comm
        planned_together(program, joined, watch)
        resumed = program.checkpoints.resumed
        _begin(program, result, resumed)
        with _connected(program, resumed, joined.mark, inside) as comm:
            if watch is not None:
                watch.connect(comm)
            collecting = Collecting(inside, _nobody if watch is None else watch.take_deposit)
            comm.observed_by(collecting.put)
            comm.before_meeting(partial(_bring_rows, joined))
            joined.facts_at_checkpoint = lambda: {"num_deposited": collecting.num_put}
            outcome = program(comm)
            collecting.finish()
            parts = joined.beside.send_rest()
            with inside.off_clock():
                ends = inside.all_gather_object((parts, outcome.remarks))
            _end(result, outcome)
            if watch is not None:
                joined.beside.take_rest([number for number, _ in ends])
                watch.finish(comm, _last_present(result))
    return [remark for _, own in ends for remark in own]


def _bring_rows(joined: JoinedRank) -> None:
    """Have the first process know the rows of all, and tell the other sites, before these count on them."""
    joined.beside.send_now()
    with joined.comm.off_clock():
        joined.comm.barrier()
    if joined.comm.rank == 0:
        joined.beside.take_now()


def _begin(program: Program, result: FitResult, resumed: StoredCheckpoint | None) -> None:
    result.resumed_step = 0 if resumed is None else resumed.step
    result.checkpoint_folder = program.checkpoints.folder
    result.minibatch_size = program.request.minibatch_size


def _end(result: FitResult, outcome: RankOutcome) -> None:
    result.rank_states, result.max_steps = [outcome.state], outcome.max_steps
    result.mean_state = result.judged_state = outcome.state


def _last_present(result: FitResult) -> Sequence[int]:
    return result.averaged_ranks[max(result.averaged_ranks)] if result.averaged_ranks else []


def _nobody(place: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Deposits come to the first process alone."""


def _stamped(site: int, row: Mapping[str, Any]) -> StampedRow:
    return untimed_row(site, row)._replace(virtual_seconds=float(row.get("wall_seconds", 0.0)))
