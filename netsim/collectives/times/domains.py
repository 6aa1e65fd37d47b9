"""The collectives of a network that are timed in sandboxes, and not on it.

Those that can meet each other on a link are one contention domain (`domain.py`); others are timed by themselves:
where no link is common to both, or where their regular messages fit into all links at the same time and nobody takes
part in one before it is through the other. Whatever else starts or changes on a link that they can use brings them on
the network, as far as they have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.times.domain import Domain
from netsim.collectives.times.memory import Memory, Recent
from netsim.collectives.times.opening import Opening, unknown
from netsim.collectives.times.recurrence import Lines
from netsim.collectives.times.solvers import ByEvents, Quick
from netsim.collectives.times.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from netsim.collectives.times.opening import Known
    from netsim.collectives.times.work import Work
    from netsim.fluid.network import Network

__all__ = ["Domains"]

# An irregular collective of more messages has too many pairs to look for the links of each.
_MOST_MESSAGES = 50_000
# So many messages or fewer are simulated in less time than it takes to know whether they have been timed before.
_FEW_MESSAGES = 2
_MOST_KNOWN = 512


@dataclass(slots=True)
class _Reach:
    """Where messages of a collective can go, and what it is like there.

    Attributes:
        pairs: of hosts; None: too many.
        links: acknowledgements included.
        conditions: what those links are like, in the network's `version`.
    """

    pairs: tuple[tuple[int, int], ...] | None
    links: frozenset[int]
    conditions: bytes = b""
    version: int = -1


class Domains:
    """One network's collectives that are not on it.

    Attributes:
        memory: what is known of how collectives go.
        domains: those that cannot meet each other, in the order in which they began.
    """

    def __init__(self, network: Network) -> None:
        self.memory = Memory([Quick(network), ByEvents()])
        self._network = network
        self._quiet = State(is_kept=True)
        self.domains: list[Domain] = []
        self._reach: Recent[_Reach] = Recent(_MOST_KNOWN)
        self._fits: Recent[bool] = Recent(_MOST_KNOWN)  # as long as the network's version is this one:
        self._version = -1

    @classmethod
    def of(cls, network: Network) -> Domains:
        """Those of a network, the same each time."""
        if network.elsewhere is None:
            network.elsewhere = cls(network)
        assert isinstance(network.elsewhere, cls)
        return network.elsewhere

    def admit(self, work: Work, host: int) -> Domain | None:
        """Take in a collective that begins on a host, if it can be kept off the network. Returns where it goes."""
        network, links = self._network, self._reach_of(work).links
        if network.may_give_up and not links.isdisjoint(network.dead_links):
            return None
        if any(not links.isdisjoint(used) for used in network.links_in_use):
            return None
        if not self.domains:
            return self._alone(work, links)
        meeting = [domain for domain in self.domains if not domain.links.isdisjoint(links)]
        if meeting and self._fit([*(other for domain in self.domains for other in domain.works), work]):
            meeting = []
        busy = [domain for domain in self.domains if domain not in meeting and domain.is_busy(host)]
        if len(meeting) + len(busy) > 1:
            self._bring_on(meeting + busy)
            return None
        if not meeting and not busy:
            return self._alone(work, links)
        domain = (meeting + busy)[0]
        domain.links |= links
        return domain

    def _alone(self, work: Work, links: frozenset[int]) -> Domain | None:
        """A domain of its own, unless it is simulated in less time than it takes to look whether it is known."""
        if self.memory.is_in_vain and work.schedule.num_messages <= _FEW_MESSAGES:
            self.memory.skip()
            return None
        domain = Domain(self._network, self.memory, self._quiet, self._opening, self.domains.remove)
        domain.links = links
        self.domains.append(domain)
        return domain

    def check(self, domain: Domain | None, host: int) -> None:
        """A member on `host` enters a collective of a domain: both come on if one there is still busy in another."""
        if any(each is not domain and each.is_busy(host) for each in self.domains):
            self._bring_on([each for each in self.domains if each is domain or each.is_busy(host)])

    def _opening(self, work: Work, known: Known, instant: float) -> Opening:
        """All that a collective that begins adds to what is known."""
        reach, network = self._reach_of(work), self._network
        new = unknown(known, work.group, reach.pairs)
        windows = None if new == [] else network.window_states(work.group, new, instant)
        if reach.version != network.version:
            reach.conditions, reach.version = network.conditions(sorted(reach.links)), network.version
        return Opening(work.schedule, work.hosts, work.group, reach.conditions, windows, reach.pairs)

    # -- what the network is told and tells ----------------------------------------------------------------------

    def before_change(self, links: Iterable[int] | None) -> None:
        """Something starts or changes on these links (None: on any)."""
        if self.domains:
            self._bring_on(
                [each for each in self.domains if links is None or not each.links.isdisjoint(links)]
            )

    def come_back(self) -> None:
        """Be on the network from now on."""
        self._bring_on(self.domains)

    def host_bytes(self) -> Iterator[tuple[int, int, float]]:
        """Source host, target host and payload bytes that have come through by now."""
        for domain in self.domains:
            yield from domain.host_bytes()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing."""
        return not self.domains

    def _bring_on(self, domains: list[Domain]) -> None:
        for domain in list(domains):
            domain.bring_on()

    # -- what links are like -------------------------------------------------------------------------------------

    def _reach_of(self, work: Work) -> _Reach:
        """Where messages of a collective and their acknowledgements can go."""
        key = (work.schedule, work.hosts)
        reach = self._reach.recall(key)
        return reach if reach is not None else self._reach.keep(key, self._find_reach(work))

    def _find_reach(self, work: Work) -> _Reach:
        topology, schedule = self._network.topology, work.schedule
        members = schedule.regular_pairs
        if members is None and schedule.num_messages > _MOST_MESSAGES:
            return _Reach(None, frozenset(range(len(topology.links))))
        if members is None:
            members = frozenset((message.src, message.dst) for message in schedule.messages())
        ways = {(work.hosts[src], work.hosts[dst]) for src, dst in members}
        both = ways | {(dst, src) for src, dst in ways}
        links = frozenset(link for src, dst in both for link in topology.route(src, dst))
        # Those who receive send notes under a rendezvous.
        return _Reach(tuple(sorted(both if self._network.protocol.rendezvous else ways)), links)

    def _fit(self, works: list[Work]) -> bool:
        """Whether messages of these collectives cannot meet on any link."""
        if not self._network.protocol.is_plain or any(work.schedule.regular_pairs is None for work in works):
            return False
        if self._version != self._network.version:
            self._version = self._network.version
            self._fits.clear()
        key = frozenset((work.schedule, work.hosts) for work in works)
        known = self._fits.recall(key)
        return known if known is not None else self._fits.keep(key, self._find_out(works))

    def _find_out(self, works: list[Work]) -> bool:
        pairs: set[tuple[int, int]] = set()
        for work in works:
            regular = work.schedule.regular_pairs
            if regular is None or not work.are_hosts_apart:
                return False
            pairs.update((work.hosts[src], work.hosts[dst]) for src, dst in regular)
        wires = self._network.wires
        lines = Lines(wires, range(len(self._network.topology.hosts)))
        src, dst = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
        lines.of(src, dst)
        return lines.fit_at_once(wires.bytes_per_second)
