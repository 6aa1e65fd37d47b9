"""Constructor arguments of strategies: groups of options, synonyms, checks, and the refusal of other names."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from exogym_core.names import plain_numbers
from exogym_core.successors import STRATEGY_ARGUMENTS, unknown_arguments
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "SYNONYMS",
    "Configured",
    "Options",
    "accepted_arguments",
    "checked_options",
    "flag",
    "fraction",
    "given_arguments",
    "name_in",
    "number",
    "one_of",
    "option",
    "positive_int",
    "refuse_unknown",
    "resolved_synonyms",
    "share",
    "whole_number",
]


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


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Options:
    """Arguments that belong together: subclasses become frozen dataclasses with a field for each argument.

    A class that lists them as `Options = DiLoCoOptions` takes each of them by name.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], called: Mapping[str, str] | None = None) -> Self:
        """Options from `given` values, checked; None, like a missing one, is the default.

        Errors begin with `where` and name an argument as it is `called` by the user.

        Raises:
            InputError: a value without meaning.
        """
        values = {}
        for field in dataclasses.fields(cls):
            value, check = plain_numbers(given.get(field.name)), field.metadata["check"]
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
        """Names of the arguments."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Defaults of the arguments, by name."""
        return {field.name: field.default for field in dataclasses.fields(cls)}


class Configured:
    """Class whose constructor takes the fields of its `Options` by name, and those in `positional` by position too.

    `class MyStrategy(Strategy, name="Mine")` enters it in `registry` under that name.

    Attributes:
        Options: dataclass of its options.
        positional: names of arguments that may be given by position, in order.
        taken: names of a base's arguments that the class itself gives.
        registry: classes by the names that experiment files give them.
    """

    Options: ClassVar[type[Any]] = Options
    positional: ClassVar[tuple[str, ...]] = ()
    taken: ClassVar[tuple[str, ...]] = ()
    registry: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, name: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if name is not None:
            cls.registry[name] = cls
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]


def _signature(cls: type[Configured]) -> inspect.Signature:
    """Signature of `cls(...)` for help and editors: options by their names and defaults."""
    own = inspect.signature(cls.__init__)
    parameters = list(own.parameters.values())[1:]
    if all(each.kind is not each.VAR_POSITIONAL for each in parameters):
        return own.replace(parameters=parameters)
    by_name, defaults = inspect.Parameter.KEYWORD_ONLY, cls.Options.defaults()
    kinds = dict.fromkeys(cls.positional, inspect.Parameter.POSITIONAL_OR_KEYWORD) | {
        name: by_name for name in defaults if name not in cls.positional
    }
    named = [inspect.Parameter(name, kind, default=defaults.get(name)) for name, kind in kinds.items()]
    return inspect.Signature([*named, inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)])


def by_name(cls: type[Configured], positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of `cls` by name.

    Raises:
        TypeError: as of any function, too many positional arguments, or one that is given by name as well.
    """
    taken = cls.positional[: len(positional)]
    if len(positional) > len(taken):
        raise TypeError(f"{cls.__name__}: {len(positional)} positional arguments; it takes {len(taken)}")
    for name in taken:
        if name in named:
            raise TypeError(f"{cls.__name__}: multiple values for argument {name!r}")
    return {**dict(zip(taken, positional, strict=True)), **named}


def checked_options(
    cls: type[Configured], positional: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """`cls.Options` from the arguments of a call of `cls`, by any of their names, and the other arguments.

    Raises:
        InputError: two names of one argument have different values, or a value is wrong.
    """
    own, called = resolved_synonyms(cls, by_name(cls, positional, named))
    names = cls.Options.names()
    options = cls.Options.of(cls.__name__, {name: own[name] for name in names if name in own}, called)
    return options, {called.get(name, name): value for name, value in own.items() if name not in names}


def _own_arguments(cls: type) -> list[str]:
    """Names that `cls(...)` accepts, without their synonyms."""
    names: list[str] = []
    for base in cls.__mro__:
        names += base.__dict__["Options"].names() if "Options" in base.__dict__ else []
        names += base.__dict__.get("positional", ())
        init = base.__dict__.get("__init__")
        if init is None or base is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        # Arguments that a base requires are given by its subclasses.
        names += [p.name for p in named if base is cls or p.default is not p.empty]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in dict.fromkeys(names) if name not in getattr(cls, "taken", ())]


def accepted_arguments(cls: type) -> list[str]:
    """Names that `cls(...)` accepts: its constructor's and, through `**options`, its bases', and synonyms."""
    names = _own_arguments(cls)
    synonyms = [name for group in SYNONYMS if set(group) & set(names) for name in group]
    return list(dict.fromkeys([*names, *synonyms]))


def resolved_synonyms(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Given arguments (None counts as not given) by the names that `cls` has for them, and the names given.

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


def given_arguments(
    cls: type[Configured], positional: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of `cls(*positional, **named)` by name, with the defaults of `cls` itself."""
    positional, named = plain_numbers(positional), plain_numbers(named)
    signature = inspect.signature(cls)
    bound = signature.bind_partial(*positional, **named)
    bound.apply_defaults()
    others = {each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD}
    said = {name: value for name, value in bound.arguments.items() if name not in others} | named
    defaults = cls.__dict__["Options"].defaults() if "Options" in cls.__dict__ else {}
    return defaults | {
        name: value for name, value in said.items() if value is not None or name not in defaults
    }


def refuse_unknown(cls: type, unknown: Mapping[str, Any]) -> None:
    """Raise UnknownNameError if `unknown` holds anything: an argument is never swallowed."""
    if unknown:
        raise unknown_arguments(cls.__name__, unknown, accepted_arguments(cls), STRATEGY_ARGUMENTS)


def whole_number(where: str, name: str, value: object, least: int = 0) -> int:
    """`value` as an int of at least `least`."""
    value = plain_numbers(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{where}: {name}={value!r} must be a whole number of at least {least}")
    return value


positive_int = partial(whole_number, least=1)


def number(where: str, name: str, value: object) -> float:
    """`value` as a finite float of at least 0."""
    value = plain_numbers(value)
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
            listed = ", ".join(repr(each) for each in accepted)
            raise InputError(f"{where}: {name}={value!r} must be one of {listed}")
        return value

    return check


def name_in(*accepted: str) -> Callable[[str, str, Any], Any]:
    """A check that lets only the names `accepted` through; the error suggests the nearest one."""

    def check(where: str, name: str, value: Any) -> Any:
        if value not in accepted:
            raise unknown_name(f"{name} of {where}", str(value), accepted)
        return value

    return check


def flag(where: str, name: str, value: object) -> bool:
    """`value` as true or false, which texts such as "no" are not."""
    if not isinstance(value, bool):
        raise InputError(f"{where}: {name}={value!r} must be true or false")
    return value
