"""Networks as data: hosts, links, regions, routes, and where ranks are placed."""

from netsim.topology.topology import Host, Link, Topology, shipped_topologies

__all__ = ["Host", "Link", "Topology", "shipped_topologies"]
