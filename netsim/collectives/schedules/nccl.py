"""NCCL's collectives between hosts: a ring, and for all_reduce a double binary tree, both in slices; and its choice.

Facts from NVIDIA/nccl (2.8.4 to 2.29.7), protocol Simple: src/device/all_reduce.h and prims_simple.h (chunks,
slices, order of sends), src/graph/trees.cc, src/enqueue.cc (chunk sizes), src/include/collectives.h (steps). With one
network card NCCL has two channels, each of which carries a part of the tensor over connections of its own. A
connection's buffer of 4 MiB (NCCL_BUFFSIZE) has eight steps (NCCL_STEPS); a ring's chunk of four steps travels in two
slices, and a slice is passed on as soon as it has come. A channel's kernel takes slices in order, so the first chunk of
a loop leaves when the last one before it has come whole. Trees and chains pass on single steps, up to eight at once.

Members are ordered by rank, one a host. Not here: the protocols LL and LL128 (LL doubles the bytes of small
tensors), chains of several GPUs inside a host, and PAT, by which recent versions gather and scatter small tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from netsim.collectives.schedules.ring import RingPhase
from netsim.collectives.schedules.schedule import Phase, Step, boundaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netsim.collectives.schedules.schedule import Bytes, Problem, Ranks

__all__ = [
    "BARRIER_BYTES",
    "all_gather_nccl_ring",
    "all_reduce_nccl_ring",
    "all_reduce_nccl_tree",
    "barrier_nccl",
    "broadcast_nccl_ring",
    "prefers_tree",
    "reduce_nccl_ring",
    "reduce_scatter_nccl_ring",
]

BARRIER_BYTES = 4
"""Bytes of the all_reduce that is a barrier."""

CHANNELS = 2
_BUFFER_BYTES, _BUFFER_STEPS = 4 << 20, 8
_STEP_BYTES = _BUFFER_BYTES // _BUFFER_STEPS
_CHUNK_BYTES, _SLICES = 4 * _STEP_BYTES, 2  # of a ring
_LEAST_SLICE_BYTES = _CHUNK_BYTES // _SLICES // 32
_LEAST_CHANNEL_BYTES = 16 << 10  # a second channel is used for more


def _num_channels(num_bytes: int) -> int:
    return CHANNELS if num_bytes > _LEAST_CHANNEL_BYTES else 1


def _whole(num_bytes: int, element_bytes: int) -> int:
    """Round down to whole elements, at least one."""
    return max(num_bytes // element_bytes, 1) * element_bytes


def _slice_bounds(layout: Bytes, channels: int, element_bytes: int) -> Bytes:
    """Boundaries of the slices of all parts, each by loop, slice and channel.

    Channels alternate, so a part is not in one piece a channel: only sizes and their order matter.
    """
    size = np.diff(layout)
    share = -(-size // (channels * element_bytes)) * element_bytes
    most = _whole(_CHUNK_BYTES, element_bytes)
    loops = max(int(-(-share.max(initial=0) // most)), 1)
    sizes = np.zeros((len(size), loops, _SLICES, channels), np.int64)
    for channel in range(channels):
        left = np.clip(size - channel * share, 0, share)
        chunk = np.clip(left[:, None] - np.arange(loops) * most, 0, most)
        half = -(-chunk // (_SLICES * element_bytes)) * element_bytes
        first = np.minimum(np.maximum(half, _whole(_LEAST_SLICE_BYTES, element_bytes)), chunk)
        sizes[:, :, 0, channel], sizes[:, :, 1, channel] = first, chunk - first
    return np.append(0, np.cumsum(sizes))


class PipelinedTree(Phase):
    """Trees, one a channel, through which its part of the tensor moves in chunks: up and added, down and kept, or both.

    In wave k the deepest members send chunk k. A level passes it on eight waves later, as many as a connection's
    buffer holds. A wave has a step for each channel and direction, and the window is eight waves: so a member passes
    a chunk on as soon as it has come, with as many under way as the buffer holds.
    """

    def __init__(
        self, p: Problem, parents: Sequence[Sequence[int]], *, goes_up: bool, goes_down: bool
    ) -> None:
        """`parents` has, by channel, the parent of each position, -1 for the root's."""
        self._ranks = p.ranks
        channels = self.num_channels = _num_channels(p.num_bytes)
        halves = boundaries(p.num_bytes, channels, p.element_bytes)
        step_bytes = _whole(_STEP_BYTES, p.element_bytes)
        self._bounds = [
            np.append(np.arange(low, high, step_bytes), high)
            for low, high in zip(halves[:-1].tolist(), halves[1:].tolist(), strict=True)
        ]
        self._members = [_by_depth(parents[channel]) for channel in range(channels)]
        self._parents = [np.array(parents[channel], np.int64) for channel in range(channels)]
        self._lanes = [
            (channel, up) for up in (True,) * goes_up + (False,) * goes_down for channel in range(channels)
        ]
        self._deepest = max(int(depth.max(initial=0)) for _, depth in self._members)
        self._below = self._deepest if goes_up else 0  # levels that a chunk has passed before it goes down
        self.window = _BUFFER_STEPS * len(self._lanes)
        waves = max(len(bounds) - 1 for bounds in self._bounds)
        span = self._deepest - 1 + (self._deepest if goes_up and goes_down else 0)
        self.num_steps = self._all_steps = (waves + _BUFFER_STEPS * span) * len(self._lanes)

    def reduces(self, index: int) -> bool:
        """Receivers add on the way up."""
        return self._lanes[index % len(self._lanes)][1]

    def step(self, index: int) -> Step:
        """Chunks that pass a level in one direction of one channel."""
        wave, lane = divmod(index, len(self._lanes))
        channel, up = self._lanes[lane]
        bounds, (members, depth) = self._bounds[channel], self._members[channel]
        chunk = wave - _BUFFER_STEPS * (self._deepest - depth if up else self._below + depth - 1)
        moves = (chunk >= 0) & (chunk < len(bounds) - 1)
        chunk, members = chunk[moves], members[moves]
        ends = self._ranks[members], self._ranks[self._parents[channel][members]]
        return Step(*(ends if up else ends[::-1]), bounds[chunk], bounds[chunk + 1] - bounds[chunk])

    def pair_bytes(self, num_ranks: int) -> Iterator[tuple[Ranks, Ranks, Bytes]]:
        """Children with parents, and parents with children."""
        if self.num_steps != self._all_steps:
            yield from super().pair_bytes(num_ranks)
            return
        for channel, up in self._lanes:
            members = np.flatnonzero(self._parents[channel] >= 0)
            ends = self._ranks[members], self._ranks[self._parents[channel][members]]
            bounds = self._bounds[channel]
            yield *(ends if up else ends[::-1]), np.full(len(members), bounds[-1] - bounds[0], np.int64)

    @property
    def num_messages(self) -> int:
        """Chunks times members below a root."""
        return sum((len(self._bounds[channel]) - 1) * (len(self._ranks) - 1) for channel, _ in self._lanes)


def _by_depth(parents: Sequence[int]) -> tuple[Ranks, Ranks]:
    """Positions by depth, without the root, and the depth of each."""
    up = np.array(parents, np.int64)
    depth, above = np.zeros(len(up), np.int64), up
    while (is_below := above >= 0).any():
        depth += is_below
        above = np.where(is_below, up[above], -1)
    order = np.argsort(depth, kind="stable")[1:]
    return order, depth[order]


def _binary_parents(num: int) -> list[int]:
    """Parents in the first tree: 0 above the largest power of two, leaves at odd positions, subtrees in order.

    >>> _binary_parents(6)
    [-1, 2, 4, 2, 0, 4]
    """
    parents = [-1]
    for position in range(1, num):
        bit = position & -position
        parent = (position ^ bit) | (bit << 1)
        parents.append(parent if parent < num else position ^ bit)
    return parents


def _double_tree(num: int) -> tuple[list[int], list[int]]:
    """Parents in both trees; leaves of one are inside the other: mirrored for an even number of members, else shifted.

    >>> _double_tree(4)
    ([-1, 2, 0, 2], [1, 3, 1, -1])
    """
    first = _binary_parents(num)
    if num % 2:
        return first, [
            (first[position - 1] + 1) % num if first[position - 1] >= 0 else -1 for position in range(num)
        ]
    return first, [num - 1 - parent if parent >= 0 else -1 for parent in reversed(first)]


def all_reduce_nccl_ring(p: Problem) -> tuple[Phase, ...]:
    """Sliced ring: reduce-scatter and all-gather in one pass of 2 (n - 1) rounds a loop."""
    rounds = p.num_ranks - 1
    return _ring(p, p.chunks.layout, shift=-1, num_rounds=2 * rounds, num_reducing=rounds)


def barrier_nccl(build: Callable[[Problem], tuple[Phase, ...]]) -> Callable[[Problem], tuple[Phase, ...]]:
    """A barrier as c10d's ProcessGroupNCCL does it: the all_reduce of one fp32 number, by the algorithm `build`."""
    return lambda p: build(replace(p, op="all_reduce", num_bytes=BARRIER_BYTES, element_bytes=BARRIER_BYTES))


def reduce_scatter_nccl_ring(p: Problem) -> tuple[Phase, ...]:
    """Sliced ring of n - 1 rounds a loop."""
    rounds = p.num_ranks - 1
    return _ring(p, p.layout, shift=-1, num_rounds=rounds, num_reducing=rounds)


def all_gather_nccl_ring(p: Problem) -> tuple[Phase, ...]:
    """Sliced ring of n - 1 rounds a loop."""
    return _ring(p, p.layout, shift=0, num_rounds=p.num_ranks - 1, num_reducing=0)


def _ring(p: Problem, layout: Bytes, *, shift: int, num_rounds: int, num_reducing: int) -> tuple[Phase, ...]:
    """Loops around a ring, in each of which every part moves on by a chunk a channel, in slices.

    A round has a step for each slice of each channel, and so has the window.
    """
    if not num_rounds:
        return ()
    channels = _num_channels(p.num_bytes)
    bounds = _slice_bounds(layout, channels, p.element_bytes)
    pieces, window = (len(bounds) - 1) // p.num_ranks, channels * _SLICES
    loops = pieces // window
    ring = RingPhase(
        p.ranks,
        bounds,
        shift=shift,
        reduce=num_reducing > 0,
        pieces=pieces,
        window=window,
        skip_empty=True,
        loops=loops,
        num_rounds=num_rounds,
        num_reducing=num_reducing,
    )
    ring.num_channels = channels
    return (ring,)


def all_reduce_nccl_tree(p: Problem) -> tuple[Phase, ...]:
    """Double binary tree, half the tensor through each; up and down at once."""
    if p.num_ranks == 1:
        return ()
    return (PipelinedTree(p, _double_tree(p.num_ranks), goes_up=True, goes_down=True),)


def broadcast_nccl_ring(p: Problem) -> tuple[Phase, ...]:
    """Around the ring from the root, chunk by chunk."""
    return _chain(p, [(position - 1) % p.num_ranks for position in range(p.num_ranks)], goes_up=False)


def reduce_nccl_ring(p: Problem) -> tuple[Phase, ...]:
    """Around the ring to the root, chunk by chunk."""
    return _chain(p, [(position + 1) % p.num_ranks for position in range(p.num_ranks)], goes_up=True)


def _chain(p: Problem, parents: list[int], *, goes_up: bool) -> tuple[Phase, ...]:
    if p.num_ranks == 1:
        return ()
    parents[p.root] = -1
    return (PipelinedTree(p, [parents] * CHANNELS, goes_up=goes_up, goes_down=not goes_up),)


# The choice between ring and tree: src/graph/tuning.cc (latencies, bandwidths, corrections), src/graph/search.cc
# (bandwidths that its search tries) and src/transport/net_socket.cc (speed of the card) of 2.29.7. NCCL knows the
# number of hosts and ranks, the bytes, and the speed of the card that the kernel reports. It does not know rates and
# round trips of the network, so its choice is the same on a LAN and across an ocean.


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
