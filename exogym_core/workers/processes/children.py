"""Child processes that end with their parent, report how they ended, and leave nothing behind.

Parent and child share a private socket pair, a `Pipe`: no other process can open it, so it may carry pickles. A child
is forked where that is safe (closures, notebooks and scripts without a guard then work), otherwise started afresh with
its target sent by value, without importing the parent's main module again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import glob
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import cloudpickle

from exogym_core.workers.processes.protocol import INLINE_BYTES, dumps, dumps_for_child, loads
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "ChannelClosed",
    "Children",
    "DescriptorClosedError",
    "Pipe",
    "Poller",
    "RankEnd",
    "can_fork",
    "end_process",
    "fork",
    "interruptions_deferred",
    "trim_memory",
]

# --- signals -------------------------------------------------------------------------------------------------


_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptions_deferred() -> Iterator[None]:
    """Let signals interrupt after the block, such as one that sends a message or forks.

    A message that is cut off would be taken for the head of the next one, and Python ignores exceptions of handlers in
    functions called at a fork, such as `logging`'s. Blocking signals does not help: another thread may get one, and
    Python still raises in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # interruptions are not raised here
        yield
        return
    deferred: list[int] = []

    def interrupt() -> None:
        for number in deferred:
            signal.raise_signal(number)

    with contextlib.ExitStack() as restoring:
        restoring.callback(interrupt)
        for number in _INTERRUPTING:
            handler = signal.getsignal(number)
            if callable(handler):
                restoring.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: deferred.append(number))
        yield


# --- pipes ---------------------------------------------------------------------------------------------------


_HEADER = struct.Struct("<QI")  # length of a frame, number of its parts
_LENGTH = struct.Struct("<Q")  # of a part
_BYTES_AT_ONCE = INLINE_BYTES


class ChannelClosed(EOFError):  # noqa: N818 (an ending, not always an error)
    """The other end of a `Pipe` has been closed, or its process has ended."""


class DescriptorClosedError(OSError):
    """Code of this process has closed the descriptor of a `Pipe`."""


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """Errors of the system as `ChannelClosed`, or `DescriptorClosedError`."""
    try:
        yield
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ChannelClosed("the process at the other end has closed the channel") from error
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ENOTSOCK):
            raise DescriptorClosedError(error.errno, "code of this process has closed the channel") from error
        raise


class RankEnd(Protocol):
    """A rank's end of a connection to the simulation."""

    def send(self, obj: Any) -> None:
        """Send an object to the other end."""

    def recv(self) -> Any:
        """The next object; blocks until it is there."""

    def waiting(self) -> bool:
        """True if there is one already."""


class Pipe:
    """An end of a private connection between a parent and its child: objects and descriptors, in order.

    Frames may be pickles, so both ends must be processes of one run. Threads may send side by side, and while one
    receives.

    An end that has sent or received a descriptor reads ahead: all received bytes at once, with fewer calls of the
    system. Then callers that select have to use `recv_all`, and further descriptors would be lost.

    Raises:
        ChannelClosed: (`send`, `recv`, ...) the other end is gone. Messages that it sent before can still be received.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._reads_ahead = False
        self._room = bytearray(_BYTES_AT_ONCE)
        self._ahead = memoryview(b"")  # read, and not handed out

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        """Return two connected ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, obj: Any) -> None:
        """Send one object; blocks while the other end does not read and the socket's buffer is full."""
        with _closed(), self._sending:
            for piece in self._framed(obj):
                self._socket.sendall(piece)

    def send_receiving(self, obj: Any) -> list[Any]:
        """Send one object and return the objects received meanwhile.

        Two ends that both send would wait for each other once their buffers are full; the end that uses this
        never makes the other wait.
        """
        received: list[Any] = []
        for piece in self._framed(obj):
            left = memoryview(piece)
            while left:
                try:
                    with _closed():
                        left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    readable, writable, _ = select.select([self], [self], [])
                    if readable and not writable:
                        received += self.recv_all()
        return received

    def recv(self) -> Any:
        """The next object; blocks until it is there."""
        length, num_parts = _HEADER.unpack(self._read(_HEADER.size))
        frame = self._read(length)
        parts = []
        if num_parts:
            frame = memoryview(bytes(frame))
            parts = [self._read(*_LENGTH.unpack(self._read(_LENGTH.size))) for _ in range(num_parts)]
        # The other end of a socket pair is our own child: no other process can write here.
        return loads(frame, parts)

    def recv_all(self) -> list[Any]:
        """The next object and those read with it, which `select` does not report; blocks for the first."""
        received = [self.recv()]
        while self._ahead:
            received.append(self.recv())
        return received

    def send_fd(self, fd: int) -> None:
        """Send an open file descriptor; the other end gets its own copy. From now on this end reads ahead."""
        with _closed():
            socket.send_fds(self._socket, [b"F"], [fd])
        self._reads_ahead = True

    def recv_fd(self) -> int:
        """Receive a descriptor from the other end; the caller closes it. From now on this end reads ahead."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise ChannelClosed("expected a descriptor, and the channel ended before")
        os.set_inheritable(fds[0], False)
        self._reads_ahead = True
        return fds[0]

    def waiting(self) -> bool:
        """True if a message has arrived."""
        return bool(self._ahead or select.select([self], [], [], 0)[0])

    def fileno(self) -> int:
        """The socket's descriptor, for `select` and its like."""
        return self._socket.fileno()

    def finish(self, *, receiving: bool = False) -> None:
        """Send no more (and with `receiving`, expect no more): the other end's `recv` then ends at once."""
        with contextlib.suppress(OSError):  # the other end may be gone already
            self._socket.shutdown(socket.SHUT_RDWR if receiving else socket.SHUT_WR)

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        self._socket.close()

    def _framed(self, obj: Any) -> list[bytes | memoryview]:
        parts: list[memoryview] = []
        frame = dumps(obj, parts)
        head: list[bytes | memoryview] = [_HEADER.pack(len(frame), len(parts)) + frame]
        return head + [piece for part in parts for piece in (_LENGTH.pack(len(part)), part)]

    def _read(self, num_bytes: int) -> memoryview:
        """The next bytes, in one buffer however many they are; valid until the next call."""
        got = len(self._ahead)
        if got < num_bytes:
            if num_bytes > len(self._room):
                view = memoryview(bytearray(num_bytes))
            else:
                view = memoryview(self._room) if self._reads_ahead else memoryview(self._room)[:num_bytes]
            view[:got] = bytes(self._ahead)
            while got < num_bytes:
                with _closed():
                    part = self._socket.recv_into(view[got:])
                if not part:
                    raise ChannelClosed("the process at the other end has closed the channel")
                got += part
            self._ahead = view[:got]
        frame, self._ahead = self._ahead[:num_bytes], self._ahead[num_bytes:]
        return frame


class Poller:
    """Waits for the first of several descriptors, registered once while they stay the same.

    Args:
        fds_of: the descriptors of each of those listened to.
    """

    def __init__(self, fds_of: Callable[[int], Sequence[int]]) -> None:
        self._fds_of = fds_of
        self._indices: tuple[int, ...] = ()
        self._poll = select.poll()
        self._owner: dict[int, int] = {}

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> dict[int, list[int]]:
        """Members of `indices` that can be read, in order, each with its readable descriptors."""
        asked = tuple(indices)
        if asked != self._indices:
            self._poll, self._indices = select.poll(), asked
            self._owner = {fd: index for index in asked for fd in self._fds_of(index)}
            for fd in self._owner:
                self._poll.register(fd, select.POLLIN)
        found: dict[int, list[int]] = {}
        for fd, _ in self._poll.poll(None if timeout_seconds is None else timeout_seconds * 1000):
            found.setdefault(self._owner[fd], []).append(fd)
        return dict(sorted(found.items())) if len(found) > 1 else found


# --- processes -----------------------------------------------------------------------------------------------


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_EXIT_DESCRIPTOR_CLOSED = 74  # the system's EX_IOERR
_GRACE_SECONDS = 1.0


class Children:
    """Context manager: `num` processes that run `target(index, channel)`, ended and reaped on leaving.

    A child ends when `target` returns (exit code 0) or raises (traceback on stderr, exit code 1), and at once
    when its parent ends, however that happens. SIGINT is ignored in children: the parent decides. Leaving
    without an exception gives children a second to end by themselves; otherwise they are killed at once.
    Enter and leave in one thread, since on Linux 'the parent' of a process is the thread that started it. A
    forked child has copies of torch's and numpy's generators, and a `random` module seeded again. It must call
    `torch.set_num_threads(1)` first: with more, OpenMP waits for threads that the fork has not copied.
    `add` forks further children.

    Args:
        target: called in each child, with its index and its end of the channel.
        num: number of children.
        method: `fork`, `spawn`, or `auto`: fork on Linux while neither CUDA, autograd's GPU threads nor Ray run here.
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
        self._pidfds: dict[int, int] = {}
        self._poller = Poller(self._fds_of)
        self._statuses: dict[int, int | None] = {}

    def __enter__(self) -> Self:
        try:
            payload = dumps_for_child(self._target) if self.method == "spawn" else b""
            for index in range(self._num):
                self._start(index)
            if self.method == "spawn":  # after all have started: importing takes them seconds, side by side
                for channel in self.channels:
                    # A child that has died is found by its exit code.
                    with contextlib.suppress(ChannelClosed):
                        channel.send(payload)
        except BaseException:
            self._end(grace_seconds=0.0)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(grace_seconds=_GRACE_SECONDS if kind is None else 0.0)

    def add(self, name: str) -> int:
        """Start one more child, by the method of the others; returns its index."""
        self._names.append(name)
        index = len(self.pids)
        self._start(index)
        return index

    def send_signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to child `index`, unless it has ended."""
        if not self._poll_status(index):
            os.kill(self.pids[index], number)

    def reap(self, index: int, timeout_seconds: float = 0.0) -> str | None:
        """Exit of child `index`, see `describe_exit`, after closing its descriptors; None while it runs."""
        how = self.describe_exit(index, timeout_seconds)
        if how is not None:
            self.channels[index].close()
            if index in self._pidfds:
                os.close(self._pidfds.pop(index))
        return how

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Children among `indices` that have sent a message or ended; blocks for the first.

        On an ended child's channel `recv` returns earlier messages, then raises `ChannelClosed`, even if
        a process that it had started still holds the other end. Empty after `timeout_seconds`.
        """
        found = self._poller.ready(indices, timeout_seconds)
        for index, fds in found.items():
            may_have_ended = self._pidfds.get(index) in (None, *fds)
            if may_have_ended and self._poll_status(index):
                self.channels[index].finish(receiving=True)
        return list(found)

    def _fds_of(self, index: int) -> list[int]:
        own = self._pidfds.get(index)
        return [self.channels[index].fileno(), *([] if own is None else [own])]

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str | None:
        """Exit of child `index`, as `killed by signal 9 (SIGKILL)` or `exit code 3`; None while it runs.

        A closed channel may be seen a moment before the end of its process: then give `timeout_seconds`.
        """
        self._wait([index], timeout_seconds)
        if not self._poll_status(index):
            return None
        code = self._statuses[index]
        if code is None:
            return "ended, its exit code was collected by other code of this process"
        if code == _EXIT_DESCRIPTOR_CLOSED:
            return f"exit code {code}: code of its own closed its connection to this process, as os.closerange does"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        return f"killed by signal {-code}"

    def is_stopped(self, index: int) -> bool:
        """True if child `index` has been stopped by a signal, where the system shows it."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pids[index]}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    @interruptions_deferred()  # one between the fork and the next line would lose the child's pid
    def _start(self, index: int) -> None:
        ours, theirs = Pipe.pair()
        # Blocked until the child has settled: they would reach it as the parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTING)
        try:
            self.channels.append(ours)
            start = self._fork if self.method == "fork" else self._spawn
            self.pids.append(start(index, theirs, mask))
            if sys.platform == "linux":
                self._pidfds[index] = os.pidfd_open(self.pids[-1])
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _fork(self, index: int, theirs: Pipe, mask: set[signal.Signals | int]) -> int:
        parent, libc = os.getpid(), _libc()
        pid = fork()
        if pid == 0:
            try:
                for channel in self.channels:
                    channel.close()
                for fd in self._pidfds.values():
                    os.close(fd)
                _settle(parent, self._names[index], mask, libc)  # opens a file, where few may be open
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
        """True if child `index` has ended, after reaping it."""
        if index not in self._statuses:
            try:
                pid, status = os.waitpid(self.pids[index], os.WNOHANG)
            except ChildProcessError:  # other code has waited for any child of this process
                self._statuses[index] = None
            else:
                if pid:
                    self._statuses[index] = os.waitstatus_to_exitcode(status)
        return index in self._statuses

    def _wait(self, indices: Iterable[int], timeout_seconds: float) -> None:
        """Wait until these children have ended, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        for index in indices:
            while not self._poll_status(index) and (left := deadline - time.monotonic()) > 0:
                if index in self._pidfds:  # the last one's may have found no room
                    select.select([self._pidfds[index]], [], [], left)
                else:
                    time.sleep(min(left, 0.01))

    def _end(self, grace_seconds: float) -> None:
        """End and reap every child, and close every descriptor."""
        started = range(len(self.pids))
        try:
            for channel in self.channels:
                channel.finish()  # a child that waits for its parent continues to its end
            self._wait(started, grace_seconds)
        finally:
            for index in started:
                self.send_signal(index, signal.SIGKILL)
            self._wait(started, timeout_seconds=60.0)  # a killed process ends as soon as its disk lets it
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()
            for channel in self.channels:
                channel.close()


def flush_output() -> None:
    """Flush printed text, if a reader is left."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def end_process(code: int) -> NoReturn:
    """End at once, without exit handlers and `finally` blocks; printed text is written out."""
    flush_output()
    os._exit(code)


def fork() -> int:
    """`os.fork` whose child never collects cyclic garbage that it has inherited.

    Garbage may own native threads, as stores and process groups of torch.distributed do. Their destructors join
    those threads, which a fork has not copied, and would never return.
    """
    flush_output()  # or the child would write the same text again
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Python warns of threads that may hold locks. Torch's own threads hold none of Python's, and a
            # child that waits for a lock for ever still ends with its parent.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    return pid


def can_fork() -> bool:
    """True if children can be forked: on Linux, before CUDA, autograd's GPU threads or Ray have started."""
    return _choose_method("auto") == "fork"


def _choose_method(method: str) -> str:
    if method not in ("auto", "fork", "spawn"):
        raise InputError(f"unknown start method '{method}' of child processes: use auto, fork or spawn")
    if method != "auto":
        return method
    torch = sys.modules.get("torch")
    used = (torch and torch.cuda.is_initialized()) or _has_unforkable_threads()
    safe = sys.platform == "linux" and not used
    return "fork" if safe else "spawn"


# torch refuses every backward pass in a fork after autograd has started threads for GPUs; forks crash in handlers of
# gRPC while it runs, which Ray starts and leaves running when it is shut down.
_UNFORKABLE = ("pt_autograd", "grpc_", "event_engine")


def _has_unforkable_threads() -> bool:
    """True if this process has threads of a library whose forked children fail."""
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(path) as file:  # a thread may have ended meanwhile
            if file.read().startswith(_UNFORKABLE):
                return True
    return False


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def trim_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _settle(parent: int, name: str, mask: set[signal.Signals | int], libc: ctypes.CDLL | None) -> None:
    """Make this process a child that ends with its parent and leaves Ctrl-C and a closed terminal to it."""
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]), 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked for the signal
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
        pass  # the parent has given the run up, such as on Ctrl-C, and reports why itself
    except DescriptorClosedError:
        code = _EXIT_DESCRIPTOR_CLOSED
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


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
    """End this process when the parent's end of the channel closes (where the kernel cannot do so)."""
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always reported
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
