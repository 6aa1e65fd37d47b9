"""Which sites reach each other: pairs are tested when an average fails, and broken ones until they work again.

A site may reach the rendezvous and not another site: a firewall, a route that swallows packets, one direction of a
cable. Only the two of them can find out. So after a failed average each pair of its members is asked to connect and to
exchange some bytes, on ports as gloo has them, and both tell what came of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

from exogym_core.ranks.rendezvous.site_info import names_of
from netsim.ranks.reach import largest_mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from exogym_core.ranks.rendezvous.site_info import SiteInfo

__all__ = ["PairTest", "SitePairs", "test_seconds"]

_RETEST_SECONDS = 3.0  # between two tests of a pair that is broken
_SILENT_SECONDS = 1.5  # who lives says so every half second
_ANSWER_SECONDS = 1.0  # after a test's time its results may still come


def test_seconds(averaging_seconds: float) -> float:
    """Seconds for a test of two sites: little of an average's time, and more than TCP's first repeat."""
    return min(max(averaging_seconds / 4, 2.0), 10.0)


@dataclass(eq=False)
class PairTest:
    """A test under way: `missing` are answers that have not come, as (site, process, the other site)."""

    group: str
    members: tuple[int, ...]
    until: float
    missing: set[tuple[int, int, int]] = field(default_factory=set)


class SitePairs:
    """Tests pairs of sites, and keeps which are broken.

    Args:
        sites: by number.
        send: called with (site, message).
        new_group: gives a name that no group has had.
        say: called with lines for people.
    """

    def __init__(
        self,
        sites: Mapping[int, SiteInfo],
        send: Callable[[int, Mapping[str, Any]], None],
        new_group: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._sites, self._send, self._new_group, self._say = sites, send, new_group, say
        self._tests: dict[str, PairTest] = {}
        self._reports: dict[
            tuple[int, int, int], tuple[str, str]
        ] = {}  # (site, process, other) -> both sessions
        self._broken: dict[tuple[int, int], float] = {}  # pair -> since when
        self._next: dict[tuple[int, int], float] = {}  # pair -> when it is tested again

    def test(self, members: Collection[int], seconds: float, now: float) -> PairTest:
        """Have each two of these sites find out whether they reach each other."""
        there = tuple(sorted(site for site in members if self._sites[site].is_connected))
        made = PairTest(self._new_group(), there, now + seconds + _ANSWER_SECONDS)
        made.missing = {
            (site, lane, other)
            for site, other in permutations(there, 2)
            for lane in self._sites[site].lanes
            if self._sites[other].lanes.get(lane) is not None
        }
        if made.missing:
            self._tests[made.group] = made
        for site in there:
            peers = {
                str(other): {str(lane): place for lane, place in self._sites[other].lanes.items()}
                for other in there
                if other != site
            }
            if peers:
                self._send(site, {"push": "test", "group": made.group, "peers": peers, "seconds": seconds})
        return made

    def told(self, site: int, lane: int, group: str, other: int, is_reached: bool, now: float) -> None:
        """A process of a site has found out whether it reaches another site."""
        test = self._tests.get(group)
        if test is None or (site, lane, other) not in test.missing:
            return
        test.missing.discard((site, lane, other))
        if not is_reached:  # whatever the others say, the pair is broken
            test.missing = {each for each in test.missing if _pair(each[0], each[2]) != _pair(site, other)}
        if is_reached or not self._sites[other].is_connected:
            self._reports.pop((site, lane, other), None)
        else:
            self._reports[site, lane, other] = self._sessions(site, other)
        self._settle(site, other, now)

    def is_over(self, test: PairTest, among: Collection[int], now: float) -> bool:
        """Whether it is known which of these reach each other."""
        return now >= test.until or not any(
            site in among and other in among for site, _, other in test.missing
        )

    def is_broken(self, one: int, other: int) -> bool:
        """Whether two sites do not reach each other, or are just finding out."""
        return _pair(one, other) in self._broken or any(
            _pair(site, peer) == _pair(one, other)
            for test in self._tests.values()
            for site, _, peer in test.missing
        )

    def mesh(self, sites: Collection[int]) -> tuple[int, ...]:
        """The largest set of these sites that all reach each other."""
        return largest_mesh(sites, {site: self.unreached(site) for site in sites})

    def unreached(self, site: int) -> list[int]:
        """The sites that one does not reach."""
        return sorted(sum(pair) - site for pair in self._broken if site in pair)

    @property
    def broken(self) -> list[list[int]]:
        """The pairs of sites that do not reach each other."""
        return [list(pair) for pair in sorted(self._broken)]

    def was_away(self, seconds: float) -> None:
        """This process stood still for so long."""
        for test in self._tests.values():
            test.until += seconds

    def look(self, now: float) -> None:
        """End tests, and test broken pairs again."""
        for test in list(self._tests.values()):
            if self.is_over(test, test.members, now):
                del self._tests[test.group]
                for site in test.members:
                    self._send(site, {"push": "dissolved", "group": test.group})
        for (site, lane, other), sessions in list(self._reports.items()):
            if self._sessions(site, other) != sessions:  # of a process that is no more
                del self._reports[site, lane, other]
                self._settle(site, other, now)
        for pair in list(self._broken):
            there = all(self._sites[site].is_connected for site in pair)
            if there and now >= self._next.get(pair, -math.inf) and not self._is_tested(pair):
                self._next[pair] = self.test(pair, _RETEST_SECONDS, now).until + _RETEST_SECONDS

    def _is_tested(self, pair: tuple[int, int]) -> bool:
        return any(set(pair) <= set(test.members) for test in self._tests.values())

    def _sessions(self, site: int, other: int) -> tuple[str, str]:
        return self._sites[site].session, self._sites[other].session

    def _settle(self, site: int, other: int, now: float) -> None:
        """Call a pair broken as long as one of its processes says so."""
        pair = _pair(site, other)
        is_broken = any(_pair(one, another) == pair for one, _, another in self._reports)
        silent = [one for one in pair if now > self._sites[one].heard + _SILENT_SECONDS]
        if is_broken and pair not in self._broken:
            self._broken[pair], self._next[pair] = now, now + _RETEST_SECONDS
            why = (
                f"site {silent[0]} does not answer"
                if silent
                else ("both reach the rendezvous: see that all TCP ports are open between them, both ways")
            )
            self._say(f"{names_of(pair)} do not reach each other; {why}")
        elif not is_broken and pair in self._broken:
            since = self._broken.pop(pair)
            if not silent:
                self._say(f"{names_of(pair)} reach each other again, after {now - since:.0f} s")


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)
