"""Quantities with units: what is accepted, what is refused, and exactness."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim import units
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

ROWS = Path(__file__).with_name("quantities.txt").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", ROWS)
def test_accepted(row: str) -> None:
    parse, given, value = row.split(" | ")
    assert getattr(units, parse)(eval(given)) == eval(value)


@given(st.integers(0, 10**6))
def test_the_same_time_in_any_unit_is_the_same_number(milliseconds: int) -> None:
    seconds = f"{milliseconds // 1000}.{milliseconds % 1000:03} s"
    assert (
        parse_seconds(f"{milliseconds} ms") == parse_seconds(seconds) == parse_seconds(f"{milliseconds}e3 us")
    )


@given(st.floats(1e-3, 1e15))
def test_printed_quantities_read_back(value: float) -> None:
    assert parse_bits_per_second(format_bits_per_second(value)) == pytest.approx(value, rel=1e-3, abs=1e-3)
    # Long times are in whole units: `2 min 34 s`.
    parts = re.findall(r"\d\S* \w+", format_seconds(value))
    assert sum(map(parse_seconds, parts)) == pytest.approx(value, rel=1e-3 if value < 120 else 1e-2)
    assert parse_bytes(format_bytes(round(value))) == pytest.approx(round(value), rel=1e-3)


@given(st.floats(0, 1))
def test_printed_fractions_read_back(value: float) -> None:
    assert parse_fraction(format_fraction(value)) == pytest.approx(value, rel=1e-3)


def test_rounding_never_prints_a_thousand() -> None:
    assert format_bytes(999_960) == "1 MB"
    assert format_bits_per_second(999_940) == "999.9 kbit/s"
    assert format_bytes(9_999.96e12) == "10000 TB"
    seconds = {0.99996: "1 s", 0.99994e-3: "999.9 us", 0.99996e-3: "1 ms", 119.96: "2 min", 119.94: "119.9 s"}
    seconds |= {3599.7: "1 h", 3599.4: "59 min 59 s", -3599.7: "-1 h", 7199.9: "2 h", 3570.0: "59 min 30 s"}
    assert {value: format_seconds(value) for value in seconds} == seconds
