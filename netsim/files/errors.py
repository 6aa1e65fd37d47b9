"""The few exception types of NetGym. Every message is one complete line, with details on the lines below it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DeadlockError",
    "InputError",
    "MismatchError",
    "NetsimError",
    "RankError",
    "UnknownNameError",
    "unknown_name",
]


class NetsimError(Exception):
    """Base of all errors raised on purpose by this project."""


class InputError(NetsimError, ValueError):
    """Something a user wrote is wrong; the first line names the file, field, rank or call, and what to do."""


class UnknownNameError(InputError, TypeError):
    """An argument, key or choice that does not exist; the message lists the accepted ones, likeliest first."""


class DeadlockError(NetsimError, ValueError):
    """Ranks wait for what can never come. The first line tells the circle, the table below every rank's call."""


class MismatchError(InputError):
    """Members of one collective disagree in operation, shape, dtype, reduce op or root."""


class RankError(NetsimError, RuntimeError):
    """A rank failed with an exception of its own, or its process died.

    `rank` is the rank that failed first.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


def unknown_name(what: str, given: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that does not exist, as one line: what was given and what is accepted.

    >>> str(unknown_name("strategy", "DiLoco", ["FedAvg", "DiLoCo"]))
    "unknown strategy 'DiLoco': did you mean 'DiLoCo'? Accepted: DiLoCo, FedAvg"
    """
    names = sorted(set(known))
    # Compared without case and separators, since those are what people misremember.
    plain = {name: name.lower().replace("-", "").replace("_", "") for name in names}
    target = given.lower().replace("-", "").replace("_", "")
    names.sort(key=lambda name: -difflib.SequenceMatcher(None, target, plain[name]).ratio())
    if not names:
        return UnknownNameError(f"unknown {what} '{given}': none is accepted here")
    likely = difflib.SequenceMatcher(None, target, plain[names[0]]).ratio() >= 0.6
    hint = f"did you mean '{names[0]}'? " if likely else ""
    return UnknownNameError(f"unknown {what} '{given}': {hint}Accepted: {', '.join(names)}")
