"""Strategies of hypothesis: tensors, calls of groups, and programs of ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.testing.collectives import CallChoices, CollectiveTrial
from exogym_core.testing.group_calls import (
    DTYPES,
    FLOATS,
    LAYOUTS,
    OPERATIONS,
    REDUCE_OPS,
    REDUCING,
    SHAPES,
    CallSequence,
    GroupCall,
    TensorForm,
)
from exogym_core.testing.rank_programs import Action, RankProgram
from netsim.errors import InputError
from netsim.testing import worlds
from netsim.testing.worlds import Picks, topologies, weather

try:
    from hypothesis import strategies as st
except ImportError:
    raise InputError("netgym.testing: hypothesis is not installed: run: pip install 'netgym[test]'") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

__all__ = [
    "EVENT_BYTES",
    "call_sequences",
    "collective_trials",
    "hold_for_all",
    "packed_trial",
    "picked_call",
    "picked_form",
    "picked_group",
    "picked_ranks",
    "programs",
    "tensors",
]

T = TypeVar("T")

_SMALLER_EXAMPLES = 100  # that are tried at most, once one fails
_FORM_BYTES, _CALL_BYTES = 8, 20
EVENT_BYTES = 24
"""Of each event of a program."""


hold_for_all = partial(worlds.hold_for_all, most_smaller=_SMALLER_EXAMPLES)


# --- tensors and calls of groups -----------------------------------------------------------------------------


def tensors(
    dtypes: Sequence[torch.dtype] = DTYPES, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> st.SearchStrategy[Tensor]:
    """Draw tensors, some without elements, some not contiguous.

    Args:
        dtypes: of which each has one.
        shapes: likewise.
    """
    data = st.binary(min_size=_FORM_BYTES, max_size=_FORM_BYTES)
    return data.map(lambda data: picked_form(Picks(data), dtypes, shapes).tensor())


def picked_form(
    picks: Picks,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    layouts: Sequence[str] = LAYOUTS,
) -> TensorForm:
    """Form of tensors of one of these dtypes, shapes and layouts."""
    return TensorForm(
        picks.of(dtypes), picks.of(shapes), picks.of(layouts), picks.below(1000), picks.chance(2)
    )


def picked_group(picks: Picks, num_ranks: int, size: int = 0) -> tuple[int, ...]:
    """Ranks in any order, as many as `size` says, or any number."""
    order = list(range(num_ranks))
    return tuple(order.pop(picks.below(len(order))) for _ in range(size or 1 + picks.below(num_ranks)))


def picked_call(picks: Picks, operations: Sequence[str], num_groups: int = 1) -> GroupCall:
    """A call of one of these operations."""
    operation, reduce_op = picks.of(operations), picks.of(REDUCE_OPS)
    dtypes: Sequence[torch.dtype] = DTYPES
    if operation in REDUCING:
        dtypes = FLOATS if reduce_op == "avg" else DTYPES[:-1]  # without bool
    is_listed = operation in ("reduce_scatter", "all_to_all") and picks.chance(2)
    return GroupCall(
        operation,
        picked_form(picks, dtypes, SHAPES),
        picks.below(num_groups),
        reduce_op if operation in REDUCING else "sum",
        picks.below(5),
        operation == "all_to_all" and is_listed,
        is_listed,
        picks.of((None, 0, 1, 2, 3)),
        picks.chance(2),
    )


def call_sequences(num_calls: int, max_ranks: int = 5) -> st.SearchStrategy[CallSequence]:
    """Draw calls of all ranks and of groups; asynchronous ones are waited for some calls later.

    Args:
        num_calls: of each sequence.
        max_ranks: largest number of ranks.
    """

    def make(data: bytes) -> CallSequence:
        picks, calls = Picks(data[:16]), data[16:]
        num_ranks = 1 + picks.below(max_ranks)
        groups = [tuple(range(num_ranks)), *(picked_group(picks, num_ranks) for _ in range(picks.below(3)))]
        made = [
            picked_call(Picks(calls[at : at + _CALL_BYTES]), OPERATIONS, len(groups))
            for at in range(0, len(calls), _CALL_BYTES)
        ]
        return CallSequence(num_ranks, made, groups)

    size = 16 + num_calls * _CALL_BYTES
    return st.binary(min_size=size, max_size=size).map(make)


# --- functions on ranks --------------------------------------------------------------------------------------

_DELAYS = (0.0, 0.5, 0.001, 0.02)


def chosen_call(picks: Picks, choices: CallChoices) -> GroupCall:
    """A call of a function that is checked."""
    operation, reduce_op = choices.operation, picks.of(choices.reduce_ops)
    dtypes = [each for each in choices.dtypes if each.is_floating_point or reduce_op != "avg"]
    form = picked_form(picks, dtypes, choices.shapes or SHAPES, choices.layouts)
    if not choices.shapes and not picks.chance(2):
        form = form._replace(shape=(picks.below(18),))
    is_uneven = choices.is_uneven and not picks.chance(3)
    is_listed = operation in ("reduce_scatter", "all_to_all")
    return GroupCall(operation, form, 0, reduce_op, picks.below(8), is_uneven, is_listed)


@st.composite
def collective_trials(draw: st.DrawFn, choices: CallChoices) -> CollectiveTrial:
    """Draw calls of a function by all ranks or by a group, some on a network with stragglers and weather."""
    picks = Picks(draw(st.binary(min_size=32, max_size=32)))
    size = picks.of(choices.num_ranks)
    num_ranks, group = size, tuple[int, ...]()
    if picks.chance(3):
        num_ranks += picks.below(2)
        group = picked_group(picks, num_ranks, size)
    num_calls = 1 + picks.below(3)
    data = draw(st.binary(min_size=num_calls * _CALL_BYTES, max_size=num_calls * _CALL_BYTES))
    calls = [
        chosen_call(Picks(data[at : at + _CALL_BYTES]), choices) for at in range(0, len(data), _CALL_BYTES)
    ]
    if picks.chance(2):  # of one form with other values, which a function may take for the same call
        form = calls[0].form
        calls = [replace(calls[0], form=form._replace(seed=form.seed + n)) for n in range(num_calls)]
    trial = CollectiveTrial(num_ranks, tuple(calls), group)
    if not picks.chance(2):
        return trial
    topology = draw(topologies(max_hosts=num_ranks))
    if picks.chance(4):
        topology |= draw(weather(topology))
    delays = tuple(picks.of(_DELAYS) for _ in range(num_ranks))
    protocol = picks.of(("ideal", "linux-tcp", "gloo"))
    return replace(trial, topology=dict(topology), protocol=protocol, delays=delays)


def packed_trial(choices: CallChoices, num_ranks: int, num_calls: int = 12) -> CollectiveTrial:
    """Many calls by a number of ranks in another order, always the same: for where starting ranks takes long."""
    draw = Random(num_ranks)
    calls = tuple(chosen_call(Picks(draw.randbytes(_CALL_BYTES)), choices) for _ in range(num_calls))
    return CollectiveTrial(num_ranks, calls, tuple(range(num_ranks))[::-1])


# --- programs of ranks ---------------------------------------------------------------------------------------

_COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
    "barrier",
)


class Events:
    """Actions of ranks, drawn as one sequence of events each of which all its ranks come to, so none waits for ever.

    Args:
        num_ranks: number of ranks.
        two_way: whether calls are among them whose answer depends on virtual time.
    """

    def __init__(self, num_ranks: int, two_way: bool = True) -> None:
        self.num_ranks, self.two_way = num_ranks, two_way
        self.ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.open: list[set[int]] = [set() for _ in range(num_ranks)]
        self.event = 0
        self.picks = Picks(b"")
        kinds: list[tuple[int, Callable[[], None]]] = [
            (2, self.nothing),
            (6, self.compute),
            (8, partial(self.by_members, self.give, "collective")),
            (4, partial(self.by_members, self.begin, "post")),
            (3, self.wait),
            (2, self.message),
        ]
        if two_way:
            kinds += [
                (3, self.look),
                (2, partial(self.by_members, self.give, "off")),
                (1, self.anyone),
                (1, self.cancelled),
                (2, self.mail),
                (1, self.present),
                (1, self.timed),
                (1, self.mistaken),
            ]
        self._kinds = [kind for weight, kind in kinds for _ in range(weight)]

    def program(self, data: bytes) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, from EVENT_BYTES an event."""
        for at in range(0, len(data), EVENT_BYTES):
            self.event += 1
            self.picks = Picks(data[at : at + EVENT_BYTES])
            self.picks.of(self._kinds)()
        if self.two_way and self.picks.chance(30):
            self.event += 1
            self.give(self.someone(), "fail")
        for rank in range(self.num_ranks):
            for event in sorted(self.open[rank]):
                self.give(rank, "wait", event)
        return tuple(map(tuple, self.ranks))

    def give(self, rank: int, kind: str, *arguments: Any) -> None:
        self.ranks[rank].append(Action(self.event, kind, arguments))

    def begin(self, rank: int, kind: str, *arguments: Any) -> None:
        """Give an action whose end is waited for later."""
        self.give(rank, kind, *arguments)
        self.open[rank].add(self.event)

    def someone(self) -> int:
        return self.picks.below(self.num_ranks)

    def two(self) -> tuple[int, int]:
        first = self.someone()
        return first, (first + 1 + self.picks.below(self.num_ranks - 1)) % self.num_ranks

    def members(self) -> tuple[int, ...]:
        if self.picks.chance(2):
            group = picked_group(self.picks, self.num_ranks)
            if len(group) > 1:
                return group
        return tuple(range(self.num_ranks))

    def size(self) -> int:
        """Of tensors, in elements of 8 bytes."""
        return self.picks.of((1, 0, 3, 100, 5_000, 40_000))

    def seconds(self) -> float:
        return self.picks.of((0.1, 0.001, 0.01, 0.02, 0.5))

    def call(self) -> tuple[str, tuple[int, ...], int, int]:
        members = self.members()
        return self.picks.of(_COLLECTIVES), members, self.size(), self.picks.below(len(members))

    def nothing(self) -> None:
        """No action: events that have no part in a failure shrink to this."""

    def compute(self) -> None:
        self.give(self.someone(), "advance", self.seconds())

    def by_members(self, act: Callable[..., object], kind: str) -> None:
        """An action of each member of a collective."""
        call = self.call()
        for rank in call[1]:
            act(rank, kind, *call)

    def wait(self) -> None:
        rank = self.someone()
        if self.open[rank]:
            event = self.picks.of(sorted(self.open[rank]))
            self.open[rank].remove(event)
            self.give(rank, "wait", event)

    def message(self) -> None:
        src, dst = self.two()
        size, tag = self.size(), self.picks.below(2)
        for rank, other, kind in ((src, dst, "send"), (dst, src, "recv")):
            if self.picks.chance(2):
                self.begin(rank, f"i{kind}", other, size, tag)
            else:
                self.give(rank, kind, other, size, tag)

    def look(self) -> None:
        rank = self.someone()
        if self.open[rank] and self.picks.chance(2):
            self.give(rank, "is_completed", self.picks.of(sorted(self.open[rank])))
        else:
            self.give(rank, "now")

    def anyone(self) -> None:
        """Several ranks send to one, which takes the first message."""
        dst, *sources = self.members()
        size, tag = self.size(), 1000 + self.event
        for src in sources:
            self.begin(src, "isend", dst, size, tag)
        for _ in sources:
            self.give(dst, "recv", None, size, tag)

    def cancelled(self) -> None:
        src, dst = self.two()
        size, tag = self.size(), 1000 + self.event
        self.begin(src, "isend", dst, size, tag)
        self.give(dst, "cancelled", src, size, tag, self.seconds())

    def mail(self) -> None:
        box = self.picks.of(("", "b"))
        if self.picks.chance(2):
            self.give(self.someone(), "put", self.someone(), self.size(), box)
        else:
            self.give(self.someone(), "take", box, self.picks.of((0.0, 0.0, 0.01, 0.2, math.inf)))

    def present(self) -> None:
        ranks, seconds, size = self.members(), self.seconds(), self.size()
        for rank in ranks:
            self.give(rank, "average_present", ranks, seconds, size)

    def timed(self) -> None:
        members = self.members()
        name = self.picks.of(("all_reduce", "all_gather", "broadcast", "reduce", "gather"))
        size, root = self.size(), self.picks.below(len(members))
        seconds = self.picks.of((0.05, 0.005, 0.5, 100.0))
        for rank in members:
            self.give(rank, "timed", name, members, size, root, seconds)

    def mistaken(self) -> None:
        self.give(self.someone(), "mistaken")


def picked_ranks(data: bytes, num_ranks: int, two_way: bool) -> tuple[tuple[Action, ...], ...]:
    """Actions of each rank, as for `programs`, from EVENT_BYTES an event."""
    return Events(num_ranks, two_way).program(data)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    two_way: bool = True,
    has_weather: bool = True,
    max_ranks: int = 6,
    max_events: int = 16,
) -> RankProgram:
    """Draw programs of ranks: computing, collectives of all and of groups, messages, mailboxes, and waiting for them.

    Args:
        draw: hypothesis's.
        two_way: with calls whose answer depends on virtual time: `now`, `take`, `average_present`, time-outs.
        has_weather: some networks have weather.
        max_ranks: largest number of ranks, 2 at least.
        max_events: largest number of events.
    """
    num_ranks = draw(st.integers(2, max_ranks))
    data = draw(st.binary(min_size=3 * EVENT_BYTES, max_size=max_events * EVENT_BYTES))
    topology = draw(topologies(min_hosts=num_ranks, max_hosts=num_ranks))
    if has_weather and draw(st.integers(0, 2)) == 2:
        topology |= draw(weather(topology))
    names = ("ideal", "linux-tcp", "gloo") if two_way else ("ideal",)
    algorithms = ("auto",) if two_way else ("auto", "direct", "ring", "tree")
    ranks = picked_ranks(data, num_ranks, two_way)
    return RankProgram(ranks, topology, draw(st.sampled_from(names)), draw(st.sampled_from(algorithms)))
