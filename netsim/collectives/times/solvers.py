"""The ways of finding when members of collectives are through, each of which may refuse.

A solver is told where collectives under way have got to and who enters, and says where that leads: to a state whose
ends are known or will be found as time goes by. What it refuses is left to the next one; events never refuse.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from netsim.collectives.times.compiled import compiled_seconds
from netsim.collectives.times.recurrence import contention_free_seconds
from netsim.collectives.times.states import State, Transition
from netsim.fluid.compiling import is_worth_compiling

if TYPE_CHECKING:
    from netsim.collectives.times.sandbox import Sandbox
    from netsim.collectives.times.states import End, Entries
    from netsim.fluid.network import Network

__all__ = ["ByEvents", "Quick", "Solver", "Way"]

Seconds = npt.NDArray[np.float64]

_ROUNDING = 1e-12  # relative; ends as near as this are one for those who go by events


class Way(Protocol):
    """Where collectives under way have got to."""

    is_quiet: bool  # whether nobody is there yet

    def sandbox_after(self, entries: Entries) -> tuple[tuple[int, ...], Sandbox]:
        """The places of collectives that are not over, and a sandbox in which all have entered."""


class Solver(Protocol):
    """One way of finding out."""

    def solve(self, way: Way, entries: Entries) -> Transition | None:
        """Where it leads that these enter; None: it cannot tell."""


class Quick:
    """One collective that all members enter on a quiet, plain network: by recurrence, else by compiled events."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def solve(self, way: Way, entries: Entries) -> Transition | None:
        """Where it leads; None: messages meet and are few, or it is anything else."""
        if not way.is_quiet or len(entries.openings) > 1 or not self._network.protocol.is_plain:
            return None
        (opening,) = entries.openings
        schedule = opening.schedule
        if len(entries.members) < schedule.num_ranks:
            return None
        arrivals = np.zeros(schedule.num_ranks)
        arrivals[list(entries.members)] = entries.seconds
        wires = self._network.wires
        seconds = contention_free_seconds(schedule, opening.hosts, arrivals, wires)
        if seconds is None and is_worth_compiling("messages", schedule.num_messages):
            seconds = compiled_seconds(schedule, opening.hosts, arrivals, wires)
        if seconds is None:
            return None
        is_over = bool((seconds < np.inf).all())
        return Transition((), State(ends=_by_instant(seconds), known_until=math.inf, is_over=is_over))


class ByEvents:
    """Message by message, as time goes by."""

    def solve(self, way: Way, entries: Entries) -> Transition:
        """Where it leads."""
        kept, sandbox = way.sandbox_after(entries)
        return Transition(kept, State(sandbox.known, known_until=entries.lasting, start=sandbox))


def _by_instant(seconds: Seconds) -> list[End]:
    """Members by the instant at which they are through, those that never are left out."""
    ends: list[tuple[float, list[tuple[int, int]]]] = []
    for member in np.argsort(seconds, kind="stable").tolist():
        instant = float(seconds[member])
        if instant == math.inf:
            break
        if not ends or instant - ends[-1][0] > _ROUNDING * abs(instant):
            ends.append((instant, []))
        ends[-1][1].append((0, member))
    return [(instant, tuple(sorted(members))) for instant, members in ends]
