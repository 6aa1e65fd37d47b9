"""Chakra execution traces of a program's ranks, which simulators of clusters such as ASTRA-sim read.

One file a rank: length-delimited protobuf messages, a GlobalMetadata and then a Node for each piece of computing and
each communication, with its dependencies. Field numbers and enumerations are those of Chakra's
schema/protobuf/et_def.proto (https://github.com/mlcommons/chakra), whose few messages are written here by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.ranks import Advance, Await, Call, Key, Post, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from netsim.network.trace import Span
    from netsim.ranks import Request

__all__ = ["ExecutionTraces"]

_VERSION = "0.0.4"
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7  # NodeType
_COLLECTIVES = {  # CollectiveCommType
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}


class ExecutionTraces:
    """Execution traces, built from requests of ranks in order of virtual time.

    A node depends on the calls that its rank has waited for (data) and on its last computing (control), so that
    communication overlaps where it did in the program. The simulator that reads the trace decides when it starts.

    Args:
        num_ranks: of the program.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [_RankTrace() for _ in range(num_ranks)]

    def take(self, rank: int, request: Request) -> None:
        """Add a rank's request."""
        trace = self._ranks[rank]
        match request:
            case Advance():
                trace.compute(request.seconds)
            case Post():
                trace.communicate(request.key, request.member, request.call)
            case Wait() | Await():
                trace.wait(request.key)

    def add_times(self, spans: Iterable[Span]) -> None:
        """Add the duration of each communication: from its rank's post to its end, late members included.

        Args:
            spans: of ranks, from a `netsim.network.trace.Recorder`.
        """
        for span in spans:
            if span.kind == "communication":
                self._ranks[span.rank].add_time(span)

    def write(self, folder: Path) -> None:
        """Write chakra.RANK.et for every rank."""
        for rank, trace in enumerate(self._ranks):
            (folder / f"chakra.{rank}.et").write_bytes(trace.encoded())


class _RankTrace:
    def __init__(self) -> None:
        self._messages = [_text(1, _VERSION)]
        self._computed: int | None = None  # the last node of computing
        self._waited: list[int] = []  # nodes that the next ones depend on
        self._posted: dict[object, int] = {}  # the node of each call
        self._pending: set[Key] = set()  # not waited for yet
        self._groups: dict[object, int] = {}

    def compute(self, seconds: float) -> None:
        micros = round(seconds * 1e6)
        if micros:
            self._computed = self._node("compute", _COMPUTE, _number(7, micros))
            self._waited = []

    def communicate(self, key: Key, member: int, call: Call) -> None:
        about: dict[str, str | int] = {"comm_size": call.num_bytes}
        if call.op == "sendrecv":
            name, kind = ("recv", _RECEIVE) if member else ("send", _SEND)
            about |= {"comm_src": call.ranks[0], "comm_dst": call.ranks[1], "comm_tag": 0}
        else:
            name, kind = call.op, _COLLECTIVE
            group = self._groups.setdefault(call.ranks, len(self._groups))
            about |= {"comm_type": _COLLECTIVES[call.op], "pg_name": str(group)}
        self._posted[key] = self._node(name, kind, b"".join(map(_attribute, about, about.values())))
        self._pending.add(key)

    def add_time(self, span: Span) -> None:
        self._messages[self._posted[span.key]] += _number(
            7, round((span.end_seconds - span.begin_seconds) * 1e6)
        )

    def wait(self, key: Key) -> None:
        if key in self._pending:
            self._pending.remove(key)
            self._waited.append(self._posted[key])

    def _node(self, name: str, kind: int, rest: bytes) -> int:
        number = len(self._messages)
        before = b"" if self._computed is None else _number(4, self._computed)
        needed = b"".join(_number(5, node) for node in self._waited)
        head = _number(1, number) + _text(2, name) + _number(3, kind) + before + needed
        self._messages.append(head + rest + _attribute("is_cpu_op", False))
        return number

    def encoded(self) -> bytes:
        return b"".join(_varint(len(message)) + message for message in self._messages)


# --- protobuf's wire format ---------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(name: str, value: bool | int | str) -> bytes:
    """A Node's AttributeProto: a boolean, an int64 or a string."""
    field = 27 if isinstance(value, bool) else 9
    content = _text(29, value) if isinstance(value, str) else _number(field, value)
    return _bytes(10, _text(1, name) + content)
