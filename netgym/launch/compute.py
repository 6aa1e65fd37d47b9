"""Virtual time of a program's computing between two calls."""

from __future__ import annotations

import functools
import shlex
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.cost.devices import find_device
from exogym_core.cost.operations import OperationWatch
from exogym_core.cost.roofline import MEMORY_SHARE, Roofline
from exogym_core.names import visible
from netgym.launch.kernel_times import KernelName, read_kernel_times, signature_of
from netsim.errors import InputError
from netsim.topology.devices import device_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.cost.operations import TorchOperation

__all__ = ["ComputeClock", "DeviceClock"]


class ComputeClock:
    """Virtual seconds of computing.

    Attributes:
        kind: `live` (CPU seconds of its main thread, measured as it runs), `flops` (on a device), or `marks` (only
            calls of `netgym.advance`).
        factor: virtual seconds for each measured one.
        on_device: seconds of operations; None where they do not count.
    """

    def __init__(self, kind: str = "live", factor: float = 1.0, on_device: DeviceClock | None = None) -> None:
        self.kind, self.factor, self.on_device = kind, factor, on_device
        self._last = 0.0
        self._spent: Callable[[], float] = time.thread_time

    @classmethod
    def parse(cls, text: str) -> ComputeClock:
        """Parse `live [FACTOR]`, `flops DEVICE [PRODUCTS [MEMORY]]`, `FILE.csv DEVICE [PRODUCTS [MEMORY]]` or `marks`.

        PRODUCTS and MEMORY are shares of the device's peak and of its memory's bandwidth.

        Raises:
            InputError: it is none of these.

        >>> ComputeClock.parse("live 0.05").factor
        0.05
        """
        try:
            kind, *rest = shlex.split(text) or [""]
            if kind == "marks" and not rest:
                return cls(kind)
            if kind == "live" and len(rest) < 2:
                factor = float(rest[0]) if rest else 1.0
                if 0 <= factor < float("inf"):
                    return cls(kind, factor)
            if kind == "flops" and 0 < len(rest) < 4:
                return cls(kind, on_device=DeviceClock(_roofline(rest)))
            if kind.endswith(".csv") and len(rest) < 4:
                if not rest:
                    raise InputError(
                        f"compute {visible(text)!r}: name the device of operations that the trace lacks, such as "
                        f"'{visible(kind)} h100'"
                    )
                return cls("flops", on_device=DeviceClock(_roofline(rest), read_kernel_times(Path(kind))))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
        raise InputError(
            f"compute {visible(text)!r}: write 'live', 'live 0.1' (times a factor), 'flops h100' (a device; 'flops "
            "h100 0.6 0.8': with the shares that products reach of its peak, and all else of its memory's bandwidth), "
            "'trace.csv h100' (measured, see --record-compute) or 'marks' (only netgym.advance counts)"
        )

    def start(self, is_process: bool = True) -> None:
        """Measure from now on: the main thread of a process that is a rank, else this thread.

        CPU seconds of all threads would add up parallel work.
        """
        if is_process:
            main = threading.main_thread().ident
            assert main is not None
            self._spent = functools.partial(time.clock_gettime, time.pthread_getcpuclockid(main))
        if self.on_device is not None:
            self.on_device.start()

    def measure(self) -> float:
        """Virtual seconds of computing since the last call of `resume`, or since the thread began."""
        if self.kind == "live":
            return (self._spent() - self._last) * self.factor
        return 0.0 if self.on_device is None else self.on_device.seconds

    def take_seconds(self) -> float:
        """Virtual seconds of computing since the last call of `resume`, or since the thread began; pauses."""
        return self.measure() if self.on_device is None else self.on_device.take_seconds()

    def skip(self, measured: float) -> None:
        """Leave out what has been spent since `measure` returned `measured`."""
        if self.kind == "live" and self.factor:
            self._last = self._spent() - measured / self.factor

    def resume(self) -> None:
        """Resume measuring, before the program's own code runs."""
        if self.kind == "live":
            self._last = self._spent()
        elif self.on_device is not None:
            self.on_device.is_paused = False


def _roofline(words: Sequence[str]) -> Roofline:
    """Roofline of `DEVICE [PRODUCTS [MEMORY]]`.

    Raises:
        ValueError: a share is no number.
        InputError: a share is not above 0, or above 1.
    """
    device = find_device(words[0])
    products, memory = ([float(word) for word in words[1:]] + [None, None])[:2]
    if any(share is not None and not 0 < share <= 1 for share in (products, memory)):
        given = " ".join(words[1:])
        raise InputError(
            f"compute of {visible(words[0])}: shares {visible(given)}: a share is above 0 and at most 1"
        )
    return Roofline(device, device_name(words[0]), products, MEMORY_SHARE if memory is None else memory)


class DeviceClock:
    """Seconds of operations on a device, measured ones by a trace, all others by a roofline.

    Args:
        roofline: of the device.
        measured: seconds by the trace; None: there is none.

    Attributes:
        is_paused: operations are not the program's.
        seconds: since they were taken.
    """

    def __init__(self, roofline: Roofline, measured: Mapping[KernelName, float] | None = None) -> None:
        self._roofline, self._measured = roofline, measured
        self.is_paused = False
        self.seconds = 0.0
        self._parts: Counter[str] = Counter()
        self._estimated: Counter[KernelName] = Counter()
        self._reported_seconds = 0.0

    def start(self) -> None:
        """Count from now on, in this thread and its backward passes."""
        OperationWatch(self._add).__enter__()  # type: ignore[no-untyped-call]

    def take_seconds(self) -> float:
        """Seconds since the last call; pauses."""
        self.is_paused = True
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def forget(self) -> None:
        """Drop what has been counted for the account: it was start-up."""
        self._parts.clear()
        self._estimated.clear()

    def take_account(self, *, is_last: bool = False) -> dict[str, Any] | None:
        """Seconds so far by what bounds them, speeds, and operations that the trace lacks.

        None until they have grown by a tenth, or to the last since the last account.
        """
        total = self._parts.total()
        if total <= self._reported_seconds * (1.0 if is_last else 1.1):
            return None
        self._reported_seconds = total
        return {
            "device": self._roofline.name,
            "product_share": self._roofline.product_share,
            "memory_share": self._roofline.memory_share,
            "rates": dict(self._roofline.rates),
            "seconds": dict(self._parts),
            "estimated": {
                str(each): seconds for each, seconds in self._estimated.most_common(_MOST_ESTIMATED)
            },
            "num_estimated": len(self._estimated),
        }

    def _add(self, operation: TorchOperation) -> None:
        if self.is_paused:
            return
        if self._measured is not None:
            signature = signature_of(operation)
            seconds, bound = self._measured.get(signature), "measured"
            if seconds is None:
                seconds, bound = self._roofline.seconds(operation)
                self._estimated[signature] += seconds  # type: ignore[assignment]
        else:
            seconds, bound = self._roofline.seconds(operation)
        self.seconds += seconds
        self._parts[bound] += seconds  # type: ignore[assignment]


_MOST_ESTIMATED = 20
