"""Plays collectives on a network, by the fastest of the ways that give the right times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.collectives.events import Execution
from netsim.collectives.rendezvous import RendezvousExecution

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from netsim.collectives.schedules import Schedule
    from netsim.network import Network

__all__ = ["Play", "play"]


class Play:
    """One collective under way on a network."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def arrive(self, member: int) -> None:
        """This member (a position in the group) enters now."""
        self._execution.arrive(member)


def play(
    network: Network,
    schedule: Schedule,
    hosts: Sequence[int],
    *,
    group: Hashable = None,
    on_done: Callable[[int], None],
) -> Play:
    """Start one collective among members on `hosts`; nothing happens before they arrive.

    Args:
        network: on whose links and clock it is played.
        schedule: what is sent.
        hosts: the host of each member; members may share one.
        group: names the connections it uses; collectives of one group share them, and their state.
        on_done: called with a member's position at the instant it is through, which may be before others
        arrive (the root of a broadcast), and within `arrive` where nothing is to be waited for.
    """
    way = RendezvousExecution if network.protocol.rendezvous else Execution
    return Play(way(network, schedule, hosts, group, on_done))
