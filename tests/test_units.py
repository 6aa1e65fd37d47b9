"""Quantities with units: what is accepted, what is refused, and exactness."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim import units
from netsim.errors import InputError
from netsim.units import (
    format_bits_per_second,
    format_bytes,
    format_fraction,
    format_seconds,
    parse_bits_per_second,
    parse_bytes,
    parse_fraction,
    parse_seconds,
)

Parse = Callable[[object], float]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bits_per_second, "100 Mbit/s", 1e8),
        (parse_bits_per_second, "100Mbps", 1e8),
        (parse_bits_per_second, "1.5 Gbit/s", 1.5e9),
        (parse_bits_per_second, "1e3 kbit/s", 1e6),
        (parse_bits_per_second, "1 Kibit/s", 1024),
        (parse_bits_per_second, "0 bit/s", 0),
        (parse_bits_per_second, " 7 bps ", 7),
        (parse_bits_per_second, ".5 Tbit/s", 5e11),
        (parse_seconds, "30 ms", 0.03),
        (parse_seconds, "50us", 5e-5),
        (parse_seconds, "1 ns", 1e-9),
        (parse_seconds, "2 min", 120),
        (parse_seconds, "1.5 h", 5400),
        (parse_seconds, "-0 s", 0),
        (parse_bytes, "100MB", 10**8),
        (parse_bytes, "4 MiB", 4 * 2**20),
        (parse_bytes, "1 kB", 1000),
        (parse_bytes, "1 KiB", 1024),
        (parse_bytes, "1.5 kB", 1500),
        (parse_bytes, 1500, 1500),
        (parse_bytes, "1500", 1500),
        (parse_bytes, "0 B", 0),
        (parse_fraction, "0.01 %", 1e-4),
        (parse_fraction, "100%", 1),
    ],
)
def test_accepted(parse: Parse, text: object, value: float) -> None:
    assert parse(text) == value


def test_the_error_for_a_bare_number_names_the_missing_unit() -> None:
    with pytest.raises(
        InputError, match=r"^expected a time such as '30 ms', got the bare number 5: add its unit$"
    ):
        parse_seconds(5)


@given(st.integers(0, 10**6))
def test_the_same_time_in_any_unit_is_the_same_number(milliseconds: int) -> None:
    seconds = f"{milliseconds // 1000}.{milliseconds % 1000:03} s"
    assert (
        parse_seconds(f"{milliseconds} ms") == parse_seconds(seconds) == parse_seconds(f"{milliseconds}e3 us")
    )


@given(st.floats(1e-3, 1e15))
def test_printed_quantities_read_back(value: float) -> None:
    assert parse_bits_per_second(format_bits_per_second(value)) == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert parse_seconds(format_seconds(value)) == pytest.approx(value, rel=1e-3)
    assert parse_bytes(format_bytes(round(value))) == pytest.approx(round(value), rel=1e-3)


@given(st.floats(0, 1))
def test_printed_fractions_read_back(value: float) -> None:
    assert parse_fraction(format_fraction(value)) == pytest.approx(value, rel=1e-3)


def test_rounding_never_prints_a_thousand() -> None:
    assert format_bytes(999_960) == "1 MB"
    assert format_bits_per_second(999_940) == "999.9 kbit/s"


def test_examples() -> None:
    assert doctest.testmod(units).failed == 0
