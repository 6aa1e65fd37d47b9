"""Rows of advice that are one thing: a strategy whose searched options hardly matter here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["merged", "told_alike"]

_ALIKE = 1e-3  # of days, relative


def merged(rows: Sequence[dict[str, Any]], searched: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """One row for those that differ in searched options alone and take as long; its `alike` has the others' options.

    Of such rows the one whose options are smallest stays, in the order in which strategies list them.

    Args:
        rows: by their days, what does not fit at the end.
        searched: names of options by strategy.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        names = list(searched.get(row["strategy"], ()))
        place = next((at for at, other in enumerate(kept) if names and _are_alike(row, other, names)), None)
        if place is None:
            kept.append({**row, "alike": list(row.get("alike", []))})
            continue
        first, second = sorted((kept[place], row), key=lambda each: _values(each, names))
        others = [*kept[place]["alike"], *row.get("alike", []), second["options"]]
        distinct = [
            each for at, each in enumerate(others) if each not in others[:at] and each != first["options"]
        ]
        kept[place] = {**first, "alike": distinct}
    return kept


def _are_alike(row: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> bool:
    fixed = [
        {key: value for key, value in each["options"].items() if key not in names} for each in (row, other)
    ]
    same = all(row[key] == other[key] for key in ("strategy", "streams", "left_out", "groups", "fits"))
    return same and fixed[0] == fixed[1] and abs(row["days"] - other["days"]) <= _ALIKE * other["days"]


def _values(row: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Of searched options; one that a strategy chooses itself comes last."""
    return [row["options"].get(name, float("inf")) for name in names]


def told_alike(row: Mapping[str, Any], searched: Mapping[str, Mapping[str, int]]) -> str:
    """How many other options take as long, and between which values.

    >>> row = {"strategy": "S", "options": {"tau": 2}, "alike": [{"tau": 5}, {"tau": 10}]}
    >>> told_alike(row, {"S": {"tau": 0}})
    ' (and 2 alike: tau 2 to 10)'
    """
    if not row["alike"]:
        return ""
    ranges = []
    for name in searched[row["strategy"]]:
        values = sorted({each[name] for each in (row["options"], *row["alike"]) if name in each})
        if len(values) > 1:
            ranges.append(f"{name} {values[0]} to {values[-1]}")
    return f" (and {len(row['alike'])} alike{': ' if ranges else ''}{', '.join(ranges)})"
