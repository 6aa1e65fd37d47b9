"""The ranks' request streams as lines of text: what a checkpoint keeps of the clock.

Generators cannot be saved, but a fresh kernel that is fed the same requests arrives at the same instant with
the same transfers in flight. A request is a line of JSON; groups and keys are nested tuples of numbers and
names, which JSON writes as lists.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError
from netsim.ranks.kernel import (
    Advance,
    Call,
    Confirm,
    Fetch,
    FirstSent,
    Join,
    Key,
    Mark,
    Post,
    Publish,
    Put,
    Request,
    Take,
    Wait,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Journal", "requests_from_text", "requests_to_text"]


@dataclass
class Journal:
    """What ranks have requested: before this run began, and since.

    Attributes:
        past: the requests of each rank that the kernel plays before the rank's own; empty for a run from the
            start.
        log: the kernel's own log, which grows while the run goes on; it begins with the past.
    """

    past: list[list[Request]] = field(default_factory=list)
    log: list[list[Request]] = field(default_factory=list)


def requests_to_text(streams: Sequence[Sequence[Request]]) -> bytes:
    """Compressed lines, `[rank, kind, ...]` each; texts may be concatenated.

    Raises:
        InputError: a marked row holds something other than numbers, text, lists and mappings.
    """
    lines = []
    for rank, stream in enumerate(streams):
        for request in stream:
            try:
                lines.append(json.dumps([rank, *_plain(request)], separators=(",", ":")))
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"rank {rank}, checkpoint: the row {request!r} cannot be kept ({error}); "
                    "mark rows of numbers, text, lists and mappings"
                ) from None
    text = "".join(f"{line}\n" for line in lines)
    return gzip.compress(text.encode(), compresslevel=4, mtime=0)


def requests_from_text(text: bytes, num_ranks: int) -> list[list[Request]]:
    """The streams that `requests_to_text` wrote, in one piece or several.

    Raises:
        ValueError: the text is damaged.
    """
    streams: list[list[Request]] = [[] for _ in range(num_ranks)]
    # Rows that say the same are one object, and so are calls: a log repeats itself all the time.
    seen: dict[str, Request] = {}
    try:
        for line in gzip.decompress(text).decode().splitlines():
            rank_text, _, rest = line[1:].partition(",")
            request = seen.get(rest)
            if request is None:
                request = seen[rest] = _request(json.loads(f"[{rest}"))
            streams[int(rank_text)].append(request)
    except (OSError, EOFError, IndexError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    return streams


def _plain(request: Request) -> list[Any]:
    match request:
        case Advance():
            return ["advance", request.seconds]
        case Post():
            return ["post", *request.key, request.member, request.call]
        case Wait():
            return ["wait", *request.key]
        case Join():
            return ["join", *request]
        case Confirm():
            return ["confirm", *request]
        case Publish():
            return ["publish", *request]
        case Fetch():
            return ["fetch", *request]
        case Put():
            return ["put", *request]
        case Take():
            return ["take", request.box, str(request.seconds), request.is_past]
        case FirstSent():
            return ["receive", *request]
        case Withdraw():
            return ["withdraw", *request]
        case Mark():
            return ["mark", request.row]
        case _:
            raise TypeError(f"{type(request).__name__} is no part of a log")


def _request(record: list[Any]) -> Request:
    match record:
        case ["advance", seconds]:
            return Advance(seconds)
        case ["post", group, number, member, call]:
            return Post(Key(_tuples(group), _tuples(number)), member, Call(*map(_tuples, call)))
        case ["wait", group, number]:
            return Wait(Key(_tuples(group), _tuples(number)))
        case ["join", [group, number], *rest]:
            return Join(Key(_tuples(group), _tuples(number)), *map(_tuples, rest))
        case ["confirm", [group, number], *rest]:
            return Confirm(Key(_tuples(group), _tuples(number)), *rest)
        case ["publish", [group, number], num_bytes]:
            return Publish(Key(_tuples(group), _tuples(number)), num_bytes)
        case ["fetch", group, *rest]:
            return Fetch(_tuples(group), *rest)
        case ["put", box, number, call]:
            return Put(_tuples(box), number, Call(*map(_tuples, call)))
        case ["take", box, seconds, is_past]:
            return Take(_tuples(box), float(seconds), is_past)
        case ["receive", keys, is_past]:
            return FirstSent(tuple(Key(*map(_tuples, key)) for key in keys), is_past)
        case ["withdraw", [group, number], is_past]:
            return Withdraw(Key(_tuples(group), _tuples(number)), is_past)
        case ["mark", row]:
            return Mark(row)
    raise ValueError(f"no request: {record!r}")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
