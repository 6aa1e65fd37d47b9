"""What ranks request, recorded once and replayed on any network: for plans, where what ranks do is known before when.

Where ranks ask for the time, what they do depends on it: such a run cannot be recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.simulated.alone import Computing, run_alone
from exogym_core.communicator.simulated.simulation import Schedules, Simulation, World
from exogym_core.ranks.journal import Journal
from exogym_core.ranks.run import RunResult, run_ranks
from netsim.files.errors import InputError
from netsim.ranks.requests import Advance, Exit, Mark, Post, Wait

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from netsim.ranks.kernel import StampedRow
    from netsim.ranks.requests import Answer, Request
    from netsim.topology.topology import Topology

__all__ = ["Body", "Recording", "goes_alone", "record", "record_kinds"]


@dataclass(frozen=True)
class Recording:
    """The requests of every rank; of ranks that differ in their number alone, those of one of them.

    Attributes:
        num_ranks: how many there are.
        streams: one a rank, or one for each kind of ranks.
        asks_for_time: what ranks do depends on when they do it: then this is not what they do elsewhere.
        kinds: of each rank, which stream is its own; None: its own number's.
    """

    num_ranks: int
    streams: Sequence[Sequence[Request | Computing]]
    asks_for_time: bool = False
    kinds: Sequence[int] | None = None

    def rows(self, rank: int) -> list[Mapping[str, Any]]:
        """What a rank marked."""
        return [request.row for request in self.streams[rank] if isinstance(request, Mark)]

    def peers(self) -> list[Hashable]:
        """Whom ranks call, from each of their marks to the next; of ranks that mark at all (servers do not)."""
        columns = []
        for stream in self.streams:
            found: list[list[tuple[int, ...]]] = [[]]
            for request in stream:
                if isinstance(request, Mark):
                    found.append([])
                elif isinstance(request, Post):
                    found[-1].append(request.call.ranks)
            if len(found) > 1:
                columns.append([tuple(calls) for calls in found[:-1]])
        return list(zip(*columns, strict=True))

    def calls_at_the_end(self) -> int:
        """How many calls all ranks post between their last two marks."""
        counts = []
        for stream in self.streams:
            marks = [place for place, request in enumerate(stream) if isinstance(request, Mark)]
            part = stream[marks[-2] : marks[-1]] if len(marks) > 1 else ()
            counts.append(sum(isinstance(request, Post) for request in part))
        return sum(counts[kind] for kind in (range(len(counts)) if self.kinds is None else self.kinds))

    def lengthened(self, num_marks: int) -> Recording:
        """The same with the part between the last two marks done again, until there are so many marks of each rank.

        As it is where that part is not what the one before it was, but for numbers that went on.
        """
        return replace(self, streams=[_lengthened(stream, num_marks) for stream in self.streams])

    def replay(
        self,
        topology: Topology,
        seconds: Sequence[Callable[[int], float]],
        *,
        placement: Sequence[str] | None = None,
        protocol: str | Mapping[str, Any] | None = None,
        collectives: str | Mapping[str, str] | None = "auto",
        num_marks: int | None = None,
        schedules: Schedules | None = None,
    ) -> tuple[RunResult[None], Schedules]:
        """Replay it on a network.

        Args:
            topology: the network; where it has no weather, long collectives are reckoned from their first steps.
            seconds: of computing by step, one function a rank.
            placement, protocol, collectives: as `run_ranks` has them.
            num_marks: it ends with so many marks of each rank; None: with its end.
            schedules: by which calls go; None: found for this network.

        Returns:
            What it took, with `bytes_sent` and `wan_bytes` on this network in marked rows; the schedules of its calls.
        """
        world = World.build(self.num_ranks, topology, placement, protocol, collectives)
        schedules = schedules if schedules is not None else Schedules(world)
        is_quiet = not topology.weather
        past: list[deque[Request]] = [
            deque(self._requests(rank, seconds[rank], schedules, num_marks, merges=is_quiet))
            for rank in range(self.num_ranks)
        ]
        rows: list[StampedRow] = []
        simulation = Simulation(
            world,
            _nobody_is_left,
            _nothing,
            _no_answer,
            rows.append,
            past,
            schedules=schedules,
            abridged=is_quiet,
        )
        simulation.kernel.run()
        result: RunResult[None] = RunResult.of(simulation, [None] * self.num_ranks, rows, [])
        return result, schedules

    def _requests(
        self,
        rank: int,
        seconds: Callable[[int], float],
        schedules: Schedules,
        num_marks: int | None,
        *,
        merges: bool,
    ) -> Iterator[Request]:
        """One rank's stream; what it computes without a call between is one stretch, if it may be."""
        stream = self.streams[rank if self.kinds is None else self.kinds[rank]]
        computing, sent, wan, marks = 0.0, 0, 0, 0
        for request in stream:
            if isinstance(request, Computing | Advance):
                if isinstance(request, Computing):
                    computing += seconds(request.step) * request.share
                else:
                    computing += request.seconds
                if merges:
                    continue
            if computing:
                yield Advance(computing)
                computing = 0.0
            if isinstance(request, Post):
                own = request if self.kinds is None else request._replace(member=rank)
                more = schedules.traffic(own.call, own.member)
                sent, wan = sent + more[0], wan + more[1]
                yield own
            elif isinstance(request, Mark):
                yield Mark({**request.row, "bytes_sent": sent, "wan_bytes": wan})
                marks += 1
                if marks == num_marks:
                    break
            elif not isinstance(request, Computing | Advance):
                yield request
        if computing:
            yield Advance(computing)
        yield Exit()


Body = Callable[["Communicator", Callable[[int, float], None]], None]


def record_kinds(
    body: Body, num_ranks: int, collectives: str | Mapping[str, str] | None = "auto"
) -> Recording:
    """One rank of each kind runs alone, for all of them.

    No rank may go by what others send (`goes_alone` of a smaller run tells), and each must call all others. Kinds are
    contiguous: ranks between two that request the same do so too, as where tensors are cut into parts of which the
    first are larger.
    """
    streams: list[Sequence[Request | Computing]] = []
    kinds = [0] * num_ranks

    def alone(rank: int) -> tuple[int, Sequence[Request | Computing]]:
        made = run_alone(body, num_ranks, collectives, rank)
        for kind, known in enumerate(streams):
            if list(_calls(known)) == list(_calls(made)):
                return kind, known
        streams.append(made)
        return len(streams) - 1, made

    def between(first: int, last: int) -> None:
        """Find the kinds of the ranks between two whose kinds are known."""
        if kinds[first] == kinds[last]:
            kinds[first:last] = [kinds[first]] * (last - first)
        elif last - first > 1:
            middle = (first + last) // 2
            kinds[middle], _ = alone(middle)
            between(first, middle)
            between(middle, last)

    kinds[0], _ = alone(0)
    kinds[-1], _ = alone(num_ranks - 1)
    between(0, num_ranks - 1)
    return Recording(num_ranks, streams, kinds=kinds)


def goes_alone(made: Recording, body: Body) -> bool:
    """Whether every rank of a run requests alone what it requested among the others, and calls all of them."""
    everyone = tuple(range(made.num_ranks))
    if made.asks_for_time or made.num_ranks < 2:
        return False
    for rank, stream in enumerate(made.streams):
        if any(isinstance(request, Post) and request.call.ranks != everyone for request in stream):
            return False
        try:
            alone = run_alone(body, made.num_ranks, "auto", rank)
        except (ValueError, RuntimeError):  # what it does needs the others
            return False
        if list(_calls(alone)) != list(_calls(stream)):
            return False
    return True


def _lengthened(stream: Sequence[Request | Computing], num_marks: int) -> Sequence[Request | Computing]:
    ends = [place + 1 for place, request in enumerate(stream) if isinstance(request, Mark)]
    num_more = num_marks - len(ends)
    if num_more <= 0 or len(ends) < 3:
        return stream
    before, last = stream[ends[-3] : ends[-2]], stream[ends[-2] : ends[-1]]
    if len(before) != len(last) or any(_gone_on(*pair, 1) is None for pair in zip(before, last, strict=True)):
        return stream
    made = list(stream[: ends[-1]])
    for times in range(1, num_more + 1):
        made += (_gone_on(*pair, times) for pair in zip(before, last, strict=True))  # type: ignore[misc]
    steps = {
        later.key.group: later.key.number - earlier.key.number  # type: ignore[operator]
        for earlier, later in zip(before, last, strict=True)
        if isinstance(earlier, Post | Wait) and isinstance(later, Post | Wait)
    }
    for request in stream[ends[-1] :]:  # what was in flight at the end
        step = steps.get(request.key.group, 0) if isinstance(request, Post | Wait) else 0
        made.append(_renumbered(request, num_more * step) if step else request)
    return made


def _gone_on(
    earlier: Request | Computing, later: Request | Computing, times: int
) -> Request | Computing | None:
    """What comes after these two, so many times on; None where it is not known."""
    if isinstance(earlier, Computing) and isinstance(later, Computing):
        return later._replace(step=later.step + times * (later.step - earlier.step))
    if isinstance(earlier, Mark) and isinstance(later, Mark):
        return Mark({name: _next(earlier.row[name], value, times) for name, value in later.row.items()})
    if isinstance(earlier, Post | Wait) and isinstance(later, Post | Wait):
        first, second = earlier.key.number, later.key.number
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        same = _renumbered(earlier, second - first) == later
        return _renumbered(later, times * (second - first)) if same else None
    return later if earlier == later else None


def _next(earlier: Any, later: Any, times: int) -> Any:
    return later + times * (later - earlier) if isinstance(later, int) else later


def _renumbered(request: Request | Computing, step: int) -> Request | Computing:
    assert isinstance(request, Post | Wait)
    return request._replace(key=request.key._replace(number=request.key.number + step))  # type: ignore[operator]


def _calls(stream: Sequence[Request | Computing]) -> Iterator[Request]:
    """What a rank requests, but for what it marks and computes, and for its own number."""
    for request in stream:
        if isinstance(request, Post):
            yield request._replace(member=0)
        elif not isinstance(request, Mark | Computing):
            yield request


def record(
    body: Body,
    num_ranks: int,
    seconds: Sequence[Callable[[int], float]] | None = None,
    collectives: str | Mapping[str, str] | None = "auto",
) -> Recording:
    """Every rank runs, each with its own speed.

    Args:
        body: what a rank does.
        num_ranks: how many.
        seconds: of computing by step, one function a rank; None: it takes no time.
        collectives: as `run_ranks` has them.
    """
    streams: list[list[Request | Computing]] = [[] for _ in range(num_ranks)]

    def own(comm: Communicator) -> bool:
        def computing(step: int, share: float) -> None:
            if seconds is not None:
                comm.advance(seconds[comm.rank](step) * share)

        body(comm, computing)
        return comm.state.has_asked  # type: ignore[attr-defined,no-any-return]

    journal = Journal(on_request=lambda rank, request: streams[rank].append(request))
    asked = run_ranks(own, num_ranks, collectives=collectives, journal=journal).results
    return Recording(num_ranks, streams, any(asked))


def _nobody_is_left(rank: int | None) -> bool:
    raise InputError(f"rank {rank}: its recorded requests end without its own end")


def _nothing(*_: object) -> None:
    """Nobody waits for values."""


def _no_answer(rank: int, answer: Answer) -> None:
    raise InputError(f"rank {rank}: it asks for the time, and its requests were recorded")
