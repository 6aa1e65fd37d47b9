"""What sites train, by name, compared: tells people in what one differs from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.names import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["differences", "known_facts", "short_names"]

_MOST_TOLD = 3


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str = "theirs") -> str:
    """Facts that differ, in words; "" where none does, or one of the two has told nothing.

    `whose` stands before the second of two values.

    >>> differences({"settings: seed": "7"}, {"settings: seed": "42"})
    'settings: seed is 7, theirs 42'
    """
    if not mine or not theirs:
        return ""
    differing = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    told = [
        f"{visible(name, 60)} is {visible(mine.get(name, 'absent'), 60)}, "
        f"{whose} {visible(theirs.get(name, 'absent'), 60)}"
        for name in differing[:_MOST_TOLD]
    ]
    more = [f"and {len(differing) - len(told)} more"] if len(differing) > len(told) else []
    return "; ".join([*told, *more])


def short_names(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts by the names that a user has written, without the part that they belong to."""
    parts = ("strategy's options: ", "settings: ")
    return {name.removeprefix(parts[0]).removeprefix(parts[1]): value for name, value in facts.items()}


def known_facts(hello: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those that a process has told when it came; none of what is no such thing."""
    facts = hello.get("facts")
    return facts if isinstance(facts, dict) else {}
