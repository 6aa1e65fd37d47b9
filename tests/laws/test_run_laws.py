"""Laws 4, 6 and 10 on random programs: what ranks see depends on the program alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import regions_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.gloo.deadlock_detector import Pending, Posted, Want, deadlock_among
from exogym_core.testing import Action, RankProgram, programs
from exogym_core.testing.rank_programs import Actor

TOPOLOGY = regions_form({"a": 3, "b": 2}, protocol="ideal")
NUM_RANKS = 5


LOOK = 1000  # as event


@settings(max_examples=20)
@given(programs(two_way=False))
def test_looking_is_free(program: RankProgram) -> None:
    """With calls and computing off the clock after each event a program has the same values, times and bytes."""
    everyone = tuple(range(len(program.ranks)))
    look = Action(LOOK, "off", ("all_gather", everyone, 3, 0))
    events = range(1 + max((each.event for actions in program.ranks for each in actions), default=0))
    ranks = [
        tuple(each for event in events for each in (*(a for a in actions if a.event == event), look))
        for actions in program.ranks
    ]

    def off(actor: Actor, *call: Any) -> None:
        with actor.comm.off_clock():
            actor.comm.advance(99.0)
            actor.call(*call)

    with patch.object(Actor, "off", off):
        looking = replace(program, ranks=tuple(ranks)).outcome()
    looking["rows"] = [[row for row in rows if row[1]["event"] != LOOK] for rows in looking["rows"]]
    assert looking == program.outcome()


@pytest.mark.parametrize("workers", ["threads", {"kind": "processes", "processes": 2}])
def test_ranks_meet_only_at_their_calls(workers: Any) -> None:
    """Rank 4 computes 10 s and takes part in nothing: no rank waits for it, though it ends last."""

    def body(comm: Communicator) -> None:
        if comm.rank == 4:
            return comm.advance(10.0)
        group = comm.group([0, 1, 2, 3])
        comm.advance(1.0)
        group.barrier()
        return None

    done = run_ranks(body, NUM_RANKS, TOPOLOGY, workers=workers)
    assert done.rank_virtual_seconds[4] == done.virtual_seconds == 10.0
    assert all(1.0 < seconds < 1.2 for seconds in done.rank_virtual_seconds[:4])


# --- waits --------------------------------------------------------------------------------------------------

NUM_WAITING = 4

# ("all", members) a collective; ("send" or "recv", other rank, tag); ("any", tag) a message from anyone
collectives = st.tuples(
    st.just("all"),
    st.sets(st.integers(0, NUM_WAITING - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks))),
)
messages = st.tuples(st.sampled_from(["send", "recv"]), st.integers(0, NUM_WAITING - 1), st.integers(0, 1))
from_anyone = st.tuples(st.just("any"), st.integers(0, 1))
waiting_programs = st.lists(
    st.lists(st.one_of(collectives, messages, messages, from_anyone), max_size=5),
    min_size=NUM_WAITING,
    max_size=NUM_WAITING,
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
            others = [rank for rank in range(NUM_WAITING) if rank != me]
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


@given(waiting_programs, st.integers(0, 10_000))
@settings(max_examples=30)
def test_a_verdict_is_never_wrong_and_never_missing(waiting_programs: list[list[Any]], seed: int) -> None:
    ranks = [Rank(rank, program) for rank, program in enumerate(waiting_programs)]
    condemned, pending = live(ranks, random.Random(seed))
    stuck = {each.rank for each in ranks if each.want is not None}
    assert condemned <= stuck
    ended = [each for each in ranks if each.want is None]
    for each in ranks:  # in the end all that wait say so, and who has ended waits for the others to end
        want = each.want
        if want is None:
            number = each.posted.add("the end")
            want = Want(
                "ended", tuple((rank, "the end", number) for rank in range(NUM_WAITING) if rank != each.rank)
            )
        pending[each.rank] = each.posted.pending(want)
    assert reported(pending) >= stuck
    assert bool(reported(pending)) == (len(ended) < NUM_WAITING)
