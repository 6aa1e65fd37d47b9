"""Memory that the processes of a run share, tensors in it, and leases: which readers still hold which part."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from exogym_core.communicator.exchange import copy_values
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Arena", "Block", "Leases", "Store", "TensorRef", "blocks_in"]

# Virtual: pages are allocated when written. Less if the address space of processes is limited (`ulimit -v`).
_MOST_BYTES_A_REGION, _LEAST_BYTES_A_REGION = 1 << 38, 1 << 29
_MOST_BYTES = 1 << 45
_INLINE_BYTES = 4096  # below this a copy through the pipe is cheaper than counting readers
_IN_NUMPY = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}


class Block(NamedTuple):
    """A part of the arena: its offset and its bytes in use."""

    offset: int
    num_bytes: int


class TensorRef(NamedTuple):
    """A tensor on its way to another process: `content` is its bytes, or its offset in the arena."""

    content: bytes | int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def blocks_in(refs: Sequence[TensorRef]) -> list[Block]:
    """The parts of the arena that these tensors lie in."""
    return [Block(ref.content, ref.num_bytes) for ref in refs if isinstance(ref.content, int)]


class Store(Protocol):
    """Region of shared memory in which one process puts tensors for others."""

    def put(self, tensor: Tensor, *, copies: bool = False) -> TensorRef:
        """Put `tensor` where others can read it; as a copy if it changes before they have read it."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, once: bool = False) -> Tensor:
        """Uninitialised tensor for a later `put`; `once`: not needed again soon."""

    def get(self, ref: TensorRef) -> Tensor:
        """The tensor behind `ref`."""

    def free(self, blocks: Sequence[Block]) -> None:
        """Release blocks without readers."""

    def owner(self, block: Block) -> int:
        """The region that a block is of."""


class Arena:
    """Memory that some processes share, which inherit it by fork or open it by its descriptor.

    Every process reads all of it; each writes into a region of its own, which it alone allocates. It has no name, so
    nothing is left behind however the processes end. Blocks come in powers of two and are kept for
    the next tensor of that size.

    Args:
        fd: of existing memory; None: create it.
        num_regions: number of regions.
        region: of this process.
    """

    def __init__(self, fd: int | None = None, *, num_regions: int = 2, region: int = 0) -> None:
        self.fd = fd if fd is not None else _anonymous_file(num_regions)
        self._map = _mapped(self.fd)
        self._begin = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._region_bytes = len(self._map) // num_regions
        self._next = region * self._region_bytes
        self._end = self._next + self._region_bytes
        self._region = region
        self._free: dict[int, list[_Place]] = defaultdict(list)  # by size
        self._in_use: dict[int, _Place] = {}  # by offset

    def put(self, tensor: Tensor, *, copies: bool = False) -> TensorRef:
        """Put `tensor` where the others can read it; without a copy if it is there already.

        Args:
            tensor: on the CPU.
            copies: always copy: it changes before all have read it.
        """
        shape, num_bytes, dtype = tuple(tensor.shape), tensor.nbytes, tensor.dtype
        if num_bytes <= _INLINE_BYTES:
            return TensorRef(_bytes_of(tensor), num_bytes, shape, dtype)
        offset = tensor.data_ptr() - self._begin
        if copies or not self._is_here(offset, tensor):
            offset = self._allocate(num_bytes)
            copy_values(self._view(offset, shape, dtype), tensor)
        elif offset in self._in_use:
            self._in_use[offset].num_users += 1
        return TensorRef(offset, num_bytes, shape, dtype)

    def _is_here(self, offset: int, tensor: Tensor) -> bool:
        """True if others can read the tensor where it is: in their regions, or the whole of a block without readers."""
        if not (0 <= offset < len(self._map) and tensor.is_contiguous()):
            return False
        place = self._in_use.get(offset)
        if place is None:
            return offset // self._region_bytes != self._region
        return place.num_users == 1 and place.bytes_used == tensor.nbytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, once: bool = False) -> Tensor:
        """Uninitialised tensor for a later `put` without a copy; its block is in use while the tensor is.

        Args:
            shape, dtype: of the tensor.
            once: not needed again soon: its memory returns to the system when others have read it. Blocks that are
                used at each step keep theirs, as page faults would cost more.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes <= _INLINE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        offset = self._allocate(num_bytes, once=once)
        memory = memoryview(self._map)[offset : offset + num_bytes]
        weakref.finalize(memory, self._let_go, offset).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def get(self, ref: TensorRef) -> Tensor:
        """The tensor behind `ref`, without a copy: valid until it is reported as read."""
        if isinstance(ref.content, int):
            return self._view(ref.content, ref.shape, ref.dtype)
        if not ref.content:
            return torch.empty(ref.shape, dtype=ref.dtype)
        line = torch.frombuffer(bytearray(ref.content), dtype=ref.dtype)
        return line if len(ref.shape) == 1 else line.view(ref.shape)

    def free(self, blocks: Sequence[Block]) -> None:
        """Free blocks of this process's region, whose values others have read."""
        for block in blocks:
            self._let_go(block.offset, is_read=True)

    def _let_go(self, offset: int, *, is_read: bool = False) -> None:
        """Drop a user of a block, and free it after the last; any thread may do so."""
        place = self._in_use[offset]
        place.num_users -= 1
        if not place.num_users:
            del self._in_use[offset]
            self._free[place.num_bytes].append(place)
        if place.once and (is_read or not place.num_users) and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, offset, place.num_bytes)

    def owner(self, block: Block) -> int:
        """The region that a block is of."""
        return block.offset // self._region_bytes

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last tensor in it."""
        os.close(self.fd)

    def _allocate(self, num_bytes: int, *, once: bool = False) -> int:
        size = 1 << max(12, (num_bytes - 1).bit_length())  # of pages
        place = self._free[size].pop() if self._free[size] else self._new_place(size, num_bytes)
        place.num_users, place.bytes_used, place.once = 1, num_bytes, once
        self._in_use[place.offset] = place
        return place.offset

    def _new_place(self, size: int, num_bytes: int) -> _Place:
        if self._next + size > self._end:
            raise InputError(
                f"a tensor of {num_bytes} bytes does not fit into the {self._region_bytes >> 20} MiB that a process "
                "shares here: raise the limit on the address space (ulimit -v), or use workers.kind=threads"
            )
        self._next += size
        return _Place(self._next - size, size)

    def _view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(tuple(shape))


@dataclass(eq=False)
class _Place:
    """Block of this process's region, in use or free.

    Attributes:
        offset: in the arena.
        num_bytes: of the block.
        bytes_used: by the tensor in it.
        num_users: one for all readers elsewhere, one for the tensor created in it.
        once: its memory returns to the system.
    """

    offset: int
    num_bytes: int
    bytes_used: int = 0
    num_users: int = 0
    once: bool = False


def _bytes_of(tensor: Tensor) -> bytes:
    """The values of a small tensor, in order."""
    if tensor.is_cpu and tensor.dtype in _IN_NUMPY and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach().numpy().tobytes()
    # Not contiguous(): one element with another stride counts as such, and cannot be viewed as bytes.
    line = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    return line.view(torch.uint8).numpy().tobytes()


def _anonymous_file(num_regions: int) -> int:
    """Descriptor of an unnamed sparse file, as large as an arena."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("netgym", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, _region_bytes(num_regions) * num_regions)
    except OSError as error:
        os.close(fd)
        raise InputError(
            f"processes cannot share memory ({error.strerror}): raise the limit on the size of files "
            "(ulimit -f unlimited), or use workers.kind=threads"
        ) from None
    return fd


def _region_bytes(num_regions: int) -> int:
    """Share of a process's address space that a region may take."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    room = _MOST_BYTES if limit == resource.RLIM_INFINITY else limit // 4
    size = max(_LEAST_BYTES_A_REGION, min(_MOST_BYTES_A_REGION, room // num_regions))
    return size & -4096


def _mapped(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise InputError(
            f"processes cannot share memory ({error.strerror}): raise the limit on the address space (ulimit -v), or "
            "use workers.kind=threads"
        ) from None


class Leases:
    """Counts the readers of blocks; blocks without readers return to their owner.

    Region 0 of the store belongs to the simulation, region `i + 1` to process `i`.

    Args:
        store: of the blocks.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_readers: dict[int, int] = {}  # by offset
        self._due: defaultdict[int, list[Block]] = defaultdict(list)

    def lend(self, blocks: Sequence[Block]) -> None:
        """Add a reader of each block."""
        for block in blocks:
            self._num_readers[block.offset] = self._num_readers.get(block.offset, 0) + 1

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Remove a reader of each block."""
        for block in blocks:
            left = self._num_readers[block.offset] - 1
            if left:
                self._num_readers[block.offset] = left
                continue
            del self._num_readers[block.offset]
            owner = self._store.owner(block)
            if owner:
                self._due[owner - 1].append(block)
            else:
                self._store.free([block])

    def due_to(self, index: int) -> list[Block]:
        """Blocks returned to process `index` and not yet reported to it."""
        return self._due.pop(index, [])
