"""What a rendezvous knows of a site."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["START", "SiteInfo", "names_of", "progress_of"]

START = -1
"""The number of the meeting before the first round, at which all get the same state."""

# A process whose connection ended may only have lost that: it is gone when it has not come back by then.
_RETURN_SECONDS = 1.0


@dataclass(eq=False)
class SiteInfo:
    """What is known of one site.

    Attributes:
        site: its number.
        session: names its process.
        where: host and process, for people.
        heard: when it last said something.
        lost: when its connection ended; infinity while it is there.
        has_begun: whether it has what the others had, and takes part.
        has_done_all: whether it has done its rounds; it may still serve others.
        has_ended: whether it is through with everything.
        goes_further: whether its file is of another length than that of those who are through.
        newest: the number of the state that it has published.
        fetched: the number of the state that it downloaded last.
        fetched_after: for how long others had that state then.
        downloads_since: when the download began that is under way.
        num_slow: averages that it was left out of since they took too long, and has not done one since.
        slow_until: as long as nobody waits for its downloads, since two took too long.
        missed: the first of the rounds without it, up to the last one; None: it took part.
        told_missed: when people were told so.
        lanes: its processes, by their places in it, and where each answers tests of others.
        pulse: step, round and place, as it told them.
        silent_lanes: its processes that have not been heard of for long, though their connections are there.
    """

    site: int
    session: str
    where: str
    heard: float
    lost: float = math.inf
    has_begun: bool = False
    has_done_all: bool = False
    has_ended: bool = False
    goes_further: bool = False
    newest: int = START - 1
    fetched: int = START - 1
    fetched_after: float = 0.0
    downloads_since: float | None = None
    num_slow: int = 0
    slow_until: float = -math.inf
    missed: int | None = None
    told_missed: float = 0.0
    lanes: dict[int, Any] = field(default_factory=lambda: {0: None})
    pulse: Mapping[str, Any] = field(default_factory=dict)
    silent_lanes: set[int] = field(default_factory=set)

    def is_gone(self, now: float) -> bool:
        """Whether it is not expected back, or not soon."""
        return self.has_ended or bool(self.silent_lanes) or now >= self.lost + _RETURN_SECONDS

    @property
    def can_serve(self) -> bool:
        """Whether others can download from it."""
        return self.is_connected and not self.silent_lanes

    @property
    def is_connected(self) -> bool:
        """Whether it can be spoken to."""
        return self.lost == math.inf


def names_of(sites: Sequence[int]) -> str:
    """Sites, for people."""
    return ("site " if len(sites) == 1 else "sites ") + ", ".join(map(str, sites))


def progress_of(info: SiteInfo) -> str:
    """How far one has come, for people."""
    step = info.pulse.get("step")
    return "" if not step else f", after step {step}"
