"""What ranks and their simulation say to each other over and over again, in few bytes.

A rank's calls differ from step to step in their numbers and values alone. What stays the same (who calls what, with
which shapes, from which line) is said once and has a number from then on; what is left are plain values, which
`marshal` writes ten times faster than `pickle` writes objects. Whatever has no short form goes as a pickle.
"""

from __future__ import annotations

import marshal
import pickle
from typing import TYPE_CHECKING, Any

from exogym_core.ranks.processes.arena import Block, TensorRef
from exogym_core.ranks.processes.pickling import dumps_for_child
from exogym_core.ranks.processes.records import Answered, Asking, Blocked, Done, Freed, Requests, Values
from netsim.ranks.requests import Advance, Await, CallEnding, Key, Mark, Post, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

__all__ = ["ShorthandReader", "ShorthandWriter"]

_MOST_PHRASES = 4096
_PICKLE, _SHORT = b"p", b"s"


class ShorthandWriter:
    """Writes what a `ShorthandReader` at the other end reads, in the same order."""

    def __init__(self) -> None:
        self._phrases: dict[Hashable, int] = {}
        self._new: list[bytes] = []  # phrases that the other end has not seen
        self._begins_anew = False
        self._short: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            Values: self._values,
            Requests: self._requests,
            Blocked: lambda record: (
                "B",
                record.rank,
                self._phrase(record.key.group),
                record.key.number,
                record.member,
            ),
            Asking: lambda record: ("A", record.rank),
            Freed: lambda record: ("F", [tuple(block) for block in record.blocks]),
            Done: self._done,
            Answered: self._answered,
            Advance: lambda request: ("a", float(request.seconds)),
            Wait: lambda request: ("w", self._phrase(request.key.group), request.key.number),
            Await: lambda request: (
                "t",
                self._phrase(request.key.group),
                request.key.number,
                float(request.seconds),
            ),
            Post: self._post,
            Mark: self._mark,
        }

    def write(self, obj: object) -> bytes:
        """One object: a record, or a list of them, or anything else."""
        if len(self._phrases) >= _MOST_PHRASES:
            self._phrases.clear()
            self._begins_anew = True
        try:
            said = self._batch(obj) if isinstance(obj, list) else self._item(obj)
            frame = _SHORT + marshal.dumps((self._begins_anew, self._new, said))
        except (ValueError, TypeError):  # something in it is no plain value: what is new in it comes again
            self._phrases.clear()
            self._new, self._begins_anew = [], True
            return _PICKLE + _pickled(obj)
        self._new, self._begins_anew = [], False
        return frame

    def _batch(self, batch: list[Any]) -> list[tuple[Any, ...]]:
        """What a rank mostly says is that it posts a call and waits for it: that goes as one."""
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
                said = ("S", self._phrase(call), key.number, [ref.content for ref in refs], seconds)
                return [*(self._item(each) for each in batch[:-3]), said]
        return [self._item(each) for each in batch]

    def _item(self, each: object) -> tuple[Any, ...]:
        short = self._short.get(type(each))
        return short(each) if short is not None else ("p", _pickled(each))

    def _phrase(self, phrase: Hashable) -> int:
        number = self._phrases.get(phrase)
        if number is None:
            number = self._phrases[phrase] = len(self._phrases)
            self._new.append(_pickled(phrase))
        return number

    def _values(self, record: Values) -> tuple[Any, ...]:
        heads = tuple([ref[1:] for ref in record.refs])
        call = (record.rank, record.key.group, record.ranks, record.member, record.signature, heads)
        return "C", self._phrase(call), record.key.number, [ref.content for ref in record.refs]

    def _requests(self, record: Requests) -> tuple[Any, ...]:
        return "R", record.rank, [self._item(request) for request in record.requests]

    def _post(self, request: Post) -> tuple[Any, ...]:
        what = (request.key.group, request.member, request.call, request.seconds)
        return "o", self._phrase(what), request.key.number

    def _mark(self, request: Mark) -> tuple[Any, ...]:
        row = tuple(request.row.items())
        if all(type(value) is str for _, value in row):  # a place in a program, which comes again
            return "m", self._phrase(row)
        return "p", _pickled(request)

    def _done(self, record: Done) -> tuple[Any, ...]:
        if record.error is not None:
            return "p", _pickled(record)
        own = [(member, self._refs(refs)) for member, refs in record.own.items()]
        freed = [tuple(block) for block in record.freed]
        whose = self._phrase((record.key.group, record.members))
        return "D", whose, record.key.number, self._refs(record.shared), own, freed

    def _answered(self, record: Answered) -> tuple[Any, ...]:
        value = record.value
        if isinstance(value, CallEnding):
            return "V", record.rank, value.value
        if value is None or type(value) in (bool, int, float):
            return "V", record.rank, value
        return "p", _pickled(record)

    def _refs(self, refs: Sequence[TensorRef]) -> list[tuple[int, Any]]:
        return [(self._phrase(ref[1:]), ref.content) for ref in refs]


class ShorthandReader:
    """Reads what a `ShorthandWriter` has written, from a process of the same run: it trusts what it reads."""

    def __init__(self) -> None:
        self._phrases: list[Any] = []

    def read(self, frame: bytes) -> Any:
        """The object that was written."""
        if frame[:1] == _PICKLE:
            return pickle.loads(memoryview(frame)[1:])  # nosec B301
        begins_anew, new, said = marshal.loads(memoryview(frame)[1:])  # nosec B302
        if begins_anew:
            self._phrases.clear()
        self._phrases += [pickle.loads(phrase) for phrase in new]  # nosec B301
        if not isinstance(said, list):
            return self._record(said)
        if said and said[-1][0] == "S":
            return [*(self._record(each) for each in said[:-1]), *self._step(*said[-1][1:])]
        return [self._record(each) for each in said]

    def _step(
        self, phrase: int, nth: Any, contents: Sequence[Any], seconds: float | None
    ) -> tuple[Values, Blocked, Requests]:
        rank, group, ranks, member, signature, heads, call, limit = self._phrases[phrase]
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
                rank, group, ranks, member, signature, heads = self._phrases[number]
                refs = [TensorRef(content, *head) for content, head in zip(contents, heads, strict=True)]
                return Values(rank, Key(group, nth), ranks, member, signature, refs)
            case ("R", rank, requests):
                return Requests(rank, [self._request(each) for each in requests])
            case ("B", rank, group, nth, member):
                return Blocked(rank, Key(self._phrases[group], nth), member)
            case ("A", rank):
                return Asking(rank)
            case ("F", blocks):
                return Freed([Block(*block) for block in blocks])
            case ("D", whose, nth, shared, own, freed):
                group, members = self._phrases[whose]
                refs_of = {member: self._refs(refs) for member, refs in own}
                blocks = [Block(*block) for block in freed]
                return Done(Key(group, nth), members, self._refs(shared), refs_of, None, blocks)
            case ("V", rank, value):
                return Answered(rank, CallEnding(value) if isinstance(value, str) else value)
        return pickle.loads(said[1])  # nosec B301

    def _request(self, said: tuple[Any, ...]) -> Any:
        match said:
            case ("o", number, nth):
                group, member, call, seconds = self._phrases[number]
                return Post(Key(group, nth), member, call, seconds)
            case ("w", group, nth):
                return Wait(Key(self._phrases[group], nth))
            case ("m", number):
                return Mark(dict(self._phrases[number]))
            case ("a", seconds):
                return Advance(seconds)
            case ("t", group, nth, seconds):
                return Await(Key(self._phrases[group], nth), seconds)
        return pickle.loads(said[1])  # nosec B301

    def _refs(self, said: Sequence[tuple[int, Any]]) -> list[TensorRef]:
        return [TensorRef(content, *self._phrases[head]) for head, content in said]


def _pickled(obj: object) -> bytes:
    try:
        return pickle.dumps(obj, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        return dumps_for_child(obj)  # by value: classes and functions that no module of the other end has
