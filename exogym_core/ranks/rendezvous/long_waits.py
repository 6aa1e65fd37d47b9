"""Tells of waits at a rendezvous that last: who waits, for whom, and where in their code those are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from exogym_core.names import visible
from exogym_core.ranks.rendezvous.site_info import START, names_of, progress_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from exogym_core.ranks.rendezvous.agenda import Attempt, RoundMeeting
    from exogym_core.ranks.rendezvous.site_info import SiteInfo

__all__ = ["LongWaits"]

_FIRST_SECONDS = (
    30.0  # and then whenever it has lasted twice as long; at the run's begin, always after so long
)


class LongWaits:
    """What has been told of waits.

    Args:
        sites: by number.
        say: called with lines for people.
    """

    def __init__(self, sites: Mapping[int, SiteInfo], say: Callable[[str], None]) -> None:
        self._sites, self._say = sites, say

    def look(
        self,
        what: RoundMeeting | Attempt,
        come: Collection[int],
        missing: Collection[int],
        now: float,
        until: float = math.inf,
    ) -> None:
        """Those who have `come` wait for those `missing`, since `what` was opened, and `until` then."""
        seconds, is_begin = now - what.opened, what.number == START and until < math.inf
        again = what.told_seconds + _FIRST_SECONDS if is_begin else 2 * what.told_seconds
        if not come or not missing or seconds < max(_FIRST_SECONDS, again):
            return
        what.told_seconds = seconds
        name = "the run's begin" if what.number == START else f"round {what.number + 1}"
        verb = "waits" if len(come) == 1 else "wait"
        each = "; ".join(self._told(site, now) for site in sorted(missing))
        then = f"; it begins without in {until - now:.0f} s (netgym rendezvous --wait)" if is_begin else ""
        self._say(f"{name}: {names_of(sorted(come))} {verb} since {seconds:.0f} s: {each}{then}")

    def _told(self, site: int, now: float) -> str:
        info = self._sites.get(site)
        if info is None:
            return f"site {site} has not come yet"
        if not info.is_connected:
            return f"site {site} is lost{progress_of(info)}"
        if info.downloads_since is not None:
            return f"site {site} downloads the state since {now - info.downloads_since:.0f} s"
        place = info.pulse.get("place")
        where = f", in {visible(place, 120)}" if place else ""
        return f"site {site} is not there{progress_of(info)}{where}, heard of {now - info.heard:.0f} s ago"
