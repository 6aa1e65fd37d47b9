"""The simulation's process for ranks that others start; see `netgym.launch.joining`."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from exogym_core.workers.processes.children import ChannelClosed
from netgym.launch.report import show_summary, write_launch
from netgym.launch.run import JoinedRanks, Launch, Script, launched_run
from netsim.errors import InputError

if TYPE_CHECKING:
    from netgym.launch.report import LaunchReport

__all__ = ["JoinedRanks", "main"]


_SECONDS_TO_START = 300.0
_PLAIN_WIDTH = 120  # of output to a file or a pipe


def _launch() -> Launch:
    """Launch of rank 0's environment."""
    from netsim import Topology

    return Launch(
        Script(sys.argv[0], tuple(sys.argv[1:])),
        None,
        Topology.load(os.environ.get("NETGYM_TOPOLOGY", "lan")),
        compute=os.environ.get("NETGYM_COMPUTE", "live"),
        protocol=os.environ.get("NETGYM_PROTOCOL"),
        collectives=os.environ.get("NETGYM_COLLECTIVES"),
    )


def _serve(fd: int, num_ranks: int, path: str) -> int:
    listener = socket.socket(fileno=fd)
    try:
        joined = JoinedRanks.let_in(listener, time.monotonic() + _SECONDS_TO_START)
    finally:
        listener.close()
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    try:
        launch = _launch()
        world = launch.world(num_ranks)
    except InputError as error:  # reported by the ranks, whose variables they are
        joined.refuse(str(error))
        return 1
    with launched_run(launch, world, lambda line: None) as (run, arena_fd):
        joined.welcome(arena_fd)
        run.serve(joined)
    _record(run.report())
    if run.error is not None:
        print(f"error: {run.error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _record(report: LaunchReport) -> None:
    out = os.environ.get("NETGYM_OUT")
    if out:
        from exogym_core.results.run_folder import RunFolder

        folder = RunFolder.create(out, Path(out).name)
        report = write_launch(folder, report)
    console = Console(stderr=True, highlight=False)
    show_summary(report, console if console.is_terminal else Console(stderr=True, width=_PLAIN_WIDTH))


def main(fd: int, num_ranks: int, path: str) -> int:
    """Let `num_ranks` ranks in by the socket `fd`, which is at `path`, and simulate until they end; the exit code."""
    try:
        return _serve(fd, num_ranks, path)
    except (InputError, ChannelClosed, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    _, _fd, _num_ranks, _path, *sys.argv = sys.argv  # the rest is the script's
    sys.exit(main(int(_fd), int(_num_ranks), _path))
