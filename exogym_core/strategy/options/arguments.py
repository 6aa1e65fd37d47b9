"""Constructor arguments of strategies: synonyms, checks, and the refusal of names that do not exist."""

from __future__ import annotations

import inspect
import math
from typing import Any, TypeVar

from exogym_core.successors import STRATEGY_ARGUMENTS, unknown_arguments
from netsim.files.errors import InputError

__all__ = [
    "accepted_arguments",
    "fraction",
    "number",
    "one_argument",
    "positive_int",
    "refuse_unknown",
    "told_arguments",
]

T = TypeVar("T")


def accepted_arguments(cls: type) -> list[str]:
    """Names that `cls(...)` accepts: those of its constructor and, through `**kwargs`, of its bases'."""
    names: list[str] = []
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if init is None or base is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        # What a base requires its subclasses give themselves.
        names += [p.name for p in named if base is cls or p.default is not p.empty]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(dict.fromkeys(names))


def told_arguments(cls: type, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What `cls(*positional, **named)` says by name, with the defaults of the constructor of `cls` itself."""
    signature = inspect.signature(cls)
    bound = signature.bind_partial(*positional, **named)
    bound.apply_defaults()
    others = [name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    return {name: value for name, value in bound.arguments.items() if name not in others} | named


def refuse_unknown(cls: type, unknown: dict[str, Any]) -> None:
    """Raise UnknownNameError if `unknown` holds anything: an argument is never swallowed."""
    if unknown:
        raise unknown_arguments(cls.__name__, unknown, accepted_arguments(cls), STRATEGY_ARGUMENTS)


def one_argument(where: str, default: T, /, **given: T | None) -> T:
    """The value of an argument known by several names; `default` if none of them is given.

    Raises:
        InputError: two of the names were given different values.

    >>> one_argument("DiLoCoStrategy", 100, H=None, local_steps=500)
    500
    """
    present = {name: value for name, value in given.items() if value is not None}
    if not present:
        return default
    (first, value), *others = present.items()
    for name, other in others:
        if other != value:
            raise InputError(
                f"{where}: {first}={value!r} and {name}={other!r} are one argument; give one of them"
            )
    return value


def positive_int(where: str, name: str, value: object) -> int:
    """`value` as an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {name}={value!r} must be a whole number of at least 1")
    return value


def number(where: str, name: str, value: object, minimum: float = 0.0) -> float:
    """`value` as a finite float of at least `minimum`."""
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not math.isfinite(value) or value < minimum:  # type: ignore[operator, arg-type]
        raise InputError(f"{where}: {name}={value!r} must be a number of at least {minimum:g}")
    return float(value)  # type: ignore[arg-type]


def fraction(where: str, name: str, value: object) -> float:
    """`value` as a float above 0 and at most 1."""
    share = number(where, name, value)
    if not 0 < share <= 1:
        raise InputError(f"{where}: {name}={value!r} must be above 0 and at most 1 (0.005 is half a percent)")
    return share
