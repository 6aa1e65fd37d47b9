"""What a step of ranks costs the simulation, counted in calls: nothing here looks at a clock of the machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NoReturn

import netsim
from exogym_core.communicator.simulated.simulation import Simulation, World
from netsim import Topology
from netsim.network.build import MODULES
from netsim.ranks import Advance, Call, Exit, Key, Post, Request, Wait

NUM_RANKS = 4
OURS = str(Path(netsim.__file__).parent)
# What is compiled where there is a compiler; its cost is counted in events.
ENGINE = tuple(f"{OURS}/network/{name}.py" for name in MODULES)


def simulation(steps: int) -> Simulation:
    """Ranks that compute and average, again and again, over a WAN."""
    world = World.build(NUM_RANKS, Topology.load("wan-4-regions"), None, "ideal", None)
    call = Call("all_reduce", tuple(range(NUM_RANKS)), 40_000, element_bytes=4)

    def stream(rank: int) -> list[Request]:
        return [
            request
            for step in range(steps)
            for request in (Advance(0.05), Post(Key(0, step), rank, call), Wait(Key(0, step)))
        ] + [Exit()]

    past = [stream(rank) for rank in range(NUM_RANKS)]
    return Replay(world, past)


class Replay(Simulation):
    """Simulation without ranks, which have made all requests."""

    def _let_run(self, rank: int | None) -> NoReturn:
        raise AssertionError(f"rank {rank} has nothing left to request")


def calls(steps: int) -> Counter[str]:
    """Calls of functions of netsim outside its engine, by name, and the engine's events, in a run of so many steps."""
    counted: Counter[str] = Counter()
    made = simulation(steps)

    def count(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OURS) and not file.startswith(ENGINE):
            counted[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        made.kernel.run()
    finally:
        sys.setprofile(before)
    counted["events"] = made.network.engine.counts.num_events
    return counted


def test_a_step_that_repeats_passes_few_calls() -> None:
    """A rank's step (compute, post, wait) went through 70 calls of netsim once; what nobody asked for costs none."""
    calls(3)  # whatever is kept in modules is there
    a_step = calls(60)
    a_step.subtract(calls(20))
    num_messages = 2 * (NUM_RANKS - 1)  # of a ring, by rank; each of them arrives, and is through
    assert a_step.pop("events") <= 40 * NUM_RANKS * 2 * num_messages
    num = sum(a_step.values()) / (40 * NUM_RANKS)
    assert num < 50, a_step.most_common(20)
    # Nobody watches, no weather, no crashed host: none of these is asked about.
    for unasked in ("Diary.begin", "Downtime.since", "Uptime.is_down", "Kernel._read"):
        assert not a_step[unasked]
