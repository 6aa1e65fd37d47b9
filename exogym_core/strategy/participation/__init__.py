"""Participants of a strategy: workers that train, servers that combine, sites, and ranks that are absent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Participants"]


class Participants:
    """Roles of the ranks of a strategy; by default all train, in step with each other.

    Attributes:
        num_servers: ranks that compute nothing and `serve` instead; they are the last ones, and no workers.
        accepted_servers: the least and the largest number of them.
        is_synchronous: ranks do the same number of steps; where they do not, each ends at its own time.
    """

    num_servers: int = 0
    accepted_servers: tuple[int, float] = (1, math.inf)
    is_synchronous: bool = True

    @property
    def server_groups(self) -> tuple[int, ...]:
        """Numbers of servers by kind; each kind is spread over regions as workers are."""
        return (self.num_servers,)

    def workers_among(self, num_ranks: int) -> int:
        """Number of workers among so many ranks.

        Args:
            num_ranks: workers and servers.

        Raises:
            InputError: servers leave no worker.
        """
        if num_ranks <= self.num_servers:
            raise InputError(
                f"{type(self).__name__}: {num_ranks} ranks, of which {self.num_servers} serve, leave no worker; "
                "start more ranks"
            )
        return num_ranks - self.num_servers

    def take_servers(self, count: int) -> None:
        """Set the number of servers.

        Raises:
            InputError: the strategy has no servers, or cannot do with so many.
        """
        least, most = self.accepted_servers
        if not self.num_servers:
            raise InputError(f"{type(self).__name__}: servers={count}, but it has none; leave servers out")
        if not least <= count <= most:
            accepted = f"{least}" if least == most else f"{least} at least"
            raise InputError(
                f"{type(self).__name__}: servers={count}, but it takes {accepted}; leave servers out"
            )
        self.num_servers = count

    def serve(self, updated: Callable[[float], None]) -> None:
        """Serve instead of training, until no worker sends anything any more.

        Args:
            updated: to be called after changes of the model that could be shipped, with the local steps that have
                gone into it, as a mean over workers, when whatever has been taken from mailboxes is dealt with: it is
                evaluated then, and checkpoints keep `state_dict()`; after a restart `serve` begins again from that.
        """
        raise InputError(f"{type(self).__name__}: has no servers; leave servers out")
