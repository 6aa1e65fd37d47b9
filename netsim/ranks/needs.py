"""Members that a member of a collective waits for: those whose values its own is made of, and no others."""

from __future__ import annotations

__all__ = ["FROM_ROOT", "needs_nobody"]

#: Operations whose root has what all others get.
FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")
# All others carry messages even without elements: who receives learns that (and of what shape) there is nothing.
_NOTHING_IF_EMPTY = (*FROM_ROOT, *_TO_ROOT, "all_reduce", "all_gather", "reduce_scatter")


def needs_nobody(op: str, is_root: bool, is_empty: bool) -> bool:
    """Whether a member is through with a call as soon as it has posted, as far as values go.

    Args:
        op: what is called.
        is_root: the member is the call's root.
        is_empty: the call is of no elements at all.
    """
    if is_empty and op in _NOTHING_IF_EMPTY:
        return True
    return (op in FROM_ROOT and is_root) or (op in _TO_ROOT and not is_root)
