"""When compiled code (the `fast` extra) is worth loading, which takes about a second."""

from __future__ import annotations

import importlib.util

__all__ = ["LEAST", "is_worth_compiling"]

LEAST = {"transfers": 5_000, "messages": 20_000}
"""From how much of each kind of work on: transfers of a list, messages of a collective."""


def is_worth_compiling(kind: str, amount: int) -> bool:
    """Whether there is so much work of a kind of `LEAST` that compiled code saves time, and it is installed."""
    return amount >= LEAST[kind] and importlib.util.find_spec("numba") is not None
