"""Child processes that end with their parent, tell how they ended, and leave nothing behind.

A child is forked where that is safe (closures, notebooks and scripts without a guard then work), otherwise
started afresh with its target sent by value, without importing the parent's main module again.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, NoReturn, Self

import cloudpickle

from exogym_core.ranks.processes.channel import ChannelClosed, Ears, Pipe
from exogym_core.ranks.processes.pickling import dumps_for_child
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

__all__ = ["ChannelClosed", "Children", "Pipe"]

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_GRACE_SECONDS = 1.0


class Children:
    """Context manager: `num` processes that run `target(index, channel)`, ended and reaped on leaving.

    A child ends when `target` returns (exit code 0) or raises (traceback on stderr, exit code 1), and at once
    when its parent ends, however that happens. SIGINT is ignored in children: the parent decides. Leaving
    without an exception gives children a second to end by themselves; otherwise they are killed at once.
    Enter and leave in one thread, since on Linux 'the parent' of a process is the thread that started it. A
    forked child has copies of torch's and numpy's generators, and a `random` module seeded anew. It must call
    `torch.set_num_threads(1)` first: with more, OpenMP waits for threads that the fork has not copied.

    Args:
        target: what each child runs, with its index and its end of the channel.
        num: number of children.
        method: `fork`, `spawn`, or `auto`: fork on Linux while neither CUDA nor autograd's GPU threads run.
        names: names of the processes as seen in `ps` (15 characters count), one a child or none.

    Raises:
        InputError: `method` is unknown, or `target` cannot be sent to a spawned process.
    """

    def __init__(
        self,
        target: Callable[[int, Pipe], None],
        num: int,
        *,
        method: str = "auto",
        names: Sequence[str] = (),
    ) -> None:
        self.method = _choose_method(method)
        self.channels: list[Pipe] = []
        self.pids: list[int] = []
        self._target = target
        self._num = num
        self._names = list(names) or [f"netgym {index}" for index in range(num)]
        self._pidfds: list[int] = []
        self._ears = Ears(self._fds_of)
        self._statuses: dict[int, int | None] = {}

    def __enter__(self) -> Self:
        for stream in (sys.stdout, sys.stderr):  # or forked children would write the same text again
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        try:
            payload = dumps_for_child(self._target) if self.method == "spawn" else b""
            for index in range(self._num):
                self._start(index)
            if self.method == "spawn":  # after all have started: importing takes them seconds, side by side
                for channel in self.channels:
                    with contextlib.suppress(
                        ChannelClosed
                    ):  # a child that has died is found by its exit code
                        channel.send(payload)
        except BaseException:
            self._end(grace_seconds=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(grace_seconds=_GRACE_SECONDS if kind is None else 0.0)

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Those of the children `indices` that have sent something or ended, waiting for the first.

        On an ended child's channel `recv` gives what it sent before, then raises `ChannelClosed`, even where
        a process that it had started still holds the other end. Empty after `timeout_seconds`.
        """
        found = self._ears.ready(indices, timeout_seconds)
        for index, fds in found.items():
            may_have_ended = not self._pidfds or self._pidfds[index] in fds
            if may_have_ended and self._poll_status(index):
                self.channels[index].finish(receiving=True)
        return list(found)

    def _fds_of(self, index: int) -> list[int]:
        pidfds = self._pidfds[index : index + 1]
        return [self.channels[index].fileno(), *pidfds]

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str | None:
        """How child `index` ended, as `killed by signal 9 (SIGKILL)` or `exit code 3`; None while it runs.

        A closed channel may be seen a moment before the end of its process: then give `timeout_seconds`.
        """
        self._wait([index], timeout_seconds)
        if not self._poll_status(index):
            return None
        code = self._statuses[index]
        if code is None:
            return "ended, its exit code was collected by other code of this process"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        return f"killed by signal {-code}"

    def is_stopped(self, index: int) -> bool:
        """Whether child `index` has been stopped by a signal, where the system tells."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pids[index]}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def _start(self, index: int) -> None:
        ours, theirs = Pipe.pair()
        # A signal between the fork and the next line would lose the child's pid, or reach it as the parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.channels.append(ours)
            start = self._fork if self.method == "fork" else self._spawn
            self.pids.append(start(index, theirs, mask))
            if sys.platform == "linux":
                self._pidfds.append(os.pidfd_open(self.pids[-1]))
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _fork(self, index: int, theirs: Pipe, mask: set[signal.Signals | int]) -> int:
        parent, libc = os.getpid(), _libc()
        with warnings.catch_warnings():
            # Python warns of threads that may hold locks. Torch's own threads hold none of Python's, and a
            # child that waits for a lock for ever still ends with its parent.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                _settle(parent, self._names[index], mask, libc)
                for channel in self.channels:
                    channel.close()
                for fd in self._pidfds:
                    os.close(fd)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            _run(self._target, index, theirs)
        return pid

    def _spawn(self, index: int, theirs: Pipe, mask: set[signal.Signals | int]) -> int:
        os.set_inheritable(theirs.fileno(), True)
        arguments = (theirs.fileno(), index, os.getpid(), self._names[index])
        # sys.path first, so that modules which pickles refer to are found as the parent finds them.
        code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as c; c._spawned{arguments!r}"
        flags = [f"-W{option}" for option in sys.warnoptions]
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *flags, "-c", code],
            os.environ,
            setsigmask=mask | {signal.SIGINT},
            setsigdef=[signal.SIGTERM],
        )

    def _poll_status(self, index: int) -> bool:
        """Whether child `index` has ended, after reaping it."""
        if index not in self._statuses:
            try:
                pid, status = os.waitpid(self.pids[index], os.WNOHANG)
            except ChildProcessError:  # somebody waits for any child of this process
                self._statuses[index] = None
            else:
                if pid:
                    self._statuses[index] = os.waitstatus_to_exitcode(status)
        return index in self._statuses

    def _wait(self, indices: Iterable[int], timeout_seconds: float) -> None:
        """Until these children have ended, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        for index in indices:
            while not self._poll_status(index) and (left := deadline - time.monotonic()) > 0:
                if self._pidfds:
                    select.select([self._pidfds[index]], [], [], left)
                else:
                    time.sleep(min(left, 0.01))

    def _end(self, grace_seconds: float) -> None:
        """End and reap every child, and give every descriptor back."""
        started = range(len(self.pids))
        try:
            for channel in self.channels:
                channel.finish()  # a child that waits for its parent goes on, to its end
            self._wait(started, grace_seconds)
        finally:
            for index in started:
                if not self._poll_status(index):
                    os.kill(self.pids[index], signal.SIGKILL)
            self._wait(started, timeout_seconds=60.0)  # a killed process ends as soon as its disk lets it
            for fd in self._pidfds:
                os.close(fd)
            self._pidfds.clear()
            for channel in self.channels:
                channel.close()


def _choose_method(method: str) -> str:
    if method not in ("auto", "fork", "spawn"):
        raise InputError(f"unknown start method '{method}' of child processes: use auto, fork or spawn")
    if method != "auto":
        return method
    torch = sys.modules.get("torch")
    safe = sys.platform == "linux" and not (torch and torch.cuda.is_initialized()) and not _autograd_threads()
    return "fork" if safe else "spawn"


def _autograd_threads() -> bool:
    """Whether a backward pass has started threads for GPUs: torch refuses every backward in a fork then."""
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(path) as file:  # a thread may have ended meanwhile
            if file.read().startswith("pt_autograd"):
                return True
    return False


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _settle(parent: int, name: str, mask: set[signal.Signals | int], libc: ctypes.CDLL | None) -> None:
    """Make this process a child that ends with its parent and leaves Ctrl-C to it."""
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]), 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked to be told
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)  # the parent's event loop is not ours
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - {signal.SIGINT})
    sys.stdin = open(os.devnull)  # noqa: SIM115 (open to the end of the process: the terminal is the parent's)


def _run(target: Callable[[int, Pipe], None], index: int, channel: Pipe) -> NoReturn:
    """Run a child's target and end the process, without the parent's exit handlers and `finally` blocks."""
    code = 1
    try:
        target(index, channel)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except ChannelClosed:
        pass  # the parent has given the run up, such as on Ctrl-C, and tells why itself
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def _spawned(fd: int, index: int, parent: int, name: str) -> NoReturn:
    """The first call of a spawned child, from its command line."""
    os.set_inheritable(fd, False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    libc = _libc()
    _settle(parent, name, set(mask), libc)
    if libc is None:
        threading.Thread(target=_end_with, args=(fd,), daemon=True).start()
    channel = Pipe(socket.socket(fileno=fd))
    try:
        target = cloudpickle.loads(channel.recv())
    except ChannelClosed:
        os._exit(1)
    _run(target, index, channel)


def _end_with(fd: int) -> None:
    """End this process when the parent's end of the channel is gone (where the kernel cannot be asked to)."""
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always reported
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
