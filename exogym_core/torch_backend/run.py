"""The simulation of a launched program: its ranks' reports are kept, and it ends in one of four ways."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.communicator.values import combine
from exogym_core.ranks.call_sites import CallSites
from exogym_core.ranks.carrier import Sinks
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.processes.carrying import ProcessRun, blocks_of
from exogym_core.ranks.processes.records import Failed
from exogym_core.torch_backend.report import Ending, report_of
from netsim.files.errors import InputError, NetsimError, RankError
from netsim.network.recorder import Recorder
from netsim.tools.chakra import ExecutionTraces
from netsim.tools.trace import write_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.ranks.processes.arena import Arena
    from exogym_core.ranks.processes.homes import Homes
    from exogym_core.torch_backend.report import LaunchReport
    from netsim.network.recorder import Span
    from netsim.ranks.requests import Request

__all__ = ["LaunchedRun", "nothing_simulated"]


class LaunchedRun(ProcessRun):
    """A process a rank, each somebody's program.

    A rank's failure ends the run when the clock needs that rank: of several failures the one that is first in virtual
    time is raised, however the processes hurry.

    Args:
        world: where it runs.
        arena: where values lie.
        until_seconds: of virtual time, at which it is cut.
        traced: keep what traces need.

    Attributes:
        ending: how it has ended.
        error: why it failed.
    """

    def __init__(
        self, world: World, arena: Arena, *, until_seconds: float = math.inf, traced: bool = False
    ) -> None:
        self.ending: Ending = "finished"
        self.error: NetsimError | None = None
        self._sites = CallSites(world.num_ranks, keeps_history=traced)
        self._recorder = Recorder() if traced else None
        self._traces = ExecutionTraces(world.num_ranks, self._now) if traced else None
        self._failed: dict[int, NetsimError] = {}
        sinks = Sinks(
            self._sites.take_row, journal=Journal(on_request=self._requested), recorder=self._recorder
        )
        blocks = blocks_of(world.num_ranks, world.num_ranks)
        combined = partial(combine, empty=arena.empty)
        super().__init__(world, blocks, arena, sinks, combined, meets_outside=True)
        self._sites.book = self.simulation.schedules
        self.simulation.kernel.until_seconds = until_seconds

    def _requested(self, rank: int, request: Request) -> None:
        self._sites.take_request(rank, request)
        if self._traces is not None:
            self._traces.take(rank, request)

    def _now(self) -> float:
        return float(self.simulation.kernel.clock.now)

    def serve(self, homes: Homes) -> None:
        """Bring the run to its end, whatever that is."""
        try:
            self.run(homes)
        except KeyboardInterrupt:
            self.ending = "interrupted"
            return
        if self.failure.error is not None:
            self.fail(self._with_ended_ranks(self.failure.error))
        elif self.simulation.kernel.running:
            self.ending = "until"

    def fail(self, error: NetsimError) -> None:
        """The run has failed."""
        self.ending, self.error = "failed", error

    def _with_ended_ranks(self, error: NetsimError) -> NetsimError:
        """The ranks first whose end has closed the connections that the error tells of."""
        ended = sorted(set(range(len(self.states))) - self.simulation.kernel.running)
        if not (isinstance(error, RankError) and error.is_consequence and ended):
            return error
        names = f"rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended))}"
        return RankError(f"{names} ended before the others: {error}", ended[0])

    def refuse(self, refusal: str) -> None:
        """Fail, where a process was refused or where nothing was simulated: its figures would be wrong.

        Args:
            refusal: why a process was refused; "" where none was.
        """
        if refusal:
            self.fail(InputError(refusal))
        elif self.ending == "finished" and not self._sites.num_calls:
            used = ", ".join(self._sites.uncharged)
            if used:
                why = f"the program used {used}, which is not simulated"
            elif self._sites.num_started:
                why = "init_process_group was called, and nothing after it"
            else:
                why = "no rank called init_process_group"
            self.fail(InputError(nothing_simulated(why)))

    def report(self, about: dict[str, Any]) -> LaunchReport:
        """Report of the run."""
        told = None if self.error is None else str(self.error).partition("\n")[0]
        return report_of(self.simulation, self._sites, about, self.ending, told)

    # --- failures in the order of virtual time -------------------------------------------------------------

    def _take_in(self, index: int, record: NamedTuple) -> None:
        if not isinstance(record, Failed):
            super()._take_in(index, record)
            return
        self._failed[record.rank] = record.error
        self._unfinished[index].discard(record.rank)
        self._live = [each for each, ranks in enumerate(self._unfinished) if ranks]

    def _let_run(self, rank: int | None) -> bool:
        failed = self._failed
        nobody_else = not self._inboxes and self.simulation.exchange.running <= failed.keys()
        if failed and (rank in failed or nobody_else):
            first = failed.pop(rank) if rank in failed else failed.pop(next(iter(failed)))
            self.failure.add(first)
            for error in failed.values():  # one of them may be what lies behind it
                self.failure.add(error)
        return super()._let_run(rank)

    # --- traces --------------------------------------------------------------------------------------------

    def write_traces(self, trace: Path | None, chakra: Path | None, warn: Callable[[str], None]) -> None:
        """Write what was asked for, as far as the run got.

        Args:
            trace: a file for Perfetto.
            chakra: a folder for execution traces.
            warn: called with a line where a file cannot be written.
        """
        if self._recorder is None or self._traces is None:
            return
        try:
            if trace is not None:
                write_trace(self._recorder, trace, self.simulation.world.hosts, self._places())
            if chakra is not None:
                self._traces.add_times([*self._recorder.spans, *self._recorder.unfinished_spans()])
                self._traces.write(chakra)
        except InputError as problem:
            warn(f"trace: {problem}")

    def _places(self) -> Callable[[Span], str]:
        """The place of the program at which a rank waits: the last one that it marked."""
        instants, places = defaultdict[int, list[float]](list), defaultdict[int, list[str]](list)
        for rank, instant, place in self._sites.history:
            instants[rank].append(instant)
            places[rank].append(place)

        def place_of(span: Span) -> str:
            at = bisect_right(instants[span.rank], span.begin_seconds)
            return places[span.rank][at - 1] if at and span.kind == "wait" else ""

        return place_of


def nothing_simulated(why: str) -> str:
    """The line for a program none of whose calls came to the simulated network."""
    return (
        f"no call crossed the simulated network: {why}: use collectives, send or recv on a backend of torch's own; "
        "with -n N each of N processes is a rank, without it the script starts its ranks"
    )
