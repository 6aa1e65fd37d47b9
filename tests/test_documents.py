"""The part of YAML that user files are read as, and quantities with units."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from netsim import units
from netsim.errors import InputError, UnknownNameError
from netsim.files import documents
from netsim.files.documents import MAX_VALUES, Document, parse_document
from netsim.files.schemas import Schema, validate_document
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("''", ""),
        ("'7'", "7"),
        ("7", 7),
        ("-7", -7),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("9223372036854775807", 2**63 - 1),
        ("=", "="),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: object) -> None:
    data = parse_document(f"key: {text}").data
    assert data == {"key": value}
    assert isinstance(data, dict)
    assert type(data["key"]) is type(value)


def test_keys_are_text() -> None:
    assert parse_document("{1: a, no: b, 010: c, null: d}").data == {
        "1": "a",
        "no": "b",
        "010": "c",
        "null": "d",
    }


def test_lines_are_known_by_key_path() -> None:
    document = parse_document("a:\n  - b: 1\n    c:\n      2\n  - [3,\n     4]\n")
    assert document.line_of(("a", 0, "c")) == 3
    assert document.line_of(("a", 1, 1)) == 6
    assert document.line_of(("a", 0, "nothing", "here")) == 2
    assert document.line_of(()) == 1
    assert Document("<mapping>", {}).line_of(("a",)) is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 500_000,
        "{a: " * 250_000,
        "- " * 500_000,
        "[" + "1," * (MAX_VALUES + 10) + "1]",
        "{" + "a," * 400_000 + "}",
        "a: &x [1]\n" + "".join(f"b{i}: &y{i} [*x, *x]\n" for i in range(10)),
        "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b, *b]}\n",
        "%TAG !a! b\n" * 60_000,
    ],
    ids=lambda text: text[:8],
)
def test_hostile_files_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^evil\.yaml:\d"):
        parse_document(text, "evil.yaml")


def test_without_libyaml_the_same_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: [1, {b: no}]\nc: |\n  text\n"
    fast = parse_document(text)
    monkeypatch.setattr(documents, "_Parser", yaml.SafeLoader)
    slow = parse_document(text)
    assert (slow.data, slow.lines) == (fast.data, fast.lines)
    with pytest.raises(InputError, match="deep"):
        parse_document("[" * 1000)
    with pytest.raises(InputError, match=":1: control character"):
        parse_document("a: \x01")


class _Outer(Schema):
    name: str
    inner: int


@pytest.mark.parametrize(
    ("text", "which"),
    [
        ("root: secret\nfoo: hidden\n", "none of its keys"),
        ("name: a\nhosts: [a]\nrouters: [b]\ninter: []\n", "of its keys only name"),
    ],
)
def test_another_kind_of_file_is_not_quoted(text: str, which: str) -> None:
    """Each of its keys was: the hashes of a password file."""
    with pytest.raises(UnknownNameError) as caught:
        validate_document(_Outer, parse_document(text, "shadow"))
    assert str(caught.value) == f"shadow:1: {which} belongs here; accepted: inner, name"


@pytest.mark.parametrize(
    "text",
    [
        "*sesame",
        "a: *sesame",
        "&sesame",
        "!sesame x",
        "sesame: 1\nsesame: 2",
        "12345678901234567890123",
        "0123",
        "1e999",
    ],
)
def test_a_file_that_cannot_be_read_is_not_quoted(text: str) -> None:
    """It may be a file that nobody meant to show: a token alone, a number to unlock something."""
    with pytest.raises(InputError) as caught:
        parse_document(text, "secret")
    assert str(caught.value).startswith(("secret:1: ", "secret:2: "))
    assert not any(word in str(caught.value) for word in ("sesame", "12345", "0123", "1e999"))


ROOT = Path(__file__).parents[1]
EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("netsim", "exogym_core")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    """Doctests of every module: five had been wrong, as none was run."""
    assert doctest.testmod(importlib.import_module(name.removesuffix(".__init__"))).failed == 0


# --- quantities with units ----------------------------------------------------------------------------------

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
