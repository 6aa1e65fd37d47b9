"""The protocol between the simulation and its rank groups: messages, and the codec that writes them as bytes.

A rank's calls differ from step to step in their numbers and values alone. Repeated parts (caller, group, shapes, line)
are interned: sent once, and by number from then on. Plain values are left, which `marshal` writes ten times faster than
`pickle` writes objects; anything else is pickled by value.
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from exogym_core.workers.processes.shared_memory import Block, TensorRef, blocks_in
from netsim.errors import InputError
from netsim.ranks import Advance, Await, CallEnding, Key, Mark, Post, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.simulated.calls import RankState
    from netsim.errors import BrokenCallError, MismatchError, NetsimError
    from netsim.ranks import Answer, Request

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
    "MessageDecoder",
    "MessageEncoder",
    "Requests",
    "Values",
    "dumps_for_child",
    "loads",
]

# --- pickling by value ---------------------------------------------------------------------------------------


_FAILURES = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError, RuntimeError)
_MAX_DEPTH = 6


INLINE_BYTES = 1 << 16
"""Tensors of more bytes are no part of a pickle."""


def dumps_for_child(obj: Any, put: Callable[[Tensor], Any] | None = None) -> bytes:
    """`obj` as a pickle that needs no module but installed ones to load.

    Args:
        obj: any object that can be pickled by value.
        put: stores a large tensor and returns the reference that stands for it in the pickle, see `loads`; None: all
            tensors are part of it.

    Raises:
        InputError: it cannot be pickled; the first line names the part of it that cannot, and the remedy.
    """
    try:
        file = io.BytesIO()
        _ByValuePickler(file, put).dump(obj)
        return file.getvalue()
    except _FAILURES as error:
        path, part = _culprit(obj, getattr(obj, "__qualname__", type(obj).__qualname__))
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} ({type(part).__qualname__}) cannot be sent to another process ({reason}): "
            f"create it inside the function that ranks run, or use workers.kind=threads"
        ) from error


def loads(raw: bytes | memoryview, get: Callable[[Any], Tensor]) -> Any:
    """An object that was pickled in a process of the same run; `get` returns the tensor of a reference."""
    return _Unpickler(io.BytesIO(raw), get).load()


class _References(pickle.Pickler):
    """Pickles references instead of large tensors; a tensor that occurs twice is stored once."""

    def __init__(self, file: io.BytesIO, put: Callable[[Tensor], Any] | None) -> None:
        super().__init__(file, protocol=5)
        self._put = put
        self._stored: dict[int, tuple[Tensor, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if self._put is None or type(obj) is not Tensor or not _is_plain_and_large(obj):
            return None
        if id(obj) not in self._stored:
            self._stored[id(obj)] = obj, self._put(obj)
        return self._stored[id(obj)][1]


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


class _ByValuePickler(_References, cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors of dtypes without a typed storage as bytes: torch's own pickles of them cannot be read."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.dtype not in _WITH_STORAGE and obj.layout == torch.strided:
            line = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return _viewed, (line, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, get: Callable[[Any], Tensor]) -> None:
        super().__init__(file)
        self._get = get
        self._loaded: dict[Any, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        if pid not in self._loaded:
            self._loaded[pid] = self._get(pid)
        return self._loaded[pid]


_WITH_STORAGE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4,
}  # fmt: skip


def _viewed(line: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
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


# --- from ranks --------------------------------------------------------------------------------------------


class Requests(NamedTuple):
    """Requests of `rank` to the clock since the last flush."""

    rank: int
    requests: list[Request]


class Values(NamedTuple):
    """Values of a member for a call."""

    rank: int
    key: Key
    ranks: tuple[int, ...]
    member: int
    signature: Signature
    refs: list[TensorRef]


class Blocked(NamedTuple):
    """`rank` waits for its values as a member of a call."""

    rank: int
    key: Key
    member: int


class Asking(NamedTuple):
    """`rank` waits for the clock's answer."""

    rank: int


class Ended(NamedTuple):
    """`rank` has finished; its result is pickled."""

    rank: int
    result: bytes
    state: RankState


class Failed(NamedTuple):
    """`rank` has failed with `error`."""

    rank: int
    error: NetsimError


class Deposited(NamedTuple):
    """Snapshot of `rank` for the observer."""

    rank: int
    note: Mapping[str, Any]
    refs: list[TensorRef]


class Freed(NamedTuple):
    """Parts of the arena that have been read and may be used again."""

    blocks: list[Block]


# --- to ranks ----------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """The values of a call for some `members` that live in one process; `own` where they differ.

    `freed` are parts of the arena that this process may use again.
    """

    key: Key
    members: tuple[int, ...]
    shared: list[TensorRef]
    own: dict[int, list[TensorRef]]
    error: MismatchError | BrokenCallError | None
    freed: list[Block]

    @property
    def blocks(self) -> list[Block]:
        """The parts of the arena that these values lie in."""
        return blocks_in([*self.shared, *(ref for refs in self.own.values() for ref in refs)])


class Answered(NamedTuple):
    """The clock's answer to `rank`."""

    rank: int
    value: Answer


class Abort(NamedTuple):
    """The run has failed: unwind."""

    reason: str


# --- codec ---------------------------------------------------------------------------------------------------


_MOST_INTERNED = 4096
_PICKLE, _SHORT = b"p", b"s"


class MessageEncoder:
    """Writes what a `MessageDecoder` at the other end reads, in the same order."""

    def __init__(self) -> None:
        self._interned: dict[Hashable, int] = {}
        self._new: list[bytes] = []  # interned values that the other end has not seen
        self._begins_anew = False
        self._short: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            Values: self._values,
            Requests: self._requests,
            Blocked: lambda record: (
                "B",
                record.rank,
                self._intern(record.key.group),
                record.key.number,
                record.member,
            ),
            Asking: lambda record: ("A", record.rank),
            Freed: lambda record: ("F", [tuple(block) for block in record.blocks]),
            Done: self._done,
            Answered: self._answered,
            Advance: lambda request: ("a", float(request.seconds)),
            Wait: lambda request: ("w", self._intern(request.key.group), request.key.number),
            Await: lambda request: (
                "t",
                self._intern(request.key.group),
                request.key.number,
                float(request.seconds),
            ),
            Post: self._post,
            Mark: self._mark,
        }

    def write(self, obj: object) -> list[bytes | memoryview]:
        """Write an object (a message, a list of them, or anything else) as a frame, with large tensors as parts."""
        if len(self._interned) >= _MOST_INTERNED:
            self._interned.clear()
            self._begins_anew = True
        if not isinstance(obj, list) and type(obj) not in self._short:
            return _pickled_in_parts(obj)
        try:
            said = self._batch(obj) if isinstance(obj, list) else self._item(obj)
            frame = _SHORT + marshal.dumps((self._begins_anew, self._new, said))
        except (ValueError, TypeError):  # something in it is no plain value: what is new in it comes again
            self._interned.clear()
            self._new, self._begins_anew = [], True
            return _pickled_in_parts(obj)
        self._new, self._begins_anew = [], False
        return [frame]

    def _batch(self, batch: list[Any]) -> list[tuple[Any, ...]]:
        """Messages of a batch; the most frequent ones, a post and the wait for it, as one."""
        if len(batch) > 2 and type(batch[-3]) is Values and type(batch[-2]) is Blocked:
            values, requests = batch[-3], getattr(batch[-1], "requests", [])
            seconds = None
            if requests and type(requests[0]) is Advance:
                seconds, requests = float(requests[0].seconds), requests[1:]
            rank, key, ranks, member, signature, refs = values
            same = [(rank, key, member), [(key, member), (key,)]]
            if [batch[-2], [request[:2] for request in requests]] == same and type(requests[0]) is Post:
                heads = tuple([ref[1:] for ref in refs])
                call = (rank, key.group, ranks, member, signature, heads, *requests[0][2:])
                said = ("S", self._intern(call), key.number, [ref.content for ref in refs], seconds)
                return [*(self._item(each) for each in batch[:-3]), said]
        return [self._item(each) for each in batch]

    def _item(self, each: object) -> tuple[Any, ...]:
        short = self._short.get(type(each))
        return short(each) if short is not None else ("p", _pickled(each))

    def _intern(self, value: Hashable) -> int:
        number = self._interned.get(value)
        if number is None:
            number = self._interned[value] = len(self._interned)
            self._new.append(_pickled(value))
        return number

    def _values(self, record: Values) -> tuple[Any, ...]:
        heads = tuple([ref[1:] for ref in record.refs])
        call = (record.rank, record.key.group, record.ranks, record.member, record.signature, heads)
        return "C", self._intern(call), record.key.number, [ref.content for ref in record.refs]

    def _requests(self, record: Requests) -> tuple[Any, ...]:
        return "R", record.rank, [self._item(request) for request in record.requests]

    def _post(self, request: Post) -> tuple[Any, ...]:
        what = (request.key.group, request.member, request.call, request.seconds)
        return "o", self._intern(what), request.key.number

    def _mark(self, request: Mark) -> tuple[Any, ...]:
        row = tuple(request.row.items())
        if all(type(value) is str for _, value in row):  # a place in a program, which comes again
            return "m", self._intern(row)
        return "p", _pickled(request)

    def _done(self, record: Done) -> tuple[Any, ...]:
        if record.error is not None:
            return "p", _pickled(record)
        own = [(member, self._refs(refs)) for member, refs in record.own.items()]
        freed = [tuple(block) for block in record.freed]
        whose = self._intern((record.key.group, record.members))
        return "D", whose, record.key.number, self._refs(record.shared), own, freed

    def _answered(self, record: Answered) -> tuple[Any, ...]:
        value = record.value
        if isinstance(value, CallEnding):
            return "V", record.rank, value.value
        if value is None or type(value) in (bool, int, float):
            return "V", record.rank, value
        return "p", _pickled(record)

    def _refs(self, refs: Sequence[TensorRef]) -> list[tuple[int, Any]]:
        return [(self._intern(ref[1:]), ref.content) for ref in refs]


class MessageDecoder:
    """Reads what a `MessageEncoder` has written, from a process of the same run: it trusts what it reads."""

    def __init__(self) -> None:
        self._interned: list[Any] = []

    def read(self, frame: bytes | memoryview, *parts: bytes | memoryview) -> Any:
        """The object that was written; its large tensors lie in `parts`."""
        if frame[:1] == _PICKLE:

            def get(reference: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
                index, dtype, shape = reference
                return torch.frombuffer(parts[index], dtype=torch.uint8).view(dtype).view(shape)

            return loads(memoryview(frame)[1:], get)
        begins_anew, new, said = marshal.loads(memoryview(frame)[1:])  # nosec B302
        if begins_anew:
            self._interned.clear()
        self._interned += [pickle.loads(value) for value in new]  # nosec B301
        if not isinstance(said, list):
            return self._record(said)
        if said and said[-1][0] == "S":
            return [*(self._record(each) for each in said[:-1]), *self._step(*said[-1][1:])]
        return [self._record(each) for each in said]

    def _step(
        self, value: int, nth: Any, contents: Sequence[Any], seconds: float | None
    ) -> tuple[Values, Blocked, Requests]:
        rank, group, ranks, member, signature, heads, call, limit = self._interned[value]
        key = Key(group, nth)
        refs = [TensorRef(content, *head) for content, head in zip(contents, heads, strict=True)]
        requests: list[Any] = [Post(key, member, call, limit), Wait(key)]
        if seconds is not None:
            requests.insert(0, Advance(seconds))
        values = Values(rank, key, ranks, member, signature, refs)
        return values, Blocked(rank, key, member), Requests(rank, requests)

    def _record(self, said: tuple[Any, ...]) -> Any:
        match said:
            case ("C", number, nth, contents):
                rank, group, ranks, member, signature, heads = self._interned[number]
                refs = [TensorRef(content, *head) for content, head in zip(contents, heads, strict=True)]
                return Values(rank, Key(group, nth), ranks, member, signature, refs)
            case ("R", rank, requests):
                return Requests(rank, [self._request(each) for each in requests])
            case ("B", rank, group, nth, member):
                return Blocked(rank, Key(self._interned[group], nth), member)
            case ("A", rank):
                return Asking(rank)
            case ("F", blocks):
                return Freed([Block(*block) for block in blocks])
            case ("D", whose, nth, shared, own, freed):
                group, members = self._interned[whose]
                refs_of = {member: self._refs(refs) for member, refs in own}
                blocks = [Block(*block) for block in freed]
                return Done(Key(group, nth), members, self._refs(shared), refs_of, None, blocks)
            case ("V", rank, value):
                return Answered(rank, CallEnding(value) if isinstance(value, str) else value)
        return pickle.loads(said[1])  # nosec B301

    def _request(self, said: tuple[Any, ...]) -> Any:
        match said:
            case ("o", number, nth):
                group, member, call, seconds = self._interned[number]
                return Post(Key(group, nth), member, call, seconds)
            case ("w", group, nth):
                return Wait(Key(self._interned[group], nth))
            case ("m", number):
                return Mark(dict(self._interned[number]))
            case ("a", seconds):
                return Advance(seconds)
            case ("t", group, nth, seconds):
                return Await(Key(self._interned[group], nth), seconds)
        return pickle.loads(said[1])  # nosec B301

    def _refs(self, said: Sequence[tuple[int, Any]]) -> list[TensorRef]:
        return [TensorRef(content, *self._interned[head]) for head, content in said]


def _pickled_in_parts(obj: object) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = []

    def put(tensor: Tensor) -> tuple[int, torch.dtype, tuple[int, ...]]:
        parts.append(tensor.view(-1).view(torch.uint8).numpy().data)
        return len(parts) - 1, tensor.dtype, tuple(tensor.shape)

    frame = _PICKLE + _pickled(obj, put)
    return [frame, *parts]


def _pickled(obj: object, put: Callable[[Tensor], Any] | None = None) -> bytes:
    file = io.BytesIO()
    try:
        _References(file, put).dump(obj)
        return file.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError):
        # By value: classes and functions that no module of the other end has.
        return dumps_for_child(obj, put)
