"""From bytes to a damaged file: the same bytes always give the same one, so that any fuzzer can look for more.

atheris changes the bytes by what they reach, hypothesis shrinks them, and a random generator does where there is
neither.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from netsim.files.documents import parse_document

T = TypeVar("T")

# Scalars as they stand in a file, unquoted: what readers take for different things, or stumble over.
RAW = [
    "",
    *"""~  null  true  no  0  -1  1  1.5  1e400  -0.0  .nan  -.inf  010  1:30  1_000  0x10  99999999999999999999
1e-320  5e-324  1.7976931348623157e308  {}  []  [[]]  {a: 1}  &a x  *a  !!python/object:os.system x
<<  ? x  - x  a: b  #  '  "  `  @
%  |  >  0 s  -1 ms  1e9 s  1e-9 s  1 kbit/s  1e22 bit/s  0 Mbit/s  1e-4 bit/s  nan Mbit/s  50 %  100 %  101 %  -1 %
1e308 Tbit/s  1 GB  1 MB/s  3 parsec  1 ms ms  a/b  ../x  /dev/zero  é  a b  \\u0000  9223372036854775807  -5
""".replace("\n", "  ").split("  "),
    "x" * 200,
    "1" * 400,
    "[" * 60 + "]" * 60,
    "9" * 19,
]


class Raw(str):
    """Stands in a file as it is, not as a quoted text."""

    __slots__ = ()


class Choices:
    """Decisions drawn from bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, limit: int) -> int:
        """A whole number from 0 up to below `limit`."""
        width = 1 if limit <= 256 else 4
        part = self._data[self._at : self._at + width].ljust(width, b"\0")
        self._at += width
        return int(part[0] if width == 1 else struct.unpack("<I", part)[0]) % max(limit, 1)

    def pick(self, of: Sequence[T]) -> T:
        """One of them."""
        return of[self.below(len(of))]

    def rest(self) -> bytes:
        """What has not been used."""
        return self._data[self._at :]


def flow(value: Any) -> str:
    """Plain data as YAML of one line; `Raw` as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return json.dumps(value)


def as_json(value: Any) -> str:
    """Plain data as JSON; `Raw` as text."""
    return json.dumps(value)


def damaged_text(choices: Choices, text: bytes, words: Sequence[bytes]) -> bytes:
    """A text with up to four pieces left out, doubled, exchanged or put in."""
    for _ in range(1 + choices.below(4)):
        at, length = choices.below(len(text) + 1), choices.below(40)
        match choices.below(6):
            case 0:
                text = text[:at] + text[at + length :]
            case 1:
                text = text[:at] + text[at : at + length] * 2 + text[at + length :]
            case 2:
                text = text[:at] + choices.pick(words) + text[at + length :]
            case 3:
                text = text[:at] + choices.pick(words) + text[at:]
            case 4:
                text = text[:at] + bytes([choices.below(256)]) + text[at + 1 :]
            case _:
                text = text[:at]
    return text


def damaged_tree(choices: Choices, tree: Any, keys: Sequence[str], values: Sequence[Any]) -> Any:
    """Plain data with up to four places replaced, left out, renamed, doubled or put in; the original is left alone."""
    tree = copy.deepcopy(tree)
    for _ in range(1 + choices.below(4)):
        tree = _damaged_once(choices, tree, keys, values)
    return tree


def _damaged_once(choices: Choices, tree: Any, keys: Sequence[str], values: Sequence[Any]) -> Any:
    inner: Any = tree
    put: Callable[[Any], None] | None = None
    for _ in range(1 + choices.below(6)):
        if not isinstance(inner, dict | list) or not inner:
            break
        holder: Any = inner
        key: Any = choices.pick(list(holder)) if isinstance(holder, dict) else choices.below(len(holder))
        inner, put = holder[key], lambda value, holder=holder, key=key: holder.__setitem__(key, value)
    if put is None:
        return copy.deepcopy(choices.pick(values))
    match choices.below(7):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[choices.pick(keys)] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder[choices.pick(keys)] = copy.deepcopy(choices.pick(values))
        case 3 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case 4:
            put([inner])
        case 5 if isinstance(inner, str) and not isinstance(inner, Raw):
            put(damaged_text(choices, inner.encode(), [b" ", b"-", b"1e9", b"/"]).decode(errors="replace"))
        case _:
            put(copy.deepcopy(choices.pick(values)))
    return tree


def tree_of(text: str) -> Any:
    """The plain data of a good YAML file."""
    return parse_document(text).data


def keys_of(trees: Sequence[Any]) -> list[str]:
    """All keys in them, and some that are nearly right."""
    found: set[str] = set()
    stack = list(trees)
    while stack:
        tree = stack.pop()
        if isinstance(tree, dict):
            found |= set(map(str, tree))
            stack += tree.values()
        elif isinstance(tree, list):
            stack += tree
    names = sorted(found)
    return [*names, *(name[:-1] or "x" for name in names[:20]), "", "__class__", "x" * 300, "\x1b[31m"]
