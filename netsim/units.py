"""Quantities as people write them ("100 Mbit/s", "30 ms", "4 MiB", "0.01 %") to SI numbers, and back.

Network rates are bits per second, sizes are bytes, times are seconds. Prefixes are those of SI (k = 1000) and
IEC (Ki = 1024). A number without its unit is refused, as ambiguous; sizes alone may be
plain whole numbers, which are bytes. Also values of users as errors show them.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from netsim.errors import InputError

__all__ = [
    "format_bits_per_second",
    "format_bytes",
    "format_count",
    "format_fraction",
    "format_list",
    "format_seconds",
    "parse_bits_per_second",
    "parse_bytes",
    "parse_dollars_per_byte",
    "parse_dollars_per_request",
    "parse_fraction",
    "parse_seconds",
    "plain_numbers",
    "printable",
    "shown",
]

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)[ ]?([A-Za-z/%]*)")
_PRICE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)[ ]?\$/([A-Za-z]+)")
_MICRO = {0xB5: "u", 0x3BC: "u"}  # the micro sign and the Greek letter
_LONGEST_TEXT = 64  # characters; keeps hostile digits out of the arithmetic
_LARGEST_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of quantity: name, an example to show, units as exact multiples of the SI unit, a bare number's unit."""

    noun: str
    example: str
    units: dict[str, Decimal]
    bare_unit: str = ""


def _prefixed(unit: str, prefixes: dict[str, int]) -> dict[str, Decimal]:
    return {prefix + unit: Decimal(factor) for prefix, factor in prefixes.items()}


_SI = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_RATE = _Kind(
    "a rate", "100 Mbit/s", _prefixed("bit/s", _SI) | _prefixed("bps", _SI) | _prefixed("bit/s", _IEC)
)
_SIZE = _Kind("a size", "4 MiB", _prefixed("B", _SI) | _prefixed("B", _IEC), bare_unit="B")
_TIME = _Kind(
    "a time",
    "30 ms",
    {
        "ns": Decimal("1e-9"),
        "us": Decimal("1e-6"),
        "ms": Decimal("1e-3"),
        "s": Decimal(1),
        "min": Decimal(60),
        "h": Decimal(3600),
    },
)
_FRACTION = _Kind("a percentage", "0.01 %", {"%": Decimal("0.01")})


def parse_bits_per_second(value: object) -> float:
    """A network rate in bits per second, from text with its unit; zero is valid here.

    Raises InputError for a bare number, an unknown unit, and what is negative or not finite.

    >>> parse_bits_per_second("100 Mbit/s"), parse_bits_per_second("1.5Gbps")
    (100000000.0, 1500000000.0)
    >>> parse_bits_per_second(100)
    Traceback (most recent call last):
    netsim.errors.InputError: expected a rate such as '100 Mbit/s', got the bare number 100: add its unit
    """
    return float(_parse(value, _RATE))


def parse_seconds(value: object) -> float:
    """A time in seconds, from text with its unit (ns, us, ms, s, min, h).

    Raises InputError for a bare number, an unknown unit, and what is negative or not finite.

    >>> parse_seconds("30 ms"), parse_seconds("2 min"), parse_seconds("0 s")
    (0.03, 120.0, 0.0)
    """
    return float(_parse(value, _TIME))


def parse_bytes(value: object) -> int:
    """A size in whole bytes, from text with its unit (kB = 1000, KiB = 1024) or a plain number of bytes.

    Raises InputError for an unknown unit, what is negative, not finite or not whole, and more than 2^63 - 1.

    >>> parse_bytes("100MB"), parse_bytes("4 MiB"), parse_bytes(1500), parse_bytes("1e18"), parse_bytes("0 B")
    (100000000, 4194304, 1500, 1000000000000000000, 0)
    >>> parse_bytes("1 KB")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    netsim.errors.InputError: unknown unit 'KB' in '1 KB': did you mean 'kB'? Accepted: B, GB, GiB, ...
    """
    size = _parse(value, _SIZE)
    if size != size.to_integral_value():
        raise InputError(f"expected {_SIZE.noun} of whole bytes, got {shown(value)}")
    if size > _LARGEST_BYTES:
        raise InputError(f"expected {_SIZE.noun} below 2^63 bytes, got {shown(value)}")
    return int(size)


def parse_fraction(value: object) -> float:
    """A share between 0 and 1, from a percentage.

    Raises InputError for a bare number, and for what is negative or above 100 %.

    >>> parse_fraction("0.01 %"), parse_fraction("100%")
    (0.0001, 1.0)
    """
    fraction = _parse(value, _FRACTION)
    if fraction > 1:
        raise InputError(f"expected {_FRACTION.noun} of at most 100 %, got {shown(value)}")
    return float(fraction)


def parse_dollars_per_byte(value: object) -> float:
    """A price of traffic in dollars per byte, from text such as "0.02 $/GB" (GB = 1e9 bytes; also $/MB, $/TB, $/GiB).

    Raises InputError for anything else, and for what is negative or not finite.

    >>> parse_dollars_per_byte("0.02 $/GB"), parse_dollars_per_byte("90 $/TB")
    (2e-11, 9e-11)
    """
    return _parse_price(value, _SIZE.units, "0.02 $/GB")


_REQUESTS = {"request": 1, "thousand": 1000, "million": 1_000_000}


def parse_dollars_per_request(value: object) -> float:
    """A price of a request in dollars, from text such as "4.50 $/million" (also $/thousand, $/request).

    Raises InputError for anything else, and for what is negative or not finite.

    >>> parse_dollars_per_request("4.50 $/million"), parse_dollars_per_request("0.005 $/thousand")
    (4.5e-06, 5e-06)
    """
    return _parse_price(value, _REQUESTS, "4.50 $/million")


def _parse_price(value: object, units: Mapping[str, Decimal | int], example: str) -> float:
    """Price in dollars of a single byte or request, counted by `units`; `example` is for the message."""
    match = (
        _PRICE.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= _LONGEST_TEXT else None
    )
    if match is None or match.group(2) not in units or not math.isfinite(float(match.group(1))):
        raise InputError(f"expected a price such as '{example}', got {shown(value)}")
    return float(Decimal(match.group(1)) / units[match.group(2)])


def format_bits_per_second(bits_per_second: float) -> str:
    """A rate with the SI prefix that suits it.

    >>> format_bits_per_second(1e9), format_bits_per_second(523.4e6), format_bits_per_second(0)
    ('1 Gbit/s', '523.4 Mbit/s', '0 bit/s')
    """
    return _format_prefixed(bits_per_second, "bit/s")


def format_bytes(num_bytes: float) -> str:
    """A size with the SI prefix that suits it.

    >>> format_bytes(100_000_000), format_bytes(999), format_bytes(1536)
    ('100 MB', '999 B', '1.536 kB')
    """
    return _format_prefixed(num_bytes, "B")


def format_seconds(seconds: float) -> str:
    """A time in the unit that suits it, with four significant digits; from two minutes on in whole ones of two units.

    >>> format_seconds(0.03), format_seconds(5e-05), format_seconds(0), format_seconds(12.5)
    ('30 ms', '50 us', '0 s', '12.5 s')
    >>> format_seconds(154), format_seconds(120), format_seconds(5400), format_seconds(-200_000)
    ('2 min 34 s', '2 min', '1 h 30 min', '-55 h 33 min')
    """
    if not math.isfinite(seconds) or seconds == 0:
        return f"{seconds:g} s"
    sign, magnitude = "-" if seconds < 0 else "", abs(seconds)
    rounded = float(f"{magnitude:.4g}") if magnitude < 120 else round(magnitude)
    for least, unit, part, part_seconds in ((3600, "h", "min", 60), (120, "min", "s", 1)):
        if rounded >= least:
            whole, rest = divmod(round(magnitude / part_seconds), 60)
            return f"{sign}{whole} {unit}" + (f" {rest} {part}" if rest else "")
    scales = ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))
    unit = next(unit for least, unit in scales if rounded >= least)
    return f"{_digits(seconds / float(_TIME.units[unit]))} {unit}"


def format_count(count: float, noun: str) -> str:
    """A number of things, with the noun in its right form.

    >>> format_count(1, "point"), format_count(1200, "process"), format_count(2, "strategy")
    ('1 point', '1,200 processes', '2 strategies')
    """
    if count == 1:
        return f"1 {noun}"
    is_consonant_and_y = noun.endswith("y") and noun[-2] not in "aeiou"
    plural = f"{noun[:-1]}ies" if is_consonant_and_y else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {plural}"


def format_fraction(fraction: float) -> str:
    """A share as a percentage.

    >>> format_fraction(0.0001), format_fraction(0)
    ('0.01 %', '0 %')
    """
    return f"{_digits(fraction * 100)} %"


def format_list(names: Sequence[str], most: int) -> str:
    """Names in a line, the first ones of many.

    >>> format_list(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def shown(value: object) -> str:
    """A user's value as an error shows it: short, on one line, in ASCII.

    >>> shown("caf\\xe9"), shown(None), shown({"a": 1}), shown("x" * 100)[:8]
    ("'caf\\\\xe9'", 'nothing', 'a mapping', "'xxxxxxx")
    """
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:56]}..."


def printable(text: object) -> str:
    """Text from a file without what would break a line, a terminal or a reader's eyes."""
    plain = json.dumps(str(text))[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return plain if len(plain) <= 100 else f"{plain[:97]}..."


def plain_numbers(value: Any, depth: int = 8) -> Any:
    """`value` with Python's numbers in place of numpy's, in lists and mappings too, `depth` of them in each other.

    >>> import numpy as np
    >>> plain_numbers({"lr": np.float64(0.5), "names": ["a"]})
    {'lr': 0.5, 'names': ['a']}
    """
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if not depth:  # a list may hold itself
        return value
    inner = partial(plain_numbers, depth=depth - 1)
    if type(value) is dict:
        return {inner(key): inner(each) for key, each in value.items()}
    return type(value)(map(inner, value)) if type(value) in (list, tuple) else value


def _parse(value: object, kind: _Kind) -> Decimal:
    """The value in the kind's SI unit, exactly: '30 ms' and '0.03 s' must be the same number."""
    expected = f"expected {kind.noun} such as '{kind.example}'"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{expected}, got {shown(value)}")
    if isinstance(value, int | float) and not kind.bare_unit:
        raise InputError(f"{expected}, got the bare number {shown(value)}: add its unit")
    text = str(value).translate(_MICRO)
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST_TEXT else None
    if match is None:
        raise InputError(f"{expected}, got {shown(value)}")
    number, unit = match[1], match[2] or kind.bare_unit
    if not unit:
        raise InputError(f"{expected}, got the bare number {number}: add its unit")
    if unit not in kind.units:
        size = unit.removesuffix("/s").removesuffix("ps")
        if kind is _RATE and size != unit and size in _SIZE.units:  # they look alike, and differ by 8
            bits = format_bits_per_second(float(Decimal(number) * _SIZE.units[size] * 8))
            raise InputError(
                f"{shown(value)} is in bytes, and rates are in bits: write '{bits}' if bytes are meant"
            )
        # Units of other kinds are not close to any of ours, however alike they look.
        known = sorted(kind.units)
        folded = {name.lower(): name for name in known}
        near = folded.get(unit.lower()) or next(iter(difflib.get_close_matches(unit, known, n=1)), None)
        accepted = f": did you mean '{near}'? Accepted" if near else "; accepted"
        raise InputError(f"unknown unit '{unit}' in {shown(value)}{accepted}: {', '.join(known)}")
    quantity = Decimal(number) * kind.units[unit]
    if quantity < 0:
        raise InputError(f"{expected} and not negative, got {shown(value)}")
    if not math.isfinite(float(quantity)):
        raise InputError(f"{expected}, got {shown(value)}, which is too large")
    return abs(quantity)  # no negative zero


def _digits(number: float) -> str:
    return f"{number:.4g}" if abs(number) < 9999.5 else f"{number:.0f}"


def _format_prefixed(number: float, unit: str) -> str:
    if not math.isfinite(number):
        return f"{number} {unit}"
    # 999.96 rounds to 1000 with four digits, so it belongs to the next prefix.
    prefix = next((prefix for prefix in "TGMk" if abs(number) >= _SI[prefix] * 0.99995), "")
    return f"{_digits(number / _SI[prefix])} {prefix}{unit}"
