"""Objects within reach of an object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["reachable"]


def reachable(
    root: object, opens: Callable[[object], bool], longest: float = math.inf, most: float = math.inf
) -> Iterator[object]:
    """`root` and the objects within its reach, each once: through mappings, lists, tuples, sets, and attributes.

    Args:
        root: begin here.
        opens: whether the attributes of an object lead further.
        longest: items of the longest mapping, list, tuple or set that leads further.
        most: objects after which the search ends.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting and len(seen) < most:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Mapping | list | tuple | set):
            items = value.values() if isinstance(value, Mapping) else value
            waiting += items if len(value) <= longest else ()
        elif opens(value):
            waiting += getattr(value, "__dict__", {}).values()
