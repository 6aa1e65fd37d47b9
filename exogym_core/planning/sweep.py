"""Plans over a grid of options, and where one strategy stops beating another."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError
from netsim.files.units import parse_bits_per_second

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["break_even", "grid", "step_ratio_lines"]


def grid(sweeps: Iterable[str]) -> list[dict[str, str]]:
    """Every combination of what `KEY=a,b,c` texts list; one empty combination without any.

    Raises:
        InputError: a text is not of that form.

    >>> grid(["H=10,100", "codec=int8"])
    [{'H': '10', 'codec': 'int8'}, {'H': '100', 'codec': 'int8'}]
    """
    axes = []
    for text in sweeps:
        key, separator, values = text.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not separator or not key.strip() or not all(listed):
            raise InputError(f"--sweep {text}: expected KEY=VALUE,VALUE,..., such as protocol.streams=1,8,64")
        axes.append([(key.strip(), value) for value in listed])
    return [dict(point) for point in itertools.product(*axes)]


def break_even(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """For each pair of strategies, at which value of `key` the faster one changes.

    Between two neighbouring points the crossing is read from the straight line through the ratio of their
    seconds a step, over the logarithm of the value.

    Args:
        rows: plans as mappings, each with `point`, the values of what is swept.
        key: which of these runs along the line; numbers or rates.
    """
    found = []
    others = {tuple(sorted((k, v) for k, v in row["point"].items() if k != key)) for row in rows}
    for rest in sorted(others):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if tuple(sorted((k, v) for k, v in row["point"].items() if k != key)) == rest:
                place = _number(row["point"][key])
                series.setdefault(row["strategy"], []).append((place, 1 / row["tokens_per_second"]))
        for first, second in itertools.combinations(sorted(series), 2):
            pairs = list(zip(sorted(series[first]), sorted(series[second]), strict=False))
            found += [
                {"first": first, "second": second, "key": key, "at": at, "point": dict(rest)}
                for at in _crossings(pairs)
            ]
    return found


def _crossings(
    pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]],
) -> list[float]:
    """Where the ratio of two series crosses one, between neighbouring values."""
    logs = [(math.log(first[0]), math.log(first[1] / second[1])) for first, second in pairs]
    return [
        math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
        for (x0, y0), (x1, y1) in itertools.pairwise(logs)
        if y0 * y1 < 0
    ]


def step_ratio_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of strategies at one point: how many times the other's steps the faster one may need.

    Below that ratio of steps to the same loss it is still the sooner there.
    """
    lines = []
    for _, group in itertools.groupby(rows, key=lambda row: tuple(sorted(row.get("point", {}).items()))):
        for first, second in itertools.combinations(list(group), 2):
            fast, slow = sorted((first, second), key=lambda row: -row["tokens_per_second"])
            lines.append(
                {
                    "faster": fast["strategy"],
                    "slower": slow["strategy"],
                    "steps_ratio": fast["tokens_per_second"] / slow["tokens_per_second"],
                    "point": dict(fast.get("point", {})),
                }
            )
    return lines


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = parse_bits_per_second(text)
    if number <= 0:
        raise InputError(f"sweep: {text!r} is not above zero")
    return number
