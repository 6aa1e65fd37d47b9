"""Collectives that are under way without being on their network.

Several may be at once where they cannot meet: their regular messages fit into all links at the same time,
and nobody takes part in one before it is through the other. Anything else that starts or changes on the
network brings them all on: they are played on a copy from their start up to that instant, and the network
takes over from the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.clock import Clock
from netsim.collectives.recurrence import Lines
from netsim.collectives.rehearsal import Rehearsals, is_plain
from netsim.fork import fork, take_over, unseen, wires_of
from netsim.outage import may_give_up

if TYPE_CHECKING:
    from collections.abc import Hashable

    from netsim.collectives.play import Play
    from netsim.network import Network

__all__ = ["Stage"]


class Stage:
    """One network's collectives that are not on it.

    Attributes:
        rehearsals: what is known of how collectives go.
    """

    def __init__(self, network: Network) -> None:
        self.rehearsals = Rehearsals(network)
        self._network = network
        self._plays: list[Play] = []
        self._known: dict[Hashable, bool] = {}

    @classmethod
    def of(cls, network: Network) -> Stage:
        """The stage of a network, the same each time."""
        if network.stage is None:
            network.stage = cls(network)
        stage: Stage = network.stage
        return stage

    def admit(self, play: Play) -> bool:
        """Take in a collective that is about to begin, if it can be kept off the network."""
        if self._network.num_in_flight or may_give_up(self._network):
            return False
        if self._plays and not self._fit([*self._plays, play]):
            self.step_in()
            return False
        self._plays.append(play)
        self._network.before_change = self.step_in
        return True

    def check(self, play: Play, host: int) -> None:
        """A member on `host` enters `play`; step in if one there is still busy with another."""
        for other in self._plays:
            if other is not play and host in other.hosts and not other.is_through(host):
                self.step_in()
                return

    def dismiss(self, play: Play) -> None:
        """A collective is over."""
        self._plays.remove(play)
        if not self._plays:
            self._network.before_change = None

    def step_in(self) -> None:
        """Bring all on the network, as if they had been there from the start."""
        network, now = self._network, self._network.env.now
        plays, self._plays = self._plays, []
        network.before_change = None
        first = min(min(play.arrivals.values(), default=now) for play in plays)
        copied = fork(network, Clock(first))
        for play in plays:
            play.start_again(copied, now)
        if first < now:
            copied.env.run(until=now)
        take_over(network, copied)
        for play in plays:
            play.go_live()
        with unseen(network):
            for play in plays:
                play.arrive_again(now)

    def _fit(self, plays: list[Play]) -> bool:
        """Whether messages of these collectives cannot meet on any link."""
        if any(play.schedule.regular_pairs is None for play in plays):
            return False
        key = (self._network.version, frozenset((play.schedule, play.hosts) for play in plays))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._find_out(plays)
        return known

    def _find_out(self, plays: list[Play]) -> bool:
        pairs: set[tuple[int, int]] = set()
        for play in plays:
            regular = play.schedule.regular_pairs
            if regular is None or len(set(play.hosts)) < len(play.hosts):
                return False
            pairs.update((play.hosts[src], play.hosts[dst]) for src, dst in regular)
        if not is_plain(self._network.protocol):
            return False
        wires = wires_of(self._network)
        lines = Lines(wires, range(len(self._network.topology.hosts)))
        src, dst = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
        lines.of(src, dst)
        return lines.fit_at_once(wires.bytes_per_second)
