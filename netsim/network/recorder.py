"""What happened while a network ran, kept: transfers, use of links, what ranks did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from netsim.network.network import Network

__all__ = ["Recorder", "Span", "TransferRecord"]


class Span(NamedTuple):
    """Something that a rank did for a while.

    Attributes:
        rank: whose.
        kind: `compute`; `communication`, from the Post of a call until it is done; `wait`, for such a call;
            `lost`, what was computed in vain, since the host crashed.
        name: the call's op; the kind where there is none.
        begin_seconds, end_seconds: when.
        num_bytes: the call's, None where there is none.
    """

    rank: int
    kind: Literal["compute", "communication", "wait", "lost"]
    name: str
    begin_seconds: float
    end_seconds: float
    num_bytes: int | None = None


@dataclass(slots=True)
class TransferRecord:
    """One transfer.

    Attributes:
        source, target: host indices.
        num_bytes: payload.
        begin_seconds: when it was sent.
        connection: as its sender named it.
        arriving_seconds: when its first byte arrived; None before.
        end_seconds: when all were there, or it was given up; None before.
        delivered_bytes: what came through.
    """

    source: int
    target: int
    num_bytes: float
    begin_seconds: float
    connection: Hashable
    arriving_seconds: float | None = None
    end_seconds: float | None = None
    delivered_bytes: float = 0.0


class Recorder:
    """Watches a network and ranks, and keeps what it sees.

    Attributes:
        transfers: by id.
        link_use: link index -> (instant, payload bytes per second from then on), in order.
        link_capacity: likewise (instant, bits per second that it carries), for links whose capacity has changed.
        spans: what ranks did; give `spans.append` to `netsim.ranks.kernel.Kernel` as `on_span`.
        network: that it watches, if any yet.
        unfinished_spans: called for what ranks are doing when the file is written; a kernel's, where there is one.
    """

    def __init__(self) -> None:
        self.transfers: dict[int, TransferRecord] = {}
        self.link_use: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        self.link_capacity: dict[int, list[tuple[float, float]]] = {}
        self.spans: list[Span] = []
        self.unfinished_spans: Callable[[], list[Span]] = list
        self.network: Network | None = None
        self._rates: dict[int, float] = {}
        self._users: defaultdict[int, dict[int, None]] = defaultdict(dict)  # transfers by link

    def watch(self, network: Network) -> None:
        """Keep what happens on a network from now on; on one network only."""
        assert self.network is None
        self.network = network
        network.observe(self)

    # -- what the network tells ------------------------------------------------------------------------------

    def transfer_started(
        self, transfer: int, source: int, target: int, num_bytes: float, connection: Hashable
    ) -> None:
        """A transfer was sent."""
        self.transfers[transfer] = TransferRecord(source, target, num_bytes, self._now, connection)

    def transfer_ended(self, transfer: int, delivered_bytes: float) -> None:
        """A transfer is over."""
        record = self.transfers[transfer]
        record.end_seconds, record.delivered_bytes = self._now, delivered_bytes
        if record.arriving_seconds is None:
            record.arriving_seconds = self._now
        if self._rates.pop(transfer, None) is not None:
            links = self._route(record)
            for link in links:
                del self._users[link][transfer]
            self._note(links)

    def rates_changed(self, transfers: Sequence[int], bytes_per_second: Sequence[float]) -> None:
        """Transfers go on at other rates."""
        concerned: dict[int, None] = {}
        for transfer, rate in zip(transfers, bytes_per_second, strict=True):
            record = self.transfers[transfer]
            if record.arriving_seconds is None:
                record.arriving_seconds = self._now
            self._rates[transfer] = rate
            for link in self._route(record):
                self._users[link][transfer] = None
                concerned[link] = None
        self._note(concerned)

    def capacity_changed(self, link: int, bits_per_second: float) -> None:
        """A link carries more or less from now on, or nothing."""
        if link not in self.link_capacity:
            assert self.network is not None
            self.link_capacity[link] = [(0.0, self.network.topology.links[link].bits_per_second)]
        points = self.link_capacity[link]
        if points[-1][0] == self._now:
            points.pop()
        points.append((self._now, bits_per_second))

    @property
    def _now(self) -> float:
        assert self.network is not None
        return float(self.network.env.now)

    def _route(self, record: TransferRecord) -> tuple[int, ...]:
        assert self.network is not None
        return self.network.topology.route(record.source, record.target)

    def _note(self, links: Iterable[int]) -> None:
        for link in links:
            use, now = self.link_use[link], self._now
            total = sum(self._rates[transfer] for transfer in self._users[link])
            if use and use[-1][0] == now:
                use.pop()  # rates between two things that happen at one instant hold for no time
            if (use[-1][1] if use else 0.0) != total:
                use.append((now, total))
