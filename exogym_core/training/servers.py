"""Where servers stand: workers as without them, and each kind of servers spread over regions likewise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.topology.topology import Topology

__all__ = ["with_servers"]


def with_servers(
    topology: Topology, num_workers: int, placement: Sequence[str] | None, groups: Sequence[int]
) -> Sequence[str] | None:
    """The host of each worker, then of each server; as given where there are no servers, or where all are placed.

    Args:
        topology: where.
        num_workers: how many.
        placement: of the workers, as `run_ranks` has it.
        groups: how many servers of each kind.
    """
    if not sum(groups) or (placement is not None and len(placement) == num_workers + sum(groups)):
        return placement
    hosts = list(topology.place(num_workers, placement))
    for number in groups:
        hosts += topology.place(number)
    return [topology.hosts[host].name for host in hosts]
