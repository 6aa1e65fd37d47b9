"""Types of the values in topology files: how each is read, written, and described in the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

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
    "RATE",
    "TIME",
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
    "Quantity",
    "Rate",
    "RateOrZero",
    "Series",
    "Share",
    "Text",
]

_LEAST_RATE, _MOST_RATE = 1e-3, 1e21  # bits per second; beyond these, durations lose all digits
_NAME = re.compile(r"\w[\w.:@+-]{0,99}")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity in files, text with its unit: reader, writer and JSON Schema of a field of a schema.

    A number is read, as one in SI units, where the validation has a context. It is written with the fewest digits that
    read back to it, or by the function for its unit in the serialization's context.

    Attributes:
        parse: reads text.
        unit: that it is written with.
        example: text for the schema.
        pattern: regular expression of accepted units.
    """

    parse: Callable[[object], float]
    unit: str
    example: str
    pattern: str

    def read(self, value: object, info: ValidationInfo) -> float:
        """Read a file's text, or a program's number."""
        if info.context is not None and not isinstance(value, str | bool):
            # Of the wrong kind, which is refused below.
            with suppress(TypeError, ValueError, ArithmeticError):
                value = self._plain_text(value)
        return self.parse(value)

    def write(self, number: float, info: SerializationInfo) -> str:
        """Write a number as a file has it."""
        text: str = (info.context or {}).get(self.unit, self._plain_text)(number)
        return text

    def _plain_text(self, value: Any) -> str:
        number = float(value)
        if self.unit == "%":  # the point of the fraction's own digits moves: multiplying by 100 would round
            return f"{(Decimal(repr(number)) * 100).normalize():f} %"
        is_whole = number.is_integer() and abs(number) < 1e15
        return f"{int(number) if is_whole else repr(number)} {self.unit}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(self.write, info_arg=True)
        return core_schema.with_info_before_validator_function(
            self.read, handler(source), serialization=write
        )

    def __get_pydantic_json_schema__(self, *schema: object) -> dict[str, Any]:
        pattern = rf"^[0-9.eE+-]+ ?{self.pattern}$"
        return {"type": "string", "examples": [self.example], "pattern": pattern}


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


def _read_series(value: Any, info: ValidationInfo) -> object:
    if info.context is not None and not isinstance(value, str | list | tuple | Mapping):
        with suppress(TypeError):  # a program's rows may be of any kind
            value = [list(row) for row in value]
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


RATE = Quantity(parse_bits_per_second, "bit/s", "100 Mbit/s", "([kMGT]i?)?(bit/s|bps)")
TIME = Quantity(parse_seconds, "s", "30 ms", "(ns|us|ms|s|min|h)")

Name: TypeAlias = Annotated[str, BeforeValidator(_read_name)]
Text: TypeAlias = Annotated[str, BeforeValidator(_read_text), Field(max_length=2000)]
Rate: TypeAlias = Annotated[float, replace(RATE, parse=_read_rate)]
RateOrZero: TypeAlias = Annotated[float, replace(RATE, parse=_read_any_rate)]
Duration: TypeAlias = Annotated[float, replace(TIME, parse=_read_duration)]
Interval: TypeAlias = Annotated[float, replace(TIME, parse=_read_interval)]
Loss: TypeAlias = Annotated[float, Quantity(_read_loss, "%", "0.01 %", "%")]
Share: TypeAlias = Annotated[float, Quantity(parse_fraction, "%", "50 %", "%")]
Price: TypeAlias = Annotated[float, Quantity(parse_dollars_per_byte, "$/B", "0.02 $/GB", r"\$/([kMGT]i?)?B")]
RequestPrice: TypeAlias = Annotated[
    float,
    Quantity(parse_dollars_per_request, "$/request", "4.50 $/million", r"\$/(request|thousand|million)"),
]
Bytes: TypeAlias = Annotated[
    int,
    BeforeValidator(_read_bytes),
    WithJsonSchema({"type": "string", "examples": ["4 MiB"], "pattern": "^[0-9.eE+-]+ ?([kMGT]i?)?B$"}),
]
Packets: TypeAlias = Annotated[int, BeforeValidator(_read_packets), Field(json_schema_extra={"minimum": 1})]
Mtu: TypeAlias = Annotated[
    int, BeforeValidator(read_mtu), Field(json_schema_extra={"minimum": 576, "maximum": 65_535})
]
Ends: TypeAlias = Annotated[list[Name], Field(min_length=2, max_length=2)]
Series: TypeAlias = Annotated[Any, BeforeValidator(_read_series)]
ProtocolSpec: TypeAlias = Annotated[Any, BeforeValidator(_read_protocol)]
Direction: TypeAlias = Literal["both", "up", "down"]
