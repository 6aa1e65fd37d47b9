"""Shell scripts that make a simulated network real on Linux hosts: tc with htb, netem and u32, a script a host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from netsim.topology.graph import Host
    from netsim.topology.topology import Topology

__all__ = ["address_file", "shaping_script"]

_MOST_PEERS = 4000  # class numbers are hexadecimal, four digits


def address_file(topology: Topology) -> str:
    """`addresses.sh`, which every script reads: one variable a host, to be filled in."""
    lines = [
        f"# The addresses of the hosts of {_on_one_line(topology.name)}: fill in what they really are.",
        *(f"address_{host.index}=192.0.2.{host.index + 1}  # {host.name}" for host in topology.hosts[:250]),
        *(f"address_{host.index}=  # {host.name}" for host in topology.hosts[250:]),
    ]
    return "\n".join(lines) + "\n"


def shaping_script(topology: Topology, host: int) -> str:
    """What shapes all that leaves one host: its own line, and to each peer rate, one-way latency and loss of the route.

    What routes of several hosts share behind their own lines (a WAN link between regions) is not shared here: each pair
    gets its rate. Latency is one way, so both ends run their script.

    Raises InputError for more than 4,000 peers.
    """
    if len(topology.hosts) > _MOST_PEERS:
        raise InputError(f"{topology.name}: tc scripts are for up to {_MOST_PEERS} hosts")
    own = topology.hosts[host]
    others = [peer for peer in topology.hosts if peer.index != host and topology.route(host, peer.index)]
    first = {topology.route(host, peer.index)[0] for peer in others}
    line = sum(topology.links[link].bits_per_second for link in first)
    lines = [
        "#!/bin/sh",
        f"# What leaves {own.name} in the network {_on_one_line(topology.name)}.",
        f"# As root: sh {own.name}.sh DEVICE; addresses.sh is beside it. Undo: tc qdisc del dev DEVICE root",
        "set -eu",
        "device=${1:?usage: sh SCRIPT DEVICE}",
        '. "$(dirname "$0")/addresses.sh"',
        'tc qdisc replace dev "$device" root handle 1: htb default 1',
        'tc class add dev "$device" parent 1: classid 1:1 htb rate 100gbit  # all else',
        f'tc class add dev "$device" parent 1: classid 1:2 htb rate {_bits(line)}',
    ]
    for number, peer in enumerate(others, 16):
        lines += _to_peer(topology, host, peer, f"{number:x}", line / len(others))
    return "\n".join(lines) + "\n"


def _to_peer(topology: Topology, host: int, peer: Host, handle: str, share: float) -> list[str]:
    """One class a peer: at least its share of the host's own line, at most what the route carries."""
    links = [topology.links[link] for link in topology.route(host, peer.index)]
    rate = min(link.bits_per_second for link in links)
    seconds = topology.route_latency_seconds(host, peer.index)
    loss = 1 - math.prod(1 - link.loss for link in links)
    lost = f" loss {loss * 100:.6g}%" if loss else ""
    add = 'tc {} add dev "$device"'.format
    # netem holds what is on its way: twice the bandwidth-delay product, in full frames.
    limit = max(1000, math.ceil(2 * rate * seconds / 8 / 1514))
    return [
        f"# to {peer.name}",
        f"{add('class')} parent 1:2 classid 1:{handle} htb rate {_bits(min(share, rate))} ceil {_bits(rate)}",
        f"{add('qdisc')} parent 1:{handle} handle {handle}: netem delay {seconds * 1e6:.0f}us{lost} limit {limit}",
        f"{add('filter')} parent 1: protocol ip u32 match ip dst"
        f' "$address_{peer.index}"/32 flowid 1:{handle}',
    ]


def _bits(bits_per_second: float) -> str:
    return f"{max(bits_per_second, 8):.0f}bit"


def _on_one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
