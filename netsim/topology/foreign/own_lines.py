"""Rates that look as if a place's own line, and none of its ways, had been measured."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.topology.foreign.draft import rate

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["remarks_on_lines"]

_ALIKE = 1.1  # the largest of a place's rates by its least
_MOST_REMARKS = 4


@dataclass(frozen=True)
class _Alike:
    """Rates on the wire that a place has to some others, or from them, all nearly the same."""

    least: float
    most: float
    others: frozenset[str]


def remarks_on_lines(
    rates: Mapping[tuple[str, str], float], lines: Mapping[str, tuple[int, float, float]], payload: float
) -> list[str]:
    """A remark on each place whose rates to all others, or from them, are alike, while its hosts' lines are wider.

    Links of their own let such a place send to all at once as much as was measured to each. Where all that send to a
    place send alike to everybody, it is their lines that tell, and not its own.

    Args:
        rates: (from, to) -> bit/s on the wire, where it was measured.
        lines: place -> (hosts, bit/s up and bit/s down of each host's own link), of all places.
        payload: share of a byte on the wire that is goodput, in which rates are told.

    >>> rates = {("home", "a"): 40e6, ("home", "b"): 39e6, ("a", "b"): 1e9, ("b", "a"): 2e9, ("a", "home"): 3e8}
    >>> (line,) = remarks_on_lines(rates, dict.fromkeys(("home", "a", "b"), (1, 1e10, 1e10)), 1.0)
    >>> line.partition(":")[0]
    "home's rates to all others are alike (39 to 40 Mbit/s)"
    """
    up, down = _alike(rates, 0), _alike(rates, 1)
    up_told = {
        one: each for one, each in up.items() if len(down) == len(lines) or not each.others <= down.keys()
    }
    down_told = {
        one: each for one, each in down.items() if len(up) == len(lines) or not each.others <= up.keys()
    }
    remarks = []
    for place, (hosts, own_up, own_down) in lines.items():
        sends, gets = up_told.get(place), down_told.get(place)
        sends = sends if sends is not None and own_up * hosts > sends.most * _ALIKE else None
        gets = gets if gets is not None and own_down * hosts > gets.most * _ALIKE else None
        said = []
        if sends is not None:
            own_up = sends.most
            said.append(f"{place}'s rates to all others are alike ({_span(sends, payload)})")
        if gets is not None:
            own_down = gets.most
            said.append(f"all others' rates to {place} are alike ({_span(gets, payload)})")
        if said:
            remarks.append(
                f"{', and '.join(said)}: probably its own line, which it would have here to each of them at once;"
                f" measure two at once, or give {_options(place, hosts, own_up, own_down)} (bytes on the wire)"
            )
    if len(remarks) > _MOST_REMARKS:
        told = f"likewise of {len(remarks) - _MOST_REMARKS:,} more places"
        remarks[_MOST_REMARKS:] = [told]
    return remarks


def _alike(rates: Mapping[tuple[str, str], float], end: int) -> dict[str, _Alike]:
    """The places whose rates to two others or more (end 0; from: 1) are alike."""
    ways: dict[str, dict[str, float]] = {}
    for ends, each in rates.items():
        ways.setdefault(ends[end], {})[ends[1 - end]] = each
    return {
        place: _Alike(min(each.values()), max(each.values()), frozenset(each))
        for place, each in ways.items()
        if len(each) > 1 and max(each.values()) <= _ALIKE * min(each.values())
    }


def _span(alike: _Alike, payload: float) -> str:
    least, most = (rate(float(f"{each * payload:.3g}")) for each in (alike.least, alike.most))
    if least == most:
        return most
    return f"{least.split()[0] if least.split()[1] == most.split()[1] else least} to {most}"


def _options(place: str, hosts: int, up: float, down: float) -> str:
    both = [rate(float(f"{each:.3g}")).replace(" ", "") for each in (up, down)]
    line = both[0] if both[0] == both[1] else ":".join(both)
    alone = f" --hosts {shlex.quote(f'{place}=1')}" if hosts > 1 else ""
    return f"--nic {shlex.quote(f'{place}={line}')}{alone}"
