"""Collectives that are under way without being on their network.

Those that can meet each other on a link are followed together (`strand.py`), others by themselves: where no
link is common to both, or where their regular messages fit into all links at the same time and nobody takes
part in one before it is through the other. Whatever else starts or changes on a link that they can use brings
them on the network, as far as they have come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.times.recurrence import Lines
from netsim.collectives.times.rehearsal import Rehearsals, is_plain
from netsim.collectives.times.strand import Strand
from netsim.fluid.fork import conditions_of, links_in_use, wires_of
from netsim.fluid.outage import dead_links, may_give_up

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from netsim.collectives.times.play import Play
    from netsim.fluid.network import Network

__all__ = ["Stage"]

# An irregular collective of more members has too many pairs to look for the links of each.
_MOST_MEMBERS = 128


class Stage:
    """One network's collectives that are not on it.

    Attributes:
        rehearsals: what is known of how collectives go.
    """

    def __init__(self, network: Network) -> None:
        self.rehearsals = Rehearsals(network)
        self._network = network
        self._strands: list[Strand] = []
        self._known_fits: dict[Hashable, bool] = {}
        self._known_links: dict[Hashable, frozenset[int]] = {}
        self._known_conditions: dict[Hashable, Hashable] = {}
        self._version = -1

    @classmethod
    def of(cls, network: Network) -> Stage:
        """The stage of a network, the same each time."""
        if network.stage is None:
            network.stage = cls(network)
        stage: Stage = network.stage
        return stage

    def admit(self, play: Play, host: int) -> Strand | None:
        """Take in a collective that begins on a host, if it can be kept off the network. Returns where it goes."""
        links = self._links(play)
        if may_give_up(self._network) and not links.isdisjoint(dead_links(self._network)):
            return None
        if any(not links.isdisjoint(used) for used in links_in_use(self._network)):
            return None
        meeting = [strand for strand in self._strands if not strand.links.isdisjoint(links)]
        if meeting and self._fit([*(other for strand in self._strands for other in strand.plays), play]):
            meeting = []
        busy = [strand for strand in self._strands if strand not in meeting and strand.is_busy(host)]
        if len(meeting) + len(busy) > 1:
            self._bring_on(meeting + busy)
            return None
        strand = (meeting + busy or [self._strand()])[0]
        strand.links |= links
        return strand

    def check(self, play: Play, host: int) -> None:
        """A member on `host` enters `play`; bring it on if one there is still busy with another one elsewhere."""
        if any(strand is not play.strand and strand.is_busy(host) for strand in self._strands):
            self._bring_on([each for each in self._strands if each is play.strand or each.is_busy(host)])

    def _strand(self) -> Strand:
        strand = Strand(self._network, self.rehearsals, self._conditions, self._dismiss)
        self._strands.append(strand)
        self._network.before_change = self._change
        return strand

    def _change(self, links: Iterable[int] | None) -> None:
        """Something starts or changes on these links (None: on any)."""
        concerned = [each for each in self._strands if links is None or not each.links.isdisjoint(links)]
        if concerned:
            self._bring_on(concerned)

    def _bring_on(self, strands: list[Strand]) -> None:
        for strand in strands:
            strand.bring_on()

    def _dismiss(self, strand: Strand) -> None:
        self._strands.remove(strand)
        if not self._strands:
            self._network.before_change = None

    # -- what links are like ---------------------------------------------------------------------------------------

    def _links(self, play: Play) -> frozenset[int]:
        """All links that messages of a collective and their acknowledgements can use."""
        key = (play.schedule, play.hosts)
        links = self._known_links.get(key)
        if links is None:
            links = self._known_links[key] = self._find_links(play)
        return links

    def _find_links(self, play: Play) -> frozenset[int]:
        topology, schedule = self._network.topology, play.schedule
        pairs = schedule.regular_pairs
        if pairs is None and schedule.num_ranks > _MOST_MEMBERS:
            return frozenset(range(len(topology.links)))
        if pairs is None:
            pairs = frozenset((message.src, message.dst) for message in schedule.messages())
        ways = {(play.hosts[src], play.hosts[dst]) for src, dst in pairs}
        ways |= {(dst, src) for src, dst in ways}
        return frozenset(link for src, dst in ways for link in topology.route(src, dst))

    def _conditions(self, play: Play) -> Hashable:
        """What the links of a collective are like at present."""
        if self._version != self._network.version:
            self._version = self._network.version
            self._known_conditions.clear()
            self._known_fits.clear()
        key = (play.schedule, play.hosts)
        conditions = self._known_conditions.get(key)
        if conditions is None:
            found = conditions_of(self._network, sorted(self._links(play)))
            conditions = self._known_conditions[key] = self.rehearsals.number_of(found)
        return conditions

    def _fit(self, plays: list[Play]) -> bool:
        """Whether messages of these collectives cannot meet on any link."""
        if not is_plain(self._network.protocol) or any(play.schedule.regular_pairs is None for play in plays):
            return False
        key = (self._network.version, frozenset((play.schedule, play.hosts) for play in plays))
        known = self._known_fits.get(key)
        if known is None:
            known = self._known_fits[key] = self._find_out(plays)
        return known

    def _find_out(self, plays: list[Play]) -> bool:
        pairs: set[tuple[int, int]] = set()
        for play in plays:
            regular = play.schedule.regular_pairs
            if regular is None or len(set(play.hosts)) < len(play.hosts):
                return False
            pairs.update((play.hosts[src], play.hosts[dst]) for src, dst in regular)
        wires = wires_of(self._network)
        lines = Lines(wires, range(len(self._network.topology.hosts)))
        src, dst = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
        lines.of(src, dst)
        return lines.fit_at_once(wires.bytes_per_second)
