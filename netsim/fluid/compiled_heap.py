"""What compiled code is made of: functions, records, and a heap of them. Import this file only where it is wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["ITEM", "Records", "compiled", "pop", "push", "record"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
Records = npt.NDArray[Any]

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("compiled*.py")))
)


def compiled(function: _Function) -> _Function:
    """Compile a function when it is first called, and keep the result on disk."""
    # numba looks for changes in the file of a function and not in those of its callees: its name tells of them.
    function.__qualname__ += f"_{_SOURCES.hexdigest()[:12]}"
    return cast("_Function", numba.njit(cache=True, nogil=True)(function))


def record(whole: str, real: str) -> np.dtype[np.void]:
    """A record of whole and of real numbers, by their names."""
    return np.dtype(
        [(name, np.int64) for name in whole.split()] + [(name, np.float64) for name in real.split()]
    )


ITEM = record("item", "key")
"""An entry of a heap."""


@compiled
def push(heap: Records, size: int, key: float, item: int) -> None:
    """Add to a binary heap of `size` entries ordered by (key, item)."""
    i = size
    while i > 0:
        above = heap[(i - 1) >> 1]
        if above.key < key or (above.key == key and above.item < item):
            break
        heap[i].key, heap[i].item = above.key, above.item
        i = (i - 1) >> 1
    heap[i].key, heap[i].item = key, item


@compiled
def pop(heap: Records, size: int) -> None:
    """Remove the root of a binary heap of `size` entries."""
    size -= 1
    key, item = heap[size].key, heap[size].item
    i = 0
    while 2 * i + 1 < size:
        down = 2 * i + 1
        left, right = heap[down], heap[down + 1]
        if down + 1 < size and (right.key < left.key or (right.key == left.key and right.item < left.item)):
            down += 1
        below = heap[down]
        if key < below.key or (key == below.key and item <= below.item):
            break
        heap[i].key, heap[i].item = below.key, below.item
        i = down
    heap[i].key, heap[i].item = key, item
