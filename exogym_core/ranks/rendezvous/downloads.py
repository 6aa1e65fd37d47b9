"""Who of the sites at a rendezvous gives its state to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from exogym_core.ranks.rendezvous.agenda import Wanted
    from exogym_core.ranks.rendezvous.finishers import Finishers
    from exogym_core.ranks.rendezvous.pairs import SitePairs
    from exogym_core.ranks.rendezvous.site_info import SiteInfo

__all__ = ["Downloads"]


class Downloads:
    """What sites want and nobody could give yet.

    Args:
        sites: by number.
        send: called with (site, message).
        new_group: gives a name that no group has had.
        finishers: who has finished the run.
        pairs: which sites reach each other.
    """

    def __init__(
        self,
        sites: Mapping[int, SiteInfo],
        send: Callable[[int, Mapping[str, Any]], None],
        new_group: Callable[[], str],
        finishers: Finishers,
        pairs: SitePairs,
    ) -> None:
        self._sites, self._send, self._new_group, self._finishers = sites, send, new_group, finishers
        self._pairs = pairs
        self._wanted: list[Wanted] = []
        self._under_way: dict[
            int, tuple[str, SiteInfo, int]
        ] = {}  # who downloads -> group, who gives, number

    def ask(self, wanted: Wanted) -> None:
        """A site wants a state."""
        self._end(wanted.site)
        self._wanted.append(wanted)

    def forget(self, site: int) -> None:
        """A site wants nothing any more."""
        self._end(site)
        self._wanted = [each for each in self._wanted if each.site != site]

    def _end(self, site: int) -> None:
        self._under_way.pop(site, None)
        if site in self._sites:
            self._sites[site].downloads_since = None

    def are_from(self, site: int) -> bool:
        """Whether somebody downloads from this site."""
        return any(holder.site == site for _, holder, _ in self._under_way.values())

    def of(self, number: int) -> set[int]:
        """Sites that download the state of that number now."""
        return {site for site, (_, _, theirs) in self._under_way.items() if theirs == number}

    def look(self, newest: int, now: float) -> None:
        """See who can be answered, where `newest` is the number of the newest state."""
        for site, (group, holder, _) in list(self._under_way.items()):
            if not holder.can_serve or self._sites[holder.site] is not holder:
                self._end(site)
                self._send(site, {"push": "dissolved", "group": group})  # it asks again
        for wanted in list(self._wanted):
            if self._is_answered(wanted, newest, now) and wanted in self._wanted:
                self._wanted.remove(wanted)

    def _is_answered(self, wanted: Wanted, newest: int, now: float) -> bool:
        others = [info for site, info in self._sites.items() if site != wanted.site]
        if newest >= wanted.at_least:
            serving = [info for info in others if info.newest == newest and info.can_serve]
            holders = [info for info in serving if not self._pairs.is_broken(wanted.site, info.site)]
            if serving and not holders:
                return False  # until it reaches one of them again
            holders = [info for info in holders if info.site not in wanted.without] or holders
            if holders:
                holder = min(holders, key=lambda info: info.heard)
                group = self._new_group()
                found = {"number": newest, "holder": holder.site, "group": group}
                self._send(holder.site, {"push": "serve", "to": wanted.site, **found})
                self._send(wanted.site, {"id": wanted.question, **found})
                self._under_way[wanted.site] = (group, holder, newest)
                self._sites[wanted.site].downloads_since = now
                return True
        waiting = {each.site for each in self._wanted}
        if any(not info.is_gone(now) and info.site not in waiting for info in others):
            return False  # somebody may have it soon
        told = {"refused": self._finishers.line} if self._finishers else {"number": None}
        self._send(wanted.site, {"id": wanted.question, **told})
        return True
