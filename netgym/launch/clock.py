"""Virtual time in a launched program: the functions by which a script and its libraries read time or sleep.

Before `init_process_group`, in threads that are no rank, and for modules that need host time (`HOST_TIME`) they are
Python's own.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import math
import sys
import time
import timeit
import warnings
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from netsim.network.clock import on_grid

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from netgym.launch.compute import ComputeClock
    from netgym.launch.session import RankSession

__all__ = [
    "CLOCKS",
    "DATES",
    "HOST_TIME",
    "MOST_READINGS",
    "POLL_SECONDS",
    "READINGS_A_POLL",
    "SHOWN_TIME",
    "VIRTUAL_TIME",
    "RankClock",
    "imported_clocks",
    "shows_time",
    "uses_host_time",
    "virtualize",
]

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
"""Functions of Python's `time` that become virtual, each with its form in nanoseconds."""

DATES = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""Functions of Python's `time` that take the present by default, each with the position of the argument for it."""

HOST_TIME = (
    *("netsim", "exogym_core", "netgym", "torch"),
    *(
        "aiohttp",
        "anyio",
        "botocore",
        "filelock",
        "fsspec",
        "google",
        "grpc",
        "httpcore",
        "httpx",
        "huggingface_hub",
        "hypothesis",
    ),
    *("mlflow", "ray", "requests", "s3transfer", "urllib3", "wandb", "zmq"),
)
"""Packages that keep host time, as all of Python's own library does: they wait for other processes and machines, or
time garbage collections (hypothesis), which come at any place of a script."""

SHOWN_TIME = ("logging", "tensorboard", "torch.utils.tensorboard", "tqdm")
"""Packages that show the time that they read: no request of a program depends on it, on any network."""

VIRTUAL_TIME = (
    *("logging", "timeit", "torch.utils.benchmark", "torch.utils.tensorboard"),
    "netgym.launch.cuda_on_cpu",  # events
)
"""Modules of those that read virtual time, for the script that calls them."""

POLL_SECONDS = 1e-3
"""Least virtual seconds between two polls of an unfinished call: a loop that only polls ends."""

MOST_READINGS, READINGS_A_POLL = 100_000, 100
"""Readings in a row without a call, or `2 * POLL_SECONDS` of computing between two, that take no time; and those after
them that show one time: the next one waits for `POLL_SECONDS` of computing, so that a loop which only reads ends."""

_MOST_HOST_SECONDS = 0.01  # of a sleep: a loop that waits for a thread or file does not spin
_TICKS = 64  # of host time a second, in whole microseconds (of datetime) and exact in floats
_TICK_NANOSECONDS = 10**9 // _TICKS
_REAL: dict[str, Callable[[], float]] = {name: getattr(time, name) for name in CLOCKS}
_sleep = time.sleep


class RankClock:
    """A rank's virtual time as its own process knows it. Readings change none, and take none but in a loop of them.

    The kernel is asked for the time of the rank's last request once after each call of the simulation: until the next
    call the time is that answer and the computing since, which stays uncharged. Where the rank only reads, it lets time
    pass, as polls do.

    Attributes:
        computed: seconds of computing charged so far.
        last: the last reading.
        ticks: by clock, host time at the start of virtual time, rounded up to `_TICKS` a second: differences
            of readings are the same in every run.
    """

    def __init__(self, comm: SimulatedCommunicator, compute: ComputeClock) -> None:
        self._comm, self._compute = comm, compute
        self.computed = self._next_poll = 0.0
        self.ticks: dict[str, int] = {}
        self._answer: float | None = None
        self._is_shown = False  # nobody has read the answer who acts on it
        self.last = 0.0
        self._num_readings, self._read_at = 0, 0.0  # in a row; seconds of computing at the last one

    def begin(self) -> None:
        """Note host time, from which virtual time goes on."""
        self.ticks = {name: math.ceil(read() * _TICKS) for name, read in _REAL.items()}

    def spend(self, seconds: float) -> None:
        """Compute for a number of seconds."""
        if seconds:
            self._comm.advance(seconds)
            self.computed += seconds

    # --- readings ------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Note a call of the simulation, in which time may pass."""
        self._answer, self._num_readings = None, 0

    def read(self, is_computing: bool, reader: Callable[[], str | None]) -> float:
        """Virtual seconds, between two calls of the simulation; or seconds of computing alone.

        Args:
            is_computing: the latter.
            reader: returns that of `Ask`.
        """
        since = self._compute.measure()
        if self.computed + since - self._read_at >= 2 * POLL_SECONDS:
            self._num_readings = 0
        self._num_readings += 1
        if self._num_readings > MOST_READINGS and self._num_readings % READINGS_A_POLL == 1:
            self.spend(POLL_SECONDS)
            self._answer = self._comm.now(reader())  # others may do meanwhile what the rank waits for
        self._read_at = self.computed + since
        if is_computing:
            seconds = self._read_at
        else:
            if self._answer is None or self._is_shown:
                asks = reader()
                if self._answer is None or asks is not None:
                    self._answer = self._comm.instant(asks)
                self._is_shown = asks is None
            self.last = max(self._answer + on_grid(self._comm.pending_seconds + since), self.last)
            seconds = self.last
        self._compute.skip(since)
        return seconds

    # --- polling -------------------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """Let `POLL_SECONDS` pass since the last poll that found its call unfinished."""
        self.spend(max(self._next_poll - self.computed, 0.0))

    def poll_again(self) -> None:
        """Note a poll that has found its call unfinished."""
        self._next_poll = self.computed + POLL_SECONDS

    def end_polls(self) -> None:
        """Note a wait, in which time passes by itself."""
        self._next_poll = 0.0


# --- who asks ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def uses_host_time(module: str) -> bool:
    """True if a module reads host time, by the longest prefix in `VIRTUAL_TIME`, `HOST_TIME` or Python's library.

    >>> [uses_host_time(name) for name in ("__main__", "queue", "logging.handlers", "torch.utils.data")]
    [False, True, False, True]
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in VIRTUAL_TIME or prefix == "__main__":
            return False
        if prefix in HOST_TIME:
            return True
    return parts[0] in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def shows_time(module: str) -> bool:
    """True if a module of `SHOWN_TIME` or below one; `logging.handlers` rotates files by it."""
    return module != "logging.handlers" and any(f"{module}.".startswith(f"{name}.") for name in SHOWN_TIME)


def imported_clocks() -> list[tuple[ModuleType, str]]:
    """Names for functions of `time` in loaded modules that read virtual time.

    Found before a fork: in one, reading the names of all modules copies 31 MB that processes share.
    """
    clocks = {_sleep, *(getattr(time, name + unit) for name in CLOCKS for unit in ("", "_ns"))}
    clocks |= {getattr(time, name) for name in DATES}
    return [
        (module, name)
        for module in list(sys.modules.values())
        if module is time or not uses_host_time(getattr(module, "__name__", ""))
        for name, value in list(vars(module).items())
        if type(value) is BuiltinFunctionType and value in clocks
    ]


def virtualize(current: Callable[[], RankSession | None], imported: list[tuple[ModuleType, str]]) -> None:
    """Give this process, and those that it forks, virtual time: Python's `time` and `datetime.now`.

    Args:
        current: returns the session of the calling thread, if it is a rank.
        imported: names to replace, of `imported_clocks`.
    """

    def session_of(frame: FrameType) -> RankSession | None:
        """The session in whose virtual time the code of a frame lives; None: in host time."""
        session = current()
        if session is None or not session.has_begun or uses_host_time(frame.f_globals.get("__name__", "")):
            return None
        return session

    def clock(name: str) -> None:
        real, real_nanoseconds = getattr(time, name), getattr(time, f"{name}_ns")
        is_computing = name in ("process_time", "thread_time")

        def seconds() -> float:
            if (session := session_of(sys._getframe(1))) is None:
                return real()  # type: ignore[no-any-return]
            return session.clock.ticks[name] / _TICKS + session.read(is_computing)

        def nanoseconds() -> int:
            if (session := session_of(sys._getframe(1))) is None:
                return real_nanoseconds()  # type: ignore[no-any-return]
            return session.clock.ticks[name] * _TICK_NANOSECONDS + round(session.read(is_computing) * 1e9)

        replaced[real], replaced[real_nanoseconds] = seconds, nanoseconds

    def date(name: str, position: int) -> None:
        real, local = getattr(time, name), time.localtime

        def of_now(*arguments: Any) -> Any:
            session = session_of(sys._getframe(1))
            if session is None or arguments[position:] not in ((), (None,)):
                return real(*arguments)
            seconds = session.clock.ticks["time"] / _TICKS + session.read()
            takes_seconds = name in ("localtime", "gmtime", "ctime")
            return real(*arguments[:position], seconds if takes_seconds else local(seconds))

        replaced[real] = of_now

    def sleep(seconds: float) -> None:
        session = session_of(sys._getframe(1))
        if session is None or not seconds > 0:
            _sleep(seconds)
        else:
            _sleep(min(seconds, _MOST_HOST_SECONDS))
            session.sleep(seconds)

    def now(cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        if (session := session_of(sys._getframe(1))) is None:
            return real_now.__get__(None, cls)(tz)  # type: ignore[no-any-return]
        return cls.fromtimestamp(session.clock.ticks["time"] / _TICKS + session.read(), tz)

    def utcnow(cls: type[datetime.datetime]) -> datetime.datetime:
        if (session := session_of(sys._getframe(1))) is None:
            return real_utcnow.__get__(None, cls)()  # type: ignore[no-any-return]
        seconds = session.clock.ticks["time"] / _TICKS + session.read()
        return cls.fromtimestamp(seconds, datetime.UTC).replace(tzinfo=None)

    replaced: dict[Any, Callable[..., Any]] = {_sleep: sleep}
    for name in CLOCKS:
        clock(name)
    for name, position in DATES.items():
        date(name, position)
    for module, name in imported:
        setattr(module, name, replaced[getattr(module, name)])
    for function in (timeit.timeit, timeit.repeat, timeit.Timer.__init__):
        function.__defaults__ = tuple(replaced.get(value, value) for value in function.__defaults__ or ())
    # torch.compile breaks its graph there, as at Python's own clocks.
    warnings.filterwarnings("ignore", message="Dynamo does not know how to trace the builtin .sys._getframe")
    # The methods of the class itself, which keeps its identity; `today` reads `time.time`.
    (methods,) = gc.get_referents(datetime.datetime.__dict__)
    real_now, real_utcnow = methods["now"], methods["utcnow"]
    methods["now"], methods["utcnow"] = classmethod(now), classmethod(utcnow)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
