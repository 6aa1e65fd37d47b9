"""Schemas of files: pydantic's models, and its errors as mistakes by file, line and key.

Separate from `netsim.files.documents`: programs without schemas do not wait for pydantic's import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from netsim.errors import UnknownNameError, unknown_name
from netsim.files.documents import MAX_PROBLEMS, ConfigError
from netsim.units import printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pydantic_core import ErrorDetails

    from netsim.files.documents import Document, KeyPath

__all__ = ["Schema", "problems_of", "validate_document"]

_Model = TypeVar("_Model", bound=BaseModel)

# Names of a union's types in the path of a pydantic error; an empty key stands for all.
_TYPE_TAG = re.compile(r"|bool|int|float|str|constrained-\w+|(list|dict|literal|function-\w+)\[.*\]")
_ACCEPTED = re.compile(r"^unknown choice .*[Aa]ccepted: (.*)$")


class Schema(BaseModel):
    """Base of all file schemas: exact types, unknown keys refused with the likeliest right one, immutable.

    Attributes:
        model_config: pydantic's settings, inherited by every schema.
    """

    # Models are built when they are first used, those of a whole file at once: half of the time.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, frozen=True, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        if isinstance(data, Mapping) and cls.model_config.get("extra") == "forbid":
            known = [info.alias or name for name, info in cls.model_fields.items()]
            unknown = [str(key) for key in data if key not in known]
            if unknown:
                raise PydanticCustomError(
                    "unknown_keys", "unknown keys", {"unknown": unknown, "known": known}
                )
        return data


def validate_document(model: type[_Model], document: Document) -> _Model:
    """Check `document` against a `model`; raises InputError that lists every mistake by file, line and key."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise document.errors(problems_of(error, document.data)) from None


def problems_of(error: ValidationError, data: object) -> list[ConfigError]:
    """Turn a validation `error` about `data` into mistakes, one for each key."""
    return _merge((problem for details in error.errors() for problem in _problems(details)), data)


def _problems(details: ErrorDetails) -> Iterator[ConfigError]:
    """Translate pydantic's errors into problems with key paths."""
    path = tuple(part for part in details["loc"] if part != "[key]")
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "unknown_keys":
        unknown, known = context["unknown"], context["known"]
        # Looking for what was meant takes long among many.
        names = [printable(key) for key in unknown]
        texts = [str(unknown_name("key", name, known)) for name in names[:MAX_PROBLEMS]]
        fitting = [key for key in map(str, given) if key in known]
        num_meant = len(fitting) + sum("did you mean" in text for text in texts)
        # Not the content of a file that is something else altogether; topologies and experiments have a name.
        if not path and (
            not num_meant or (len(fitting) < 2 and len(unknown) > 2 and 2 * num_meant <= len(given))
        ):
            which = f"of its keys only {fitting[0]}" if fitting else "none of its keys"
            yield ConfigError(path, f"{which} belongs here; accepted: {', '.join(sorted(known))}", True)
            return
        texts += [f"unknown key '{name}'" for name in names[MAX_PROBLEMS:]]
        yield from (ConfigError((*path, key), text, True) for key, text in zip(unknown, texts, strict=True))
    elif kind == "value_error" and isinstance(context.get("error"), ValueError):
        error = context["error"]
        yield ConfigError(path, str(error), isinstance(error, UnknownNameError))
    elif kind == "missing":
        yield ConfigError(path, "is missing: add this key")
    elif kind == "literal_error" and isinstance(given, str) and "'" in context["expected"]:
        known = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        yield ConfigError(path, str(unknown_name("choice", printable(given), known)), True)
    else:
        # Not the content of a file that is something else altogether.
        got = "text" if not path and isinstance(given, str) else context.get("actual_length", shown(given))
        yield ConfigError(path, f"{_expectation(kind, context, given, details['msg'])}, got {got}")


def _merge(problems: Iterable[ConfigError], data: object) -> list[ConfigError]:
    """Merge errors of a value that fits none of several types, of which pydantic reports one for each type."""
    values: dict[KeyPath, list[ConfigError]] = {}
    for problem in problems:
        values.setdefault(_without_types(problem.path, data), []).append(problem)
    return [
        # An error in a part of the value shows which type was meant.
        _join(path, same)
        for path, same in values.items()
        if same[0].path == path or not any(other[: len(path)] == path != other for other in values)
    ]


def _without_types(path: KeyPath, data: object) -> KeyPath:
    """Remove the names of types that pydantic inserts into key paths."""
    kept: list[str | int] = []
    for part in path:
        known = isinstance(data, Mapping) and part in data
        if not known and isinstance(part, str) and _TYPE_TAG.fullmatch(part):
            continue
        kept.append(part)
        known = known or (isinstance(data, list) and isinstance(part, int) and part < len(data))
        data = data[part] if known else None  # type: ignore[index]
    return tuple(kept)


def _join(path: KeyPath, problems: Sequence[ConfigError]) -> ConfigError:
    if len(problems) == 1:
        return replace(problems[0], path=path)
    wanted = [
        _ACCEPTED.sub(lambda found: f"'{found[1]}'".replace(", ", "' or '"), problem.message)
        for problem in problems
    ]
    words = [text.removeprefix("expected ").partition(", got ")[0] for text in wanted]
    got = next((text.partition(", got ")[2] for text in wanted if ", got " in text), "")
    choices = [problem for problem in problems if "did you mean" in problem.message]
    if not choices and got == "a mapping":  # of the type whose own check speaks of it
        choices = [problem for problem in problems if not problem.message.startswith("expected ")]
    if choices:
        return replace(choices[0], path=path)
    return ConfigError(
        path, f"expected {' or '.join(dict.fromkeys(words))}" + (f", got {got}" if got else "")
    )


_EXPECTED = {
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping (keys and values)",
    "model_type": "expected a mapping (keys and values)",
    "model_attributes_type": "expected a mapping (keys and values)",
    "finite_number": "expected a finite number",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "too_short": ("at least", "min_length"),
    "too_long": ("at most", "max_length"),
}


def _expectation(kind: str, context: Mapping[str, Any], given: object, message: str) -> str:
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        noun = "" if not key.endswith("length") else " characters" if isinstance(given, str) else " entries"
        return f"expected {words} {context[key]}{noun}"
    if kind == "literal_error":
        return f"expected {context['expected'].lower()}"
    return message[:1].lower() + message[1:]
