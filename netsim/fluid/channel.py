"""Connections: transfers between the same hosts that leave one after the other."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from netsim.fluid.paths import Path
    from netsim.fluid.tcp import Window

__all__ = ["BackgroundConnection", "Channel", "Channels"]


@dataclass(frozen=True, slots=True)
class BackgroundConnection:
    """Names the connections of background traffic: which entry, and which of its connections."""

    entry: int
    number: int


class Channel:
    """Transfers of one connection, in order; the first one is under way.

    Attributes:
        lane: tells it apart from others of its path.
        connection: what its sender calls it.
        path: which way it goes.
        window: how TCP limits it; None where nothing does.
        queue: slots of its transfers, in order of sending.
        backlog: bytes of those transfers.
        most_bytes_per_second: what the sender offers at most.
    """

    __slots__ = ("backlog", "connection", "lane", "most_bytes_per_second", "path", "queue", "window")

    def __init__(
        self,
        lane: Hashable,
        connection: Hashable,
        path: Path,
        window: Window | None,
        most_bytes_per_second: float = math.inf,
    ) -> None:
        self.lane = lane
        self.connection = connection
        self.path = path
        self.window = window
        self.queue: deque[int] = deque()
        self.backlog = 0.0
        self.most_bytes_per_second = most_bytes_per_second

    @property
    def is_background(self) -> bool:
        """Whether it is one of background traffic."""
        return isinstance(self.connection, BackgroundConnection)

    def swallows(self, num_bytes: float, now: float) -> bool:
        """Whether the sender's socket takes in all that is to be sent, so that the sender can go on."""
        return self.window is not None and num_bytes <= self.window.buffer_bytes(now)


class Channels:
    """The connections of a network, by what tells them apart and by path.

    A connection that is idle and whose state is that of a new one is forgotten: nobody can tell. Of the others so
    many are kept as a machine has file descriptors for; those idle for longest are closed first.
    """

    def __init__(self) -> None:
        self._lanes: dict[Hashable, dict[int, Channel]] = {}
        self._num = 0
        self._sweep_at = _FEW_IDLE

    def __iter__(self) -> Iterator[Channel]:
        for lane in self._lanes.values():
            yield from lane.values()

    def __len__(self) -> int:
        return self._num

    def find(self, lane: Hashable, path: Path) -> Channel | None:
        """The connection of a path in a lane."""
        channels = self._lanes.get(lane)
        return None if channels is None else channels.get(path.index)

    def of(self, lane: Hashable) -> Iterable[Channel]:
        """All connections of a lane."""
        return self._lanes.get(lane, _NO_CHANNELS).values()

    def add(self, channel: Channel, now: float) -> Channel:
        """Open a connection."""
        if self._num >= self._sweep_at:
            self._sweep(now)
        self._lanes.setdefault(channel.lane, {})[channel.path.index] = channel
        self._num += 1
        return channel

    def remove(self, channel: Channel) -> None:
        """Close a connection."""
        channels = self._lanes[channel.lane]
        del channels[channel.path.index]
        self._num -= 1
        if not channels:
            del self._lanes[channel.lane]

    def _sweep(self, now: float) -> None:
        """Forget idle connections; called so seldom that it costs next to nothing for each that is opened."""
        idle = []
        for channel in [channel for channel in self if not channel.queue]:
            if channel.window is None or channel.window.is_as_new(now):
                self.remove(channel)
            else:
                idle.append(channel)
        if len(idle) > _MOST_IDLE:
            idle.sort(key=_last_used)
            for channel in idle[: len(idle) - _MOST_IDLE // 2]:
                self.remove(channel)
        self._sweep_at = max(2 * self._num, _FEW_IDLE)


_FEW_IDLE = 1024
_MOST_IDLE = 1 << 15
_NO_CHANNELS: Mapping[int, Channel] = {}


def _last_used(channel: Channel) -> float:
    assert channel.window is not None
    return channel.window.last_used
