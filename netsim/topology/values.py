"""Types of the values in topology files: how each is read, written, and described in the JSON Schema.

A written quantity has the fewest digits that read back to the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, WithJsonSchema

from netsim.errors import InputError
from netsim.topology.protocol import read_mtu
from netsim.units import (
    format_count,
    parse_bits_per_second,
    parse_bytes,
    parse_dollars_per_byte,
    parse_dollars_per_request,
    parse_fraction,
    parse_seconds,
    shown,
)

__all__ = [
    "Bytes",
    "Direction",
    "Duration",
    "Ends",
    "Interval",
    "Loss",
    "Mtu",
    "Name",
    "Packets",
    "Price",
    "ProtocolSpec",
    "Rate",
    "RateOrZero",
    "Series",
    "Share",
    "Text",
    "Writer",
    "write_value",
]

_LEAST_RATE, _MOST_RATE = 1e-3, 1e21  # bits per second; beyond these, durations lose all digits
_NAME = re.compile(r"\w[\w.:@+-]{0,99}")


@dataclass(frozen=True, slots=True)
class Writer:
    """Writer of a type's values."""

    write: Callable[[Any], Any]


def write_value(of: Any, value: Any) -> Any:
    """Write `value` of the type `of` as a file has it; text, numbers without a unit and None are unchanged."""
    if value is None or isinstance(value, str | bool):
        return value
    if get_origin(of) in (Union, UnionType):
        of = next(each for each in get_args(of) if each is not type(None))
    writers = [each for each in get_args(of) if isinstance(each, Writer)]
    if writers:
        try:
            return writers[0].write(value)
        except (TypeError, ValueError, ArithmeticError):
            return value  # of the wrong kind, which its reader refuses
    if isinstance(value, tuple | list):
        item = get_args(get_args(of)[0])[0]
        return [write_value(item, each) for each in value]
    return value


def _read_name(value: object) -> object:
    """Accept whole numbers as names, as YAML gives them for unquoted ones."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise InputError(f"expected a name, got {shown(value)}: quote it if it is meant as text")
    if not _NAME.fullmatch(value):
        rule = "up to 100 letters, digits and . _ - : @ +, a letter, digit or _ first"
        raise InputError(f"expected a name ({rule}), got {shown(value)}")
    return value


def _read_text(value: object) -> object:
    if isinstance(value, str) and not value.isprintable() and not value.replace("\n", " ").isprintable():
        raise InputError(f"expected text without control characters, got {shown(value)}")
    return value


def _limited(
    parse: Callable[[object], float], fits: Callable[[float], bool], expected: str, advice: str = ""
) -> Callable[[object], float]:
    """Reader of quantities within limits."""

    def read(value: object) -> float:
        number = parse(value)
        if not fits(number):
            raise InputError(f"expected {expected}, got {shown(value)}{advice}")
        return number

    return read


_NO_LINK = ": leave out the link instead"
_read_any_rate = _limited(
    parse_bits_per_second,
    lambda rate: rate == 0 or _LEAST_RATE <= rate <= _MOST_RATE,
    "a rate from 0.001 bit/s to 1e21 bit/s",
)
_read_rate = _limited(_read_any_rate, lambda rate: rate > 0, "a rate above zero", _NO_LINK)
_read_duration = _limited(parse_seconds, lambda seconds: seconds <= 1e9, "a time of at most 1e9 s")
_read_bytes = _limited(parse_bytes, lambda size: size <= 1e17, "a size of at most 1e17 bytes")
_read_interval = _limited(_read_duration, lambda seconds: seconds >= 1e-6, "a time of at least 1 us")
_read_loss = _limited(parse_fraction, lambda loss: loss < 1, "a loss below 100 %", _NO_LINK)


def _read_packets(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"expected a whole number of packets, at least 1, got {shown(value)}")
    return value


def _read_series(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    expected = "expected a CSV file, or a list of [time, value] rows"
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{expected}, got {'no rows' if value in ([], ()) else shown(value)}")
    for number, row in enumerate(value, 1):
        if not isinstance(row, list | tuple) or len(row) != 2:
            got = format_count(len(row), "value") if isinstance(row, list | tuple) else shown(row)
            raise InputError(f"{expected}, got {got} as row {number}")
    return list(value)


def _read_protocol(value: object) -> object:
    """Accept the name of a preset, or a mapping that `netsim.topology.protocol` checks."""
    if value is None or (isinstance(value, str) and value.isprintable()):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise InputError(f"expected a preset such as 'linux-tcp', or a mapping, got {shown(value)}")


def _in(unit: str) -> Writer:
    def write(number: float) -> str:
        is_whole = float(number).is_integer() and abs(number) < 1e15
        return f"{int(number) if is_whole else repr(float(number))} {unit}"

    return Writer(write)


def _write_percentage(fraction: float) -> str:
    """Move the point of the fraction's own digits: multiplying by 100 would round."""
    return f"{(Decimal(repr(float(fraction))) * 100).normalize():f} %"


def _schema(example: str, pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example], "pattern": rf"^[0-9.eE+-]+ ?{pattern}$"})


_RATE, _RATE_SCHEMA = _in("bit/s"), _schema("100 Mbit/s", "([kMGT]i?)?(bit/s|bps)")
_TIME, _TIME_SCHEMA = _in("s"), _schema("30 ms", "(ns|us|ms|s|min|h)")
_PERCENTAGE = Writer(_write_percentage)
_PRICE = Writer(lambda dollars_per_byte: f"{float(dollars_per_byte)!r} $/B")  # digits that read back exactly

Name: TypeAlias = Annotated[str, BeforeValidator(_read_name)]
Text: TypeAlias = Annotated[str, BeforeValidator(_read_text), Field(max_length=2000)]
Rate: TypeAlias = Annotated[float, BeforeValidator(_read_rate), _RATE, _RATE_SCHEMA]
RateOrZero: TypeAlias = Annotated[float, BeforeValidator(_read_any_rate), _RATE, _RATE_SCHEMA]
Duration: TypeAlias = Annotated[float, BeforeValidator(_read_duration), _TIME, _TIME_SCHEMA]
Interval: TypeAlias = Annotated[float, BeforeValidator(_read_interval), _TIME, _TIME_SCHEMA]
Loss: TypeAlias = Annotated[float, BeforeValidator(_read_loss), _PERCENTAGE, _schema("0.01 %", "%")]
Share: TypeAlias = Annotated[float, BeforeValidator(parse_fraction), _PERCENTAGE, _schema("50 %", "%")]
Price: TypeAlias = Annotated[
    float, BeforeValidator(parse_dollars_per_byte), _PRICE, _schema("0.02 $/GB", r"\$/([kMGT]i?)?B")
]
RequestPrice: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_dollars_per_request),
    Writer(lambda dollars: f"{float(dollars)!r} $/request"),
    _schema("4.50 $/million", r"\$/(request|thousand|million)"),
]
Bytes: TypeAlias = Annotated[int, BeforeValidator(_read_bytes), _schema("4 MiB", "([kMGT]i?)?B")]
Packets: TypeAlias = Annotated[int, BeforeValidator(_read_packets), Field(json_schema_extra={"minimum": 1})]
Mtu: TypeAlias = Annotated[
    int, BeforeValidator(read_mtu), Field(json_schema_extra={"minimum": 576, "maximum": 65_535})
]
Ends: TypeAlias = Annotated[list[Name], Field(min_length=2, max_length=2)]
Series: TypeAlias = Annotated[Any, BeforeValidator(_read_series)]
ProtocolSpec: TypeAlias = Annotated[Any, BeforeValidator(_read_protocol)]
Direction: TypeAlias = Literal["both", "up", "down"]
