"""The same network with other figures: what a plan asks 'what if' of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from netsim.topology.graph import Link
    from netsim.topology.topology import Topology

__all__ = ["with_links", "with_wan_bandwidth"]


def with_links(topology: Topology, change: Callable[[Link], Link]) -> Topology:
    """This network with every link as `change` makes it."""
    return replace(topology, links=tuple(change(link) for link in topology.links))


def with_wan_bandwidth(topology: Topology, bits_per_second: float) -> Topology:
    """This network with so much on each link between sites, each way."""
    inside = {host.name for host in topology.hosts if host.region is not None}
    return with_links(
        topology,
        lambda link: (
            link
            if link.source in inside or link.target in inside
            else replace(link, bits_per_second=bits_per_second)
        ),
    )
