"""Files that users write: YAML read safely, mistakes reported by file, line and key.

    document = load_document("experiment.yaml")
    experiment = validate_document(Experiment, document)              # of `netsim.files.schemas`
    raise document.error(("workers", "count"), "more ranks than hosts")   # what a schema cannot know

The reader takes a small, unsurprising part of YAML: mappings, lists and scalars. Plain scalars are read as
YAML 1.2 reads them (`no` and `1:30` are text, `1e9` is a number), and whatever two readers could take for
different things is refused: duplicate keys, `010`, anchors and aliases, merge keys, tags, several documents,
`.nan` and `.inf`. It works event by event, so hostile files end at their first offence and never cost memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from netsim.errors import InputError, UnknownNameError
from netsim.files.plain_files import read_text
from netsim.units import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "MAX_DEPTH",
    "MAX_FILE_BYTES",
    "MAX_PROBLEMS",
    "MAX_VALUES",
    "ConfigError",
    "Document",
    "KeyPath",
    "key_text",
    "load_document",
    "parse_document",
]

MAX_PROBLEMS = 20  # listed in one error; the rest is counted

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the top of a document to a value: `("links", 0, "latency")`."""


@dataclass(frozen=True, slots=True)
class ConfigError:
    """A mistake in a document.

    Attributes:
        path: key path at which it is.
        message: what is wrong, and what to do.
        is_unknown_name: the value is a name that does not exist.
    """

    path: KeyPath
    message: str
    is_unknown_name: bool = False


def key_text(path: KeyPath) -> str:
    """Format a key path: `links[0].latency`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{printable(part)}"
    return text.removeprefix(".")


MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_VALUES = 250_000

# libyaml where PyYAML was built with it: 30 times as fast, the same events.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


# Characters that YAML allows nowhere in a file; the set of all others takes ten times as long to compile.
_UNREADABLE = re.compile(r"[\0-\x08\v\f\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and where each of its keys was written.

    Attributes:
        where: name of the file, or a note that the data come from Python.
        data: content of the file.
        lines: line (from 1) by key path, or what errors begin with where the file does not have the value, such as a
            flag of a command; empty for data that come from Python.
        inside: key path of the data within the file; empty for a whole file.
    """

    where: str
    data: object
    lines: Mapping[KeyPath, int | str] = field(default_factory=dict, repr=False)
    inside: KeyPath = ()

    def line_of(self, path: Sequence[str | int]) -> int | None:
        """Line (from 1) of a key path such as ("links", 0, "latency"), or of its nearest parent that has one."""
        origin = self._origin_of(path)
        return origin if isinstance(origin, int) else None

    def _origin_of(self, path: Sequence[str | int]) -> int | str | None:
        parents = (tuple(path[:length]) for length in range(len(path), -1, -1))
        return next((self.lines[parent] for parent in parents if parent in self.lines), None)

    def part(self, path: KeyPath) -> Document:
        """Part of the document below the key `path`; its errors still name file, line and whole key."""
        data: Any = self.data
        for key in path:
            data = data[key]
        lines = {place[len(path) :]: line for place, line in self.lines.items() if place[: len(path)] == path}
        if isinstance(origin := self._origin_of(path), str):  # of all that is below
            lines.setdefault((), origin)
        return replace(self, data=data, lines=lines, inside=(*self.inside, *path))

    def error(self, path: Sequence[str | int], message: str | InputError) -> InputError:
        """Return the error to raise for one key: `FILE:LINE: KEY: message`.

        Args:
            path: key path at which it is.
            message: what is wrong, and what to do; an UnknownNameError stays one.
        """
        is_unknown = isinstance(message, UnknownNameError)
        return self.errors([ConfigError(tuple(path), str(message), is_unknown)])

    def errors(self, problems: Iterable[ConfigError]) -> InputError:
        """Return the error to raise for all problems: one complete line each, in the order of the file."""
        ordered = sorted(problems, key=lambda problem: self.line_of(problem.path) or 0)
        lines = []
        for problem in ordered[:MAX_PROBLEMS]:
            origin = self._origin_of(problem.path)
            place = origin if isinstance(origin, str) else f"{self.where}:{origin}" if origin else self.where
            keys = filter(None, map(key_text, (self.inside, problem.path)))
            lines.append(": ".join((place, *keys, problem.message)))
        if len(ordered) > MAX_PROBLEMS:
            lines.append(f"{self.where}: and {len(ordered) - MAX_PROBLEMS} more")
        kind = UnknownNameError if ordered[0].is_unknown_name else InputError
        found = kind("\n".join(lines))
        found.document = self.where
        return found


def load_document(path: str | Path) -> Document:
    """Read the YAML file `path`, at most 1 MB long; raises InputError `FILE:LINE: ...` for what cannot be accepted."""
    text = read_text(path, MAX_FILE_BYTES, "split it, or generate it in Python")
    return parse_document(text, printable(str(path)))


def parse_document(text: str, where: str = "<text>") -> Document:
    """Read YAML from the string `text`; `where` names it in errors.

    >>> document = parse_document("links:\\n  - {latency: 1e9, up: no}", "wan.yaml")
    >>> document.data
    {'links': [{'latency': 1000000000.0, 'up': 'no'}]}
    >>> str(document.error(("links", 0, "up"), "expected a rate"))
    'wan.yaml:2: links[0].up: expected a rate'
    """
    directive = re.search(r"^%", text, re.MULTILINE)
    if directive:
        line = text.count("\n", 0, directive.start()) + 1
        raise InputError(f"{where}:{line}: YAML directives ('%...') are not accepted: remove the line")
    reader, parser = _Reader(where), None
    try:
        parser = _Parser(text)
        while (event := parser.get_event()) is not None:
            reader.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        message = error.problem or error.context
        if mark and "\t" in "".join(text.split("\n")[mark.line : mark.line + 1]):
            message = f"{message}: indent with spaces, not with tabs"
        raise InputError(f"{place}: not valid YAML: {message}") from None
    except yaml.YAMLError as error:
        unreadable = _UNREADABLE.search(text)
        if unreadable:
            line = text.count("\n", 0, unreadable.start()) + 1
            message = f"control character {printable(unreadable[0])}: remove it"
            raise InputError(f"{where}:{line}: {message}") from None
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None
    finally:
        if parser is not None:
            parser.dispose()
    return Document(where, reader.root, reader.lines)


class _Reader:
    """Builds plain data from YAML events with an explicit stack, without recursion."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.root: object = None
        self.lines: dict[KeyPath, int] = {}
        self._stack: list[tuple[dict[str, object] | list[object], KeyPath]] = []
        self._key: str | None = None  # of the mapping on top, when its value comes next
        self._key_line = 0
        self._num_values = 0
        self._num_documents = 0

    def take(self, event: Any) -> None:
        """Take the next event of YAML's parser."""
        line = event.start_mark.line + 1
        needs_key = bool(self._stack) and isinstance(self._stack[-1][0], dict) and self._key is None
        if getattr(event, "anchor", None) is not None and not isinstance(event, yaml.AliasEvent):
            raise self._refusal(line, "anchors ('&...') are not accepted: remove it")
        if getattr(event, "tag", None) is not None:
            raise self._refusal(line, "tags ('!...') are not accepted: remove it")
        if isinstance(event, yaml.ScalarEvent) and not needs_key:
            is_plain = event.implicit[0]  # not quoted
            self._add(self._resolve(event.value, line) if is_plain else event.value, line)
        elif isinstance(event, yaml.ScalarEvent):
            key, (mapping, path) = event.value, self._stack[-1]
            if key == "<<" and event.implicit[0]:
                raise self._refusal(line, "merge key '<<': write the keys out")
            if not key:
                raise self._refusal(line, "an empty key: give it a name")
            if key in mapping:
                first = self.lines[*path, key]
                raise self._refusal(line, f"duplicate key, first on line {first}: remove one")
            self._key, self._key_line = key, line
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(self._stack) >= MAX_DEPTH:
                raise self._refusal(line, f"nested more than {MAX_DEPTH} levels deep")
            if needs_key:
                raise self._refusal(line, "a key must be a single word or text, not a list or mapping")
            container: dict[str, object] | list[object]
            container = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._stack.append((container, self._add(container, line)))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._stack.pop()
        elif isinstance(event, yaml.AliasEvent):
            raise self._refusal(line, "aliases ('*...') are not accepted: write the value out")
        elif isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                raise self._refusal(line, "a second document ('---') in one file: use one file each")

    def _refusal(self, line: int, message: str) -> InputError:
        """Return the error for a line, without quoting it: the file may hold secrets."""
        return InputError(f"{self.where}:{line}: {message}")

    def _add(self, value: object, line: int) -> KeyPath:
        """Add a value to the container on top of the stack; return its key path."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise self._refusal(line, f"more than {MAX_VALUES:,} values: generate it in Python")
        if not self._stack:
            self.root = value
            path: KeyPath = ()
        else:
            container, parent = self._stack[-1]
            if isinstance(container, dict):
                assert self._key is not None
                path = (*parent, self._key)
                container[self._key] = value
                self._key, line = None, self._key_line
            else:
                path = (*parent, len(container))
                container.append(value)
        self.lines[path] = line
        return path

    def _resolve(self, text: str, line: int) -> object:
        """Resolve a plain scalar by YAML 1.2's core schema; refuse what YAML 1.1 reads differently."""
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if text[0] not in "+-.0123456789":
            return text
        if _INTEGER.fullmatch(text):
            if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
                raise self._refusal(line, "a whole number beyond 64 bits")
            return int(text)
        if _LEADING_ZERO.fullmatch(text):
            raise self._refusal(line, "a number with a leading zero: remove the zero, or quote it as text")
        if _NOT_FINITE.fullmatch(text):
            raise self._refusal(line, f"'{text}' is not a finite number")
        if _FLOAT.fullmatch(text):
            number = float(text)
            if not math.isfinite(number):
                raise self._refusal(line, "too large for a number")
            return number
        return text
