"""The protocol between the simulation and its rank groups: messages, and how they are pickled.

Large tensors are no part of a pickle, but buffers alongside it; classes and functions that no module of the other end
has are pickled by value.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from exogym_core.workers.processes.shared_memory import Block, TensorRef, blocks_in
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from exogym_core.communicator.simulated.communicator import RankState
    from netsim.errors import BrokenCallError, MismatchError, NetsimError
    from netsim.ranks import Answer, Key, Request

__all__ = [
    "INLINE_BYTES",
    "Abort",
    "Answered",
    "Asking",
    "Blocked",
    "Deposited",
    "Done",
    "Ended",
    "Failed",
    "Freed",
    "Requests",
    "dumps",
    "dumps_for_child",
    "loads",
]

# --- pickling by value ---------------------------------------------------------------------------------------


_FAILURES = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError, RuntimeError)
_MAX_DEPTH = 6


INLINE_BYTES = 1 << 16
"""Tensors of more bytes are no part of a pickle."""


def dumps_for_child(obj: Any, buffers: list[memoryview] | None = None) -> bytes:
    """`obj` as a pickle that needs no module but installed ones to load.

    Args:
        obj: any object that can be pickled by value.
        buffers: gets the values of large tensors, which `loads` takes again; None: all are part of the pickle.

    Raises:
        InputError: it cannot be pickled; the first line names the part of it that cannot, and the remedy.
    """
    try:
        return _dumped(_ByValuePickler, obj, buffers)
    except _FAILURES as error:
        path, part = _culprit(obj, getattr(obj, "__qualname__", type(obj).__qualname__))
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} ({type(part).__qualname__}) cannot be sent to another process ({reason}): "
            f"create it inside the function that ranks run, or use workers.kind=threads"
        ) from error


def dumps(obj: object, buffers: list[memoryview]) -> bytes:
    """`obj` as a pickle, by value where the other end has no module of it; `buffers` gets large tensors' values."""
    try:
        return _dumped(pickle.Pickler, obj, buffers)
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers.clear()
        return dumps_for_child(obj, buffers)


def _dumped(kind: type[pickle.Pickler], obj: object, buffers: list[memoryview] | None) -> bytes:
    file = io.BytesIO()
    apart = None if buffers is None else lambda buffer: buffers.append(buffer.raw())
    pickler = kind(file, 5, buffer_callback=apart)
    if kind is pickle.Pickler:
        pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}
    pickler.dump(obj)
    return file.getvalue()


def loads(raw: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """An object that was pickled in a process of the same run, with the buffers of its large tensors."""
    return pickle.loads(raw, buffers=buffers)  # nosec B301


def _reduced(tensor: Tensor) -> Any:
    """Pickle the values of a large tensor as a buffer.

    Tensors of dtypes without a typed storage are written as bytes: torch's own pickles of them cannot be read.
    """
    if _is_plain_and_large(tensor):
        values = pickle.PickleBuffer(tensor.view(-1).view(torch.uint8).numpy().data)
        return _viewed, (values, tensor.dtype, tuple(tensor.shape))
    if tensor.dtype not in _WITH_STORAGE and tensor.layout == torch.strided:
        line = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return _viewed, (line, tensor.dtype, tuple(tensor.shape))
    return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({Tensor: _reduced}, cloudpickle.Pickler.dispatch_table)


def _is_plain_and_large(tensor: Tensor) -> bool:
    is_plain = (
        tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.__dict__
    )
    return (
        is_plain
        and tensor.nbytes > INLINE_BYTES
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


_WITH_STORAGE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4,
}  # fmt: skip


def _viewed(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Tensor of bytes, which are a tensor themselves or the buffer of a large one."""
    line: Tensor = values if isinstance(values, Tensor) else torch.frombuffer(values, dtype=torch.uint8)
    return line.view(dtype).view(shape)


def _culprit(obj: Any, path: str, depth: int = 0) -> tuple[str, Any]:
    """The innermost part of `obj` that cannot be pickled, with the path that leads to it."""
    if depth < _MAX_DEPTH:
        for suffix, part in _parts(obj):
            try:
                cloudpickle.dumps(part, protocol=5)
            except _FAILURES:
                return _culprit(part, path + suffix, depth + 1)
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Parts of `obj`: captured variables, arguments, attributes, items."""
    if isinstance(obj, functools.partial):
        yield from ((f".args[{index}]", part) for index, part in enumerate((obj.func, *obj.args), start=-1))
        yield from ((f".{name}", part) for name, part in obj.keywords.items())
    elif isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in obj.items())
    elif isinstance(obj, Sequence) and not isinstance(obj, (str, bytes)):
        yield from ((f"[{index}]", part) for index, part in enumerate(obj))
    elif closure := getattr(obj, "__closure__", None):
        yield from (
            (f" -> {name}", cell.cell_contents)
            for name, cell in zip(obj.__code__.co_freevars, closure, strict=True)
        )
    elif attributes := getattr(obj, "__dict__", None):
        yield from ((f".{name}", part) for name, part in attributes.items())


# --- messages ------------------------------------------------------------------------------------------------


# --- from ranks, alongside `Part`s of calls whose tensors are references -----------------------------------


class Requests(NamedTuple):
    """Requests of `rank` to the clock since the last flush."""

    rank: int
    requests: list[Request]


class Blocked(NamedTuple):
    """`rank` waits for its values as a member of a call."""

    rank: int
    key: Key
    member: int


class Asking(NamedTuple):
    """`rank` waits for the clock's answer."""

    rank: int


class Ended(NamedTuple):
    """`rank` has finished; its result is pickled, and `refs` are the buffers of that pickle."""

    rank: int
    result: bytes
    refs: list[TensorRef]
    state: RankState


class Failed(NamedTuple):
    """`rank` has failed with `error`."""

    rank: int
    error: NetsimError


class Deposited(NamedTuple):
    """Snapshot of `rank` for the evaluator."""

    rank: int
    note: Any
    refs: list[TensorRef]


class Freed(NamedTuple):
    """Parts of the arena that have been read and may be used again."""

    blocks: list[Block]


# --- to ranks ----------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """The values of a call, by member, for those that live in one process; members with the same have one list.

    `freed` are parts of the arena that this process may use again.
    """

    key: Key
    values: dict[int, list[TensorRef]]
    error: MismatchError | BrokenCallError | None
    freed: list[Block]

    @property
    def blocks(self) -> list[Block]:
        """The parts of the arena that these values lie in."""
        distinct = {id(refs): refs for refs in self.values.values()}
        return blocks_in([ref for refs in distinct.values() for ref in refs])


class Answered(NamedTuple):
    """The clock's answer to `rank`."""

    rank: int
    value: Answer


class Abort(NamedTuple):
    """The run has failed: unwind."""

    reason: str
