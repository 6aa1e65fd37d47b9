"""Plans over a grid of options, and break-even points of strategies and their variants."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from netsim.errors import InputError
from netsim.units import parse_bits_per_second

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "FLAGS",
    "break_even",
    "changes_learning",
    "concerns",
    "grid",
    "is_axis",
    "is_of_model",
    "is_sooner",
    "number",
    "once",
    "pace",
    "placed",
    "short_keys",
    "short_names",
    "sooner_throughout",
    "step_ratio_lines",
    "without_effect",
]

#: Swept keys that are flags of `netgym plan`.
FLAGS = ("topology", "device", "utilisation", "devices-per-worker", "memory", "micro-batch", "price")

# Keys that change the duration of a step, and not its learning.
_OF_TIME = ("protocol", "wan", "placement", "collectives", "compute", "transport", *FLAGS)


def grid(sweeps: Iterable[str]) -> list[dict[str, str]]:
    """Every combination of the values in `KEY=a,b,c` texts; one empty combination without any.

    Raises:
        InputError: a text is not of that form.

    >>> grid(["H=10,100", "codec=int8"])
    [{'H': '10', 'codec': 'int8'}, {'H': '100', 'codec': 'int8'}]
    """
    axes: list[list[tuple[str, str]]] = []
    for text in sweeps:
        key, separator, values = text.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not separator or not key.strip() or not all(listed):
            raise InputError(f"--sweep {text}: expected KEY=VALUE,VALUE,..., such as protocol.streams=1,8,64")
        if any(axis[0][0] == key.strip() for axis in axes):
            raise InputError(f"--sweep {text}: '{key.strip()}' is swept twice: give all values at once")
        axes.append([(key.strip(), value) for value in listed])
    return [dict(point) for point in itertools.product(*axes)]


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Short name of each key: of a strategy's option, the fewest last words that distinguish it.

    >>> short_keys(["strategies.DiLoCo.H", "protocol.streams", "wan.bandwidth"])
    {'strategies.DiLoCo.H': 'H', 'protocol.streams': 'protocol.streams', 'wan.bandwidth': 'wan.bandwidth'}
    >>> list(short_keys(["strategies.DiLoCo.H", "strategies.FedAvg.H"]).values())
    ['DiLoCo.H', 'FedAvg.H']
    """
    every = list(keys)
    return {
        key: name if key.startswith("strategies.") else key
        for key, name in zip(every, short_names(every), strict=True)
    }


def short_names(keys: Sequence[str]) -> list[str]:
    """The last parts of key paths, as many as distinguish them.

    >>> short_names(["topology.links.{*}.bandwidth", "strategies.*.lr", "compute.jitter", "strategy"])
    ['bandwidth', 'lr', 'jitter', 'strategy']
    """
    tails = [
        [".".join(parts[-count:]) for count in range(1, len(parts))]
        for parts in (key.split(".") for key in keys)
    ]
    taken = Counter(tail for own in tails for tail in own) + Counter(keys)
    return [
        next((tail for tail in own if taken[tail] == 1), key) for key, own in zip(keys, tails, strict=True)
    ]


def concerns(row: Mapping[str, Any], key: str) -> bool:
    """True if a swept key can change a row: keys of other strategies cannot.

    >>> row = {"strategy": "AllReduce", "point": {}}
    >>> concerns(row, "strategies.DiLoCo.H"), concerns(row, "strategies.AllReduce.codec"), concerns(row, "steps")
    (False, True, True)
    """
    own = f"strategies.{row['strategy']}."
    return not key.startswith("strategies.") or key.startswith(own)


def changes_learning(key: str) -> bool:
    """True if a key can change the steps to a loss.

    >>> changes_learning("strategies.DiLoCo.H"), changes_learning("protocol.streams")
    (True, False)
    """
    return key.partition(".")[0] not in _OF_TIME


def is_of_model(key: str) -> bool:
    """True if a key changes the model or its data: then neither steps nor tokens can be compared.

    >>> is_of_model("model.name"), is_of_model("strategies.DiLoCo.H")
    (True, False)
    """
    return key.partition(".")[0] in ("model", "task")


def is_sooner(row: Mapping[str, Any], other: Mapping[str, Any], name: str = "days") -> bool:
    """True if a row is faster anywhere in both bands, or processes more tokens for the same money.

    Rows that do not fit into memory come last.

    Args:
        row, other: plans as mappings, with `days_low`, `days_high` (None: without an end) and `fits`.
        name: `days`, or `cost` for the cheaper one.
    """
    if (row["fits"] is False) != (other["fits"] is False):
        return other["fits"] is False
    if row.get("tokens_low") is not None and other.get("tokens_high") is not None:
        return bool(row["tokens_low"] > other["tokens_high"])  # for the same money
    high = row[f"{name}_high"]
    return row is not other and high is not None and bool(high < other[f"{name}_low"])


def placed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plans as mappings with `place`: rows whose bands overlap share one; None without days.

    Rows of a sweep over models have places among those of their own model; a strategy that a swept key does not concern
    counts once.
    """
    of_models: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("days") is not None:
            swept = row.get("point", {}).items()
            of_models[tuple((key, value) for key, value in swept if is_of_model(key))].append(row)
    places = {
        id(row): 1 + sum(is_sooner(other, row) for other in once(group))
        for group in of_models.values()
        for row in group
    }
    return [dict(row) if "refused" in row else {**row, "place": places.get(id(row))} for row in rows]


def once(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """First of the rows of a plan that differ only in swept values that do not concern it."""
    found: dict[Hashable, Mapping[str, Any]] = {}
    for row in rows:
        own = (item for item in row.get("point", {}).items() if concerns(row, item[0]))
        found.setdefault((row["name"], *own), row)
    return list(found.values())


def without_effect(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if the plans are equal for all values of a swept key."""
    alike: dict[Hashable, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        rest = (item for item in row["point"].items() if item[0] != key)
        alike[row["name"], *rest].append({of: row[of] for of in row if of not in ("point", "place")})
    return all(other == group[0] for group in alike.values() for other in group)


def pace(row: Mapping[str, Any]) -> float:
    """Tokens per second; for a row planned for money, the tokens that it pays for.

    >>> pace({"tokens_per_second": 10.0}), pace({"tokens_per_second": 10.0, "tokens": 7.0, "tokens_low": 6.0})
    (10.0, 7.0)
    """
    return float(row["tokens_per_second" if row.get("tokens_low") is None else "tokens"])


def is_axis(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if a swept key can be an axis: at least two values, all of them quantities above zero."""
    values = {row["point"][key] for row in rows}
    with suppress(InputError):
        return len(values) > 1 and all(number(value) > 0 for value in values)
    return False


def number(text: str) -> float:
    """Parse a swept value: a plain number, or a rate.

    Raises:
        InputError: the value is neither, or not above zero.
    """
    try:
        value = float(text)
    except ValueError:
        value = parse_bits_per_second(text)
    if value <= 0:
        raise InputError(f"sweep: {text!r} is not above zero")
    return value


def break_even(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Break-even points of each pair of strategies, and of each pair of variants that differ in one swept key.

    Between two neighbouring points, the crossing is interpolated linearly in the logarithm of the ratio of seconds (or
    dollars) per token, over the logarithm of the value. It is omitted where bands overlap at every value on one side.

    Args:
        rows: plans as mappings, each with `point`, the values of swept keys.
        key: swept key along which strategies are compared; numbers or rates.

    Returns:
        Mappings with `first` and `second` (strategies, of variants with the key that differs), `key`, `at`,
        `sooner_below` and `sooner_above` (which of both is, on each side of it) and `point`, the values of the other
        keys that both have.
    """
    return [
        {
            **dict(zip(("first", "second"), names, strict=True)),
            **{"key": key, "at": at, "sooner_below": names[below], "sooner_above": names[1 - below]},
            "point": shared,
        }
        for names, shared, pairs in _pairs(rows, key)
        for at, below in _crossings(pairs)
    ]


def sooner_throughout(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Pairs of which one is faster at every value of `key`, beyond the bands of both.

    Returns mappings with `sooner`, `later`, `key` and `point`.
    """
    return [
        {"sooner": names[side], "later": names[1 - side], "key": key, "point": shared}
        for names, shared, pairs in _pairs(rows, key)
        for side in (0, 1)
        if pairs and all(_is_surely_sooner(pair[side], pair[1 - side]) for pair in pairs.values())
    ]


#: Rows of two lines by the value of the key along which they run.
_Pairs: TypeAlias = "Mapping[float, tuple[Mapping[str, Any], Mapping[str, Any]]]"


def _pairs(
    rows: Sequence[Mapping[str, Any]], key: str
) -> Iterator[tuple[tuple[str, str], dict[str, str], _Pairs]]:
    """Names, shared part of the point, and pairs of rows of each two lines that are comparable."""
    lines: dict[Hashable, dict[float, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        rest = (item for item in row["point"].items() if item[0] != key)
        lines[row.get("name"), row["strategy"], *rest][number(row["point"][key])] = row
    for first, second in itertools.combinations(lines.values(), 2):
        distinguished = _distinguished(next(iter(first.values())), next(iter(second.values())), key)
        if distinguished is not None:
            both = sorted({*first} & {*second})  # points that were refused are missing
            yield *distinguished, {at: (first[at], second[at]) for at in both}


def _distinguished(
    first: Mapping[str, Any], second: Mapping[str, Any], along: str | None = None
) -> tuple[tuple[str, str], dict[str, str]] | None:
    """Names of two rows and the shared part of their points; None where they differ in more than one thing.

    Args:
        first, second: rows.
        along: swept key that does not count.
    """
    one, two = (row.get("point", {}) for row in (first, second))
    differ = [key for key in one if key != along and one[key] != two[key]]
    shared = {key: value for key, value in one.items() if key != along and key not in differ}
    names = [row.get("name", row["strategy"]) for row in (first, second)]
    if names[0] == names[1]:
        if len(differ) != 1 or not concerns(first, differ[0]):
            return None
        (key,) = differ
        short = short_keys([each for each in one if each != along])[key]
        names = [f"{names[0]} {short}={point[key]}" for point in (one, two)]
    elif differ:
        return None
    return (names[0], names[1]), shared


def _crossings(pairs: _Pairs) -> list[tuple[float, int]]:
    """Values at which one of two lines overtakes the other beyond both bands, and the index of the faster below."""
    found = []
    values = list(pairs)
    logs = [math.log(pace(second) / pace(first)) for first, second in pairs.values()]
    for place, (y0, y1) in enumerate(itertools.pairwise(logs)):
        below, x0, x1 = int(y1 < y0), math.log(values[place]), math.log(values[place + 1])
        sides = ((values[: place + 1], below), (values[place + 1 :], 1 - below))
        if y0 * y1 < 0 and all(
            any(_is_surely_sooner(pairs[at][side], pairs[at][1 - side]) for at in part)
            for part, side in sides
        ):
            found.append((math.exp(x0 + (x1 - x0) * y0 / (y0 - y1)), below))
    return found


def _is_surely_sooner(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """`is_sooner`, or a comparison of paces for rows without bands."""
    if row.get("days_high") is None:
        return pace(row) > pace(other) * (1 + 1e-9)
    return is_sooner(row, other)


def step_ratio_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratio of steps up to which the faster strategy stays ahead.

    For each pair of strategies at one point, and each pair of variants that differ in one swept key that changes
    learning, whose bands do not overlap. Below this ratio of steps to the same loss, the faster one still finishes
    first, or reaches the loss for less money.
    """
    found = []
    for first, second in itertools.combinations(rows, 2):
        one, two = first.get("point", {}), second.get("point", {})
        differ = [key for key in one if one[key] != two[key]]
        compared = _distinguished(first, second)
        if compared is None or any(is_of_model(key) or not changes_learning(key) for key in differ):
            continue
        names, point = compared
        (fast, faster), (slow, slower) = sorted(
            zip((first, second), names, strict=True), key=lambda pair: -pace(pair[0])
        )
        if fast.get("days_high") is not None and not is_sooner(fast, slow):
            continue  # their bands overlap
        found.append(
            {"faster": faster, "slower": slower, "steps_ratio": pace(fast) / pace(slow), "point": point}
        )
    return found
