"""What one member of a collective sends, in payload bytes, where nobody simulates it.

The same rings, binomial trees and direct messages as netsim's default schedules, so that a run counts the
same bytes on every transport; a test compares the two.
"""

from __future__ import annotations

__all__ = ["sent_bytes"]


def sent_bytes(
    op: str,
    num_ranks: int,
    member: int,
    *,
    num_bytes: int,
    element_bytes: int = 1,
    root: int = 0,
    parts: tuple[int, ...] = (),
) -> int:
    """Payload bytes that `member` of `num_ranks` sends.

    Args:
        op: name of the collective, or `send`.
        num_ranks: members of the group.
        member: whose bytes, 0 to num_ranks - 1.
        num_bytes: the tensor this member gives; for `scatter` one part, for `reduce_scatter` the whole input.
        element_bytes: chunks of a ring hold whole elements.
        root: source or destination, where there is one.
        parts: bytes for each member (`all_to_all`).

    >>> [sent_bytes("all_reduce", 4, rank, num_bytes=100) for rank in range(4)]
    [150, 150, 150, 150]
    >>> [sent_bytes("broadcast", 4, rank, num_bytes=100) for rank in range(4)]
    [200, 100, 0, 0]
    """
    if num_ranks == 1:
        return 0
    match op:
        case "all_reduce":  # reduce-scatter, then all-gather
            kept = _chunk(num_bytes, num_ranks, element_bytes, member)
            return (
                2 * num_bytes - kept - _chunk(num_bytes, num_ranks, element_bytes, (member + 1) % num_ranks)
            )
        case "reduce_scatter":
            return num_bytes - _chunk(num_bytes, num_ranks, element_bytes, member)
        case "all_gather":
            return (num_ranks - 1) * num_bytes
        case "broadcast":
            return _children((member - root) % num_ranks, num_ranks) * num_bytes
        case "reduce" | "gather":
            return num_bytes if member != root else 0
        case "scatter":
            return (num_ranks - 1) * num_bytes if member == root else 0
        case "all_to_all":
            return sum(parts) - parts[member]
        case "send":
            return num_bytes
        case "barrier" | "recv":
            return 0
    raise AssertionError(f"no collective is called {op}")


def _chunk(num_bytes: int, num_ranks: int, element_bytes: int, index: int) -> int:
    """Bytes of chunk `index` of `num_ranks`, each of ceil(elements / num_ranks) elements, the last of less."""
    chunk_bytes = -(-(num_bytes // element_bytes) // num_ranks) * element_bytes
    return max(0, min(chunk_bytes, num_bytes - index * chunk_bytes))


def _children(virtual: int, num_ranks: int) -> int:
    """Children in a binomial tree of member `virtual`: virtual + 2^j below num_ranks for 2^j > virtual."""
    return sum(
        virtual + (1 << power) < num_ranks for power in range(virtual.bit_length(), num_ranks.bit_length())
    )
