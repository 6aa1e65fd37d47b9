"""This process's rank in a simulated run: its communicator, and the cost of its computing."""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import signal
import sys
import sysconfig
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import exogym_core
from exogym_core.workers.failures import is_own
from netgym.launch.clock import RankClock, shows_time
from netgym.launch.launched import refused
from netgym.launch.private import at_end_of_backward, is_in_backward
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

    from torch import Tensor

    from exogym_core.communicator.base import Delivery
    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from netgym.launch.compute import ComputeClock

__all__ = [
    "RankSession",
    "advance",
    "attach",
    "current_session",
    "now",
    "postpone_handlers",
    "program_place",
    "session_of_thread",
]

_MOST_SECONDS = 1e9  # thirty years
_ONLY_SHOWN = "where the script only prints times, record it with --clock host"

# Folders of code that is never a program's place.
_BELOW = (
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(__file__)),
    os.path.dirname(exogym_core.__file__),
    sysconfig.get_path("stdlib"),
    "<",
)


class RankSession:
    """A rank's session: its calls charge the computing before them, and mark their places.

    Context manager of a call to the simulation, which first charges the computing before it. Handlers of signals that
    come during a call run when it returns, as after a call of gloo: they may make calls.

    `without_values` is the module of that name where tensors have none.

    The rank's clock starts when `init_process_group` makes its first group. Once the rank has left the run
    (`has_ended`) it shows the last reading, and sleeps return.
    """

    def __init__(self, comm: SimulatedCommunicator, compute: ComputeClock) -> None:
        self.comm, self._compute = comm, compute
        self._uncharged: list[dist.Work] = []
        self._depth, self._calling = 0, threading.RLock()
        self._postponed: list[Callable[[], object]] = []  # handlers of signals
        self._site = ("", "")  # place and operation that were marked last
        self._startup_seconds = 0.0
        self.clock = RankClock(comm, compute)
        self._steps, self._optimizer = 0, 0  # of the first optimizer that steps, by its id
        self.has_begun = self.has_ended = False
        self._pid = os.getpid()
        self.without_values: Any = None

    def begin(self) -> bool:
        """Start the rank's clock, at the first group; True if this was the first."""
        if self.has_begun:
            return False
        self.has_begun = True
        startup = self._startup_seconds + self._compute.take_seconds()
        self.comm.mark({"startup_seconds": startup})
        if self._compute.on_device is not None:
            self._compute.on_device.forget()
        self.clock.begin()
        self._compute.resume()
        return True

    def __enter__(self) -> SimulatedCommunicator:
        if os.getpid() != self._pid:
            raise InputError(
                f"rank {self.comm.rank}: a process that this rank has forked calls torch.distributed: only the rank "
                "itself is simulated; communicate in the parent, or start ranks with torch.multiprocessing.spawn"
            )
        if not self._calling.acquire(blocking=False):
            raise refused(
                f"rank {self.comm.rank}: two of its threads call torch.distributed at once, and it has one clock: make "
                "the calls in one thread (instead of torch.distributed.checkpoint's async_save use save)"
            )
        self.clock.forget()
        try:
            if self._depth == 0 and self.has_begun:
                self.clock.spend(self._compute.take_seconds())
                self._account()
        except BaseException:
            self._calling.release()
            raise
        self._depth += 1
        return self.comm

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        self.clock.forget()
        if self._depth == 0 and self.has_begun:
            self._compute.resume()
        self._calling.release()
        self._run_postponed()

    def postpone(self, handler: Callable[[], object]) -> bool:
        """Keep a signal's handler until this thread's call returns; False if it is in none."""
        if not self._depth or not self._calling.acquire(blocking=False):
            return False
        self._postponed.append(handler)
        self._calling.release()
        return True

    def _run_postponed(self) -> None:
        while self._postponed and not self._depth:
            self._postponed.pop(0)()

    def advance(self, seconds: float) -> None:
        """Compute for a number of virtual seconds; before the clock has started they are part of the start-up."""
        if not 0 <= seconds <= _MOST_SECONDS:
            raise InputError(
                f"netgym.advance({seconds!r}) at {program_place()}: give seconds from 0 to {_MOST_SECONDS:g}"
            )
        if self.has_begun:
            with self:
                self.clock.spend(seconds)
        else:
            self._startup_seconds += seconds

    def read(self, is_computing: bool = False) -> float:
        """The rank's virtual time, or its seconds of computing alone; inside a call, the last time read before it.

        Its caller is called by the code that reads.
        """
        frame = sys._getframe(2)
        if self.has_ended or not self._calling.acquire(blocking=False):
            return self.clock.last
        try:
            if self._depth:  # of torch's own logs
                return self.clock.computed if is_computing else self.clock.last
            self._depth += 1
            try:
                return self.clock.read(is_computing, lambda: _reader(frame))
            finally:
                self._depth -= 1
        finally:
            self._calling.release()
            self._run_postponed()

    def sleep(self, seconds: float) -> None:
        """Let a number of virtual seconds pass, counted as computing, and wait until the clock has come there."""
        if self.has_ended:
            return
        self.advance(seconds)
        if not self._depth:
            with self as comm:
                instead = "a wait that is as long everywhere can be netgym.advance(seconds)"
                comm.now(f"the clock, as it sleeps at {program_place()} ({instead})")

    def now(self) -> float:
        """The rank's virtual time."""
        return self.read() if self.has_begun else 0.0

    def end(self) -> None:
        """Charge the computing since the last call, at the end of the program."""
        with self:
            self._account(is_last=True)

    def _account(self, *, is_last: bool = False) -> None:
        """Mark what computing has been made of so far, for the report."""
        device = self._compute.on_device
        if device is not None and (account := device.take_account(is_last=is_last)) is not None:
            self.comm.mark({"computes": account})

    def at(self, op: str) -> None:
        """Mark the program's place and the operation called there, which hold for the next requests."""
        site = (program_place(), op)
        if site != self._site:
            self._site = site
            self.comm.mark({"place": site[0], "op": op})

    def stepped(self, optimizer: object) -> None:
        """Count a step of the program, for the first optimizer that steps."""
        self._optimizer = self._optimizer or id(optimizer)
        if self.has_begun and id(optimizer) == self._optimizer:
            self._steps += 1
            with self as comm:
                comm.mark({"step": self._steps})

    def delivery(
        self, deliver: Delivery[Any], given: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Delivery[Any]:
        """`deliver` of a call with tensors `given`, which may bring no values for its `outputs`."""
        if (values := self.without_values) is None:
            return deliver
        if not all(map(values.has_values, given)):
            values.forget_values(outputs)
        return values.or_forget(deliver, outputs)  # type: ignore[no-any-return]

    # --- values delivered before their virtual time --------------------------------------------------------

    def charge_later(self, work: dist.Work) -> None:
        """Charge the time of `work`, whose values are in C++ already, when the backward pass ends."""
        if not self._uncharged and is_in_backward():
            at_end_of_backward(self.settle)
        self._uncharged.append(work)

    def settle(self) -> None:
        """Wait, on the clock, for all works whose values have been delivered."""
        works, self._uncharged = self._uncharged, []
        for work in works:
            work.wait()

    def settle_others(self, work: dist.Work) -> None:
        """Charge the works delivered before `work`, before a wait for it."""
        if work not in self._uncharged:
            self.settle()
        else:
            self._uncharged.remove(work)


class _Sessions:
    """Sessions of this process: the process is a rank, or each of its threads that joined by itself."""

    def __init__(self) -> None:
        self.of_process: RankSession | None = None
        self.of_thread = threading.local()


_sessions = _Sessions()
# A process forked from a rank must not use the rank's connection.
os.register_at_fork(after_in_child=_sessions.__init__)  # type: ignore[misc]


def attach(
    comm: SimulatedCommunicator, compute: ComputeClock, leave: Callable[[RankSession], None] | None = None
) -> RankSession:
    """Connect this process to the simulation by `comm`; from another thread than the main one, that thread.

    `leave` is called with the session at the end of the process, or of the thread.
    """
    is_process = threading.current_thread() is threading.main_thread()
    compute.start(is_process)
    comm.compare_places(False)  # libraries call from different places
    session = RankSession(comm, compute)
    if is_process:
        _sessions.of_process = session
        if leave is not None:
            pid = os.getpid()
            # A fork has the exit handlers, and is no rank.
            once = functools.cache(lambda: leave(session) if os.getpid() == pid else None)
            atexit.register(once)
            multiprocessing.util.Finalize(None, once, exitpriority=0)  # its children skip atexit
    else:
        _sessions.of_thread.session = session
        if leave is not None:  # a thread's locals go with it
            _sessions.of_thread.guard = _Guard(functools.partial(leave, session))
    return session


class _Guard:
    """Calls a function when it is dropped."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def current_session() -> RankSession | None:
    """This thread's session, else this process's; None outside of a simulated run."""
    own: RankSession | None = getattr(_sessions.of_thread, "session", None)
    return own if own is not None else _sessions.of_process


def session_of_thread() -> RankSession | None:
    """This thread's session, if it is a rank."""
    own: RankSession | None = getattr(_sessions.of_thread, "session", None)
    is_main = own is None and threading.current_thread() is threading.main_thread()
    return _sessions.of_process if is_main else own


def postpone_handlers() -> None:
    """Let this process, and those that it forks, run handlers of signals between a rank's calls, never inside one."""
    set_handler, get_handler = signal.signal, signal.getsignal
    handlers: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        session = session_of_thread()
        if session is None or not session.postpone(functools.partial(handle, number, None)):
            handlers[number](number, frame)

    def get(number: int) -> Any:
        handler = get_handler(number)
        return handlers[number] if handler is handle else handler

    def set_(number: int, handler: Any) -> Any:
        before = get(number)
        set_handler(number, handle if callable(handler) else handler)
        handlers[number] = handler
        return before

    signal.signal, signal.getsignal = set_, get  # type: ignore[assignment]


def advance(seconds: float) -> None:
    """Compute for `seconds` of virtual time under `netgym launch`; does nothing elsewhere.

    Raises:
        InputError: negative or infinite seconds.
    """
    if (session := current_session()) is not None:
        session.advance(seconds)


def now() -> float:
    """Virtual seconds since `init_process_group` on this rank's clock; real seconds where nothing is simulated.

    Differences measure a script's own sections, under `netgym launch` and under torchrun alike.
    """
    session = current_session()
    return time.perf_counter() if session is None else session.now()


def _reader(frame: FrameType) -> str | None:
    """Clock that the code of a frame reads, and the place; None if it only shows the time."""
    module = frame.f_globals.get("__name__", "")
    if shows_time(module):
        return None
    if module == __name__:
        return f"netgym.now() at {program_place()}"
    within = "" if module == "__main__" else f" in {module}"
    return f"the clock{within} at {program_place()} ({_ONLY_SHOWN})"


def program_place() -> str:
    """`file:line` of the program's own running code.

    It is the innermost frame outside of installed packages, else the innermost outside of torch, Python's library and
    NetGym.
    """
    frame, otherwise = sys._getframe(1), "?"
    while frame is not None:
        kind, name = _place_of(frame.f_code.co_filename)
        if kind == "own":
            return f"{name}:{frame.f_lineno}"
        if kind == "library" and otherwise == "?":
            otherwise = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return otherwise


@functools.lru_cache(maxsize=4096)
def _place_of(path: str) -> tuple[str, str]:
    """Owner of a file (`own`, `library`, or `below` both), and its name, relative to the script's folder."""
    if path.startswith(_BELOW):
        return "below", ""
    whole = os.path.abspath(path)
    folder = os.path.join(os.path.abspath(sys.path[0] or "."), "")
    name = whole.removeprefix(folder) if whole.startswith(folder) else os.path.basename(whole)
    return "own" if is_own(whole) else "library", name
