"""Memory that a parent and its child share, and tensors in it."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Arena", "Store", "TensorRef"]

# Virtual: pages come into being when written. Each side hands out blocks of its own half. Less where the address
# space of processes is limited (`ulimit -v`).
_MOST_BYTES, _LEAST_BYTES = 1 << 38, 1 << 30
_INLINE_BYTES = 4096  # below this a copy through the pipe is cheaper than keeping books


class TensorRef(NamedTuple):
    """A tensor on its way to the other side: `content` is its bytes, or its offset in the arena."""

    content: bytes | int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Store(Protocol):
    """Where one side puts tensors for the other."""

    def put(self, tensor: Tensor) -> TensorRef:
        """Copy `tensor` to where the other side can read it."""

    def get(self, ref: TensorRef) -> Tensor:
        """The tensor behind `ref`."""

    def free(self, refs: Sequence[TensorRef]) -> None:
        """The other side has read these."""


class Arena:
    """Memory shared with one other process, which inherits it by fork or opens it by its descriptor.

    Nothing of it has a name, so nothing is left behind however the processes end. Blocks come in powers of
    two and are kept for the next tensor of that size.
    """

    def __init__(self, fd: int | None = None, *, upper_half: bool = False) -> None:
        """Make one, or open the one behind `fd`; one side takes the upper half."""
        self.fd = fd if fd is not None else _anonymous_file()
        self._map = _mapped(self.fd)
        half = len(self._map) // 2
        self._next, self._end = (half, 2 * half) if upper_half else (0, half)
        self._free: dict[int, list[int]] = defaultdict(list)

    def put(self, tensor: Tensor) -> TensorRef:
        """Copy `tensor` to where the other side can read it."""
        shape, num_bytes = tuple(tensor.shape), tensor.nbytes
        if num_bytes <= _INLINE_BYTES:
            # Not contiguous(): one element with another stride counts as such, and cannot be viewed as bytes.
            line = tensor.cpu().clone(memory_format=torch.contiguous_format).view(-1)
            content: bytes | int = line.view(torch.uint8).numpy().tobytes()
        else:
            content = self._allocate(num_bytes)
            self._view(content, num_bytes, shape, tensor.dtype).copy_(tensor)
        return TensorRef(content, num_bytes, shape, tensor.dtype)

    def get(self, ref: TensorRef) -> Tensor:
        """The tensor behind `ref`, without a copy: valid until the other side frees it."""
        if isinstance(ref.content, int):
            return self._view(ref.content, ref.num_bytes, ref.shape, ref.dtype)
        if not ref.content:
            return torch.empty(ref.shape, dtype=ref.dtype)
        return torch.frombuffer(bytearray(ref.content), dtype=torch.uint8).view(ref.dtype).view(ref.shape)

    def free(self, refs: Sequence[TensorRef]) -> None:
        """Take back blocks that this side's `put` handed out, when the other side has read them."""
        for ref in refs:
            if isinstance(ref.content, int):
                self._free[_block_bytes(ref.num_bytes)].append(ref.content)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last tensor in it."""
        os.close(self.fd)

    def _allocate(self, num_bytes: int) -> int:
        size = _block_bytes(num_bytes)
        if self._free[size]:
            return self._free[size].pop()
        if self._next + size > self._end:
            raise InputError(
                f"a tensor of {num_bytes} bytes finds no room in the {len(self._map) >> 30} GiB that processes share "
                "here: raise the limit on the address space (ulimit -v), or use workers.kind=threads"
            )
        self._next += size
        return self._next - size

    def _view(self, offset: int, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)
        return raw.view(dtype).view(shape)


def _block_bytes(num_bytes: int) -> int:
    return 1 << max(12, (num_bytes - 1).bit_length())


def _anonymous_file() -> int:
    """The descriptor of a file without a name, as large as an arena and taking no space yet."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("netgym", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _num_bytes())
    return fd


def _num_bytes() -> int:
    """How much of a process's address space an arena may take: there is one a process, besides all else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _MOST_BYTES
    return max(_LEAST_BYTES, min(_MOST_BYTES, 1 << (limit // 16).bit_length() - 1))


def _mapped(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    except OSError as error:
        raise InputError(
            f"processes cannot share memory ({error.strerror}): raise the limit on the address space (ulimit -v), or "
            "use workers.kind=threads"
        ) from None
