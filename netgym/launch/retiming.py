"""A launched run timed on another network: its recorded requests are replayed, and the script does not run.

A program that is never answered by the clock requests the same on every network: its calls, their sizes and its
computing. What the clock answers (`netgym.now`, polls, time-outs, receives from any rank) ends the recording, with the
line of the script that asked.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.run_folder import RunFolder
from exogym_core.workers.journal import request_from_record, tuples_of
from exogym_core.workers.streams import Replay
from netgym.launch.call_sites import CallSites
from netgym.launch.recording import RECORDING, RECORDING_FORMAT
from netgym.launch.report import print_launch, read_launch, report_of, write_launch
from netgym.launch.run import Launch, Script
from netsim import Topology
from netsim.errors import InputError
from netsim.files.plain_files import read_bytes
from netsim.ranks import Exit, Mark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from exogym_core.communicator.simulated.simulation import World
    from netsim.ranks import Request, StampedRow

__all__ = ["retime_launch"]

_SETTABLE = ("placement", "collectives")


def _recorded(lines: bytes) -> Iterator[Request]:
    """Requests of one rank, up to its end."""
    for line in lines.splitlines():
        request = request_from_record(json.loads(line)[1:])
        if isinstance(request, Mark):  # a mapping of numbers, names and groups
            request = Mark({name: tuples_of(value) for name, value in request.row.items()})
        yield request
    yield Exit()


class _RetimedLaunch(Replay):
    """The simulation of a launched run whose requests were recorded."""

    def __init__(self, world: World, streams: Sequence[bytes]) -> None:
        self.sites = CallSites(world.num_ranks, sites_of=world.regions)
        super().__init__(world)
        self.sites.book = self.schedules
        self.recorded = list(map(_recorded, streams))
        self.kernel.calls.ends_close = True
        self.kernel.calls.on_progress = self.sites.take_progress

    def row(self, row: StampedRow) -> None:
        """Count the waiting before a row."""
        super().row(row)
        self.sites.take_row(row)

    def served(self, rank: int, request: Request) -> None:
        """Add a request of a rank to the sums of its call site."""
        self.sites.take_request(rank, request)


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
        raise InputError(f"retime: {about['refused']}: launch it on that network instead")
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
    run.kernel.run()
    report = write_launch(made, report_of(run, run.sites, launch.about(), "finished", None))
    print_launch(report, made.path, as_json=as_json)
