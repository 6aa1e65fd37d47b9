"""A launch and its simulation: connections of ranks, reports, traces, and the four endings."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from exogym_core.communicator.exchange import rank_names
from exogym_core.communicator.simulated.simulation import World
from exogym_core.results.disk import write_whole
from exogym_core.workers.host import Sinks
from exogym_core.workers.journal import Journal
from exogym_core.workers.processes.children import ChannelClosed, Pipe, Poller
from exogym_core.workers.processes.process_runner import blocks_of
from exogym_core.workers.processes.protocol import Failed, Requests
from exogym_core.workers.processes.shared_memory import Arena
from netgym.launch.call_sites import CallSites
from netgym.launch.chakra import ExecutionTraces
from netgym.launch.lone_rank import ended
from netgym.launch.outside import OutsideMeetings
from netgym.launch.recording import LaunchRecording
from netgym.launch.report import Ending, report_of
from netgym.launch.tensors import reduce_as_gloo
from netsim import Protocol, Recorder
from netsim.errors import BrokenCallError, InputError, NetsimError, RankError
from netsim.files.documents import parse_document
from netsim.network.trace import write_trace
from netsim.ranks import Advance, Ask, Await, Exit, FirstSent, Mark, Post, Take, Withdraw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from exogym_core.workers.processes.process_runner import WorkerProcesses
    from netgym.launch.launched import Clock
    from netgym.launch.report import LaunchReport
    from netsim import Topology
    from netsim.network.trace import Span
    from netsim.ranks import Answer, Key, Question, Request


__all__ = [
    "JoinedRanks",
    "Launch",
    "LaunchedRun",
    "Script",
    "launched_run",
    "nothing_simulated",
    "serve_joined",
]


@dataclass(frozen=True)
class Script:
    """A script or module, with its command line.

    Attributes:
        name: the script's path, or the module's name.
        arguments: of its command line.
        is_module: run `name` as `python -m` does.
        prints_to_stderr: its output goes to stderr.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    prints_to_stderr: bool = False


@dataclass(frozen=True)
class Launch:
    """A script and where it runs.

    Attributes:
        script: to run.
        num_ranks: processes that run it, a rank each; None: one, which starts its ranks itself.
        topology: the network.
        compute: cost of computing, as text.
        placement: host names, one a rank.
        protocol: of transfers; None: the topology's, else `nccl-sockets` with `cuda_as_cpu`, else `gloo`.
        collectives: algorithms of collectives, as an experiment's file writes them.
        until_seconds: of virtual time, at which the run is cut.
        cuda_as_cpu: CUDA devices that the script names are the CPU.
        trace: a file for Perfetto.
        chakra: a folder for execution traces, one a rank.
        clock: time that the script reads.
        recording: a file for the ranks' requests, which `netgym retime` replays.
        has_values: False: tensors of the script have shapes alone.
    """

    script: Script
    num_ranks: int | None
    topology: Topology
    compute: str = "live"
    placement: Sequence[str] | None = None
    protocol: str | None = None
    collectives: str | None = None
    until_seconds: float = math.inf
    cuda_as_cpu: bool = False
    trace: Path | None = None
    chakra: Path | None = None
    clock: Clock = "virtual"
    recording: Path | None = None
    has_values: bool = True

    def world(self, num_ranks: int) -> World:
        """Hosts of `num_ranks` ranks.

        Raises:
            InputError: placement, protocol or algorithms are wrong.
        """
        default = "nccl-sockets" if self.cuda_as_cpu else "gloo"
        protocol = Protocol.resolve(self.protocol, self.topology.protocol, default)
        spec = self.collectives
        collectives: Any = None if spec is None else parse_document(spec, f"collectives {spec}").data
        return World.build(num_ranks, self.topology, self.placement, protocol, collectives)

    def about(self) -> dict[str, Any]:
        """Fields of a report that describe it."""
        source: Literal["option", "topology", "default"] = "option" if self.protocol else "default"
        return {
            "script": self.script.name,
            "arguments": list(self.script.arguments),
            "is_module": self.script.is_module,
            "protocol_from": "topology" if self.topology.protocol and not self.protocol else source,
            "compute": self.compute,
            "cuda_as_cpu": self.cuda_as_cpu,
            "clock": self.clock,
            "has_values": self.has_values,
            "until_seconds": None if math.isinf(self.until_seconds) else self.until_seconds,
        }


_SECONDS_BETWEEN_CHECKS = 0.1
_QUESTIONS = (Ask, Await, FirstSent, Take, Withdraw)  # requests that are answered


class JoinedRanks:
    """Connections of ranks that have joined; see `WorkerProcesses`.

    Context manager: connections are closed on leaving, and after an exception the processes are ended.

    Attributes:
        channels, pids: of each rank.
    """

    def __init__(self, joined: Mapping[int, tuple[Pipe, int]]) -> None:
        self.channels = [joined[rank][0] for rank in range(len(joined))]
        self.pids = [joined[rank][1] for rank in range(len(joined))]
        self._poller = Poller(lambda index: [self.channels[index].fileno()])

    @classmethod
    def let_in(
        cls, listener: socket.socket, deadline: float, stop: Callable[[], str] = lambda: ""
    ) -> JoinedRanks:
        """Connections of all ranks, as many as the first one names; other users are refused.

        Args:
            listener: that they connect to.
            deadline: on `time.monotonic`, for all to be there.
            stop: returns the reason why no more will come, or "".

        Raises:
            InputError: they disagree on the world size, or a rank joined twice.
            TimeoutError: some are missing.
        """
        joined: dict[int, tuple[Pipe, int]] = {}
        size = 0
        listener.settimeout(_SECONDS_BETWEEN_CHECKS)
        while not size or len(joined) < size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                reason = stop()
                if reason or time.monotonic() > deadline:
                    count = f"{len(joined)} of {size} ranks" if size else "no rank"
                    raise TimeoutError(f"{reason or 'time is up'}: {count} had joined") from None
                continue
            connection.setblocking(True)
            other = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", other)[1] != os.getuid():
                connection.close()
                continue
            channel = Pipe(connection)
            rank, pid, claimed = channel.recv()
            size = size or claimed
            if claimed != size or rank in joined or not 0 <= rank < size:
                line = (
                    f"a process has come as rank {rank} of {claimed}, and {len(joined)} of {size} were there"
                )
                for each, _ in [*joined.values(), (channel, pid)]:
                    each.send(line)
                raise InputError(f"{line}: one launch simulates one set of ranks")
            joined[rank] = channel, pid
        return cls(joined)

    def __enter__(self) -> JoinedRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end()
        for channel in self.channels:
            channel.close()

    def welcome(self, arena_fd: int) -> None:
        """Let every rank begin."""
        for channel in self.channels:
            channel.send(None)
            channel.send_fd(arena_fd)

    def refuse(self, reason: str) -> None:
        """Raise an error in every rank."""
        for channel in self.channels:
            with contextlib.suppress(ChannelClosed):
                channel.send(reason)

    def end(self) -> None:
        """Kill the processes that are still there."""
        for index, channel in enumerate(self.channels):
            with contextlib.suppress(ProcessLookupError, ChannelClosed):
                channel.send(None)  # a process that has closed its end has ended, and its id may be another's
                os.kill(self.pids[index], signal.SIGKILL)

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Wait for processes that have sent something or ended, and return them."""
        return list(self._poller.ready(indices, timeout_seconds))

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str | None:
        """Describe the end of a process, which is no child of this one; None while it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[index], 0)
            return None
        return f"process {self.pids[index]} has gone"

    def is_stopped(self, index: int) -> bool:
        """False: a stop of another's child cannot be seen."""
        return False


class LaunchedRun(OutsideMeetings):
    """A process a rank, each running the user's program.

    A rank's failure ends the run when the clock needs that rank: of several failures the one that is first in virtual
    time is raised, however the processes hurry.

    Args:
        launch: network and options.
        world: its hosts of the ranks.
        arena: shared memory of values.

    Attributes:
        ending: of the run.
        error: that ended it.
    """

    def __init__(self, launch: Launch, world: World, arena: Arena) -> None:
        self.ending: Ending = "finished"
        self.error: NetsimError | None = None
        self._launch, traced = launch, launch.trace is not None or launch.chakra is not None
        self._sites = CallSites(world.num_ranks, sites_of=world.regions)
        self._recorder = Recorder() if traced else None
        self._traces = ExecutionTraces(world.num_ranks) if traced else None
        self._recording = LaunchRecording(world.num_ranks) if launch.recording is not None else None
        # Of traces: where a rank has posted a call, and where it has waited last at an instant.
        self._places: dict[tuple[int, Key | float], str] = {}
        self._failed: dict[int, NetsimError] = {}
        self._questions: defaultdict[int, deque[Question]] = defaultdict(deque)  # by rank, those not answered
        sinks = Sinks(
            self._sites.take_row, journal=Journal(on_request=self._requested), recorder=self._recorder
        )
        blocks = blocks_of(world.num_ranks, world.num_ranks)
        super().__init__(world, blocks, arena, sinks, partial(reduce_as_gloo, empty=arena.empty))
        self._sites.book = self.schedules
        self.kernel.until_seconds = launch.until_seconds
        self.kernel.calls.ends_close = True
        self.exchange.ends_close = True
        self.kernel.calls.on_progress = self._sites.take_progress

    def _requested(self, rank: int, request: Request) -> None:
        self._sites.take_request(rank, request)
        place = self._sites.ranks[rank].site.place
        if self._recording is not None and not isinstance(request, _QUESTIONS):
            self._recording.add(rank, request, place)
        if self._traces is not None:
            self._traces.take(rank, request)
            if not isinstance(request, Advance | Mark):
                self._places[rank, request.key if isinstance(request, Post) else self._now()] = place

    def answer(self, rank: int, value: Answer) -> None:
        """Resume a rank with the clock's answer to its first question."""
        question = self._questions[rank].popleft()
        if self._recording is not None:
            self._recording.add_answered(rank, question, value, self._sites.ranks[rank].site.place)
        super().answer(rank, value)

    def _now(self) -> float:
        return float(self.kernel.clock.now)

    def serve(self, processes: WorkerProcesses) -> None:
        """Serve the run to its end."""
        try:
            self.run(processes)
        except KeyboardInterrupt:
            self.ending = "interrupted"
            return
        error = self.failure.error
        if error is not None:
            ended = sorted(set(range(len(self.states))) - self.kernel.running)
            # Whose end closed the connections.
            if ended and (error.is_consequence or isinstance(error, BrokenCallError)):
                error = RankError(f"{rank_names(ended)} ended before the others: {error}", ended[0])
            self.fail(error)
        elif self.kernel.running:
            self.ending = "until"

    def fail(self, error: NetsimError) -> None:
        """Mark the run as failed."""
        self.ending, self.error = "failed", error

    def refuse(self, refusal: str) -> None:
        """Fail the run where a process was refused or nothing was simulated, as its figures would be wrong.

        Args:
            refusal: reason for refusing a process; "" where none was.
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

    def report(self) -> LaunchReport:
        """Report of the run."""
        error = None if self.error is None else str(self.error).partition("\n")[0]
        decisions = list(self.decisions.values())
        return report_of(self, self._sites, self._launch.about(), self.ending, error, decisions)

    # --- failures in the order of virtual time -------------------------------------------------------------

    def _closed(self, index: int) -> None:
        """End the rank of a process that has left by os._exit(0), which torchrun counts as success.

        Raises:
            RankError: it has failed, or left a call that waits for other ranks.
        """
        (rank,) = self._unfinished[index]
        how = self.children.describe_exit(index, timeout_seconds=1.0)
        if how != "exit code 0" or self.exchange.has_open_call(rank):
            super()._closed(index)
        self._inboxes.append((index, [Requests(rank, [Exit()]), ended(rank)]))

    def _take_in(self, index: int, record: NamedTuple) -> None:
        if isinstance(record, Requests) and isinstance(question := record.requests[-1], _QUESTIONS):
            self._questions[record.rank].append(question)
        if not isinstance(record, Failed):
            super()._take_in(index, record)
            return
        self._failed[record.rank] = record.error
        self._unfinished[index].discard(record.rank)
        self._live = [each for each, ranks in enumerate(self._unfinished) if ranks]

    def _let_run(self, rank: int | None) -> bool:
        failed = self._failed
        nobody_else = not self._inboxes and self.exchange.running <= failed.keys()
        if failed and (rank in failed or nobody_else):
            first = failed.pop(rank) if rank in failed else failed.pop(next(iter(failed)))
            self.failure.add(first)
            for error in failed.values():  # one of them may be its cause
                self.failure.add(error)
        return super()._let_run(rank)

    # --- traces --------------------------------------------------------------------------------------------

    def write_traces(self, warn: Callable[[str], None]) -> None:
        """Write the recording, and requested traces, up to the end; `warn` takes a line on what cannot be written."""
        launch = self._launch
        if self._recording is not None and launch.recording is not None:
            if self.decisions:
                self._recording.refuse("host time decided (see host_decisions)")
            options = {name: getattr(launch, name) for name in ("placement", "protocol", "collectives")}
            write_whole(launch.recording, self._recording.to_bytes(options))
        if self._recorder is None or self._traces is None:
            return
        try:
            if self._launch.trace is not None:
                write_trace(self._recorder, self._launch.trace, self.world.hosts, self._place_of)
            if self._launch.chakra is not None:
                self._traces.add_times([*self._recorder.spans, *self._recorder.unfinished_spans()])
                self._traces.write(self._launch.chakra)
        except InputError as problem:
            warn(f"trace: {problem}")

    def _place_of(self, span: Span) -> str:
        """Place of the program at which a rank has made a call, or begins to wait."""
        of: Any = span.begin_seconds if span.kind == "wait" else span.key
        return self._places.get((span.rank, of), "")


@contextlib.contextmanager
def launched_run(
    launch: Launch, world: World, warn: Callable[[str], None]
) -> Iterator[tuple[LaunchedRun, int]]:
    """A run to serve, and the descriptor of its shared memory; its traces are written on leaving."""
    arena = Arena(num_regions=world.num_ranks + 1)
    try:
        run = LaunchedRun(launch, world, arena)
        yield run, arena.fd
    finally:
        arena.close()
    run.write_traces(warn)


def serve_joined(
    launch: Callable[[], Launch], joined: JoinedRanks, warn: Callable[[str], None]
) -> LaunchedRun:
    """Serve a run of ranks that have joined.

    Raises:
        InputError: the launch is wrong; the ranks raise it too.
    """
    try:
        made = launch()
        world = made.world(len(joined.channels))
    except InputError as error:
        joined.refuse(str(error))
        raise
    with launched_run(made, world, warn) as (run, arena_fd):
        joined.welcome(arena_fd)
        run.serve(joined)
    return run


def nothing_simulated(why: str) -> str:
    """The line for a program whose calls never reached the simulated network."""
    return (
        f"no call crossed the simulated network: {why}: use collectives, send or recv on a backend of torch's own; "
        "with -n N each of N processes is a rank, without it the script starts its ranks"
    )
