"""A buffer of tensors: in memory up to a bound, beyond it in a private file."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SpillBuffer"]

_MEMORY_BYTES = 64 * 2**20


class SpillBuffer:
    """Keeps lists of flat CPU tensors by ticket; threads may share it.

    The file has no name, so nothing of it is left behind however the process ends; room in it is used again.

    Args:
        memory_bytes: what is held in memory; more goes to the file.

    Attributes:
        bytes_in_memory, bytes_in_file: what is held now, and how large the file has become.
    """

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.bytes_in_memory = 0
        self.bytes_in_file = 0
        self._memory_bytes = memory_bytes
        self._held: dict[int, list[Tensor] | list[tuple[int, int, torch.dtype]]] = {}
        self._next = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # size -> offsets
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()

    def put(self, tensors: Sequence[Tensor]) -> int:
        """Keep `tensors`, which stay unchanged meanwhile; returns their ticket."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        with self._lock:
            ticket, self._next = self._next, self._next + 1
            if self.bytes_in_memory + num_bytes <= self._memory_bytes:
                self.bytes_in_memory += num_bytes
                self._held[ticket] = list(tensors)
            else:
                self._held[ticket] = [self._written(tensor) for tensor in tensors]
            return ticket

    def get(self, ticket: int) -> list[Tensor]:
        """Tensors kept under a ticket."""
        with self._lock:
            return [self._part(item, 0, None) for item in self._held[ticket]]

    def part(self, ticket: int, index: int, start: int, stop: int) -> Tensor:
        """Slice of the tensor at `index` under a ticket."""
        with self._lock:
            return self._part(self._held[ticket][index], start, stop)

    def pop(self, ticket: int) -> list[Tensor]:
        """Remove and return the tensors kept under a ticket."""
        tensors = self.get(ticket)
        self.drop(ticket)
        return tensors

    def drop(self, ticket: int) -> None:
        """Forget what is kept under a ticket."""
        with self._lock:
            for item in self._held.pop(ticket):
                if isinstance(item, Tensor):
                    self.bytes_in_memory -= item.nbytes
                else:
                    offset, size, dtype = item
                    self._free[size * dtype.itemsize].append(offset)

    def close(self) -> None:
        """Give the file back."""
        with self._lock:
            self._held.clear()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _written(self, tensor: Tensor) -> tuple[int, int, torch.dtype]:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        size = tensor.nbytes
        if self._free[size]:
            offset = self._free[size].pop()
        else:
            offset, self.bytes_in_file = self.bytes_in_file, self.bytes_in_file + size
        content = memoryview(tensor.contiguous().view(torch.uint8).numpy().data)
        written = 0
        while written < size:
            written += os.pwrite(self._file.fileno(), content[written:], offset + written)
        return offset, tensor.numel(), tensor.dtype

    def _part(self, item: Tensor | tuple[int, int, torch.dtype], start: int, stop: int | None) -> Tensor:
        if isinstance(item, Tensor):
            return item[start:stop]
        offset, size, dtype = item
        stop = size if stop is None else min(stop, size)
        raw = bytearray((stop - start) * dtype.itemsize)
        if not raw:
            return torch.empty(0, dtype=dtype)
        assert self._file is not None
        view, filled = memoryview(raw), 0
        while filled < len(raw):
            place = offset + start * dtype.itemsize + filled
            filled += os.preadv(self._file.fileno(), [view[filled:]], place)
        return torch.frombuffer(raw, dtype=dtype)
