"""Constructor arguments of strategies: groups of options, synonyms, checks, and the refusal of other names."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from exogym_core.successors import STRATEGY_ARGUMENTS, unknown_arguments
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "SYNONYMS",
    "Options",
    "accepted_arguments",
    "checked_options",
    "flag",
    "fraction",
    "number",
    "one_of",
    "option",
    "positive_int",
    "refuse_unknown",
    "resolved_synonyms",
    "share",
    "told_arguments",
    "whole_number",
]

T = TypeVar("T")

#: Names of one argument each, the one used here first. Others are EXO Gym's, OpenDiLoCo's and torchft's.
SYNONYMS = (
    ("H", "local_steps", "num_inner_steps", "sync_every"),
    ("optim_spec", "inner_optim_spec", "inner_optim", "inner_optimizer"),
    ("outer_optim_spec", "outer_optim", "outer_optimizer"),
    ("codec", "hivemind_compression", "grad_compression"),
    ("interval", "sparta_interval"),
    ("ranks_per_worker", "ranks_per_site"),
    ("tau", "fragment_sync_delay"),
    ("alpha", "fragment_update_alpha"),
    ("approximation_rank", "matrix_approximation_rank"),
    ("start_step", "start_powerSGD_iter"),
)


def option(default: Any, check: Callable[[str, str, Any], Any] | None = None) -> Any:
    """A field of `Options`; `check(where, name, value)` returns the value to keep, or raises InputError."""
    return dataclasses.field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Options:
    """Arguments that belong together, written down once: subclasses are dataclasses with one field each.

    A class that lists them as `Options = DiLoCoOptions` takes each of them by name.
    """

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], called: Mapping[str, str] | None = None) -> Self:
        """Those `given`, checked; None, like what is missing, is the default.

        Errors begin with `where` and name an argument as it is `called` by the user.

        Raises:
            InputError: a value without meaning.
        """
        values = {}
        for field in dataclasses.fields(cls):
            value, check = given.get(field.name), field.metadata["check"]
            if value is not None:
                name = (called or {}).get(field.name, field.name)
                values[field.name] = value if check is None else check(where, name, value)
        options = cls(**values)
        options.check(where)
        return options

    def check(self, where: str) -> None:
        """Refuse values that do not go together; subclasses with several bases call super's."""

    @classmethod
    def names(cls) -> list[str]:
        """The arguments' names."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What each is if it is not given."""
        return {field.name: field.default for field in dataclasses.fields(cls)}


O = TypeVar("O", bound=Options)  # noqa: E741


def checked_options(cls: type, kind: type[O], given: Mapping[str, Any]) -> tuple[O, dict[str, Any]]:
    """The options of `kind` among the arguments of `cls`, by any of their names, and the other arguments.

    Raises:
        InputError: two names of one argument have different values, or a value is wrong.
    """
    own, called = resolved_synonyms(cls, given)
    names = kind.names()
    options = kind.of(cls.__name__, {name: own[name] for name in names if name in own}, called)
    return options, {called.get(name, name): value for name, value in own.items() if name not in names}


def _own_arguments(cls: type) -> list[str]:
    """Names that `cls(...)` accepts, without their synonyms."""
    names: list[str] = []
    for base in cls.__mro__:
        names += base.__dict__["Options"].names() if "Options" in base.__dict__ else []
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


def accepted_arguments(cls: type) -> list[str]:
    """Names that `cls(...)` accepts: its constructor's and, through `**options`, its bases', and synonyms."""
    names = _own_arguments(cls)
    synonyms = [name for group in SYNONYMS if set(group) & set(names) for name in group]
    return list(dict.fromkeys([*names, *synonyms]))


def resolved_synonyms(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments that were given (None was not) as `cls` itself calls them, and how the user called these.

    Raises:
        InputError: two names of one argument were given different values.
    """
    accepted = accepted_arguments(cls)
    present = {name: value for name, value in given.items() if value is not None or name not in accepted}
    called: dict[str, str] = {}
    known = _own_arguments(cls)
    for group in SYNONYMS:
        name = next((name for name in group if name in known), None)
        used = [other for other in group if other in present]
        if name is None or not used:
            continue
        value = present[used[0]]
        for other in used[1:]:
            if present[other] != value:
                raise InputError(
                    f"{cls.__name__}: {used[0]}={value!r} and {other}={present[other]!r} are one argument; "
                    "give one of them"
                )
        present = {key: kept for key, kept in present.items() if key not in group} | {name: value}
        called[name] = used[0]
    return present, called


def told_arguments(cls: type, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What `cls(*positional, **named)` says by name, with the defaults of `cls` itself."""
    signature = inspect.signature(cls)
    bound = signature.bind_partial(*positional, **named)
    bound.apply_defaults()
    others = [name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    said = {name: value for name, value in bound.arguments.items() if name not in others} | named
    defaults = cls.__dict__["Options"].defaults() if "Options" in cls.__dict__ else {}
    return defaults | {
        name: value for name, value in said.items() if value is not None or name not in defaults
    }


def refuse_unknown(cls: type, unknown: Mapping[str, Any]) -> None:
    """Raise UnknownNameError if `unknown` holds anything: an argument is never swallowed."""
    if unknown:
        raise unknown_arguments(cls.__name__, unknown, accepted_arguments(cls), STRATEGY_ARGUMENTS)


def whole_number(where: str, name: str, value: object) -> int:
    """`value` as an int of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{where}: {name}={value!r} must be a whole number of at least 0")
    return value


def positive_int(where: str, name: str, value: object) -> int:
    """`value` as an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {name}={value!r} must be a whole number of at least 1")
    return value


def number(where: str, name: str, value: object) -> float:
    """`value` as a finite float of at least 0."""
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not math.isfinite(value) or value < 0:  # type: ignore[operator, arg-type]
        raise InputError(f"{where}: {name}={value!r} must be a number of at least 0")
    return float(value)  # type: ignore[arg-type]


def fraction(where: str, name: str, value: object) -> float:
    """`value` as a float above 0 and at most 1."""
    share = number(where, name, value)
    if not 0 < share <= 1:
        raise InputError(f"{where}: {name}={value!r} must be above 0 and at most 1 (0.005 is half a percent)")
    return share


def share(where: str, name: str, value: object) -> float:
    """`value` as a float from 0 to 1."""
    part = number(where, name, value)
    if part > 1:
        raise InputError(f"{where}: {name}={value!r} must be a share, 0 to 1")
    return part


def one_of(*accepted: Any) -> Callable[[str, str, Any], Any]:
    """A check that lets only the values `accepted` through."""

    def check(where: str, name: str, value: Any) -> Any:
        if value not in accepted or isinstance(value, bool):
            told = ", ".join(repr(each) for each in accepted)
            raise InputError(f"{where}: {name}={value!r} must be one of {told}")
        return value

    return check


def flag(where: str, name: str, value: object) -> bool:
    """`value` as true or false, which texts such as "no" are not."""
    if not isinstance(value, bool):
        raise InputError(f"{where}: {name}={value!r} must be true or false")
    return value
