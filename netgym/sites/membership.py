"""Membership at a rendezvous: sites that come and go, states that they publish and download.

Each method takes an event with its time in seconds, and answers by `send`. Sockets, threads and clocks are elsewhere,
so the same events in the same order give the same decisions. Rounds are decided in `rounds.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from netgym.sites.pairs import SitePairs, test_seconds
from netgym.sites.rounds import WAIT_SECONDS, PendingRounds
from netgym.sites.site_info import START, SiteInfo, SiteTable, progress_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["START", "WAIT_SECONDS", "Membership"]

_SERVING_SECONDS = 60.0  # a finished site stays at least, for sites that still need its state


class Membership(SiteTable):
    """The sites of a run, which come and go; rounds, tests of pairs and downloads are decided in classes of their own.

    Args:
        num_sites, name, send, say: as for `SiteTable`.
        wait_seconds: seconds that the run's begin waits for all sites, from the first arrival.
    """

    def __init__(
        self,
        num_sites: int,
        name: str,
        send: Callable[[int, Mapping[str, Any]], None],
        say: Callable[[str], None] = lambda line: None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        super().__init__(num_sites, name, send, say)
        self.pairs = SitePairs(self)
        self.downloads = Downloads(self, self.pairs)
        self.rounds = PendingRounds(self, self.pairs, self.downloads.of, wait_seconds)
        self._published: dict[int, float] = {}  # newest state -> when
        self._leaving: dict[int, tuple[int, float]] = {}  # site -> (question, last instant of its wait)

    # --- arrival and departure -----------------------------------------------------------------------------------

    def arrive(self, site: int | None, session: str, hello: Mapping[str, Any], now: float) -> int:
        """Register a process that arrives or returns; returns the number of its site.

        Args:
            site: the one that it is; None: the lowest that is free.
            session: names the process.
            hello: `where`, `goes_further`, and of one that was here before `has_begun`, `newest` and `elapsed`.
            now: the time.

        Raises:
            ValueError: there is no room, or another process is that site.
        """
        taken = {
            number for number, info in self.sites.items() if info.is_connected and info.session != session
        }
        if site is None:
            mine = [number for number, info in self.sites.items() if info.session == session]
            free = [number for number in range(self.num_sites) if number not in taken]
            if not free:
                raise ValueError(f"all {self.num_sites} sites are there already")
            site = (mine or free)[0]
        if not 0 <= site < self.num_sites:
            raise ValueError(f"there is no site {site}: they are numbered 0 to {self.num_sites - 1}")
        if site in taken:
            where = self.sites[site].where
            raise ValueError(
                f"site {site} is there already: {where}; give this one another NETGYM_SITE, or end that process"
            )
        known = self.sites.get(site)
        if known is None or known.session != session:
            if known is not None:
                self.forget(known.site)
                self.returns.forget(known.site)
            known = self.sites[site] = SiteInfo(site, session, str(hello.get("where", "")), now)
            self.say(f"site {site} has joined: {known.where}")
        else:
            self.say(f"site {site} is back: {known.where}")
        known.heard, known.lost = now, math.inf
        known.processes[0] = hello.get("tests_at")
        known.goes_further = bool(hello.get("goes_further"))
        known.has_begun = known.has_begun or bool(hello.get("has_begun"))
        known.newest = max(known.newest, int(hello.get("newest", START - 1)))
        self.newest = max(self.newest, known.newest)
        self.count_from(hello.get("elapsed"), now)
        return site

    def forget(self, site: int) -> None:
        """Drop the questions of an earlier process of this site."""
        self.downloads.forget(site)
        self._leaving.pop(site, None)
        self.rounds.forget(site)

    def depart(self, site: int, session: str, now: float) -> None:
        """Record that the connection of a process has ended."""
        info = self.sites.get(site)
        if info is not None and info.session == session and info.is_connected:
            info.lost = now
            if not info.has_ended:
                self.say(f"site {site} is lost: {info.where}{progress_of(info)}")
        self.update(now)

    def hear(self, site: int, local_rank: int, is_silent: bool, now: float) -> None:
        """Record that a process of a site is silent, or sends messages again."""
        silent = self.sites[site].silent_processes
        if is_silent != (local_rank in silent):
            silent.symmetric_difference_update({local_rank})
            self.say(f"site {site}: its process {local_rank} {'hangs' if is_silent else 'answers again'}")
            self.update(now)

    def done(self, site: int, now: float) -> None:
        """Record that a site has finished its rounds: the others continue without it."""
        self.sites[site].has_done_all = True
        self.update(now)

    def end(self, site: int, question: int, seconds: float, now: float) -> None:
        """Let a finished site leave when no other needs its state, after `seconds` at the latest."""
        self.sites[site].has_ended = True
        self._leaving[site] = (question, now + max(seconds, _SERVING_SECONDS))
        self.finished_by.add(f"site {site}")
        self.say(f"site {site} has finished{progress_of(self.sites[site])}")
        self.update(now)

    def finished(self, name: str) -> None:
        """Record that a folder holds the finished run, which no site then continues."""
        self.finished_by.add(name)
        self.has_finished_folder = True
        self.say(f"{name} has finished this run already: its folder has the model")
        self.rounds.refuse()

    def count_from(self, elapsed: float | None, now: float) -> None:
        """Set the run's begin back to `elapsed` seconds ago, where a site remembers an earlier one."""
        if elapsed is not None:
            began = now - float(elapsed)
            self.began = began if self.began is None else min(self.began, began)

    def stand_still(self, seconds: float) -> None:
        """Add the time for which `now` stood still to the run's seconds."""
        if self.began is not None:
            self.began -= seconds

    def elapsed(self, now: float) -> float | None:
        """Seconds since the run began; None before."""
        return None if self.began is None else now - self.began

    def publish(self, site: int, number: int, now: float) -> None:
        """Record that a site holds the state of that number."""
        info = self.sites[site]
        info.newest, info.has_begun = number, True
        if number > self.newest:
            self.newest = number
            self._published = {number: now}
        self.update(now)

    def join(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """Take a site into the meeting of a round; see `PendingRounds.join`."""
        self.forget(site)
        self.rounds.join(site, question, asked, now)
        self.update(now)

    def confirm(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """Record a member's success or failure; see `PendingRounds.confirm`."""
        self.rounds.confirm(site, question, asked, now)
        self.update(now)

    def fetch(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """Request the newest state for a site: `at_least` this number, `without` the help of these sites."""
        without = [int(other) for other in asked["without"]]
        self.downloads.request(_Request(site, question, int(asked["at_least"]), frozenset(without)))
        if without and without[-1] in self.sites:  # its download failed
            self.pairs.test([site, without[-1]], test_seconds(math.inf), now)
        self.update(now)

    def tested(self, site: int, local_rank: int, asked: Mapping[str, Any], now: float) -> None:
        """Take the result of a pair test from a process of a site: `group`, `peer`, `is_reached`."""
        self.pairs.take_result(
            site, local_rank, str(asked["group"]), int(asked["peer"]), bool(asked["is_reached"]), now
        )
        self.update(now)

    def fetched(self, site: int, number: int, now: float) -> None:
        """Record that a site has downloaded that state."""
        self.sites[site].has_begun = True
        self.returns.downloaded[site] = (number, now - self._published.get(number, now))
        self.downloads.forget(site)
        self.update(now)

    def update(self, now: float) -> None:
        """Decide pending rounds and downloads; also called as time passes."""
        self.rounds.update(now)
        self.pairs.update(now)
        self.downloads.update(now)
        for site, (question, until) in list(self._leaving.items()):
            is_late = now >= until and not self.downloads.are_from(site)
            is_needed = self.sites[site].newest == self.newest and any(
                max(info.newest, self.returns.downloaded.get(info.site, (START - 1, 0.0))[0]) < self.newest
                for info in self.sites.values()
                if info.site != site and not info.is_gone(now)
            )
            if is_late or not is_needed:
                del self._leaving[site]
                self.send(site, {"id": question})


class _Request(NamedTuple):
    """A site's request for a state of at least this number, `without` the help of these sites."""

    site: int
    question: int
    at_least: int
    without: frozenset[int]


class Downloads:
    """Downloads of states, requested and running."""

    def __init__(self, members: SiteTable, pairs: SitePairs) -> None:
        self._members, self._sites, self._pairs = members, members.sites, pairs
        self._requests: dict[int, _Request] = {}  # by site
        self._under_way: dict[int, tuple[str, SiteInfo, int]] = {}  # site -> (group, holder, number)

    def request(self, request: _Request) -> None:
        """Request a state for a site; replaces its earlier request."""
        self._end(request.site)
        self._requests[request.site] = request

    def forget(self, site: int) -> None:
        """Drop the request of a site."""
        self._end(site)
        self._requests.pop(site, None)

    def _end(self, site: int) -> None:
        self._under_way.pop(site, None)
        if site in self._sites:
            self._sites[site].downloading = None

    def are_from(self, site: int) -> bool:
        """True if a site downloads from this one."""
        return any(holder.site == site for _, holder, _ in self._under_way.values())

    def of(self, number: int) -> set[int]:
        """Sites that download the state of that number now."""
        return {site for site, (_, _, theirs) in self._under_way.items() if theirs == number}

    def update(self, now: float) -> None:
        """Answer the requests that have a holder."""
        for site, (group, holder, _) in list(self._under_way.items()):
            if not holder.can_serve or self._sites[holder.site] is not holder:
                self._end(site)
                self._members.send(site, {"push": "dissolved", "group": group})  # it asks again
        for request in list(self._requests.values()):
            if self._is_answered(request, now):
                del self._requests[request.site]

    def _is_answered(self, request: _Request, now: float) -> bool:
        newest = self._members.newest
        others = [info for site, info in self._sites.items() if site != request.site]
        if newest >= request.at_least:
            serving = [info for info in others if info.newest == newest and info.can_serve]
            holders = [info for info in serving if not self._pairs.is_broken(request.site, info.site)]
            if serving and not holders:
                return False  # no holder is reachable
            holders = [info for info in holders if info.site not in request.without] or holders
            if holders:
                holder = min(holders, key=lambda info: info.heard)
                group = self._members.new_group()
                found = {"number": newest, "holder": holder.site, "group": group}
                self._members.send(holder.site, {"push": "serve", "to": request.site, **found})
                self._members.send(request.site, {"id": request.question, **found})
                self._under_way[request.site] = (group, holder, newest)
                self._sites[request.site].downloading = now
                return True
        if any(not info.is_gone(now) and info.site not in self._requests for info in others):
            return False  # a site may publish it soon
        if self._members.finished_by:
            self._members.refuse(request.site, request.question)
        else:
            self._members.send(request.site, {"id": request.question, "number": None})
        return True
