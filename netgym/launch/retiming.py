"""A launched run timed on another network: its recorded requests are replayed, and the script does not run.

A program that does not learn the time requests the same on every network: its calls, their sizes and its computing.
What the clock answers (`time.time`, `netgym.now`, polls, receives from any rank) ends the recording, with the line of
the script that asked; times that are only shown, as by `logging`, do not. Time-outs are recorded, and replayed up to
the first that expires.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.run_folder import RunFolder
from exogym_core.workers.journal import request_from_record, tuples_of
from exogym_core.workers.streams import Replay
from netgym.launch.call_sites import CallSites
from netgym.launch.recording import RECORDING, RECORDING_FORMAT
from netgym.launch.report import print_launch, read_launch, report_of, write_launch
from netgym.launch.run import Launch, Script
from netsim import Topology
from netsim.errors import InputError, NetsimError
from netsim.files.plain_files import read_bytes
from netsim.ranks import Await, CallEnding, Exit, Mark, Post, Progress, Wait, gives_time, on_grid
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from exogym_core.communicator.simulated.simulation import World
    from netsim.ranks import Answer, Key, Request, StampedRow

__all__ = ["retime_launch"]

_SETTABLE = ("placement", "collectives")
_INSTEAD = "launch it on that network instead"


class _Expired(NamedTuple):
    """A call whose time-out has expired: its rank, key and place, the instant of its post, and the time-out."""

    rank: int
    key: Key
    place: str
    begin: float
    seconds: float


def _recorded(lines: bytes, has_limits: bool) -> Iterator[Request]:
    """Requests of one rank, up to its end; without their time-outs if they have no limits."""
    timed: dict[Key, Key] = {}  # keys of calls, with the group of a message as such
    for line in lines.splitlines():
        request = request_from_record(json.loads(line)[1:])
        if isinstance(request, Post):
            timed[request.key] = request.key
        elif isinstance(request, Wait | Await):
            request = request._replace(key=timed.pop(request.key, request.key))
        if isinstance(request, Mark):  # a mapping of numbers, names and groups
            request = Mark({name: tuples_of(value) for name, value in request.row.items()})
        if isinstance(request, Post | Await) and not has_limits:
            request = request._replace(seconds=math.inf)
        yield request
    yield Exit()


class _RetimedLaunch(Replay):
    """The simulation of a launched run whose requests were recorded.

    Attributes:
        expired: the first call whose time-out has expired, which ends it.
    """

    def __init__(self, world: World, streams: Sequence[bytes], has_limits: bool = True) -> None:
        self.sites = CallSites(world.num_ranks, sites_of=world.regions)
        self.expired: _Expired | None = None
        self._deadlines: dict[tuple[int, Key], _Expired] = {}
        super().__init__(world)
        self.sites.book = self.schedules
        self.recorded = [_recorded(lines, has_limits) for lines in streams]
        self.kernel.calls.ends_close = True
        self.kernel.calls.on_progress = self._take_progress

    def row(self, row: StampedRow) -> None:
        """Count the waiting before a row."""
        super().row(row)
        self.sites.take_row(row)

    def served(self, rank: int, request: Request) -> None:
        """Add a request of a rank to the sums of its call site, and note its time-out."""
        self.sites.take_request(rank, request)
        if isinstance(request, Post | Await) and gives_time(request):
            place = self.sites.ranks[rank].site.place
            now = float(self.kernel.clock.now)
            self._deadlines[rank, request.key] = _Expired(rank, request.key, place, now, request.seconds)

    def _take_progress(
        self, rank: int, change: Progress, key: Key | None, instant: float, seconds: float
    ) -> None:
        if change is Progress.OVER and key is not None:
            self._deadlines.pop((rank, key), None)
        self.sites.take_progress(rank, change, key, instant, seconds)

    def answer(self, rank: int, value: Answer) -> None:
        """Pass over an answer: a shown time, or the end of a call.

        Raises:
            InputError: the call has ended undone: the program would raise an error, and do something else.
        """
        if isinstance(value, CallEnding) and value != CallEnding.DONE:
            raise self._closed(f"of rank {rank} at {self.sites.ranks[rank].site.place}")

    def broken(self, group: Hashable) -> None:
        """Note the call whose time-out has expired.

        Raises:
            InputError: always.
        """
        now = float(self.kernel.clock.now)
        late = (each for each in self._deadlines.values() if each.begin + on_grid(each.seconds) <= now)
        self.expired = next(late, None)
        raise self._closed("with a time-out")

    def _closed(self, whose: str) -> InputError:
        at = format_seconds(float(self.kernel.clock.now))
        return InputError(f"retime: there a connection {whose} is closed at {at}: {_INSTEAD}")


def _refusal(late: _Expired, run: _RetimedLaunch) -> InputError:
    """The line for a call that has expired; `run` has no time-outs, and tells how long the call takes."""

    def follow(rank: int, change: Progress, key: Key | None, instant: float, seconds: float) -> None:
        if change is Progress.OVER and (rank, key) == late[:2]:
            ends.append(instant)
            run.kernel.until_seconds = instant

    ends: list[float] = []
    run.kernel.calls.on_progress = follow
    with suppress(NetsimError):
        run.kernel.run()
    takes = f"takes {format_seconds(ends[0] - late.begin)}" if ends else "does not end"
    return InputError(
        f"retime: there rank {late.rank}'s call at {late.place} {takes}, and its time-out is "
        f"{format_seconds(late.seconds)}: {_INSTEAD}"
    )


def _read(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Options of a launched run, and the requests of each rank, in lines.

    Raises:
        InputError: there is no recording, it is damaged, or it cannot be timed on another network.
    """
    path = folder / RECORDING
    if not path.is_file():
        raise InputError(f"{visible(folder)}: has no recording of its requests: launch it again with --out")
    try:
        head, _, rest = read_bytes(path).partition(b"\n")
        about = json.loads(head)
        if about["format"] != RECORDING_FORMAT:
            raise ValueError(f"format {about['format']}, not {RECORDING_FORMAT}")
        streams = []
        for length in about["lengths"]:
            streams.append(zlib.decompress(rest[:length]))
            rest = rest[length:]
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise InputError(f"{visible(path)}: is damaged: {visible(error)}; launch it again") from None
    if about["refused"]:
        raise InputError(f"retime: {about['refused']}: {_INSTEAD}")
    return about, streams


def retime_launch(
    folder: Path,
    topology: str | None,
    protocol: str | None,
    overrides: Sequence[str],
    out: str | None,
    *,
    as_json: bool,
) -> None:
    """Time a launched run on another network, and print its report: `netgym retime` of its folder.

    Args:
        folder: of the run, launched with `--out`.
        topology: name or file; None: the run's.
        protocol: of transfers; None: as launched.
        overrides: `placement=HOSTS` and `collectives=NAME`, as the options of launch.
        out: the new folder; None: the next in runs/.
        as_json: print the report as JSON.

    Raises:
        InputError: the run has not finished or has learned the time, or an argument is wrong.
    """
    launched = read_launch(folder)
    if launched.ending != "finished":
        raise InputError(f"{visible(folder)}: did not finish ({launched.ending}), and is no run to retime")
    about, streams = _read(folder)
    options: dict[str, Any] = about["options"]
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in _SETTABLE:
            raise InputError(
                f"--set {visible(key)}: of a launched run {' and '.join(_SETTABLE)} can be set; write other "
                "properties of the network into a topology file"
            )
        options[key] = value or None
    if isinstance(options["placement"], str):
        options["placement"] = options["placement"].split(",")
    launch = Launch(
        Script(launched.script, tuple(launched.arguments), launched.is_module),
        None,
        Topology.load(topology) if topology is not None else Topology.from_mapping(launched.topology),
        launched.compute,
        **options,
        cuda_as_cpu=launched.cuda_as_cpu,
        clock=launched.clock,
        has_values=launched.has_values,
    )
    if protocol is not None:
        launch = replace(launch, protocol=protocol)
    run = _RetimedLaunch(launch.world(len(streams)), streams)
    made = RunFolder.create(out, f"{Path(launched.script).stem}-retimed")
    try:
        run.kernel.run()
    except InputError:
        made.discard()
        if run.expired is None:
            raise
        raise _refusal(run.expired, _RetimedLaunch(launch.world(len(streams)), streams, False)) from None
    source = os.path.relpath(folder.resolve(), made.path.resolve())
    about = {**launch.about(), "retimed_from": source}
    report = write_launch(made, report_of(run, run.sites, about, "finished", None))
    print_launch(report, made.path, as_json=as_json)
