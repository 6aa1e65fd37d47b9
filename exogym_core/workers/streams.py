"""Request streams of a training, kept small, for timing it on other networks; what computing takes there; their replay.

    streams = Streams(num_ranks)
    streams.add(rank, request)                    # each request as the kernel serves it
    streams.requests(rank, seconds, traffic)      # the same, with the seconds and bytes of another network

Losses do not depend on the network as long as no rank learns the time: a request that is answered, or one that other
networks would not repeat, ends the recording, and `refused` says why. Equal steps are stored once: a step is the number
of its kind, its loss and its learning rate.

Computing is recorded as work, and not as seconds, in parts of the rank's current step:

    ("step", samples, share)       forward and backward pass over a share of the step's samples
    ("forward", samples, share)    its forward pass; the backward pass follows as gradients become ready:
    ("gradient", share)            the gradients of a share of the parameters
    ("rest",)                      the end of the backward pass
    seconds                        anything else: as many on every network
"""

from __future__ import annotations

import gzip
import json
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exogym_core.communicator.simulated.simulation import Simulation
from exogym_core.events import Saved, StepDone
from exogym_core.workers.host import Runner, SimulatedHost
from exogym_core.workers.journal import tuples_of
from netsim.errors import InputError
from netsim.ranks import Advance, Call, Exit, Key, Mark, MessageGroup, Post, Request, Wait, gives_time

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from exogym_core.workers.host import Sinks
    from netsim.ranks import Answer

__all__ = ["FORWARD_SHARE", "BackwardSeconds", "Replay", "ReplayHost", "Streams", "work_seconds"]

FORWARD_SHARE = 1 / 3  # of a step's computing; the backward pass does two products for each of the forward's


class BackwardSeconds:
    """Seconds of a step's passes, part by part: the backward pass is spread over the parameters."""

    def __init__(self) -> None:
        self._seconds = self._left = 0.0

    def begin(self, seconds: float) -> float:
        """Seconds of the forward pass of computing that takes `seconds`; its backward pass begins."""
        self._seconds = self._left = seconds * (1 - FORWARD_SHARE)
        return seconds * FORWARD_SHARE

    def begin_alone(self, seconds: float) -> float:
        """Begin a backward pass of `seconds`, whose forward pass was charged before; returns no seconds."""
        self._seconds = self._left = seconds
        return 0.0

    def gradient(self, share: float) -> float:
        """Seconds of the gradients of a share of the parameters."""
        seconds = min(self._seconds * share, self._left)
        self._left -= seconds
        return seconds

    def rest(self) -> float:
        """Seconds of the rest: parameters without a gradient have cost nothing yet."""
        seconds, self._seconds, self._left = self._left, 0.0, 0.0
        return seconds


def work_seconds(
    work: tuple[Any, ...], step: int, seconds: Callable[[int, int], float], backward: BackwardSeconds
) -> float:
    """Seconds of the parts of an `Advance`, added up as a rank does.

    Args:
        work: its parts.
        step: number of the step, from 0.
        seconds: of that step's samples.
        backward: of the rank.
    """
    total = 0.0
    for part in work:
        match part:
            case ("step", samples, share):
                total += seconds(step, samples) * share
            case ("forward", samples, share):
                total += backward.begin(seconds(step, samples) * share)
            case ("backward", samples, share):
                total += backward.begin_alone(seconds(step, samples) * share)
            case ("gradient", share):
                total += backward.gradient(share)
            case ("rest",):
                total += backward.rest()
            case _:
                total += part
    return total


class _Recorded(NamedTuple):
    """Varying parts of a rank's steps.

    Attributes:
        kinds: number of the kind of each step.
        values: numbers that differ between steps of a kind, in order.
    """

    kinds: array[int]
    values: array[float]


@dataclass
class _Open:
    """Requests of a rank since its last mark, and what numbers continue from."""

    parts: list[tuple[Any, ...]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)  # of the last call, by group
    step: int = 0
    payload_bytes: int = 0


_FORMAT = 1
_MOST_BYTES = 256 * 2**20  # of all ranks
_PART_BYTES = 200  # of one request of a kind, at most


class Streams:
    """Requests of the ranks of a training.

    Args:
        num_ranks: number of ranks.

    Attributes:
        refused: reason for which they cannot be replayed on another network; "" if they can.
    """

    def __init__(self, num_ranks: int) -> None:
        self.refused = ""
        self._ranks = range(num_ranks)
        self._numbers: dict[tuple[Any, ...], int] = {}  # of kinds
        self._recorded = [_Recorded(array("I"), array("d")) for _ in self._ranks]
        self._open = [_Open() for _ in self._ranks]
        self._num_bytes = 0

    # --- recording ------------------------------------------------------------------------------------------

    def add(self, rank: int, request: Request) -> None:
        """Add a request of a rank."""
        if self.refused:
            return
        own = self._open[rank]
        match request:
            case Advance(work=work) if work:
                own.parts.append(("work", work))
            case Post(key=Key(group=group, number=int() as number)) if not gives_time(request):
                call, member = request.call, request.member
                kept, nth = _nameless(group, own.values)
                if nth:
                    own.values.append(number)
                    place = None
                else:
                    place = number - own.numbers.get(group, -1)
                    own.numbers[group] = number
                if group == 0:  # the group of all ranks
                    own.parts.append(("all", place, call.op, *call[2:]))
                else:
                    own.parts.append(("post", kept, place, member, *call))
            case Wait(key=Key(group=group, number=int() as number)):
                kept, nth = _nameless(group, own.values)
                place = None if nth else number - own.numbers.get(group, -1)
                if nth:
                    own.values.append(number)
                own.parts.append(("wait", kept, place))
            case Mark(row=StepDone(place=None) as row) if row.step == own.step + 1:
                more = row.payload_bytes - own.payload_bytes
                own.step, own.payload_bytes = row.step, row.payload_bytes
                own.values += (row.loss, row.lr) if row.counted is None else (row.loss, row.lr, row.counted)
                own.parts.append(("done", row.samples, more, row.counted is not None))
                self._close(rank)
            case Mark(row=Saved()):
                pass
            case _:
                about = type(request.row if isinstance(request, Mark) else request).__name__
                self.refuse(f"on another network rank {rank} might not request this: {about}")

    def refuse(self, reason: str) -> None:
        """End the recording, and forget what there is."""
        self.refused = reason
        self._open.clear()
        self._recorded.clear()
        self._numbers.clear()

    def _close(self, rank: int) -> None:
        """Store the open requests of a rank as one step."""
        own, recorded = self._open[rank], self._recorded[rank]
        kind, num_kinds = tuple(own.parts), len(self._numbers)
        number = self._numbers.setdefault(kind, num_kinds)
        if number == num_kinds:
            self._num_bytes += _PART_BYTES * len(kind)
        recorded.kinds.append(number)
        recorded.values.extend(own.values)
        self._num_bytes += 4 + 8 * len(own.values)
        own.parts.clear()
        own.values.clear()
        if self._num_bytes > _MOST_BYTES:
            self.refuse("its requests take too much memory")

    def close(self) -> None:
        """Store what ranks have requested after their last steps."""
        for rank, own in enumerate(self._open):
            if own.parts:
                self._close(rank)

    # --- replay ---------------------------------------------------------------------------------------------

    def requests(
        self, rank: int, seconds: Callable[[int, int], float], traffic: Callable[[Call, int], tuple[int, int]]
    ) -> Iterator[Request]:
        """Requests of a rank on another network, up to its end.

        Args:
            rank: its number.
            seconds: of a step's computing there, by its number (from 0) and its samples.
            traffic: bytes that a member of a call sends, and the part of them to other regions.
        """
        kinds, recorded = list(self._numbers), self._recorded[rank]
        everyone, backward, values = tuple(self._ranks), BackwardSeconds(), iter(recorded.values)
        numbers: dict[Hashable, int] = {}
        step = payload = sent = wan = 0
        for kind in recorded.kinds:
            for part in kinds[kind]:
                match part:
                    case ("work", work):
                        if took := work_seconds(work, step, seconds, backward):
                            yield Advance(took)
                    case ("all", place, op, *rest):
                        number = numbers[0] = numbers.get(0, -1) + place
                        call = Call(op, everyone, *rest)
                        more = traffic(call, rank)
                        sent, wan = sent + more[0], wan + more[1]
                        yield Post(Key(0, number), rank, call)
                    case ("post", kept, place, member, *rest):
                        group = _named(kept, values)
                        if place is None:
                            number = int(next(values))
                        else:
                            number = numbers[group] = numbers.get(group, -1) + place
                        call = Call(*rest)
                        more = traffic(call, member)
                        sent, wan = sent + more[0], wan + more[1]
                        yield Post(Key(group, number), member, call)
                    case ("wait", kept, place):
                        group = _named(kept, values)
                        number = int(next(values)) if place is None else numbers.get(group, -1) + place
                        yield Wait(Key(group, number))
                    case ("done", samples, more_payload, is_counted):
                        step, payload = step + 1, payload + more_payload
                        loss, lr = next(values), next(values)
                        counted = next(values) if is_counted else None
                        yield Mark(StepDone(step, loss, samples, lr, sent, payload, wan, counted))
        yield Exit()

    # --- files ----------------------------------------------------------------------------------------------

    def to_bytes(self, about: Mapping[str, Any]) -> bytes:
        """Streams, and plain values `about` them, as the content of a file."""
        lengths = [[len(own.kinds), len(own.values)] for own in self._recorded]
        head = {"format": _FORMAT, "about": about, "lengths": lengths, "kinds": list(self._numbers)}
        head |= {"num_ranks": len(self._ranks), "refused": self.refused}
        parts = [json.dumps(head, separators=(",", ":")).encode(), b"\n"]
        for own in self._recorded:
            parts += [np.asarray(own.kinds, "<u4").tobytes(), np.asarray(own.values, "<f8").tobytes()]
        return gzip.compress(b"".join(parts), 6, mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes) -> tuple[Streams, dict[str, Any]]:
        """Streams and plain values of a file's content.

        Raises:
            ValueError, KeyError, TypeError, OSError, EOFError: it is damaged.
        """
        first, _, rest = gzip.decompress(content).partition(b"\n")
        head = json.loads(first)
        if head["format"] != _FORMAT:
            raise ValueError(f"is of format {head['format']}, not {_FORMAT}")
        streams = cls(head["num_ranks"])
        if head["refused"]:
            streams.refuse(head["refused"])
        streams._numbers = {tuples_of(kind): number for number, kind in enumerate(head["kinds"])}
        place = 0
        for own, (num_kinds, num_values) in zip(streams._recorded, head["lengths"], strict=True):
            own.kinds.extend(np.frombuffer(rest, "<u4", num_kinds, place).tolist())
            own.values.extend(np.frombuffer(rest, "<f8", num_values, place + 4 * num_kinds).tolist())
            place += 4 * num_kinds + 8 * num_values
        return streams, head["about"]


def _nameless(group: Hashable, values: list[float]) -> tuple[Any, bool]:
    """A group as kinds of steps have it, and whether its calls are numbered by values.

    Of groups made again and again for the same ranks the number is added to `values`.
    """
    if isinstance(group, MessageGroup):
        kept, is_numbered = _nameless(group.group, values)
        return ("message", kept, *group[1:]), is_numbered
    if isinstance(group, tuple) and isinstance(group[1], int) and group[1] > 0:
        values.append(group[1])
        return (group[0], None), True
    return group, False


def _named(kept: Any, values: Iterator[float]) -> Hashable:
    """Group that `_nameless` has made a kind of; its number is taken from `values`."""
    if isinstance(kept, tuple) and kept[0] == "message":
        return MessageGroup(_named(kept[1], values), *kept[2:])
    if isinstance(kept, tuple) and kept[1] is None:
        return kept[0], int(next(values))
    return kept  # type: ignore[no-any-return]


# --- replay: no rank runs, and no tensor moves --------------------------------------------------------------

_AT_ONCE = 64  # requests of a rank that are decoded together


class Replay(Simulation):
    """A simulation whose ranks have made all their requests before: `recorded` has those of each rank."""

    recorded: Sequence[Iterator[Request]]

    def answer(self, rank: int, value: Answer) -> None:
        """Refuse a `Question`: requests that depend on virtual time cannot be recorded once for all networks."""
        raise InputError(f"rank {rank}: it asks for the time, and its requests were recorded")

    def _let_run(self, rank: int | None) -> bool:
        if rank is None:
            return False
        stream = self.kernel.streams[rank]
        for request in self.recorded[rank]:
            stream.append(request)
            if len(stream) == _AT_ONCE:
                break
        if not stream:
            raise InputError(f"rank {rank}: its recorded requests end without its own end")
        return True


class _ReplayRunner(Replay, Runner):
    """A run of ranks whose requests were recorded."""


@dataclass(frozen=True, kw_only=True)
class ReplayHost(SimulatedHost):
    """Host of ranks whose requests were recorded.

    Attributes:
        streams: of a training.
        seconds: of computing on the host of each worker, see `Streams.requests`.
        results: what each rank's body returned.
    """

    streams: Streams
    seconds: Sequence[Callable[[int, int], float]]
    results: Sequence[Any]

    def simulate(self, body: Callable[[Any], Any], sinks: Sinks) -> Runner:
        """Replay the streams; `body` is not called."""
        run = _ReplayRunner(self.world, sinks)
        traffic = run.schedules.traffic
        run.recorded = [
            self.streams.requests(rank, seconds, traffic) for rank, seconds in enumerate(self.seconds)
        ]
        run.results = list(self.results)
        run.kernel.run()
        return run
