"""Searching whole-numbered options of a strategy by doubling and halving, from a good start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["climbed"]

_LARGE = 10_000  # as bytes are
_AS_SOON = 0.005  # relative; what differs by less is as soon, and smaller options are better then


def climbed(
    start: Mapping[str, Any],
    row: Mapping[str, Any],
    names: Sequence[str],
    planned: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    most: int,
) -> list[Mapping[str, Any]]:
    """Go from `start` to the neighbour that is sooner, or as soon with smaller options, until there is none.

    Args:
        start: options.
        row: what they need, with `days`.
        names: of the options that are searched; a neighbour has one of them doubled, halved, or one more or less; large
            ones four times as large or small.
        planned: what options need; raises InputError for such as do not go together.
        most: plans to make.

    Returns:
        Every row that was planned on the way, in order.
    """
    tried: dict[tuple[Any, ...], Mapping[str, Any] | None] = {_key(start, names): row}
    rows: list[Mapping[str, Any]] = []
    best, options = row, dict(start)
    moved = True
    while moved:
        moved = False
        for neighbour in _neighbours(options, names):
            key = _key(neighbour, names)
            if key in tried:
                continue
            if len(rows) >= most:
                return rows
            try:
                tried[key] = found = planned(neighbour)
            except InputError:
                tried[key] = None
                continue
            rows.append(found)
            if _is_better(found, neighbour, best, options, names):
                best, options, moved = found, neighbour, True
                break
    return rows


def _key(options: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(options[name] for name in names)


def _neighbours(options: Mapping[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        value = options[name]
        others = (value // 2, 2 * value, value - 1, value + 1)
        for other in dict.fromkeys(others if value < _LARGE else (4 * value, value // 4)):
            if other >= 0 and other != value:
                yield {**options, name: other}


def _is_better(
    row: Mapping[str, Any],
    options: Mapping[str, Any],
    best: Mapping[str, Any],
    best_options: Mapping[str, Any],
    names: Sequence[str],
) -> bool:
    if abs(row["days"] - best["days"]) > _AS_SOON * best["days"]:
        return bool(row["days"] < best["days"])
    return _key(options, names) < _key(best_options, names)
