"""Constructor arguments of strategies: groups of options, synonyms, checks, and the refusal of other names."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, dataclass_transform

from exogym_core.successors import STRATEGY_ARGUMENTS, unknown_arguments
from netsim.errors import InputError, about_option, unknown_name
from netsim.units import plain_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "PARTS",
    "SYNONYMS",
    "Options",
    "accepted_arguments",
    "checked_options",
    "declare",
    "flag",
    "fraction",
    "given_arguments",
    "mapping",
    "name_in",
    "number",
    "one_of",
    "option",
    "options_of",
    "positive_int",
    "refuse_unknown",
    "resolved_synonyms",
    "share",
    "take",
    "whole_number",
]


#: Strategies that a `Chain` can have as members, by the names that experiment files give them.
PARTS: dict[str, type[Any]] = {}

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
    ("mu_x", "eval_interp_coeff"),
    ("mu_y", "train_interp_coeff"),
)


def option(default: Any, check: Callable[[str, str, Any], Any] | None = None) -> Any:
    """A field of `Options`; `check(where, name, value)` returns the value to keep, or raises InputError.

    Without a check, an option whose default is a number takes no text, such as the `nan` of a file.
    """
    if check is None and isinstance(default, int | float) and not isinstance(default, bool):
        check = _no_text
    return dataclasses.field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class _Member:
    """Attribute whose options are arguments of the class that has it."""

    kind: type[Options]


def options_of(kind: type[Options]) -> Any:
    """A member made of its options, which the class that has it takes by name: `average = options_of(Averaging)`."""
    return _Member(kind)


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Options:
    """Arguments that belong together: subclasses become frozen dataclasses with a field for each argument.

    A strategy that has them as a member, `averaging: Averaging = options_of(Averaging)`, takes each of them by name.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], called: Mapping[str, str] | None = None) -> Self:
        """Options from `given` values, checked; None, like a missing one, is the default.

        Errors begin with `where` and name an argument as it is `called` by the user.

        Raises:
            InputError: values without meaning, a line each.
        """
        values, errors = {}, []
        for field in dataclasses.fields(cls):
            value, check = plain_numbers(given.get(field.name)), field.metadata["check"]
            if value is not None:
                name = (called or {}).get(field.name, field.name)
                try:
                    with about_option(name):
                        values[field.name] = value if check is None else check(where, name, value)
                except InputError as error:
                    errors.append(error)
        if errors:
            raise type(errors[0]).of_all(errors) from errors[0]
        options = cls(**values)
        for kind in reversed(cls.__mro__):
            if "check" in vars(kind):
                kind.check(options, where)  # type: ignore[attr-defined]
        return options

    def check(self, where: str) -> None:
        """Refuse values that do not go together; called of each class of the options, its bases first."""

    @classmethod
    def names(cls) -> list[str]:
        """Names of the arguments."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Defaults of the arguments, by name."""
        return {field.name: field.default for field in dataclasses.fields(cls)}


def declare(cls: Any, member_of: str | None = None) -> None:
    """Read the options that the body of `cls` declares: makes `cls.Options` of them and of its base's.

    They are fields, `H: int = option(100, positive_int)`, and members with options of their own, `average =
    options_of(Averaging)`. A class that is a member of a chain, by the name `member_of`, does not take those that every
    strategy has (`cls.common`).
    """
    if member_of is not None:
        PARTS[member_of], cls.taken = cls, cls.common
    declared = {key: value for key, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
    members = {key: value.kind for key, value in vars(cls).items() if isinstance(value, _Member)}
    cls.declared, cls.members = (*cls.declared, *declared), {**cls.members, **members}
    if declared or members:
        fields = {"__annotations__": dict.fromkeys(declared, Any), **declared}
        cls.Options = type(f"{cls.__name__}.Options", (*members.values(), cls.Options), fields)
    for key, value in declared.items():
        setattr(cls, key, value.default)
    own = inspect.signature(cls.__init__)
    parameters = list(own.parameters.values())[1:]
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    accepted = {each.name: each.default is not each.empty for each in named}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        # Arguments required by a base are passed by its subclasses.
        others = {key: True for key, is_optional in cls.accepted.items() if is_optional or key in accepted}
        accepted |= others | dict.fromkeys([*cls.positional, *cls.Options.names()], True)
    cls.accepted = {key: accepted[key] for key in accepted if key not in cls.taken}
    cls.__signature__ = own.replace(parameters=parameters)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        cls.__signature__ = _signature(cls)


def take(instance: Any, options: Any) -> None:
    """Set the attributes of `instance` that are declared options, and the members made of theirs."""
    for name in instance.declared:
        setattr(instance, name, getattr(options, name))
    for name, kind in instance.members.items():
        setattr(instance, name, kind(**{key: getattr(options, key) for key in kind.names()}))


def _signature(cls: Any) -> inspect.Signature:
    """Signature of `cls(...)` for help and editors: options by their names and defaults."""
    by_name, defaults = inspect.Parameter.KEYWORD_ONLY, _own_defaults(cls)
    first = [name for name in cls.positional if name not in cls.taken]
    kinds = dict.fromkeys(first, inspect.Parameter.POSITIONAL_OR_KEYWORD) | {
        name: by_name for name in defaults if name not in first
    }
    named = [inspect.Parameter(name, kind, default=defaults.get(name)) for name, kind in kinds.items()]
    return inspect.Signature([*named, inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)])


def _own_defaults(cls: Any) -> dict[str, Any]:
    return {name: value for name, value in cls.Options.defaults().items() if name not in cls.common}


def by_name(cls: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of `cls` by name.

    Raises:
        TypeError: as of any function, too many positional arguments, or one that is given by name as well.
    """
    taken = [name for name in cls.positional if name not in cls.taken][: len(positional)]
    if len(positional) > len(taken):
        raise TypeError(f"{cls.__name__}: {len(positional)} positional arguments; it takes {len(taken)}")
    for name in taken:
        if name in named:
            raise TypeError(f"{cls.__name__}: multiple values for argument {name!r}")
    return {**dict(zip(taken, positional, strict=True)), **named}


def checked_options(
    cls: Any, positional: Sequence[Any], named: Mapping[str, Any], where: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """`cls.Options` from the arguments of a call of `cls`, by any of their names; the other arguments.

    Raises:
        InputError: two names of one argument have different values, or a value is wrong; it begins with `where`, by
            default the name of the class.
    """
    where = where or cls.__name__
    own, called = resolved_synonyms(cls, by_name(cls, positional, named), where)
    names = [name for name in cls.Options.names() if name not in cls.taken]
    options = cls.Options.of(where, {name: own[name] for name in names if name in own}, called)
    return options, {called.get(name, name): value for name, value in own.items() if name not in names}


def accepted_arguments(cls: Any) -> list[str]:
    """Names that `cls(...)` accepts: its constructor's and, through `**options`, its base's, and synonyms."""
    synonyms = [name for group in SYNONYMS if set(group) & cls.accepted.keys() for name in group]
    return list(dict.fromkeys([*cls.accepted, *synonyms]))


def resolved_synonyms(
    cls: Any, given: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Given arguments (None counts as not given) by the names that `cls` has for them, and the names given.

    Raises:
        InputError: two names of one argument were given different values.
    """
    accepted = accepted_arguments(cls)
    present = {name: value for name, value in given.items() if value is not None or name not in accepted}
    called: dict[str, str] = {}
    for group in SYNONYMS:
        name = next((name for name in group if name in cls.accepted), None)
        used = [other for other in group if other in present]
        if name is None or not used:
            continue
        value = present[used[0]]
        for other in used[1:]:
            if present[other] != value:
                raise InputError(
                    f"{where}: {used[0]}={value!r} and {other}={present[other]!r} are one argument; give one of them",
                    about=(used[0], other),
                )
        present = {key: kept for key, kept in present.items() if key not in group} | {name: value}
        called[name] = used[0]
    return present, called


def given_arguments(cls: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `cls(*positional, **named)` by name, with the defaults of `cls` itself."""
    positional, named = plain_numbers(positional), plain_numbers(named)
    signature = inspect.signature(cls)
    bound = signature.bind_partial(*positional, **named)
    bound.apply_defaults()
    others = {each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD}
    said = {name: value for name, value in bound.arguments.items() if name not in others} | named
    defaults = _own_defaults(cls)
    return defaults | {
        name: value for name, value in said.items() if value is not None or name not in defaults
    }


def refuse_unknown(cls: Any, unknown: Mapping[str, Any]) -> None:
    """Raise UnknownNameError if `unknown` holds anything: an argument is never swallowed."""
    if unknown:
        raise unknown_arguments(cls.__name__, unknown, accepted_arguments(cls), STRATEGY_ARGUMENTS)


def _no_text(where: str, name: str, value: object) -> object:
    """`value`, which is no text."""
    if isinstance(value, str):
        raise InputError(f"{where}: {name}={value!r} must be a number")
    return value


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


def mapping(where: str, name: str, value: object) -> Mapping[str, Any]:
    """`value` as a mapping from names to values."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {name}={value!r} must be a mapping")
    return value


def flag(where: str, name: str, value: object) -> bool:
    """`value` as true or false, which texts such as "no" are not."""
    if not isinstance(value, bool):
        raise InputError(f"{where}: {name}={value!r} must be true or false")
    return value
