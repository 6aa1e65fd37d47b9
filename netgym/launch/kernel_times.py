"""Measured times of operations: recorded where a program runs on its own device, and used where it does not."""

from __future__ import annotations

import csv
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from exogym_core.cost.operations import OperationWatch
from exogym_core.cost.roofline import dtype_of
from exogym_core.names import visible
from exogym_core.results.disk import write_whole
from netsim.errors import InputError
from netsim.files.plain_files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from exogym_core.cost.operations import TorchOperation

__all__ = ["KernelName", "KernelRecorder", "read_kernel_times", "signature_of"]

_COLUMNS = ("op", "shapes", "dtypes", "calls", "ns")


class KernelName(NamedTuple):
    """TorchOperation, shapes and dtypes, as a trace names them: `aten.mm`, `8x4 4x2 -> 8x2`, `tf32 tf32 -> float32`."""

    op: str
    shapes: str
    dtypes: str

    def __str__(self) -> str:
        return f"{self.op} {self.shapes} ({self.dtypes})"


def signature_of(operation: TorchOperation) -> KernelName:
    """KernelName of an operation; kernels of attention are one operation of queries, keys and values."""
    name, operands, results = operation.name, operation.operands, operation.results
    # Which kernel of attention runs depends on the device, and what else they take on the kernel.
    if name.startswith("aten._scaled_dot_product_"):
        is_backward = name.endswith("_backward")
        name = "attention_backward" if is_backward else "attention"
        operands, results = operands[is_backward : is_backward + 3], ()
    inputs = [_dtype(each) for each in operands]
    if operation.flops and dtype_of(operation) == "tf32":
        inputs = ["tf32" if each == "float32" else each for each in inputs]
    causal = " causal" if operation.skipped else ""
    return KernelName(
        name,
        f"{_joined(map(_shape, operands))} -> {_joined(map(_shape, results))}".strip() + causal,
        f"{_joined(inputs)} -> {_joined(map(_dtype, results))}".strip(),
    )


def _joined(words: Iterable[str]) -> str:
    return " ".join(words)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "1"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def read_kernel_times(path: Path) -> dict[KernelName, float]:
    """Seconds of operations in a trace of `KernelRecorder`: CSV with `op,shapes,dtypes,calls,ns`.

    Raises:
        InputError: no such file, a column that is missing, or a row whose time is no number above 0.
    """
    where = visible(path)
    try:
        text = read_bytes(path).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read as a trace of kernels: {error}") from None
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(
            f"{where}:1: is no trace of kernels: it has no column {missing[0]}; netgym launch --record-compute "
            "writes one"
        )
    seconds: dict[KernelName, float] = {}
    for row in rows:
        try:
            nanoseconds = float(row["ns"])
        except (TypeError, ValueError):
            nanoseconds = -1.0
        if not 0 < nanoseconds < 1e15:
            raise InputError(
                f"{where}:{rows.line_num}: ns {visible(str(row['ns']))}: give nanoseconds above 0"
            )
        seconds[KernelName(row["op"], row["shapes"], row["dtypes"])] = nanoseconds * 1e-9
    return seconds


class KernelRecorder:
    """Times each operation of a block, on its CUDA device by events, else by the host's clock.

    Context manager. The time of a signature is the median of its calls: the first may compile or load a kernel.
    """

    def __init__(self) -> None:
        self._watch = OperationWatch(self._took, execute=self._execute)
        self._nanoseconds: defaultdict[KernelName, list[float]] = defaultdict(list)
        self._pending: list[tuple[KernelName, Any, Any]] = []  # events of CUDA, until they are synchronised
        self._last: tuple[Any, Any] = (0, 0)

    def __enter__(self) -> KernelRecorder:
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.__exit__(*error)  # type: ignore[no-untyped-call]
        self._settle()

    def _execute(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            out = operator(*args, **kwargs)
            end.record()
            self._last = begin, end
        else:
            start = time.perf_counter_ns()
            out = operator(*args, **kwargs)
            self._last = start, time.perf_counter_ns()
        return out

    def _took(self, operation: TorchOperation) -> None:
        begin, end = self._last
        if isinstance(begin, int):
            self._nanoseconds[signature_of(operation)].append(end - begin)
        elif any(each.is_cuda for each in (*operation.operands, *operation.results)):
            self._pending.append((signature_of(operation), begin, end))
            if len(self._pending) >= 4096:
                self._settle()

    def _settle(self) -> None:
        if self._pending:
            torch.cuda.synchronize()
        for signature, begin, end in self._pending:
            self._nanoseconds[signature].append(begin.elapsed_time(end) * 1e6)
        self._pending.clear()

    def write(self, path: Path) -> int:
        """Write the trace, the operations that took longest in all first; returns the number of rows."""
        rows = [
            (*signature, len(taken), max(round(statistics.median(taken)), 1))
            for signature, taken in self._nanoseconds.items()
        ]
        rows.sort(key=lambda row: (-row[3] * row[4], row))
        lines = [",".join(map(str, row)) for row in (_COLUMNS, *rows)]
        write_whole(path, "\n".join(lines) + "\n")
        return len(rows)
