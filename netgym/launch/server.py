"""The simulation's process for ranks that others start; see `netgym.launch.joining`."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from exogym_core.workers.processes.children import ChannelClosed
from netgym.launch.launched import clock_of_environment
from netgym.launch.report import show_summary, write_launch
from netgym.launch.run import JoinedRanks, Launch, Script, serve_joined
from netsim.cli.terminal import PLAIN_WIDTH, plain_console
from netsim.errors import InputError

__all__ = ["JoinedRanks", "main"]


_SECONDS_TO_START = 300.0


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
        clock=clock_of_environment(),
    )


def _serve(fd: int, path: str) -> int:
    listener = socket.socket(fileno=fd)
    try:
        joined = JoinedRanks.let_in(listener, time.monotonic() + _SECONDS_TO_START)
    finally:
        listener.close()
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    try:
        run = serve_joined(_launch, joined, lambda line: None)
    except InputError:  # reported by the ranks, whose variables they are
        return 1
    report, out = run.report(), os.environ.get("NETGYM_OUT")
    if out:
        from exogym_core.results.run_folder import RunFolder

        report = write_launch(RunFolder.create(out, Path(out).name), report)
    show_summary(report, plain_console(PLAIN_WIDTH, stderr=True, highlight=False))
    if run.error is not None:
        print(f"error: {run.error}", file=sys.stderr, flush=True)
        return 1
    return 0


def main(fd: int, path: str) -> int:
    """Let ranks in by the socket `fd`, which is at `path`, and simulate until they end; returns the exit code."""
    try:
        return _serve(fd, path)
    except (InputError, ChannelClosed, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    _, _fd, _path, *sys.argv = sys.argv  # the rest is the script's
    sys.exit(main(int(_fd), _path))
