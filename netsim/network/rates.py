"""Rates of all connections that drain, and the capacity that acknowledgements take on the opposite route.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from netsim.network.connections import Connection, Transfer, transfer_of
from netsim.network.fairness import AckLink, Claim, FairShares, place_of

# Share of a link that acknowledgements leave to data however fast they come: those of 1 Gbit/s in one direction would
# fill 10 Mbit/s in the other, and data there would stand still. Real ones are thinned out, or slow the others down.
ACKS_AT_MOST: Final = 0.5


@final
class Rates:
    """Fair rates: first as if there were no acknowledgements, then of what those of such rates leave.

    That is within 0.1 % of where further passes would lead, since acknowledgements take 2.3 % at most.

    Args:
        payload: bytes per second of payload that each link carries.
        processes: bytes per second that the processes of each host send, and that they receive.
        ack_share: payload that acknowledgements of a byte displace on the opposite route.

    Attributes:
        gross, net: shares of the first and the second pass; the same if there are no acknowledgements.
    """

    def __init__(self, payload: list[float], processes: list[float], ack_share: float) -> None:
        self.payload = payload
        self.ack_share = ack_share
        self._processes = processes if min(processes, default=inf) < inf else []
        capacities = (
            payload + self._processes + self._processes
        )  # of links, of processes that send, that receive
        self.gross = FairShares(capacities)
        self.net = FairShares(capacities) if ack_share else self.gross
        self._ack_links = [AckLink(link) for link in self.net.links] if ack_share else []
        self._stale: list[AckLink] = []

    @property
    def is_settled(self) -> bool:
        return self.gross.is_settled and self.net.is_settled and not self._stale

    def admit(self, connection: Connection) -> None:
        """Give a new connection its claims, on its links and then on its ranks' processes; none within a host."""
        route = connection.route
        if not route.links:
            return
        shared = route.links
        if self._processes and not connection.is_background:
            sends = len(self.payload) + route.source
            shared = [*shared, sends, sends - route.source + len(self._processes) + route.target]
        gross = net = Claim(tuple([self.gross.links[i] for i in shared]), route.weight)
        if self.ack_share:
            net = Claim(tuple([self.net.links[i] for i in shared]), route.weight)
            gross.ack_links = tuple([self._ack_links[i] for i in route.back])
        connection.gross, connection.net = gross, net

    def join(self, transfer: Transfer) -> None:
        """Begin to drain a transfer, as fast as its sender offers it at most."""
        connection = transfer.connection
        gross = connection.gross
        net = connection.net
        assert gross is not None and net is not None
        gross.weight = net.weight = connection.route.weight
        gross.owner = net.owner = transfer
        self.gross.join(gross, transfer.most)
        if self.ack_share:
            self.net.join(net, transfer.most)
            for link in gross.ack_links:
                link.claims.append(gross)

    def leave(self, connection: Connection) -> None:
        gross = connection.gross
        net = connection.net
        assert gross is not None and net is not None
        gross.owner = net.owner = None
        self.gross.leave(gross)
        if self.ack_share:
            self.net.leave(net)
            for link in gross.ack_links:
                link.claims.pop(place_of(gross, link.claims))
                self._note_stale(link)

    def limit(self, connection: Connection, cap: float) -> None:
        """Give a connection another limit."""
        gross = connection.gross
        assert gross is not None
        if gross.cap != cap:
            self.change(connection, cap)

    def change(self, connection: Connection, cap: float) -> None:
        """Give a connection the weight of its route, and a limit."""
        gross = connection.gross
        net = connection.net
        assert gross is not None and net is not None
        self.gross.change(gross, connection.route.weight, cap)
        if self.ack_share:
            self.net.change(net, connection.route.weight, cap)

    def resize(self, link: int, payload: float) -> None:
        """Give a link another capacity."""
        self.payload[link] = payload
        self.gross.resize(self.gross.links[link], payload)
        if self.ack_share:
            self._note_stale(self._ack_links[link])

    def users(self, link: int) -> list[Connection]:
        """Connections whose data or acknowledgements cross a link."""
        claims = self.gross.links[link].claims
        if self.ack_share:
            claims = claims + self._ack_links[link].claims
        return [transfer_of(claim).connection for claim in claims]

    def settle(self) -> list[Claim]:
        """Find rates after changes; returns the claims of `net` whose `next_rate` differs from `rate`."""
        changed = self.gross.settle()
        if not self.ack_share:
            return changed
        for claim in changed:
            claim.rate = claim.next_rate
            for link in claim.ack_links:
                self._note_stale(link)
        if self._stale:
            for link in self._stale:
                link.is_stale = False
                taken = 0.0
                for claim in link.claims:
                    taken += claim.rate * transfer_of(claim).connection.route.acks
                payload = self.payload[link.shared.number]
                self.net.resize(link.shared, max(payload - self.ack_share * taken, payload * ACKS_AT_MOST))
            self._stale = []
        return self.net.settle()

    def _note_stale(self, link: AckLink) -> None:
        if not link.is_stale:
            link.is_stale = True
            self._stale.append(link)
