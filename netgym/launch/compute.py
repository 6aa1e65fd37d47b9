"""Virtual time of a program's computing between two calls."""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.cost.devices import Device, find_device
from exogym_core.names import visible
from netgym.launch.private import OperationCounter
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ComputeClock"]

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class ComputeClock:
    """Virtual seconds of computing.

    Attributes:
        kind: `live` (CPU seconds of its main thread, measured as it runs), `flops` (on a device), or `marks` (only
            calls of `netgym.advance`).
        factor: virtual seconds for each measured one.
    """

    def __init__(self, kind: str = "live", factor: float = 1.0, flops: _DeviceClock | None = None) -> None:
        self.kind, self.factor, self._flops = kind, factor, flops
        self._last = 0.0
        self._spent: Callable[[], float] = time.thread_time

    @classmethod
    def parse(cls, text: str) -> ComputeClock:
        """Parse `live`, `live FACTOR`, `flops DEVICE [UTILISATION]` or `marks`.

        Raises:
            InputError: it is none of these.

        >>> ComputeClock.parse("live 0.05").factor
        0.05
        """
        kind, *rest = text.split() or [""]
        try:
            if kind == "marks" and not rest:
                return cls(kind)
            if kind == "live" and len(rest) < 2:
                factor = float(rest[0]) if rest else 1.0
                if 0 <= factor < float("inf"):
                    return cls(kind, factor)
            if kind == "flops" and 0 < len(rest) < 3:
                utilisation = float(rest[1]) if len(rest) > 1 else 0.4
                if 0 < utilisation <= 1:
                    return cls(kind, flops=_DeviceClock(find_device(rest[0]), utilisation))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
        raise InputError(
            f"compute {visible(text)!r}: write 'live', 'live 0.1' (times a factor), 'flops h100 0.4' (device and "
            "utilisation) or 'marks' (only netgym.advance counts)"
        )

    def start(self, is_process: bool = True) -> None:
        """Measure from now on: the main thread of a process that is a rank, else this thread.

        CPU seconds of all threads would add up parallel work.
        """
        if is_process:
            main = threading.main_thread().ident
            assert main is not None
            self._spent = functools.partial(time.clock_gettime, time.pthread_getcpuclockid(main))
        if self._flops is not None:
            self._flops.start()

    def take_seconds(self) -> float:
        """Virtual seconds of computing since the last call of `resume`, or since the thread began."""
        if self.kind == "live":
            return (self._spent() - self._last) * self.factor
        if self._flops is not None:
            seconds, self._flops.seconds = self._flops.seconds, 0.0
            return seconds
        return 0.0

    def resume(self) -> None:
        """Resume measuring, before the program's own code runs."""
        if self.kind == "live":
            self._last = self._spent()

    def take_new_rates(self) -> list[str]:
        """Speeds of dtypes that computing has used for the first time, as text."""
        if self._flops is None:
            return []
        rates, self._flops.new_rates = self._flops.new_rates, []
        return rates


class _DeviceClock:
    """Seconds of matrix products, convolutions and attention on a device, by the dtype of their operands.

    Attributes:
        seconds: since they were taken.
        new_rates: see `ComputeClock.take_new_rates`.
    """

    def __init__(self, device: Device, utilisation: float) -> None:
        self._device, self._utilisation = device, utilisation
        self._rates: dict[tuple[torch.dtype, bool], float] = {}
        self.seconds = 0.0
        self.new_rates: list[str] = []

    def start(self) -> None:
        """Count from now on, in this thread and its backward passes."""
        OperationCounter(self._add).__enter__()  # type: ignore[no-untyped-call]

    def _add(self, operation: object, number: float, arguments: Sequence[Any]) -> None:
        dtype = next((each.dtype for each in arguments if isinstance(each, torch.Tensor)), torch.float32)
        allowed = torch.backends.cudnn if "conv" in str(operation) else torch.backends.cuda.matmul
        key = dtype, dtype == torch.float32 and allowed.allow_tf32
        if (
            key not in self._rates
        ):  # a dtype that the device's table lacks has the speed of another, which is reported
            name, is_tf32 = str(dtype).removeprefix("torch."), key[1]
            at = "tf32" if is_tf32 else _SHORT.get(dtype, "bf16" if name.startswith("float8") else "fp32")
            at = at if at in self._device.flops else "fp32"
            rate = self._rates[key] = self._device.flops[at] * self._utilisation
            named = at if is_tf32 or _SHORT.get(dtype) == at else f"{name} as {at}"
            self.new_rates.append(f"{named} {rate / 1e12:.4g} TFLOP/s")
        self.seconds += number / self._rates[key]
