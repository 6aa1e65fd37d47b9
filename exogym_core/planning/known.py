"""What was found out for one plan and holds for others: points of a sweep differ in little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from exogym_core.strategy.base import Strategy

__all__ = ["Known"]

T = TypeVar("T")


class Known:
    """Findings by what they depend on; they last as long as this does."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._seen: list[Any] = []

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """What `find` gave when this was first asked.

        >>> known = Known()
        >>> known.once("a", lambda: 1), known.once("a", lambda: 2)
        (1, 1)
        """
        if key not in self._found:
            self._found[key] = find()
        found: T = self._found[key]
        return found

    def number_of(self, thing: object) -> int:
        """A number that equal things share, for what cannot be hashed itself.

        >>> known = Known()
        >>> known.number_of({"a": 1}), known.number_of([]), known.number_of({"a": 1})
        (0, 1, 0)
        """
        for number, seen in enumerate(self._seen):
            if seen is thing or (type(seen) is type(thing) and seen == thing):
                return number
        self._seen.append(thing)
        return len(self._seen) - 1

    def key_of(self, strategy: Strategy) -> Hashable:
        """Equal for strategies that do the same: of one class, with equal arguments and as many servers."""
        return type(strategy), self.number_of(strategy.arguments), tuple(strategy.server_groups)
