"""Pair tests of the connections between sites, at the rendezvous and between two sites.

A site may reach the rendezvous and not another site: a firewall, a route that swallows packets, one direction of a
cable. Only the two of them can find out. So after a failed average each pair of its members connects and exchanges some
bytes, on ports as gloo has them; broken pairs are tested until they work again.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import TYPE_CHECKING

from exogym_core.communicator.simulated.reach import largest_mesh
from netgym.sites.listener import SignedListener
from netgym.sites.site_info import names_of
from netsim.files.signed import PeerError, connect_peer

if TYPE_CHECKING:
    from collections.abc import Collection

    from netgym.sites.site_info import SiteTable
    from netsim.files.signed import PeerAddress, SignedChannel

__all__ = ["PairTest", "PairTests", "SitePairs", "test_seconds"]

_RETEST_SECONDS = 3.0  # between two tests of a pair that is broken
_SILENT_SECONDS = 1.5  # a live process sends a pulse every half second
_ANSWER_SECONDS = 1.0  # after a test's time its results may still come


def test_seconds(averaging_seconds: float) -> float:
    """Seconds for a test of two sites: a quarter of an average's time, and more than TCP's first retransmission."""
    return min(max(averaging_seconds / 4, 2.0), 10.0)


@dataclass(eq=False)
class PairTest:
    """A test under way: `missing` are answers that have not come, as (site, process, the other site)."""

    group: str
    members: tuple[int, ...]
    until: float
    missing: set[tuple[int, int, int]] = field(default_factory=set)


class SitePairs:
    """Pairs of sites: their tests, and those that are broken."""

    def __init__(self, members: SiteTable) -> None:
        self._members, self._sites = members, members.sites
        self._tests: dict[str, PairTest] = {}
        self._reports: dict[tuple[int, int, int], tuple[str, str]] = {}  # (site, process, other) -> sessions
        self._broken: dict[tuple[int, int], float] = {}  # pair -> time of its failure
        self._next: dict[tuple[int, int], float] = {}  # pair -> time of its next test

    def test(self, members: Collection[int], seconds: float, now: float) -> PairTest:
        """Begin a test between each two of these sites."""
        there = tuple(sorted(site for site in members if self._sites[site].is_connected))
        made = PairTest(self._members.new_group(), there, now + seconds + _ANSWER_SECONDS)
        made.missing = {
            (site, local_rank, other)
            for site, other in permutations(there, 2)
            for local_rank in self._sites[site].processes
            if self._sites[other].processes.get(local_rank) is not None
        }
        if made.missing:
            self._tests[made.group] = made
        for site in there:
            peers = {
                str(other): {
                    str(local_rank): place for local_rank, place in self._sites[other].processes.items()
                }
                for other in there
                if other != site
            }
            if peers:
                self._members.send(
                    site, {"push": "test", "group": made.group, "peers": peers, "seconds": seconds}
                )
        return made

    def take_result(
        self, site: int, local_rank: int, group: str, other: int, is_reached: bool, now: float
    ) -> None:
        """Take the result of one process's test."""
        test = self._tests.get(group)
        if test is None or (site, local_rank, other) not in test.missing:
            return
        test.missing.discard((site, local_rank, other))
        if not is_reached:  # one report is enough
            test.missing = {each for each in test.missing if _pair(each[0], each[2]) != _pair(site, other)}
        if is_reached or not self._sites[other].is_connected:
            self._reports.pop((site, local_rank, other), None)
        else:
            self._reports[site, local_rank, other] = self._sessions(site, other)
        self._settle(site, other, now)

    def is_over(self, test: PairTest, among: Collection[int], now: float) -> bool:
        """True if results of all pairs of these sites have arrived or are overdue."""
        pairs = {(site, other) for site, _, other in test.missing}
        return now >= test.until or not any({*pair} <= {*among} for pair in pairs)

    def is_broken(self, one: int, other: int) -> bool:
        """True if two sites do not reach each other, or are being tested."""
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

    def update(self, now: float) -> None:
        """End tests, and test broken pairs again."""
        for test in list(self._tests.values()):
            if self.is_over(test, test.members, now):
                del self._tests[test.group]
                self._next |= dict.fromkeys(combinations(test.members, 2), now + _RETEST_SECONDS)
                for site in test.members:
                    self._members.send(site, {"push": "dissolved", "group": test.group})
        for (site, local_rank, other), sessions in list(self._reports.items()):
            if self._sessions(site, other) != sessions:  # of a process that has ended
                del self._reports[site, local_rank, other]
                self._settle(site, other, now)
        for pair in list(self._broken):
            there = all(self._sites[site].is_connected for site in pair)
            is_tested = any(set(pair) <= set(test.members) for test in self._tests.values())
            if there and now >= self._next.get(pair, -math.inf) and not is_tested:
                self._next[pair] = self.test(pair, _RETEST_SECONDS, now).until + _RETEST_SECONDS

    def _sessions(self, site: int, other: int) -> tuple[str, str]:
        return self._sites[site].session, self._sites[other].session

    def _settle(self, site: int, other: int, now: float) -> None:
        """Mark a pair as broken while one of its processes reports so."""
        pair = _pair(site, other)
        is_broken = any(_pair(one, another) == pair for one, _, another in self._reports)
        silent = [one for one in pair if now > self._sites[one].heard + _SILENT_SECONDS]
        if is_broken and pair not in self._broken:
            self._broken[pair], self._next[pair] = now, now + _RETEST_SECONDS
            remedy = "both reach the rendezvous: see that all TCP ports are open between them, both ways"
            why = f"site {silent[0]} does not answer" if silent else remedy
            self._members.say(f"{names_of(pair)} do not reach each other; {why}")
        elif not is_broken and pair in self._broken:
            since = self._broken.pop(pair)
            if not silent:
                self._members.say(f"{names_of(pair)} reach each other again, after {now - since:.0f} s")


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


_SERVICE = "netgym site"
_NUM_CHARACTERS = 16_384  # more than a packet, both ways: some routes let only small ones through
_ECHO_SECONDS = 10.0
_SIOCGIFADDR = 0x8915


class PairTests:
    """Pair tests of a process: answers others, and connects to them.

    Args:
        address: of this machine, where gloo listens too, unless GLOO_SOCKET_IFNAME says otherwise.
        secret: known to the run's processes.

    Attributes:
        place: address of its listener; None where it cannot listen.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self.place: PeerAddress | None = None
        with contextlib.suppress(OSError):
            host = _address_of_interface(os.environ.get("GLOO_SOCKET_IFNAME", "")) or address
            self._listener = SignedListener((host, 0), secret, _SERVICE, _echo)
            self.place = self._listener.address
            self._listener.start()

    def reaches(self, place: PeerAddress, seconds: float) -> bool:
        """True if the listener there answers in time."""
        try:
            channel = connect_peer(place, self._secret, _SERVICE, "another site", seconds)
            try:
                channel.send(text="x" * _NUM_CHARACTERS)
                return len(channel.receive(seconds)["text"]) == _NUM_CHARACTERS
            finally:
                channel.close()
        except (PeerError, KeyError):
            return False

    def close(self) -> None:
        """Close the socket on which others test the connection to this site."""
        if self.place is not None:
            self._listener.close()


def _echo(channel: SignedChannel) -> None:
    try:
        channel.send(**channel.receive(_ECHO_SECONDS))
    except PeerError:
        pass
    finally:
        channel.close()


def _address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface; "" where it has none or the system does not say."""
    if not name or sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
