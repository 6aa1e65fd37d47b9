"""Numbers of all workers, or of each site by its name: `4` or `fra=4,ore=2`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["by_site", "devices", "dollars", "share"]

T = TypeVar("T")


def by_site(text: str, flag: str, number: Callable[[str], T]) -> T | dict[str, T]:
    """One number for all, or one for each host or region that is named.

    Args:
        text: what was given.
        flag: where, for errors.
        number: reads one; ValueError tells what is expected.

    Raises:
        InputError: it is neither.

    >>> by_site("4", "--devices-per-worker", devices), by_site("fra=4, ore=2", "--devices-per-worker", devices)
    (4, {'fra': 4, 'ore': 2})
    """
    found: dict[str, T] = {}
    try:
        if "=" not in text:
            return number(text)
        for part in text.split(","):
            site, sign, value = (word.strip() for word in part.partition("="))
            if not sign or not site or site in found:
                raise ValueError("SITE=NUMBER,SITE=NUMBER,..., each site once")
            found[site] = number(value)
    except ValueError as error:
        raise InputError(f"{flag} {text}: expected {error}") from None
    return found


def devices(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("a whole number from 1 on, or such as fra=4,ore=2")
    return int(text)


def dollars(text: str) -> float:
    """Dollars, from 0 on."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1e12:
        raise ValueError("dollars of a worker's hour, such as 20 or fra=20,ore=8")
    return found


def share(text: str) -> float:
    """A number above 0, up to 1."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise ValueError("a share of the peak above 0, up to 1, such as 0.4 or fra=0.5,ore=0.35")
    return found
