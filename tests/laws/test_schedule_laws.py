"""Every algorithm computes its operation's definition, and charges the bytes that compute it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import regions_form

import netsim
from netsim import InputError, Topology, schedule
from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules import trees
from netsim.collectives.schedules.algorithms import ALGORITHMS, Algorithm, build
from netsim.collectives.schedules.check import messages, play
from netsim.collectives.schedules.ring import all_gather_ring, all_reduce_ring
from netsim.collectives.schedules.schedule import ListedPhase, Problem, Schedule, step_of
from netsim.testing import CallShape, calls, check_schedule

CASES = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 8
ROWS = [(op, algorithm) for op, algorithms in ALGORITHMS.items() for algorithm in algorithms]


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_every_algorithm_keeps_the_laws(op: str, algorithm: str) -> None:
    check_schedule(ALGORITHMS[op][algorithm], op, cases=CASES)


def definition(call: CallShape, inputs: list[np.ndarray]) -> list[np.ndarray | None]:
    """What each member must hold afterwards, written out by operation."""
    num, root, bounds = len(call.group), call.root, np.cumsum([0, *call.parts])
    nothing: list[np.ndarray | None] = [None] * num
    total = sum(inputs[1:], inputs[0])
    parts = [slice(low, high) for low, high in pairwise(bounds)]
    owned = np.concatenate([inputs[rank][part] for rank, part in enumerate(parts[:num])])
    match call.operation:
        case "all_reduce":
            return [total] * num
        case "broadcast":
            return [inputs[root]] * num
        case "all_gather":
            return [owned] * num
        case "scatter":
            return [inputs[root][part] for part in parts]
        case "reduce_scatter":
            return [total[part] for part in parts]
        case "all_to_all":
            table = [parts[row * num : (row + 1) * num] for row in range(num)]
            return [
                np.concatenate([inputs[src][table[src][dst]] for src in range(num)]) for dst in range(num)
            ]
        case "reduce":
            nothing[root] = total
        case "gather":
            nothing[root] = owned
        case "sendrecv":
            nothing[1] = inputs[0]
    return nothing


@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "barrier"])
@given(data=st.data())
def test_the_laws_know_the_operations_by_their_definitions(op: str, data: st.DataObject) -> None:
    """`Operation` says which member gives and takes each part; here each operation is written out."""
    call = data.draw(calls(data.draw(st.integers(2, 6)), op))
    made = build(call.problem("direct" if op != "all_reduce" else "ring"))
    inputs = [np.arange(sum(call.parts)) + 1000 * rank for rank in range(len(call.group))]
    held = [each.copy() for each in inputs]
    play(made, held)
    bounds = np.cumsum([0, *call.parts])
    for rank, wanted in enumerate(definition(call, inputs)):
        taken = OPERATIONS[op].parts_of(OPERATIONS[op].takes, made, rank)
        if wanted is None:
            assert not taken
        else:
            got = np.concatenate([held[rank][bounds[part] : bounds[part + 1]] for part in taken])
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
@settings(max_examples=3)
@given(data=st.data())
def test_bytes_between_regions_are_those_of_the_messages(
    op: str, algorithm: str, data: st.DataObject
) -> None:
    call = data.draw(calls(data.draw(st.integers(2, 9)), op))
    regions = data.draw(st.lists(st.sampled_from("xyz"), min_size=9, max_size=9))[: len(call.group)]
    made = build(call.problem(algorithm, regions))
    crossing = np.zeros(made.num_ranks, np.int64)
    for message, has_arrived in messages(made):
        if has_arrived and regions[message.src] != regions[message.dst]:
            grain = made.element_bytes if OPERATIONS[op].has_size else 1
            crossing[message.src] += (message.high - message.low) * grain
    np.testing.assert_array_equal(made.region_bytes(regions), crossing)


def sent(p: Problem) -> list[Any]:
    """Messages of a schedule, step by step."""
    steps = [
        (phase, index, phase.step(index)) for phase in build(p).phases for index in range(phase.num_steps)
    ]
    return [
        (
            phase.reduces(index),
            phase.window,
            sorted(zip(step.src, step.dst, step.offset, step.num_bytes, strict=True)),
        )
        for phase, index, step in steps
        if step.src.size
    ]


@given(
    st.sampled_from([(op, name) for op, names in ALGORITHMS.items() for name in names]),
    st.lists(st.sampled_from("abcd"), min_size=2, max_size=9).map(sorted),
    st.integers(0, 1 << 22),
)
def test_an_algorithm_that_does_not_differ_sends_the_messages_of_an_earlier_one(
    row: tuple[str, str], regions: list[str], num_bytes: int
) -> None:
    op, name = row
    problem = Problem(op, name, len(regions), num_bytes, 0, 1, None, tuple(regions))
    names = list(ALGORITHMS[op])
    earlier = [sent(replace(problem, algorithm=each)) for each in names[: names.index(name)]]
    assert ALGORITHMS[op][name].differs(problem) or sent(problem) in earlier


@given(st.integers(1, 40), st.integers(0, 10**9))
def test_ring_all_reduce_sends_exactly_what_the_formula_says(num: int, num_bytes: int) -> None:
    assert (
        schedule("all_reduce", num, num_bytes=num_bytes, algorithm="ring").sent_bytes.sum()
        == 2 * (num - 1) * num_bytes
    )


def test_ring_over_ten_thousand_ranks_is_never_written_out() -> None:
    made = schedule("all_reduce", 10_000, num_bytes=10**9)
    assert made.num_steps == 19_998
    assert made.sent_bytes.tolist() == [2 * 9_999 * 100_000] * 10_000
    assert made.step(0).num_bytes[0] == 100_000


def two_regions(size: int) -> Topology:
    return Topology.from_mapping(regions_form({"a": size, "b": size}))


def test_gloo_messages_as_counted_on_the_wire() -> None:
    """25 segments of 1 MiB round up to 28; each of 4 members sends three quarters of them in either phase."""
    made = schedule("all_reduce", 4, num_bytes=25 << 20, algorithm="gloo", element_bytes=4)
    counts = Counter(message.src for message, has_arrived in messages(made) if has_arrived)
    assert counts == dict.fromkeys(range(4), 2 * 3 * 7)
    assert {phase.window for phase in made.phases} == {2}
    # Four bytes are one segment, which goes around twice and skips everyone else's steps.
    few = schedule("all_reduce", 4, num_bytes=4, algorithm="gloo", element_bytes=4)
    assert len(list(messages(few))) == 2 * 6


@pytest.mark.parametrize("builder", [trees.all_reduce_two_level, trees.all_reduce_two_level_direct])
@pytest.mark.parametrize("name", ["hierarchical", "by-site"])
def test_an_algorithm_says_that_it_needs_regions_whatever_its_name(
    builder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions: Any = {"hosts": range(4), "topology": two_regions(2)}

    def sent() -> Schedule:
        return schedule("all_reduce", 4, num_bytes=1000, algorithm=name, **regions)

    row = Algorithm(builder, needs_regions=True, num_messages=lambda num: num * num)
    monkeypatch.setitem(ALGORITHMS["all_reduce"], name, row)
    assert sent().sent_bytes.sum() == 6 * 1000
    monkeypatch.setitem(ALGORITHMS["all_reduce"], f"{name}-2", replace(row, needs_regions=False))
    name = f"{name}-2"
    with pytest.raises(
        InputError, match=r"member 0 of 4 sends 0 B, .* at least 1 kB \(.* needs_regions=True\)"
    ):
        sent()


def halves(p: Any) -> tuple[ListedPhase, ...]:
    """A message in two pieces, in one step."""
    half = p.num_bytes // 2
    return (ListedPhase([step_of([(0, 1, 0, half), (0, 1, half, p.num_bytes)])]),)


def too_few(p: Any) -> tuple[ListedPhase, ...]:
    """A broadcast that leaves out the last member."""
    return (ListedPhase([step_of([(0, dst, 0, p.num_bytes) for dst in range(1, p.num_ranks - 1)])]),)


def only_two(p: Any) -> tuple[ListedPhase, ...]:
    """As many bytes as are needed in all, between two members."""
    rows = [step_of([(0, 1, 0, p.num_bytes), (1, 0, 0, p.num_bytes)])] * 2 * p.num_ranks
    return (ListedPhase(rows, reduce=True),)


def never_adds(p: Any) -> tuple[Any, ...]:
    return tuple(ListedPhase([phase.step(i) for i in range(phase.num_steps)]) for phase in all_reduce_ring(p))


def passes_on_too_early(p: Any) -> tuple[ListedPhase, ...]:
    """A ring that does not wait for what it passes on."""
    (phase,) = all_gather_ring(p)
    return (ListedPhase([phase.step(i) for i in range(phase.num_steps)], window=2),)


def to_nobody(p: Any) -> tuple[ListedPhase, ...]:
    return (ListedPhase([step_of([(0, dst, 0, p.num_bytes) for dst in range(1, p.num_ranks + 1)])]),)


@pytest.mark.parametrize(
    ("op", "builder", "line"),
    [
        ("sendrecv", halves, "step 0 has two messages from member 0 to member 1: make them one"),
        ("broadcast", halves, "step 0 has two messages from member 0 to member 1: make them one"),
        ("broadcast", too_few, "member 3 of 4 receives 0 B, and broadcast takes at least 1 kB"),
        (
            "scatter",
            lambda p: (),
            "scatter by mine: member 0 of 4 sends 0 B, and scatter takes at least 750 B",
        ),
        ("all_reduce", only_two, "all_reduce by mine: member 2 of 4 sends 0 B"),
        ("all_to_all", only_two, "all_to_all by mine: member 0 of 4 sends|member 2 of 4 sends 0 B"),
        ("all_reduce", never_adds, "member 0 of 4 ends without the sum of the bytes from 0 on"),
        ("all_gather", passes_on_too_early, "member 0 of 4 ends without the values of the bytes from"),
        ("barrier", lambda p: (), "member 0 of 4 may finish before member 1 has begun"),
        ("broadcast", to_nobody, "a message of a member that does not exist: members are 0 to 3"),
        ("broadcast", lambda p: None, "<lambda> returned NoneType: return a tuple of phases, such as"),
        ("broadcast", lambda p: [], "<lambda> returned list: return a tuple of phases, such as"),
        ("broadcast", lambda p: (42,), r"mine: <lambda> returned \(int\): return a tuple of phases, such as"),
        ("broadcast", lambda p: int("x"), "broadcast by mine: ValueError: invalid literal for int"),
        ("broadcast", lambda p: p.region, "broadcast by mine: AttributeError: 'Problem' object has no"),
    ],
)
def test_a_schedule_that_cannot_be_right_is_refused(
    op: str, builder: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two messages of a pair in a step were a deadlock under gloo alone; too few bytes took no time."""
    row = Algorithm(builder, needs_regions=False, num_messages=lambda num: num)
    monkeypatch.setitem(ALGORITHMS[op], "mine", row)
    with pytest.raises(InputError, match=line):
        schedule(op, 2 if op == "sendrecv" else 4, num_bytes=1000, algorithm="mine")


def test_a_row_of_the_table_that_is_no_algorithm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS["all_reduce"], "mine", halves)
    for algorithm in ("mine", "auto"):
        with pytest.raises(InputError, match=r"all_reduce by mine: .*halves.*: make it an Algorithm\(build"):
            netsim.collective("lan", "all_reduce", num_bytes=1000, algorithm=algorithm)
