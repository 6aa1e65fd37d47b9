"""Deadlock detection among real ranks: no false alarm, however old the reports, and none missed."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from exogym_core.communicator.gloo.deadlock_detector import Pending, Posted, Want, deadlock_among

NUM_RANKS = 4

# ("all", members) a collective; ("send" or "recv", other rank, tag); ("any", tag) a message from anyone
collectives = st.tuples(
    st.just("all"), st.sets(st.integers(0, NUM_RANKS - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
)
messages = st.tuples(st.sampled_from(["send", "recv"]), st.integers(0, NUM_RANKS - 1), st.integers(0, 1))
from_anyone = st.tuples(st.just("any"), st.integers(0, 1))
programs = st.lists(
    st.lists(st.one_of(collectives, messages, messages, from_anyone), max_size=5),
    min_size=NUM_RANKS,
    max_size=NUM_RANKS,
)


class Rank:
    """Makes its calls one after the other, as soon as each can be made."""

    def __init__(self, rank: int, program: list[Any]) -> None:
        self.rank = rank
        self.program = [step for step in program if step[0] != "all" or rank in step[1]]
        self.program = [step for step in self.program if step[0] not in ("send", "recv") or step[1] != rank]
        self.posted, self.at = Posted(), 0
        self.want: Want | None = None

    def post(self) -> None:
        """Make the next call: count it, and wait."""
        kind, *what = self.program[self.at]
        me = self.rank
        if kind == "all":
            number = self.posted.add(str(what[0]))
            needs = [(rank, str(what[0]), number) for rank in what[0] if rank != me]
        elif kind == "any":
            others = [rank for rank in range(NUM_RANKS) if rank != me]
            needs = [
                (rank, f"{rank}>{me} {what[0]} s", self.posted.count(f"{rank}>{me} {what[0]} r") + 1)
                for rank in others
            ]
        else:
            other, tag = what
            way = f"{me}>{other}" if kind == "send" else f"{other}>{me}"
            number = self.posted.add(f"{way} {tag} {kind[0]}")
            needs = [(other, f"{way} {tag} {'r' if kind == 'send' else 's'}", number)]
        self.want = Want(kind, tuple(needs), kind == "any")

    def goes_on(self, ranks: list[Rank]) -> bool:
        """Whether what it waits for is there; then it does."""
        there = [need for need in self.want.needs if ranks[need[0]].posted.count(need[1]) >= need[2]]
        if self.want.any_one and there:
            self.posted.add(f"{there[0][1][:-1]}r")
        if len(there) < len(self.want.needs) and not (self.want.any_one and there):
            return False
        self.want, self.at = None, self.at + 1
        return True


def live(ranks: list[Rank], draw: random.Random) -> tuple[set[int], dict[int, Pending]]:
    """Let ranks go on in any order until none can; they say that they wait at any time, and look too.

    Returns who has ever been told that it can never go on, and what each has said last.
    """
    pending: dict[int, Pending] = {}
    condemned: set[int] = set()
    while True:
        order = draw.sample(ranks, len(ranks))
        moved = False
        for each in order:
            if each.want is not None:
                if draw.random() < 0.4:
                    pending[each.rank] = Pending.of_text(each.posted.pending(each.want).to_text().encode())
                if draw.random() < 0.7 and each.goes_on(ranks):
                    assert each.rank not in condemned, "was told that it never could"
                    moved = True
            elif each.at < len(each.program):
                each.post()
                moved = True
            condemned |= reported(pending)
        if not moved and not any(each.want is not None and each.goes_on(ranks) for each in ranks):
            return condemned, pending


def reported(pending: dict[int, Pending]) -> set[int]:
    """The ranks of which a verdict says that they can never go on."""
    error = deadlock_among(pending, {})
    if error is None:
        return set()
    return {int(line.split(":")[0].split()[1]) for line in str(error).splitlines()[1:] if "waits for" in line}


@given(programs, st.integers(0, 10_000))
@settings(max_examples=200)
def test_a_verdict_is_never_wrong_and_never_missing(programs: list[list[Any]], seed: int) -> None:
    ranks = [Rank(rank, program) for rank, program in enumerate(programs)]
    condemned, pending = live(ranks, random.Random(seed))
    stuck = {each.rank for each in ranks if each.want is not None}
    assert condemned <= stuck
    ended = [each for each in ranks if each.want is None]
    for each in ranks:  # in the end all that wait say so, and who has ended waits for the others to end
        want = each.want
        if want is None:
            number = each.posted.add("the end")
            want = Want(
                "ended", tuple((rank, "the end", number) for rank in range(NUM_RANKS) if rank != each.rank)
            )
        pending[each.rank] = each.posted.pending(want)
    assert reported(pending) >= stuck
    assert bool(reported(pending)) == (len(ended) < NUM_RANKS)


def test_what_a_rank_does_not_tell_of_is_no_ground_for_a_verdict() -> None:
    """It tells of the lanes that it used last; of others nobody knows."""
    posted = Posted()
    for number in range(600):
        posted.add(f"lane {number}")
    one = posted.pending(Want("a", ((1, "x", 1),)))
    assert not one.is_all
    other = Posted().pending(Want("b", ((0, "lane 3", 1),)))
    assert deadlock_among({0: one, 1: other}, {}) is None
    assert deadlock_among({0: one, 1: Posted().pending(Want("b", ((0, "lane 599", 2),)))}, {}) is not None
