"""What sites have come to a rendezvous for and is not settled: rounds, attempts at them, downloads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.ranks.rendezvous.pairs import PairTest

__all__ = ["Attempt", "RoundMeeting", "Wanted"]


@dataclass(eq=False)
class RoundMeeting:
    """Who has come to the meeting of a number; `members` is who was there in time, once that is known."""

    number: int
    deadline: float
    seconds: float
    awaited: frozenset[int] | None
    come: dict[int, tuple[int, float]] = field(default_factory=dict)  # site -> (question, weight)
    late: dict[int, int] = field(default_factory=dict)  # site -> question
    members: tuple[int, ...] = ()
    sessions: dict[int, str] = field(default_factory=dict)  # the members' processes
    weights: dict[int, float] = field(default_factory=dict)
    opened: float = 0.0
    told_seconds: float = 0.0  # how long it had lasted when people were told
    is_settled: bool = False


@dataclass(eq=False)
class Attempt:
    """One attempt of those present to do their work, until it is known who is `left`."""

    number: int
    attempt: int
    group: str
    members: tuple[int, ...]
    sessions: Mapping[int, str]  # their processes, as far as known
    seconds: float
    deadline: float
    num_breaks: int = 0  # attempts of the same members before this one that broke
    said: dict[int, tuple[int, bool]] = field(
        default_factory=dict
    )  # site -> (question, whether it is through)
    failed: float = math.inf  # when that was known
    test: PairTest | None = None  # finds out who reaches whom, once it has failed
    left: tuple[int, ...] | None = None
    next_group: str = ""
    opened: float = 0.0
    told_seconds: float = 0.0


@dataclass(eq=False)
class Wanted:
    """A state that a site wants to download: at least of this number, `without` the help of these."""

    site: int
    question: int
    at_least: int
    without: frozenset[int]
