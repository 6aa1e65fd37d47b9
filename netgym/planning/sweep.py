"""Plans over a grid of options, and where one strategy, or one variant of it, stops beating another."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
    axes = []
    for text in sweeps:
        key, separator, values = text.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not separator or not key.strip() or not all(listed):
            raise InputError(f"--sweep {text}: expected KEY=VALUE,VALUE,..., such as protocol.streams=1,8,64")
        axes.append([(key.strip(), value) for value in listed])
    return [dict(point) for point in itertools.product(*axes)]


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each key as people say it: of options of strategies the fewest last words that distinguish them.

    >>> short_keys(["strategies.DiLoCo.H", "protocol.streams", "wan.bandwidth"])
    {'strategies.DiLoCo.H': 'H', 'protocol.streams': 'protocol.streams', 'wan.bandwidth': 'wan.bandwidth'}
    >>> list(short_keys(["strategies.DiLoCo.H", "strategies.FedAvg.H"]).values())
    ['DiLoCo.H', 'FedAvg.H']
    """
    words = {key: key.split(".") for key in keys}
    short = {key: key for key in words}
    for key, own in words.items():
        if own[0] != "strategies":
            continue
        for count in range(1, len(own)):
            name = ".".join(own[-count:])
            if all(other == key or name != ".".join(theirs[-count:]) for other, theirs in words.items()):
                short[key] = name
                break
    return short


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
    """True if a row is sooner anywhere in both bands, or works through more tokens for the same money.

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
    """The first of the rows of a plan that differ in swept values alone which cannot change it."""
    found: dict[Hashable, Mapping[str, Any]] = {}
    for row in rows:
        own = (item for item in row.get("point", {}).items() if concerns(row, item[0]))
        found.setdefault((row["name"], *own), row)
    return list(found.values())


def without_effect(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if the plans of all values of a swept key are alike."""
    alike: dict[Hashable, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        rest = (item for item in row["point"].items() if item[0] != key)
        alike[row["name"], *rest].append({of: row[of] for of in row if of not in ("point", "place")})
    return all(other == group[0] for group in alike.values() for other in group)


def pace(row: Mapping[str, Any]) -> float:
    """Tokens a second; of a row planned for money the tokens that it pays for.

    >>> pace({"tokens_per_second": 10.0}), pace({"tokens_per_second": 10.0, "tokens": 7.0, "tokens_low": 6.0})
    (10.0, 7.0)
    """
    return float(row["tokens_per_second" if row.get("tokens_low") is None else "tokens"])


def is_axis(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if a swept key can be an axis: at least two values, all of them quantities above zero."""
    values = {row["point"][key] for row in rows}
    return len(values) > 1 and all(_is_quantity(value) for value in values)


def _is_quantity(text: str) -> bool:
    try:
        return number(text) > 0
    except InputError:
        return False


def number(text: str) -> float:
    """A swept value as a number: a plain one, or a rate.

    Raises:
        InputError: it is neither, or not above zero.
    """
    try:
        value = float(text)
    except ValueError:
        value = parse_bits_per_second(text)
    if value <= 0:
        raise InputError(f"sweep: {text!r} is not above zero")
    return value


class _Line(NamedTuple):
    """A strategy with all swept keys but one held."""

    name: str
    strategy: str
    rest: tuple[tuple[str, str], ...]
    points: Mapping[float, Mapping[str, Any]]  # rows by the value of the key


def break_even(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Break-even points of each two strategies, and of each two variants of one that differ in one swept key.

    Between two neighbouring points the crossing is read from the straight line through the ratio of their
    seconds a token (of plans for money, of the money a token takes), over the logarithm of the value. Left out where
    bands overlap at every value on one of its sides.

    Args:
        rows: plans as mappings, each with `point`, the values of swept keys.
        key: which of these runs along the line; numbers or rates.

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
    """The pairs of which one is sooner at every value of `key`, beyond the bands of both.

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
    rows: Sequence[dict[str, Any]], key: str
) -> Iterator[tuple[tuple[str, str], dict[str, str], _Pairs]]:
    """Names, shared part of the point and pairs of rows of each two lines that can be compared."""
    for first, second in itertools.combinations(_lines(rows, key), 2):
        if (distinguished := _distinguished(first, second)) is not None:
            both = sorted({*first.points} & {*second.points})  # points that were refused are missing
            yield *distinguished, {at: (first.points[at], second.points[at]) for at in both}


def _lines(rows: Sequence[Mapping[str, Any]], key: str) -> list[_Line]:
    series: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[float, Mapping[str, Any]]] = {}
    for row in rows:
        rest = tuple((k, v) for k, v in row["point"].items() if k != key)
        place = number(row["point"][key])
        series.setdefault((*_names(row), rest), {})[place] = row
    return [_Line(*line, points) for line, points in series.items()]


def _names(row: Mapping[str, Any]) -> tuple[str, str]:
    """Name of a row, and its strategy, which may have several rows at a point."""
    return row.get("name", row["strategy"]), row["strategy"]


def _distinguished(first: _Line, second: _Line) -> tuple[tuple[str, str], dict[str, str]] | None:
    """Names of two lines and their shared part; None where they differ in more than one key."""
    differ = [k for (k, v), (_, other) in zip(first.rest, second.rest, strict=True) if v != other]
    shared = {k: v for k, v in first.rest if k not in differ}
    if first.name != second.name:
        return None if differ else ((first.name, second.name), shared)
    if len(differ) != 1 or not concerns({"strategy": first.strategy}, differ[0]):
        return None
    (key,) = differ
    names = [
        f"{line.name} {short_keys(dict(line.rest))[key]}={dict(line.rest)[key]}" for line in (first, second)
    ]
    return (names[0], names[1]), shared


def _crossings(pairs: _Pairs) -> list[tuple[float, int]]:
    """Values at which one of two lines overtakes the other, and which is the sooner below, beyond the bands of both."""
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
    """`is_sooner`, of rows without bands by their pace."""
    if row.get("days_high") is None:
        return pace(row) > pace(other) * (1 + 1e-9)
    return is_sooner(row, other)


def step_ratio_lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratio of steps up to which the faster strategy stays ahead.

    For each two strategies at one point, and each two variants of one that differ in one swept key which changes what
    is learned, whose bands do not overlap. Below that ratio of steps to the same loss the faster is still the sooner
    there, or for money the one that reaches it for less.
    """
    found = []
    for first, second in itertools.combinations(rows, 2):
        compared = _compared(first, second)
        if compared is None:
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


def _compared(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[tuple[str, str], dict[str, str]] | None:
    """`_distinguished` of two rows."""
    one, two = first.get("point", {}), second.get("point", {})
    lines = [_Line(*_names(row), tuple(row.get("point", {}).items()), {}) for row in (first, second)]
    differ = [key for key in one if one[key] != two[key]]
    if any(is_of_model(key) or not changes_learning(key) for key in differ):
        return None
    return _distinguished(*lines)
