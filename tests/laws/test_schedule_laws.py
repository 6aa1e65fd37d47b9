"""Every algorithm computes its operation's definition, and charges the bytes that compute it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_on_arrays import messages, run_on_arrays

import netsim
from netsim import InputError, schedule
from netsim.collectives.schedules import trees
from netsim.collectives.schedules.algorithms import ALGORITHMS, Algorithm
from netsim.collectives.schedules.check import check_bytes, check_schedule
from netsim.collectives.schedules.direct import broadcast_direct
from netsim.collectives.schedules.ring import all_gather_ring, all_reduce_ring
from netsim.collectives.schedules.schedule import ListedPhase, Problem, Schedule, step_of

ROWS = [(op, algorithm) for op, algorithms in ALGORITHMS.items() for algorithm in algorithms]
SPLIT = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
BINDING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class Regions:
    """As much of a topology as schedules look at: the region of each host."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def region_of(self, host: int) -> str:
        return self.names[host]


@st.composite
def schedules(draw: st.DrawFn, op: str, algorithm: str) -> Schedule:
    num = draw(st.integers(2 if op == "sendrecv" else 1, 11))
    element_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    elements = draw(st.one_of(st.integers(0, 40), st.integers(0, 2000)))
    parts = None
    if op in SPLIT and algorithm != "gloo" and draw(st.booleans()):
        shape = (num, num) if op == "all_to_all" else (num,)
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        parts = (rng.integers(0, 9, shape) * element_bytes).tolist()
    return schedule(
        op,
        num,
        num_bytes=0 if op == "barrier" else elements * element_bytes,
        algorithm=algorithm,
        root=draw(st.integers(0, num - 1)),
        element_bytes=element_bytes,
        hosts=list(range(num)),
        topology=Regions(draw(st.lists(st.sampled_from("abc"), min_size=num, max_size=num))),  # type: ignore[arg-type]
        parts=parts,
    )


def random_inputs(made: Schedule, seed: int) -> list[np.ndarray]:
    """What each member puts in: its whole tensor, its part, or its row of parts."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(f"int{8 * made.element_bytes}")
    sizes = np.diff(made.layout) // made.element_bytes
    if made.op in ("all_gather", "gather"):
        lengths = sizes.tolist()
    elif made.op == "all_to_all":
        lengths = sizes.reshape(made.num_ranks, made.num_ranks).sum(axis=1).tolist()
    else:
        lengths = [made.num_bytes // made.element_bytes] * made.num_ranks
    return [rng.integers(-4, 5, length).astype(dtype) for length in lengths]


def definition(made: Schedule, inputs: list[np.ndarray]) -> list[np.ndarray | None]:
    """What each member must hold afterwards, as the operation is defined."""
    num, root = made.num_ranks, made.root
    bounds = made.layout // made.element_bytes
    nothing: list[np.ndarray | None] = [None] * num
    if made.op == "all_reduce":
        return [sum(inputs[1:], inputs[0])] * num
    if made.op == "broadcast":
        return [inputs[root]] * num
    if made.op == "all_gather":
        return [np.concatenate(inputs)] * num
    if made.op == "scatter":
        return [inputs[root][low:high] for low, high in pairwise(bounds)]
    if made.op == "reduce_scatter":
        total = sum(inputs[1:], inputs[0])
        return [total[low:high] for low, high in pairwise(bounds)]
    if made.op == "all_to_all":
        cuts = [np.cumsum(np.diff(bounds).reshape(num, num)[rank])[:-1] for rank in range(num)]
        rows = [np.split(inputs[rank], cuts[rank]) for rank in range(num)]
        return [np.concatenate([rows[src][dst] for src in range(num)]) for dst in range(num)]
    if made.op == "reduce":
        nothing[root] = sum(inputs[1:], inputs[0])
    elif made.op == "gather":
        nothing[root] = np.concatenate(inputs)
    elif made.op == "sendrecv":
        nothing[1] = inputs[0]
    return nothing


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
@given(data=st.data())
def test_every_algorithm_computes_the_definition(op: str, algorithm: str, data: st.DataObject) -> None:
    made = data.draw(schedules(op, algorithm))
    inputs = random_inputs(made, data.draw(st.integers(0, 1000)))
    with np.errstate(over="ignore"):
        for got, wanted in zip(run_on_arrays(made, list(inputs)), definition(made, inputs), strict=True):
            if wanted is None:
                assert got is None
            else:
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling", "tree", "direct", "gloo"])
def test_an_all_reduce_may_be_among_some_members_of_another(algorithm: str) -> None:
    """As the leaders of regions do it."""
    members = (9, 4, 0, 5, 7, 2)
    problem = Problem("all_reduce", algorithm, len(members), 480, 0, 4, None, (), members)
    phases = ALGORITHMS["all_reduce"][algorithm].build(problem)
    made = Schedule("all_reduce", algorithm, 10, 480, phases, problem.layout, 0, 4)
    inputs = random_inputs(made, 0)
    total = sum(inputs[member] for member in members)
    for rank, got in enumerate(run_on_arrays(made, list(inputs))):
        np.testing.assert_array_equal(got, total if rank in members else inputs[rank])


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
@given(data=st.data())
def test_bytes_charged_are_the_bytes_of_the_messages(op: str, algorithm: str, data: st.DataObject) -> None:
    made = data.draw(schedules(op, algorithm))
    regions = data.draw(st.lists(st.sampled_from("xyz"), min_size=made.num_ranks, max_size=made.num_ranks))
    sent = np.zeros(made.num_ranks, np.int64)
    crossing = np.zeros(made.num_ranks, np.int64)
    for message in messages(made):
        assert message.src != message.dst
        assert message.num_bytes >= 0
        assert message.num_bytes % made.element_bytes == 0
        sent[message.src] += message.num_bytes
        crossing[message.src] += message.num_bytes * (regions[message.src] != regions[message.dst])
    np.testing.assert_array_equal(made.sent_bytes, sent)
    np.testing.assert_array_equal(made.region_bytes(regions), crossing)


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
@given(data=st.data())
def test_no_member_finishes_before_its_dependencies(op: str, algorithm: str, data: st.DataObject) -> None:
    """Each member has heard from each other, over any path of messages, where everyone has bytes for all."""
    made = data.draw(schedules(op, algorithm))
    has_gaps = any(phase.has_gaps for phase in made.phases)
    if op not in BINDING or made.num_ranks == 1 or not made.phases or has_gaps:
        return
    contributors = [{rank} for rank in range(made.num_ranks)]
    step, arriving = 0, []
    for message in messages(made):
        if message.step != step:
            for dst, reached in arriving:
                contributors[dst] |= reached
            step, arriving = message.step, []
        arriving.append((message.dst, set(contributors[message.src])))
    for dst, reached in arriving:
        contributors[dst] |= reached
    assert all(len(reached) == made.num_ranks for reached in contributors)


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
    assert next(messages(made)).num_bytes == 100_000


def test_two_level_crosses_regions_less_than_a_ring_does() -> None:
    names = ["a", "b"] * 4
    options = {"num_bytes": 8000, "hosts": range(8), "topology": Regions(names)}
    two_level = schedule("all_reduce", 8, algorithm="two-level", **options)  # type: ignore[arg-type]
    assert two_level.region_bytes(names).sum() == 2 * 8000
    assert schedule("all_reduce", 8, algorithm="ring", **options).region_bytes(names).sum() == 14 * 8000  # type: ignore[arg-type]


def test_gloo_messages_as_counted_on_the_wire() -> None:
    """25 segments of 1 MiB round up to 28; each of 4 members sends three quarters of them in either phase."""
    made = schedule("all_reduce", 4, num_bytes=25 << 20, algorithm="gloo", element_bytes=4)
    counts = Counter(message.src for message in messages(made))
    assert counts == dict.fromkeys(range(4), 2 * 3 * 7)
    assert {phase.window for phase in made.phases} == {2}
    # Four bytes are one segment, which goes around twice and skips everyone else's steps.
    assert len(list(messages(schedule("all_reduce", 4, num_bytes=4, algorithm="gloo", element_bytes=4)))) == 6


def test_a_schedule_that_sends_too_early_is_caught() -> None:
    """The executor delivers as late as the window allows: with a window one too wide, the ring breaks."""
    made = schedule("all_reduce", 4, num_bytes=32, algorithm="ring", element_bytes=8)
    for phase in made.phases:
        assert not isinstance(phase, ListedPhase)
    inputs = [np.full(4, rank, np.int64) for rank in range(4)]
    good = run_on_arrays(made, list(inputs))
    wide = schedule("all_reduce", 4, num_bytes=32, algorithm="ring", element_bytes=8)
    windows = [phase.window for phase in wide.phases]
    try:
        for phase in wide.phases:
            phase.window = 2
        bad = run_on_arrays(wide, list(inputs))
    finally:
        for phase, window in zip(wide.phases, windows, strict=True):
            phase.window = window
    assert good[0].tolist() == [6, 6, 6, 6]
    assert bad[0].tolist() != good[0].tolist()


@pytest.mark.parametrize("builder", [trees.all_reduce_two_level, trees.all_reduce_two_level_direct])
@pytest.mark.parametrize("name", ["hierarchical", "by-site"])
def test_an_algorithm_says_that_it_needs_regions_whatever_its_name(
    builder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = {"hosts": range(4), "topology": Regions(["a", "a", "b", "b"])}

    def sent() -> Schedule:
        return schedule("all_reduce", 4, num_bytes=1000, algorithm=name, **regions)  # type: ignore[arg-type]

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


def test_an_algorithm_that_replaces_another_of_its_name_is_built_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for builder, num_steps in ((trees.broadcast_tree, 2), (broadcast_direct, 1)):
        row = Algorithm(builder, needs_regions=False, num_messages=lambda num: num)
        monkeypatch.setitem(ALGORITHMS["broadcast"], "mine", row)
        assert schedule("broadcast", 4, num_bytes=1000, algorithm="mine").num_steps == num_steps


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
@given(data=st.data())
def test_shipped_algorithms_pass_the_checks_of_others(op: str, algorithm: str, data: st.DataObject) -> None:
    made = data.draw(schedules(op, algorithm))
    check_bytes(made)
    if made.num_bytes or op in ("barrier", "all_to_all"):
        check_schedule(made)
