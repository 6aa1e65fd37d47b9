"""Requests of ranks, recorded once and replayed on any network, where they do not depend on time.

Ranks that read the clock cannot be recorded, since their requests depend on it. A rank can be recorded alone: each of
its calls completes at once with values of the right shapes. Ranks that differ only in their number and groups share one
recording. Tensors may be on the meta device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from exogym_core.communicator.exchange import combine
from exogym_core.communicator.simulated.abridged import Abridged
from exogym_core.communicator.simulated.communicator import RankState, SimulatedCommunicator
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.workers.journal import (
    Computing,
    Journal,
    request_from_record,
    request_to_record,
    tuples_of,
)
from exogym_core.workers.run import RunResult, run_ranks
from exogym_core.workers.streams import Replay
from netsim.errors import InputError
from netsim.ranks import Advance, Ask, Call, Exit, Key, Mark, Post, Wait, on_grid

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from torch import Tensor

    from exogym_core.communicator.base import Communicator, Delivery
    from exogym_core.communicator.exchange import Part
    from netsim.collectives.schedules.schedule import Schedule
    from netsim.ranks import Answer, Cancel, Question, Request, StampedRow
    from netsim.topology.topology import FloatArray

__all__ = [
    "REPEATS",
    "Body",
    "ClockReadError",
    "Computing",
    "Recording",
    "by_step",
    "copied",
    "extrapolated",
    "last_calls",
    "last_round",
    "no_time",
    "record",
    "record_kinds",
    "run_alone",
    "seconds_in_order",
    "without_network",
]

T = TypeVar("T")

# --- one rank alone ------------------------------------------------------------------------------------------


class ClockReadError(InputError):
    """Requests of a rank depend on the time, so they differ on another network."""


class _Alone:
    """A port without a simulation: it records requests and returns the rank's own values."""

    copies, turns = False, None

    def __init__(self, *, answers: bool = False) -> None:
        self.requests: list[Request | Computing] = []
        self._answers = answers

    def request(self, request: Request) -> None:
        self.requests.append(request)

    def post(self, part: Part, waits: bool = False) -> list[Tensor]:
        _, ranks, member, signature, tensors = part
        if signature.name == "sendrecv":
            raise InputError("a rank alone has no other to send to")
        if not all(tensor.is_meta for tensor in tensors):
            raise InputError("a rank alone has no values of others")
        name = signature.name
        if name == "publish":  # for ranks that come later, at times of their own
            raise ClockReadError("a rank alone has nobody that takes its state")
        if name in ("all_to_all", "reduce_scatter"):
            return [tensors[member]] * (len(ranks) if name == "all_to_all" else 1)
        if name in ("reduce", "gather", "scatter") and member != signature.root:
            return []
        if name in ("all_reduce", "reduce"):  # a sum is as large as each of its terms
            return list(combine("all_reduce", [tensors], signature.reduce_op, 0)[0])
        return list(combine(name, [tensors] * len(ranks), signature.reduce_op, signature.root)[member])

    def take(self, ticket: list[Tensor], member: int, deliver: Delivery[T]) -> T:
        return deliver(ticket)

    def ready(self, ticket: list[Tensor], member: int) -> bool:
        return True

    def forget(self, ticket: list[Tensor], member: int) -> None:
        """Do nothing: no calls are stored."""

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        """Do nothing: plans have no monitor."""

    def flush(self) -> None:
        """Do nothing: there is no clock."""

    def ask(self, question: Question) -> Answer:
        if self._answers and isinstance(question, Ask):
            return 0.0  # it is the first instant, and no call is completed
        raise ClockReadError("a rank alone has no clock to ask")


#: Requests of a rank.
Stream: TypeAlias = "Sequence[Request | Computing]"

#: The groups of several, but fewer than all, that a rank made, in order: members' ranks, and the number of groups of
#: these members.
Groups = Sequence[tuple[tuple[int, ...], int]]


class RequestsOfRank(NamedTuple):
    """Requests of a rank that ran without the others, and figures of the network that it has read, by name."""

    requests: Stream
    groups: Groups
    reads: frozenset[str] = frozenset()


def run_alone(
    body: Body, num_ranks: int, rank: int = 0, book: Schedules | None = None, *, answers: bool = False
) -> RequestsOfRank:
    """Requests and groups of `rank` of `num_ranks`, if they do not depend on others' messages.

    Args:
        body: program of the rank.
        num_ranks: ranks of the run.
        rank: number of the rank.
        book: schedules of calls; None: those without a network.
        answers: a rank that reads the clock, or asks whether a call has completed, gets the answer at time 0.

    Raises:
        ClockReadError: the rank reads the clock.
        InputError: the rank sends to a single rank, or sends values.
    """
    port, state = _Alone(answers=answers), RankState()
    comm = SimulatedCommunicator(port, range(num_ranks), rank, book or without_network(num_ranks), state)

    def computing(step: int, share: float) -> None:
        comm._request_advance()
        port.requests.append(Computing(step, share))

    body(comm, computing)
    comm._request_advance()
    groups = (entry for entry in state.num_groups.items() if 1 < len(entry[0]) < num_ranks)
    return RequestsOfRank(port.requests, tuple(groups), frozenset(state.reads))


def without_network(num_ranks: int, collectives: str | Mapping[str, str] | None = "auto") -> Schedules:
    """Schedules of calls without a network."""
    return Schedules(World.build(num_ranks, None, None, None, collectives))


# --- recordings ----------------------------------------------------------------------------------------------


#: Calls of all ranks: of more, some of the layers that are alike are simulated, and the rest is extrapolated.
MOST_CALLS = 50_000
REPEATS = (2, 4)  # of these layers, in two simulations
_MOST_STORED = 20_000  # requests of a recording in a file


@dataclass(frozen=True)
class Recording:
    """Requests of every rank; ranks of one kind, which differ only in their number, share one stream.

    Attributes:
        num_ranks: number of ranks.
        streams: one per rank, or one per kind of ranks.
        asks_for_time: requests depend on the time, so they differ on another network.
        kinds: index of each rank's stream; None: its number.
        groups: groups made by each stream's rank, and by each rank; they correspond in order.
        with_few_copies: recordings with two and with four copies of steps that are alike, see `copied`, and the number
            omitted from each; None with few copies.
        reads: figures of the network that ranks recorded alone have read, by name.
    """

    num_ranks: int
    streams: Sequence[Stream]
    asks_for_time: bool = False
    kinds: Sequence[int] | None = None
    groups: tuple[Sequence[Groups], Sequence[Groups]] = ((), ())
    with_few_copies: list[tuple[Recording, int]] | None = None
    reads: frozenset[str] = frozenset()

    def to_plain(self) -> list[Any] | None:
        """Plain values for `of_plain`; None for long recordings, and for those of one network."""
        is_long = self.with_few_copies is not None or sum(map(len, self.streams)) > _MOST_STORED
        if self.asks_for_time or is_long:
            return None
        streams = [list(map(request_to_record, stream)) for stream in self.streams]
        return [self.num_ranks, streams, self.kinds, self.groups, sorted(self.reads)]

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> Recording:
        """Recording of the values of `to_plain`, read from JSON.

        Raises:
            ValueError, TypeError, KeyError: they are no recording.
        """
        num_ranks, streams, kinds, groups, reads = plain
        requests = [list(map(request_from_record, stream)) for stream in streams]
        return cls(num_ranks, requests, kinds=kinds, groups=tuples_of(groups), reads=frozenset(reads))

    def stream(self, rank: int) -> Iterator[Request | Computing]:
        """Requests of a rank: those of its kind, in its own groups."""
        if self.kinds is None:
            return iter(self.streams[rank])
        kind = self.kinds[rank]
        names: Names = {}
        for (theirs, number), (ranks, _) in zip(self.groups[0][kind], self.groups[1][rank], strict=True):
            names |= {(theirs, nth): ((ranks, nth), ranks, ranks.index(rank)) for nth in range(number)}
        return _in_groups(self.streams[kind], names, rank)

    def peers(self) -> list[Hashable]:
        """Peers that ranks call between marks, for ranks with marks (servers have none)."""
        columns = [
            [tuple(each.call.ranks for each in part if isinstance(each, Post)) for part in parts[:-1]]
            for parts in map(_between_marks, self.streams)
            if len(parts) > 1
        ]
        return list(zip(*columns, strict=True))

    def num_calls(self, part: Callable[[Stream], Stream] = lambda stream: stream) -> int:
        """Calls of all ranks in a part of their streams."""
        counts = [sum(isinstance(request, Post) for request in part(stream)) for stream in self.streams]
        return sum(counts[kind] for kind in self.kinds or range(len(counts)))

    @property
    def calls(self) -> Counter[Call]:
        """Calls of all streams, and how often each is posted."""
        return Counter(
            request.call for stream in self.streams for request in stream if isinstance(request, Post)
        )

    @property
    def posts_by_round(self) -> list[list[list[tuple[Key, Call, float]]]]:
        """By stream and round after the first mark: calls that are waited for in it, and steps computed before them."""
        return [_posts_by_round(stream) for stream in self.streams]

    def rounds_of(self, rank: int, *kinds: type) -> list[list[Hashable]]:
        """Requests of these kinds of a rank between marks, without numbers that increase from round to round."""
        parts = _between_marks(self.stream(rank))[:-1]
        return [[_without_numbers(each) for each in part if isinstance(each, kinds)] for part in parts]

    def lengthened(self, num_marks: int) -> Recording:
        """Recording whose part between the last two marks is repeated until each rank has `num_marks` marks.

        Unchanged where the last two parts of a rank differ in more than increasing numbers.
        """
        streams = [_lengthened(stream, num_marks) for stream in self.streams]
        if len({len(_ends(stream)) for stream in streams} - {0}) > 1:  # of ranks that wait for each other
            return self
        return replace(self, streams=streams)

    def with_copies(self, most: int | None = None) -> Recording:
        """Recording with the copies of steps that marks ask for, see `copied`; `most` at most."""
        return replace(self, streams=[_with_copies(stream, most) for stream in self.streams])

    def with_all_copies(self) -> Recording:
        """Recording with all copies that marks ask for, and those with few where each mark asks for as many."""
        rows = (request.row for stream in self.streams for request in stream if isinstance(request, Mark))
        numbers = {row["copies"] for row in rows if row.get("copies") is not None}
        if not numbers:
            return self
        few = None
        if len(numbers) == 1 and (most := numbers.pop()) > REPEATS[1]:
            few = [(self.with_copies(number), most - number) for number in REPEATS]
        return replace(self.with_copies(), with_few_copies=few)

    @cached_property
    def shortened(self) -> list[tuple[Recording, int]] | None:
        """Recordings with the longest repetition of calls cut to two and to four, and the number omitted from each.

        None where rounds have few calls, no repetition (such as equal layers make), or different ones.
        """
        if self.num_calls() <= MOST_CALLS:
            return None
        found = []
        for number in REPEATS:
            made = [_with_repeats(stream, number) for stream in self.streams]
            lefts = {each[1] for each in made if each is not None}
            if None in made or len(lefts) != 1:
                return None
            streams = [each[0] for each in made if each is not None]
            found.append((replace(self, streams=streams), lefts.pop()))
        return found

    def replay(
        self,
        world: World,
        seconds: Sequence[Callable[[int], float]],
        schedules: Schedules,
        num_marks: int | None = None,
        most_seconds: float = math.inf,
        on_row: Callable[[], None] | None = None,
    ) -> RunResult[None]:
        """Replay it on a network.

        Args:
            world: ranks and network; without weather, long collectives are extrapolated from their first steps.
            seconds: seconds of computing by step, one function per rank.
            schedules: schedules of calls.
            num_marks: marks of each rank after which it ends; None: all.
            most_seconds: virtual seconds after the first mark of the last rank; later rows are left out.
            on_row: called at each mark, to show progress.

        Returns:
            Times of the run, with `bytes_sent` and `wan_bytes` on this network in marked rows.
        """
        assert world.topology is not None
        is_quiet = not world.topology.weather
        replay = _Replay(world, schedules=schedules)
        replay.most_seconds, replay.on_row = most_seconds, on_row
        replay.recorded = [
            self._requests(rank, seconds[rank], schedules, num_marks, merges=is_quiet)
            for rank in range(self.num_ranks)
        ]
        replay.kernel.run()
        return RunResult.simulated(replay, [None] * self.num_ranks, rows=replay.rows)

    def _requests(
        self,
        rank: int,
        seconds: Callable[[int], float],
        schedules: Schedules,
        num_marks: int | None,
        *,
        merges: bool,
    ) -> Iterator[Request]:
        """Requests of a rank; computing without a call in between is merged into one request, if possible.

        Computing of each step is rounded as in training, where every step is marked.
        """
        computing, of_step, step, sent, wan, marks = 0.0, 0.0, -1, 0, 0, 0
        for request in self.stream(rank):
            is_computing = isinstance(request, Computing | Advance)
            if isinstance(request, Computing):
                is_next = request.step != step
            else:  # of ranks recorded together each step is a request
                is_next = not is_computing or (step < 0 and not merges)
            if is_next:
                computing, of_step = computing + on_grid(of_step), 0.0
            if isinstance(request, Computing):
                step = request.step
                of_step += seconds(step) * request.share
            elif isinstance(request, Advance):
                of_step += request.seconds if step >= 0 else on_grid(request.seconds)
            if computing and not (is_computing and merges):
                yield Advance(computing)
                computing = 0.0
            if isinstance(request, Post):
                more = schedules.traffic(request.call, request.member)
                sent, wan = sent + more[0], wan + more[1]
                yield request
            elif isinstance(request, Mark):
                yield Mark({**request.row, "bytes_sent": sent, "wan_bytes": wan})
                marks += 1
                if marks == num_marks:
                    break
            elif not isinstance(request, Computing | Advance):
                yield request
        if computing := computing + on_grid(of_step):
            yield Advance(computing)
        yield Exit()


Body = Callable[["Communicator", Callable[[int, float], None]], object]


def record_kinds(
    body: Body,
    num_ranks: int,
    collectives: str | Mapping[str, str] | None = "auto",
    setup: Body | None = None,
    *,
    answers: bool = False,
) -> Recording:
    """Record one rank of each kind alone, for all ranks of that kind.

    No values may be sent, as on the meta device. Then members of a call make the same requests, but for the parts of an
    uneven call. In the order of their positions in groups, ranks of a kind are contiguous, so that ranks between two
    with equal requests have the same requests: where tensors are cut into parts, the first parts are larger.

    Args:
        body: program of a rank.
        num_ranks: ranks of the run.
        collectives: see `run_ranks`.
        setup: makes the groups that `body` makes, in less time; None: no groups.
        answers: see `run_alone`.

    Raises:
        InputError: a rank calls groups that `setup` does not make, or depends on others, see `run_alone`.
    """
    book = without_network(num_ranks, collectives)
    groups: list[Groups] = [()] * num_ranks
    rank_0 = run_alone(body, num_ranks, 0, book, answers=answers)
    if setup is not None and rank_0.groups:
        groups = [run_alone(setup, num_ranks, rank, book).groups for rank in range(num_ranks)]
    order = sorted(range(num_ranks), key=lambda rank: [each.index(rank) for each, _ in groups[rank]])
    streams: list[RequestsOfRank] = []
    signatures: list[Sequence[Any]] = []
    kinds = [0] * num_ranks

    def find(rank: int) -> None:
        alone = run_alone(body, num_ranks, rank, book, answers=answers) if rank else rank_0
        made = {(ranks, nth) for ranks, number in groups[rank] for nth in range(number)}
        calls = (request for request in alone.requests if isinstance(request, Post))
        if any(len(post.call.ranks) < num_ranks and post.key.group not in made for post in calls):
            raise InputError(f"rank {rank} calls groups that its setup does not make")
        signature = _signature(alone)
        if signature not in signatures:
            streams.append(alone)
            signatures.append(signature)
        kinds[rank] = signatures.index(signature)

    def between(first: int, last: int) -> None:
        """Find the kinds of ranks between two positions with known kinds."""
        shapes = {_shape(groups[rank]) for rank in order[first : last + 1]}
        middle = (first + last) // 2
        if kinds[order[first]] == kinds[order[last]] and len(shapes) == 1:
            for rank in order[first:last]:
                kinds[rank] = kinds[order[last]]
        elif middle > first:
            find(order[middle])
            between(first, middle)
            between(middle, last)

    find(order[0])
    find(order[-1])
    between(0, num_ranks - 1)
    of_kinds = [alone.groups for alone in streams]
    made = Recording(
        num_ranks,
        [alone.requests for alone in streams],
        kinds=kinds,
        groups=(of_kinds, groups),
        reads=frozenset().union(*(alone.reads for alone in streams)),
    )
    return made.with_all_copies()


#: By the group of a key: the group to write in its place, its members, and the rank's place among them.
Names = dict["Hashable", tuple["Hashable", tuple[int, ...], int]]


def _in_groups(stream: Stream, names: Names, rank: int) -> Iterator[Request | Computing]:
    """Requests of a rank of the same kind, rewritten for this rank's groups; unnamed groups hold all ranks."""
    for request in stream:
        if not isinstance(request, Post | Wait):
            yield request
            continue
        named = names.get(request.key.group)
        if named is None:
            # _replace takes three times as long.
            yield Post(request.key, rank, *request[2:]) if isinstance(request, Post) else request
            continue
        group, ranks, member = named
        key = Key(group, request.key.number)
        if isinstance(request, Post):
            yield Post(key, member, Call(request.call.op, ranks, *request.call[2:]), request.seconds)
        else:
            yield Wait(key)


def _shape(groups: Groups) -> Sequence[int]:
    """Sizes of groups; equal for ranks with corresponding groups."""
    return tuple(len(ranks) for ranks, _ in groups)


def _signature(alone: RequestsOfRank) -> Sequence[Any]:
    """Requests without marks and computing, groups numbered in order; equal for ranks of one kind."""
    names: Names = {}
    for place, (ranks, number) in enumerate(alone.groups):
        names |= {(ranks, nth): ((place, nth), (), 0) for nth in range(number)}
    stream = _in_groups(alone.requests, names, 0)
    return [*_shape(alone.groups), *(each for each in stream if not isinstance(each, Mark | Computing))]


_COUNTED = ("payload_bytes", "coded_values")


def copied(comm: Communicator, number: int | None) -> dict[str, Any]:
    """Row that a rank marks before a step (None) and after it, to request `number` copies of its requests."""
    counts = comm.traffic.payload_bytes, comm.traffic.charged_values
    return {"copies": number, **dict(zip(_COUNTED, counts, strict=True))}


def _with_copies(stream: Stream, most: int | None = None) -> Stream:
    """Requests with the copies that marks ask for, `most` at most; numbers of later calls continue after them."""
    made: list[Request | Computing] = []
    shifts: Counter[Hashable] = Counter()
    start = 0
    before: Mapping[str, Any] = {}
    for request in stream:
        if not isinstance(request, Mark) or "copies" not in request.row:
            made.append(_shifted(request, shifts))
        elif request.row["copies"] is None:
            start, before = len(made), request.row
        else:
            number = request.row["copies"] if most is None else min(request.row["copies"], most)
            copies, more = _repeated(made[start:], before, request.row, number, 1)
            made += copies
            shifts.update(more)
    return made


def _repeated(
    part: Stream, before: Mapping[str, Any], after: Mapping[str, Any], times: int, steps: int
) -> tuple[list[Request | Computing], Counter[Hashable]]:
    """Repetitions of a part of a stream, and the growth of numbers over all of them.

    Args:
        part: part of a stream.
        before, after: rows with the counts before and after the part.
        times: number of repetitions.
        steps: number of steps in the part.

    Returns:
        The requests, with numbers of calls and steps, and counts, as if they continued the stream; and the growth of
        the numbers of calls, by group, and of counts, by name.
    """
    of_one = Counter[Any](each.key.group for each in part if isinstance(each, Post))
    of_one.update({name: after[name] - before[name] for name in _COUNTED})
    growths = [Counter({name: place * count for name, count in of_one.items()}) for place in range(times + 1)]
    made = [_shifted(each, growths[place], place * steps) for place in range(1, times + 1) for each in part]
    return made, growths[-1]


def _shifted(request: Request | Computing, by: Counter[Hashable], steps: int = 0) -> Request | Computing:
    if isinstance(request, Post | Wait) and (more := by[request.key.group]):
        return request._replace(key=request.key._replace(number=request.key.number + more))  # type: ignore[operator]
    if isinstance(request, Computing) and steps:
        return request._replace(step=request.step + steps)
    if isinstance(request, Mark):
        return Mark(
            {
                **request.row,
                **{name: request.row[name] + by[name] for name in _COUNTED if name in request.row},
            }
        )
    return request


def _between_marks(stream: Iterable[Request | Computing]) -> list[list[Request | Computing]]:
    """Requests before the first mark, between each two, and after the last."""
    parts: list[list[Request | Computing]] = [[]]
    for request in stream:
        if isinstance(request, Mark):
            parts.append([])
        else:
            parts[-1].append(request)
    return parts


def _ends(stream: Stream) -> list[int]:
    """Positions after the marks of a stream."""
    return [place + 1 for place, request in enumerate(stream) if isinstance(request, Mark)]


def last_round(stream: Stream) -> Stream:
    """Requests between the last two marks."""
    parts = _between_marks(stream)
    return parts[-2] if len(parts) > 2 else ()


def _lengthened(stream: Stream, num_marks: int) -> Stream:
    ends = _ends(stream)
    num_more = num_marks - len(ends)
    if num_more <= 0 or len(ends) < 3:
        return stream
    earlier, last = stream[ends[-3] : ends[-2]], stream[ends[-2] : ends[-1]]
    if list(map(_without_numbers, earlier)) != list(map(_without_numbers, last)):
        return stream
    steps = len({each.step for each in last if isinstance(each, Computing)})
    assert isinstance(earlier[-1], Mark)
    assert isinstance(last[-1], Mark)
    made, growth = _repeated(last, earlier[-1].row, last[-1].row, num_more, steps)
    end = [_shifted(request, growth, num_more * steps) for request in stream[ends[-1] :]]
    return [*stream[: ends[-1]], *made, *end]


def _without_numbers(request: Request | Computing) -> Hashable:
    """A request without step, row and number of the call, which differ from round to round."""
    if isinstance(request, Mark):
        return Mark
    if isinstance(request, Computing):
        return Computing, request.share
    if isinstance(request, Post | Wait):
        goes_on = isinstance(request.key.number, int)
        return request._replace(key=request.key._replace(number=None)) if goes_on else object()
    return request


def extrapolated(one: T, other: T, times: int, of: int = 1) -> T:
    """Extrapolate a value from `one` and `other` by `times` / `of` times their difference, also inside containers.

    >>> extrapolated([3, {"a": 1.0}], [5, {"a": 2.0}], 6, 2)
    [11, {'a': 5.0}]
    """
    first: Any = one
    second: Any = other
    if first == second or isinstance(second, bool):
        return other
    if isinstance(second, int | float):
        more = (second - first) * times
        return second + (more // of if isinstance(more, int) else more / of)  # type: ignore[return-value]
    if isinstance(second, dict):
        return {key: extrapolated(first[key], value, times, of) for key, value in second.items()}  # type: ignore[return-value]
    if isinstance(second, list):
        return [extrapolated(*pair, times, of) for pair in zip(first, second, strict=True)]  # type: ignore[return-value]
    return other


def last_calls(stream: Iterable[Request | Computing]) -> list[tuple[Call, int]]:
    """Calls between the last two marks, each with the rank's position among the members."""
    last = _between_marks(stream)[-2]
    return [(request.call, request.member) for request in last if isinstance(request, Post)]


def _posts_by_round(stream: Stream) -> list[list[tuple[Key, Call, float]]]:
    rounds: list[list[tuple[Key, Call, float]]] = []
    posts, waited, steps = list[tuple[Key, Call, float]](), set[Key](), 0.0
    for request in stream:
        if isinstance(request, Mark):
            rounds.append([post for post in posts if post[0] in waited])
            posts, waited, steps = [], set(), 0.0
        elif isinstance(request, Post):
            posts.append((request.key, request.call, steps))
        elif isinstance(request, Wait):
            waited.add(request.key)
        elif isinstance(request, Computing):
            steps += request.share
    return rounds[1:]


def seconds_in_order(
    stream: Stream,
    computing: FloatArray,
    after: Callable[[Call], tuple[FloatArray, FloatArray] | None],
) -> float:
    """Lower bound of the seconds from the last rank's first mark to its last one, as if messages did not share links.

    All ranks have the requests of `stream`; `after` gives bounds of a call, see `after_entry`.
    Instants are in rows, one for each rank that may be the last at its first mark: it is at 0, others at minus
    infinity.
    """
    nowhere = np.full((len(computing), len(computing)), -np.inf)
    now = marked = nowhere
    entered: dict[Key, tuple[Call, FloatArray]] = {}
    for request in stream:
        match request:
            case Computing():
                now = now + request.share * computing
            case Advance():
                now = now + request.seconds
            case Mark():
                if marked is nowhere:
                    now = np.where(np.eye(len(computing), dtype=bool), 0.0, -np.inf)
                marked = now
            case Post():
                entered[request.key] = request.call, now
            case Wait() if request.key in entered:
                call, begun = entered.pop(request.key)
                if (bounds := after(call)) is not None:
                    now = np.maximum(now, (begun[:, :, None] + bounds[1]).max(axis=1))
    return float(marked.max(axis=1).min())


_LONGEST_STRETCH = 64  # calls


def _with_repeats(stream: Stream, number: int) -> tuple[Stream, int] | None:
    ends = [0, *_ends(stream)]
    made: list[Request | Computing] = []
    lefts = set()
    for first, last in pairwise(ends):
        part = stream[first:last]
        posts = [place for place, request in enumerate(part) if isinstance(request, Post)]
        start, period, count = _repetition([part[place].call for place in posts])  # type: ignore[union-attr]
        places = posts[start : start + count * period : period]  # of the last one the end is not known
        alike = {tuple(map(_without_key, part[one:end])) for one, end in pairwise(places)}
        if len(places) < number + 3 or len(alike) != 1:
            return None
        left_out = range(places[number], places[-1])
        keys = {part[place].key for place in left_out if isinstance(part[place], Post)}  # type: ignore[union-attr]
        made += (
            request
            for place, request in enumerate(part)
            if place not in left_out and not (isinstance(request, Wait) and request.key in keys)
        )
        lefts.add(len(places) - 1 - number)
    return ([*made, *stream[ends[-1] :]], lefts.pop()) if len(lefts) == 1 else None


def _without_key(request: Request | Computing) -> Hashable:
    return (request.call, request.member) if isinstance(request, Post) else request


def _repetition(values: Sequence[Hashable]) -> tuple[int, int, int]:
    """Start, length and number of repetitions of the stretch that covers most of `values`.

    >>> _repetition("xabcabcabcaby")
    (1, 3, 3)
    """
    best = (0, 1, 0)
    for period in range(1, min(_LONGEST_STRETCH, len(values) // 2) + 1):
        start = 0
        for place in range(len(values) - period + 1):
            if place < len(values) - period and values[place] == values[place + period]:
                continue
            count = (place - start) // period + 1
            if count > 1 and count * period > best[1] * best[2]:
                best = start, period, count
            start = place + 1
    return best


def record(
    body: Body,
    num_ranks: int,
    seconds: Sequence[Callable[[int], float]] | None = None,
    collectives: str | Mapping[str, str] | None = "auto",
) -> Recording:
    """Record every rank, each at its own speed.

    Args:
        body: program of a rank.
        num_ranks: number of ranks.
        seconds: seconds of computing by step, one function per rank; None: 0.
        collectives: see `run_ranks`.
    """
    streams: list[list[Request | Computing]] = [[] for _ in range(num_ranks)]

    def own(comm: Communicator) -> bool:
        assert isinstance(comm, SimulatedCommunicator)
        body(comm, by_step(comm, no_time if seconds is None else seconds[comm.rank]))
        return "clock" in comm.state.reads

    journal = Journal(on_request=lambda rank, request: streams[rank].append(request))
    asked = run_ranks(own, num_ranks, collectives=collectives, journal=journal).results
    return Recording(num_ranks, streams, any(asked))


def by_step(comm: SimulatedCommunicator, seconds: Callable[[int], float]) -> Callable[[int, float], None]:
    """Computing of a running rank: advances the clock step by step, as in training."""
    last = -1

    def computing(step: int, share: float) -> None:
        nonlocal last
        if step != last:
            comm._request_advance()
            last = step
        comm.advance(seconds(step) * share)

    return computing


def no_time(step: int) -> float:
    """Return 0 seconds: a step whose computing is left out."""
    return 0.0


class _Replay(Replay):
    """Replay of recorded requests that keeps rows, and extrapolates long collectives where there is no weather."""

    most_seconds = math.inf  # after the first mark of the last rank
    on_row: Callable[[], None] | None = None

    def __init__(self, *about: Any, **options: Any) -> None:
        self.rows: list[StampedRow] = []
        self._unmarked = set(range(about[0].num_ranks))
        super().__init__(*about, **options)
        network = self.network
        self._abridged = Abridged(network) if network is not None and not network.topology.weather else None

    def row(self, row: StampedRow) -> None:
        """Store a row marked by a rank."""
        super().row(row)
        self.rows.append(row)
        if self.on_row is not None:
            self.on_row()
        if self._unmarked:
            self._unmarked.discard(row.rank)
            if not self._unmarked:
                self.kernel.until_seconds = row.virtual_seconds + self.most_seconds

    def _start_plan(
        self, plan: Schedule, hosts: tuple[int, ...], group: Hashable, on_done: Callable[[int], None]
    ) -> tuple[Callable[[int], None], Cancel]:
        if self._abridged is None:
            return super()._start_plan(plan, hosts, group, on_done)
        return self._abridged.start(plan, hosts, group, on_done)

    def _start_all_to_all(
        self, call: Call, hosts: tuple[int, ...], group: Hashable, on_done: Callable[[int], None]
    ) -> tuple[Callable[[int, Sequence[int]], None], Cancel]:
        if self._abridged is None:
            return super()._start_all_to_all(call, hosts, group, on_done)

        def whole(rows: tuple[tuple[int, ...], ...]) -> Call:
            """The call in which member i sends `rows[i][j]` bytes to member j."""
            even = len({num_bytes for row in rows for num_bytes in row}) == 1
            return call._replace(num_bytes=sum(map(sum, rows)), parts=None if even else rows)

        return self._abridged.start_all_to_all(
            hosts, lambda rows: self.schedules.of(whole(rows)), group, on_done
        )
