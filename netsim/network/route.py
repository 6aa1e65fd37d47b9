"""Routes between hosts, with their figures at present.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from math import inf
from typing import final


@final
class NarrowestLink:
    """The link of a route that carries least, as TCP's windows meet it; its own line aside where that holds senders.

    Attributes:
        rate: payload bytes per second that it carries; while it is dead, what it carried last.
        least: the same, the sender's own line included.
        feed: payload bytes per second that the links before it carry; 0 where it is the first.
        queue: bytes that its queue holds; infinity: any window.
        follows_source: it follows the sender's own line, which drops nothing: while that is full, data wait in sockets.
        is_held: the sender's own line was full as data last drained, or a process.
        bursts_at: its index if bursts may overrun the queue and small frames wait in it (under a rendezvous); else -1.
        revision: of the links' rates, when this was measured.
    """

    def __init__(self) -> None:
        self.rate = self.least = 0.0
        self.feed = 0.0
        self.queue = inf
        self.follows_source = False
        self.is_held = False
        self.bursts_at = -1
        self.revision = -1


@final
class Delivered:
    """Payload of finished transfers.

    Attributes:
        all: bytes.
        background: of these, background traffic's.
    """

    def __init__(self) -> None:
        self.all = 0.0
        self.background = 0.0


@final
class Route:
    """Links from one host to another, and what they are like at present.

    Attributes:
        source, target: host indices.
        links: link indices in order; none within a host.
        back: link indices of the opposite route, which carries acknowledgements.
        latency: one-way seconds.
        setup: seconds of software and handshake, added before the first byte leaves.
        round_trip: seconds.
        loss: share of packets lost.
        streams: of a connection.
        weight: share of a transfer on it relative to others.
        segment: payload bytes of a full packet, one of each stream.
        acks: bytes of acknowledgements relative to those of packets as long as the protocol's.
        window_limit: bytes that the socket's buffer lets be in flight.
        narrowest: the link that carries least.
        delivered: payload of finished transfers.
    """

    def __init__(self, source: int, target: int, links: list[int], back: list[int]) -> None:
        self.source = source
        self.target = target
        self.links = links
        self.back = back
        self.latency = 0.0
        self.setup = 0.0
        self.round_trip = 0.0
        self.loss = 0.0
        self.streams = 1.0
        self.weight = 1.0
        self.segment = 0.0
        self.acks = 1.0
        self.window_limit = inf
        self.narrowest = NarrowestLink()
        self.delivered = Delivered()
