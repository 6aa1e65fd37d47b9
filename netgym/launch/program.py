"""A launched program: its processes started and ended, its simulation served."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed.rpc
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from exogym_core.workers.processes.children import Children
from exogym_core.workers.processes.shared_memory import Arena
from exogym_core.workers.rng import RandomStates, seed_process
from netgym.launch.clock import imported_clocks
from netgym.launch.launched import Launched, listen
from netgym.launch.lone_rank import LoneRank
from netgym.launch.private import import_late_modules
from netgym.launch.run import (
    JoinedRanks,
    Launch,
    LaunchedRun,
    Script,
    launched_run,
    nothing_simulated,
    serve_joined,
)
from netgym.launch.script import become_launched, run_rank, run_script
from netsim.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from exogym_core.workers.processes.children import Pipe
    from netgym.launch.report import LaunchReport

__all__ = ["run_program"]


def run_program(launch: Launch, warn: Callable[[str], None]) -> tuple[LaunchReport, NetsimError | None]:
    """Run a program to its end, to `until`, or to its failure.

    Args:
        launch: program, network and options.
        warn: called with lines of warning.

    Returns:
        The report, however it ended, and the error that ended it.

    Raises:
        NetsimError: it never reached the simulation.
        InputError: an argument is wrong, or the program makes no call that could be simulated.
        KeyboardInterrupt: before any rank had joined.
    """
    # Users' programs may compute for long between two calls.
    warnings.filterwarnings("ignore", message=".* sends nothing: ")
    with tempfile.TemporaryDirectory(prefix="netgym-") as folder, _ending_descendants():
        devices = (launch.num_ranks or len(launch.topology.rank_hosts)) if launch.cuda_as_cpu else 0
        launched = Launched(
            folder, launch.num_ranks or 0, launch.compute, devices, launch.clock, launch.has_values
        )
        run = _start_ranks if launch.num_ranks else _let_ranks_start
        ran = run(launch, launched, warn)
        ran.refuse(launched.refusal)
        return ran.report(), ran.error


_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 1.0  # trackers of shared memory clean up once the program has ended


@contextlib.contextmanager
def _ending_descendants() -> Iterator[None]:
    """Adopt the processes that the program leaves behind, and end them with it, where the system can."""
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None), _own_children()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        deadline = time.monotonic() + _GRACE_SECONDS
        while left := _own_children() - before:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _own_children() -> set[int]:
    """Processes whose parent is this one."""
    paths = glob.glob("/proc/self/task/*/children")
    return {int(pid) for path in paths for pid in Path(path).read_text().split()}


_SECONDS_OF_HANDLERS = 10.0


class _PassedSignals:
    """Passes the launcher's first signal on to the program, whose handlers then have `_SECONDS_OF_HANDLERS`.

    The run is served until then, so that handlers may communicate. A second signal, or the end of that time, raises
    KeyboardInterrupt. Context manager of the serving.

    Args:
        pids: processes of the program.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._handlers: dict[int, Callable[[int, Any], object]] = {}
        self._come, self._timer = 0, threading.Timer(0.0, lambda: None)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if callable(handler) and threading.current_thread() is threading.main_thread():
                self._handlers[number] = handler
                signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: Any) -> None:
        if self._come:
            self._handlers[number](number, frame)
            return
        self._come = number
        self._timer = threading.Timer(_SECONDS_OF_HANDLERS, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()
        with contextlib.suppress(OSError):  # without a terminal
            if number == signal.SIGINT and os.tcgetpgrp(0) == os.getpgrp():
                return  # the terminal has sent it to all of them
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, run: LaunchedRun, is_running: Callable[[], bool]) -> None:
        """After a signal, wait for the program's own end, and mark the run as interrupted."""
        if not self._come:
            return
        try:
            while run.ending != "interrupted" and is_running():
                time.sleep(0.02)
            if run.ending != "interrupted":
                self._handlers[self._come](self._come, None)  # which notes the exit code
        except KeyboardInterrupt:
            pass
        run.ending, run.error = "interrupted", None


def _start_ranks(launch: Launch, launched: Launched, warn: Callable[[str], None]) -> LaunchedRun:
    """Start a process a rank, as torchrun does."""
    num_ranks = launched.num_ranks
    import_late_modules()
    own = RandomStates.of_process()
    seed_process(0, 0)  # numpy's generators take 5 MB of a process that seeds its first
    own.load()
    gc.collect()
    gc.freeze()  # forks share memory that no collection writes to
    body = partial(run_rank, script=launch.script, launched=launched, clocks=imported_clocks())
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        launched_run(launch, launch.world(num_ranks), warn) as (run, arena_fd),
        Children(
            partial(_be_rank, num_ranks, partial(body, port=listener.getsockname()[1])), num_ranks
        ) as children,
    ):
        # Programs may connect to the store that torchrun hosts. It has a thread, so it starts after the forks.
        port = listener.getsockname()[1]
        _store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for channel in children.channels:
            channel.send_fd(arena_fd)
        with _PassedSignals(children.pids) as signals:
            run.serve(children)
            signals.end(run, lambda: not all(map(children.describe_exit, range(num_ranks))))
    return run


def _be_rank(num_ranks: int, body: Callable[[SimulatedCommunicator], Any], index: int, channel: Pipe) -> None:
    arena = Arena(channel.recv_fd(), num_regions=num_ranks + 1, region=index + 1)
    torch.set_num_threads(1)
    seed_process(0, index)  # a fork has its parent's generators: all ranks would draw the same
    LoneRank(num_ranks, index, channel, arena).run(body)


def _let_ranks_start(launch: Launch, launched: Launched, warn: Callable[[str], None]) -> LaunchedRun:
    """Start one process whose own children join as ranks."""
    with (
        listen(launched.socket) as listener,
        Children(partial(_be_script, launch.script, launched, listener), 1) as children,
    ):

        def ended() -> str:
            how = children.describe_exit(0)
            return "" if how is None else f"{launch.script.name} has ended ({how})"

        try:
            joined = JoinedRanks.let_in(listener, math.inf, ended)
        except TimeoutError as error:
            if launched.refusal or children.describe_exit(0) == "exit code 0":
                raise InputError(launched.refusal or nothing_simulated(str(error))) from None
            raise RankError(
                f"{error}: the script's own error is above; one that starts no ranks itself needs -n, such as -n 2",
                0,
            ) from None
        listener.close()  # later connections are refused
        with joined, _PassedSignals([*children.pids, *joined.pids]) as signals:
            run = serve_joined(lambda: launch, joined, warn)
            signals.end(run, lambda: children.describe_exit(0) is None)
            if run.ending != "finished":  # first: it would report its killed children
                os.kill(children.pids[0], signal.SIGKILL)
                joined.end()
        try:
            while run.ending == "finished" and (how := children.describe_exit(0, 3600.0)) != "exit code 0":
                if how is not None:
                    run.fail(RankError(f"{launch.script.name} ended after its ranks: {how}", 0))
        except KeyboardInterrupt:
            run.ending = "interrupted"
    return run


def _be_script(
    script: Script, launched: Launched, listener: socket.socket, index: int, channel: Pipe
) -> None:
    listener.close()  # left open here, it would accept ranks that are not served
    torch.set_num_threads(1)
    launched.to_environment()
    become_launched()
    run_script(script)
