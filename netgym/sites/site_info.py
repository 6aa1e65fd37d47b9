"""Facts that a rendezvous keeps about a run and each of its sites."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.deadlines import Returns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["START", "SiteInfo", "SiteTable", "names_of", "progress_of"]

START = -1
"""The number of the meeting before the first round, at which all get the same state."""

# A process whose connection ended may only have lost that: it is gone when it has not come back by then.
_RETURN_SECONDS = 1.0


@dataclass(eq=False)
class SiteInfo:
    """State of one site.

    Attributes:
        site: its number.
        session: names its process.
        where: host and process, as text.
        heard: instant of its last message.
        lost: instant at which its connection ended; infinity while it is connected.
        has_begun: it has the state of the others, and takes part.
        has_done_all: its rounds are done; it may still serve others.
        has_ended: its process has finished the run, or was refused after the end.
        goes_further: its file has another length than that of the finished sites.
        newest: number of the state that it has published.
        downloading: begin of its download of the others' state; None: it downloads nothing.
        missed: first of the rounds without it, up to the last one, and instant of the last report of that; None: it
            took part.
        processes: address at which each of its processes answers others' tests, by local rank.
        pulse: step, round and place, as last reported.
        silent_processes: its processes that hang: connected, and silent for long.
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
    downloading: float | None = None
    missed: tuple[int, float] | None = None
    processes: dict[int, Any] = field(default_factory=lambda: {0: None})
    pulse: Mapping[str, Any] = field(default_factory=dict)
    silent_processes: set[int] = field(default_factory=set)

    def is_gone(self, now: float) -> bool:
        """True if the site is not expected back soon."""
        return self.has_ended or bool(self.silent_processes) or now >= self.lost + _RETURN_SECONDS

    @property
    def can_serve(self) -> bool:
        """True if other sites can download from it."""
        return self.is_connected and not self.silent_processes

    @property
    def is_connected(self) -> bool:
        """True if messages reach the site."""
        return self.lost == math.inf


class SiteTable:
    """The sites of a run, and what all decisions about them share.

    Args:
        num_sites: most sites, numbered from 0.
        name: of this life of the rendezvous; names of groups begin with it, so that each is unique.
        send: called with (site, message) for answers, `{"id": question, ...}`, and requests, `{"push": ...}`.
        say: called with lines for people.

    Attributes:
        sites: by number.
        returns: sites that come back by downloading the others' state.
        newest: the number of the newest published state.
        began: when the first round began; None before.
        finished_by: sites, and folders, that have finished the run.
        has_finished_folder: no site continues the run, even alone.
    """

    def __init__(
        self,
        num_sites: int,
        name: str,
        send: Callable[[int, Mapping[str, Any]], None],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.num_sites, self.name, self.send, self.say = num_sites, name, send, say
        self.sites: dict[int, SiteInfo] = {}
        self.returns = Returns()
        self.newest = START - 1
        self.began: float | None = None
        self.finished_by: set[str] = set()
        self.has_finished_folder = False
        self._num_groups = 0

    def new_group(self) -> str:
        """An unused name for a group."""
        self._num_groups += 1
        return f"{self.name}-{self._num_groups}"

    def is_gone(self, site: int, now: float) -> bool:
        """True if a site that arrived before is not expected back soon."""
        return site in self.sites and self.sites[site].is_gone(now)

    def refuse(self, site: int, question: int) -> None:
        """Refuse a site after the end; others do not wait for it, even while it stays connected."""
        self.sites[site].has_ended = True
        self.send(site, {"id": question, "refused": self.refusal})

    @property
    def refusal(self) -> str:
        """Refusal of a site that comes after the end."""
        names = sorted(self.finished_by)
        have, whose = ("has", "its folder has") if len(names) == 1 else ("have", "their folders have")
        return (
            f"this run is over: {', '.join(names)} {have} finished it, {whose} the model; for another run name it, "
            "NETGYM_RUN=..., or restart the rendezvous"
        )


def names_of(sites: Sequence[int]) -> str:
    """Site numbers as text, such as `sites 0 and 2`."""
    return ("site " if len(sites) == 1 else "sites ") + ", ".join(map(str, sites))


def progress_of(info: SiteInfo) -> str:
    """Progress of a site, as text."""
    step = info.pulse.get("step")
    return "" if not step else f", after step {step}"
