"""Connections: transfers between the same hosts that leave one after the other."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from netsim.fluid.paths import Path
    from netsim.fluid.tcp import Window

__all__ = ["BackgroundConnection", "Channel"]


@dataclass(frozen=True, slots=True)
class BackgroundConnection:
    """Names the connections of background traffic: which entry, and which of its connections."""

    entry: int
    number: int


class Channel:
    """Transfers of one connection, in order; the first one is under way.

    Attributes:
        key: under which the network knows it.
        path: which way it goes.
        window: how TCP limits it; None where nothing does.
        queue: slots of its transfers, in order of sending.
        backlog: bytes of those transfers.
        most_bytes_per_second: what the sender offers at most.
        is_background: whether it is one of background traffic.
    """

    __slots__ = ("backlog", "is_background", "key", "most_bytes_per_second", "path", "queue", "window")

    def __init__(
        self,
        key: Hashable,
        path: Path,
        window: Window | None,
        most_bytes_per_second: float = math.inf,
        *,
        is_background: bool = False,
    ) -> None:
        self.key = key
        self.path = path
        self.window = window
        self.queue: deque[int] = deque()
        self.backlog = 0.0
        self.most_bytes_per_second = most_bytes_per_second
        self.is_background = is_background

    def count(self, num_bytes: float) -> None:
        """So much has come through of a transfer that is over."""
        self.path.num_bytes += num_bytes
        if self.is_background:
            self.path.background_bytes += num_bytes

    def swallows(self, num_bytes: float) -> bool:
        """Whether the sender's socket takes in all that is to be sent, so that the sender can go on."""
        return self.window is not None and num_bytes <= self.window.buffer_bytes
