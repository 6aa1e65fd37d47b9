"""A list of transfers on the network: each is sent at its start, and its instant of delivery noted.

Compiled by mypyc where a C compiler is there; see `netsim.network.build`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from netsim.network.connections import ConnectionPool, Owner, Transfer
from netsim.network.engine import Engine, Timer


@final
class FedTransfer(Owner):
    """Owner of one transfer of a list: its row, and the connection that it has taken."""

    def __init__(self, feed: Feed, row: int, pool: ConnectionPool, connection: int) -> None:
        self.hears_drops = True
        self.feed = feed
        self.row = row
        self.pool = pool
        self.connection = connection

    def delivered(self, transfer: Transfer) -> None:
        self.feed.finish[self.row] = self.feed.engine.now
        self.dropped(transfer)
        call = self.feed.on_delivered
        if call is not None:
            self.feed.engine.show_time(self.feed.engine.now)
            call()

    def dropped(self, transfer: Transfer) -> None:
        self.pool.free(self.connection)
        self.feed.end(transfer)


@final
class Feed(Timer):
    """Sends each transfer of a list at its start, on an idle connection between its hosts or a new one.

    Args:
        engine: network on which they are sent.
        starts, sources, targets, sizes: seconds, host indices, bytes of each transfer.
        finish: by transfer, set to the instant of its delivery.
        on_delivered: called at each delivery; None: nothing is called.

    Attributes:
        num_under_way: transfers that are neither delivered nor lost.
        row_of: by number of the engine, the row of each transfer in flight.
        num_sent: transfers sent so far, of `order`.
        order: rows by start.
    """

    def __init__(
        self,
        engine: Engine,
        starts: list[float],
        sources: list[int],
        targets: list[int],
        sizes: list[float],
        finish: list[float],
        on_delivered: Callable[[], None] | None,
    ) -> None:
        super().__init__(-1)
        self.engine = engine
        self.finish = finish
        self.on_delivered = on_delivered
        self.num_under_way = len(starts)
        self.num_sent = 0
        self.order = sorted(range(len(starts)), key=starts.__getitem__)
        self.row_of: dict[int, int] = {}
        self._starts, self._sources, self._targets, self._sizes = starts, sources, targets, sizes
        self._pools: dict[int, ConnectionPool] = {}  # by pair of hosts
        self._wait()

    def ring(self) -> None:
        """Send what is due."""
        engine = self.engine
        while self.num_sent < len(self.order):
            row = self.order[self.num_sent]
            if self._starts[row] > engine.now:
                break
            self.num_sent += 1
            source, target = self._sources[row], self._targets[row]
            pair = source * engine.connections.num_hosts + target
            pool = self._pools.get(pair)
            if pool is None:
                pool = self._pools[pair] = ConnectionPool()
            number = pool.take()
            connection = engine.connect(number, source, target)
            transfer = Transfer(connection, self._sizes[row], FedTransfer(self, row, pool, number))
            engine.send(transfer)
            self.row_of[transfer.number] = row
        self._wait()

    def end(self, transfer: Transfer) -> None:
        """Count a transfer as over; after the last one `Engine.advance` returns."""
        del self.row_of[transfer.number]
        self.num_under_way -= 1
        if self.num_under_way == 0:
            self.engine.has_called_out = True

    def unfinished(self) -> list[int]:
        """Rows in flight, and those to come."""
        return [*self.row_of.values(), *self.order[self.num_sent :]]

    def _wait(self) -> None:
        """Ring at the next start."""
        if self.num_sent < len(self.order):
            self.engine.wake(self, self._starts[self.order[self.num_sent]])
