"""What torch's process groups tell each other at a rendezvous before they are connected."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Notes"]

_MOST_KEYS = 20_000
_MOST_GROUPS = 1_000


class Notes:
    """What torch's process groups ask of a store; answers may have to wait.

    Args:
        answer: called with (who asked, question, answer).
    """

    def __init__(self, answer: Callable[[tuple[int, int], int, Mapping[str, Any]], None]) -> None:
        self._answer = answer
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[tuple[int, int], int, str]] = []
        self._gone: deque[str] = deque(maxlen=_MOST_GROUPS)  # groups that are no more

    def ask(self, who: tuple[int, int], question: int, asked: Mapping[str, Any]) -> None:
        """`set`, `get`, `add` or `check` a key, or `delete` it."""
        what, key = asked["does"], str(asked["key"])
        if key.partition("/")[0] in self._gone:
            self._answer(who, question, {"error": "the group is no more"})
            return
        if what == "get":
            self._waiting.append((who, question, key))
            self._look()
            return
        told: dict[str, Any] = {}
        if what == "set":
            while len(self._values) >= _MOST_KEYS:  # of groups that were made long ago
                del self._values[next(iter(self._values))]
            self._values[key] = str(asked["value"])
        elif what == "add":
            self._values[key] = str(int(self._values.get(key, "0")) + int(asked["value"]))
            told["value"] = int(self._values[key])
        elif what == "check":
            told["value"] = all(each in self._values for each in asked["keys"])
        else:
            told["value"] = self._values.pop(key, None) is not None
        self._answer(who, question, told)
        self._look()

    def forget(self, group: str) -> None:
        """The group is no more: its keys go, and who waits for one hears so."""
        self._gone.append(group)
        for key in [key for key in self._values if key.startswith(f"{group}/")]:
            del self._values[key]
        gone = [each for each in self._waiting if each[2].startswith(f"{group}/")]
        self._waiting = [each for each in self._waiting if each not in gone]
        for who, question, _ in gone:
            self._answer(who, question, {"error": "the group is no more"})

    def forget_asker(self, who: tuple[int, int]) -> None:
        """Who asked is not there any more."""
        self._waiting = [each for each in self._waiting if each[0] != who]

    def _look(self) -> None:
        for each in list(self._waiting):
            who, question, key = each
            if key in self._values:
                self._waiting.remove(each)
                self._answer(who, question, {"value": self._values[key]})
