"""The kernel: streams of requests in, exact virtual times out. No rank runs here; streams are written by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import pytest
from kernel_ports import finished

from netsim import Clock
from netsim.errors import InputError
from netsim.network.clock import on_grid
from netsim.ranks import (
    Advance,
    Answer,
    Ask,
    Call,
    Kernel,
    Key,
    Mark,
    Post,
    Request,
    StampedRow,
    Wait,
)

GRID = 2.0**-30


def key(number: int, group: str = "world") -> Key:
    return Key(group, number)


class Takes:
    """A run in which a call takes `seconds` from the arrival of its last member."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.num_under_way = 0
        self.most_under_way = 0

    def __call__(
        self, call: Call, group: Hashable, on_done: Callable[[int], None]
    ) -> Callable[[int, Call], None]:
        arrived: list[int] = []

        def end(event: object) -> None:
            self.num_under_way -= 1
            for member in arrived:
                on_done(member)

        def enter(member: int, call: Call) -> None:
            arrived.append(member)
            if len(arrived) == len(call.ranks):
                self.num_under_way += 1
                self.most_under_way = max(self.most_under_way, self.num_under_way)
                self.clock.timeout(self.seconds).callbacks.append(end)  # type: ignore[union-attr]

        return enter, lambda: None


@dataclass
class Simulated:
    """A kernel that has come to the end of its streams, and what it told on the way."""

    kernel: Kernel
    network: Takes
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    rows: list[StampedRow] = field(default_factory=list)


def simulate(streams: Sequence[Sequence[Request]], seconds: float = 0.0, in_flight: int = 1) -> Simulated:
    """Run the streams to their end on a network where every call takes `seconds`."""
    clock = Clock()
    network = Takes(clock, seconds)
    kernel, ports = finished(streams, start=network, clock=clock, collectives_in_flight=in_flight)
    return Simulated(kernel, network, ports.answers, ports.rows)


REDUCE = Call("all_reduce", (0, 1), 8)


def test_a_wait_exposes_only_what_computing_does_not_hide() -> None:
    posted = Post(key(0), 0, REDUCE)
    first = [posted, Advance(0.25), Wait(key(0)), Mark({"step": 1})]
    second = [posted._replace(member=1), Advance(2.0), Wait(key(0))]
    done = simulate([first, second], seconds=1.0)
    assert done.kernel.end_seconds == [1.0, 2.0]
    assert done.kernel.exposed_seconds == [0.75, 0.0]
    assert done.kernel.compute_seconds == [0.25, 2.0]
    assert [(row.virtual_seconds, row.row) for row in done.rows] == [(1.0, {"step": 1})]


@pytest.mark.parametrize(("in_flight", "end", "most"), [(1, 3.0, 1), (2, 2.0, 2)])
def test_collectives_of_a_group_queue_behind_one_another(in_flight: int, end: float, most: int) -> None:
    def rank(member: int) -> list[Request]:
        return [*(Post(key(n), member, REDUCE) for n in range(3)), *(Wait(key(n)) for n in range(3))]

    done = simulate([rank(0), rank(1)], seconds=1.0, in_flight=in_flight)
    assert done.kernel.end_seconds == [end, end]
    assert done.network.most_under_way == most


def test_asking_answers_at_the_ranks_own_time() -> None:
    first: list[Request] = [
        Post(key(0), 0, REDUCE),
        Ask(key(0)),
        Advance(1.0),
        Ask(key(0)),
        Ask(None),
        Wait(key(0)),
    ]
    done = simulate([first, [Post(key(0), 1, REDUCE), Wait(key(0))]], seconds=0.5)
    assert done.answers == [(0, False), (0, True), (0, 1.0)]


def test_a_thousand_equal_steps_take_equal_time() -> None:
    streams: list[list[Request]] = [[], []]
    for step in range(1000):
        for member, stream in enumerate(streams):
            stream += [Advance(0.1), Post(key(step), member, REDUCE), Wait(key(step)), Mark({})]
    done = simulate(streams, seconds=0.3)
    ends = [row.virtual_seconds for row in done.rows if row.rank == 0]
    assert {end - start for start, end in itertools.pairwise(ends)} == {ends[0]}
    assert ends[0] == pytest.approx(0.4, abs=4 * GRID)


def test_the_grid_is_never_before_the_instant() -> None:
    for seconds in (0.0, 0.1, 1 / 3, 1e-12, 12345.678):
        assert 0 <= on_grid(seconds) - seconds < GRID


def test_never_is_on_the_grid_and_no_time_is_not() -> None:
    assert on_grid(math.inf) == math.inf
    for seconds in (-1e-9, math.nan):
        with pytest.raises(InputError, match=f"must not be negative, got {seconds}"):
            on_grid(seconds)


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_computing_takes_a_finite_time(seconds: float) -> None:
    with pytest.raises(InputError, match=f"rank 1: advance: got {seconds} seconds; give a finite time"):
        simulate([[Advance(1.0)], [Advance(seconds)]])


def test_an_event_at_an_instant_happens_exactly_then() -> None:
    clock = Clock(0.1)
    seen = []
    clock.at(0.7).callbacks.append(lambda event: seen.append(clock.now))  # type: ignore[union-attr]
    clock.run()
    assert seen == [0.7]
