"""NCCL's choice between its ring and its tree, by its own model of latencies and bandwidths.

Facts from NVIDIA/nccl 2.29.7: src/graph/tuning.cc (latencies, bandwidths, corrections), src/graph/search.cc
(bandwidths that its search tries), src/transport/net_socket.cc (speed of the card). NCCL knows the number of hosts
and ranks, the bytes, and the speed of the card that the kernel reports. It does not know rates and round trips of the
network, so its choice is the same on a LAN and across an ocean.
"""

from __future__ import annotations

from typing import NamedTuple

from netsim.collectives.schedules.nccl import CHANNELS

__all__ = ["prefers_tree"]


class _Times(NamedTuple):
    """Microseconds of one algorithm: before the first step, of a step between hosts, and of one inside a host."""

    base: float
    between: float
    inside: float


# Protocols: LL, and Simple. LL128 needs NVLink and cards beside the GPU, which sockets do not count as.
_TREE = {"LL": _Times(6.8, 5.0, 1.0), "Simple": _Times(8.4, 14.0, 4.0)}
_RING = {"LL": _Times(6.6, 2.7, 1.0), "Simple": _Times(8.4, 14.0, 5.7)}
_POST_MICROSECONDS = 1.0  # of a network send, three times by Simple
_PLATEAU, _PLATEAU_BYTES = 1.4, 64  # latencies of a ring whose parts have 64 bytes or more
_TREE_SHARE, _TREE_LL_SHARE, _RING_LL_SHARE = 0.92, 1 / 3.8, 0.5
_LL_MOST = (39.0, 20.4)  # gigabytes per second between two hosts, and more
# Shares of the tree's bandwidth that it reaches with 64 bytes, 128 bytes, and so on.
_TREE_REACHES = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
# Gigabytes per second that the search tries for a channel between hosts.
_SPEEDS = (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12)


def prefers_tree(num_bytes: int, num_ranks: int, num_hosts: int, card_bits_per_second: float) -> bool:
    """Return whether NCCL takes its tree, not its ring, for an all_reduce of one tensor.

    Args:
        num_bytes: of the tensor.
        num_ranks: members.
        num_hosts: hosts that they are on; on one the ring is taken, as NVLink and PCIe are not modelled.
        card_bits_per_second: speed of the card as the kernel reports it; NCCL takes 10 Gbit/s where it does not.

    >>> [prefers_tree(size, 32, 32, 10e9) for size in (1 << 10, 1 << 18, 1 << 20, 1 << 26)]
    [True, True, False, False]
    """
    if num_hosts < 2 or not num_bytes:
        return False
    card = card_bits_per_second / 8e9
    speed = next((speed for speed in _SPEEDS if speed <= card), _SPEEDS[-1])
    steps, steps_between = 2 * (num_ranks - 1), 2 * (num_hosts - 1)
    has_peers = num_ranks > num_hosts
    levels = num_hosts.bit_length() - 1
    size = (num_bytes >> 6).bit_length() - 1
    ring, tree = [], []
    for protocol in ("LL", "Simple"):
        is_ll = protocol == "LL"
        most = _LL_MOST[num_hosts > 2]
        of_tree, of_ring = _TREE[protocol], _RING[protocol]
        # Where each host has one rank, a ring's step takes as long as a tree's.
        between = of_ring.between if has_peers else of_tree.between
        inside = max(of_ring.inside, _POST_MICROSECONDS * (1 if is_ll else 3))
        latency = of_ring.base + (steps - steps_between) * inside + steps_between * between
        if not is_ll and num_bytes // (CHANNELS * num_ranks) >= _PLATEAU_BYTES:
            latency *= _PLATEAU
        rate = min(most, speed * _RING_LL_SHARE) if is_ll else speed
        ring.append(latency + num_bytes / (1000 * rate * num_ranks / steps))
        latency = of_tree.base + 2 * (
            (num_ranks // num_hosts - 1) * of_tree.inside + levels * of_tree.between
        )
        rate = speed * _TREE_SHARE
        rate = min(most, rate * _TREE_LL_SHARE) if is_ll else rate
        if 0 <= size < len(_TREE_REACHES[protocol]):
            rate *= _TREE_REACHES[protocol][size]
        tree.append(latency + num_bytes / (1000 * rate / 2))
    return min(tree) < min(ring)
