"""The few exception types of NetGym. Every message is one complete line, with details on the lines below it."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "BrokenCallError",
    "DeadlockError",
    "InputError",
    "MemberEndedError",
    "MismatchError",
    "NetsimError",
    "RankError",
    "UnknownNameError",
    "about_option",
    "locate_errors",
    "unknown_name",
    "unknown_names",
    "visible",
]


class NetsimError(Exception):
    """Base of all errors raised on purpose by this project.

    Attributes:
        is_consequence: another rank's end has caused it, by closing a connection.
    """

    is_consequence = False


class InputError(NetsimError, ValueError):
    """Something a user wrote is wrong; the first line names the file, field, rank or call, and what to do.

    Args:
        message: the text.
        about: names of the options that are wrong, those first that are named first.

    Attributes:
        about: as given.
        inside: keys and positions of the options that hold these, outermost first.
        document: the file whose lines it names, "" for none.
    """

    document = ""

    def __init__(self, message: object = "", *, about: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.about = tuple(about)
        self.inside: tuple[str | int, ...] = ()
        self._parts: tuple[InputError, ...] = ()

    @property
    def parts(self) -> tuple[InputError, ...]:
        """The errors that it lists, a line each; itself where it is one."""
        return self._parts or (self,)

    @classmethod
    def of_all(cls, errors: Sequence[InputError]) -> Self:
        """Error that lists all `errors`, a line each."""
        made = cls("\n".join(map(str, errors)))
        made._parts = tuple(errors)
        return made


class UnknownNameError(InputError, TypeError):
    """An argument, key or choice that does not exist; the message lists the accepted ones, likeliest first."""


class DeadlockError(NetsimError, ValueError):
    """Ranks wait for events that can never happen. The first line names the circle; a table has each rank's call."""


class MismatchError(InputError, RuntimeError):
    """Members of one collective disagree in operation, shape, dtype, reduce op or root; a RuntimeError as gloo's."""


class BrokenCallError(NetsimError, RuntimeError):
    """A call with a time-out failed: the time was up, a member ended, or a connection was lost.

    Args:
        message: what happened.
        rank: whose call it was, which the message names; None: it names none.
    """

    def __init__(self, message: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class MemberEndedError(BrokenCallError):
    """A call failed because a member had ended, or its group was broken; its text says "Connection closed by peer"."""

    is_consequence = True


class RankError(NetsimError, RuntimeError):
    """A rank failed with an exception of its own, or its process died.

    Args:
        message: what happened, the first line for itself.
        rank: the one that failed first; an attribute too.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def locate_errors(where: str, about: Sequence[str] = ()) -> Iterator[None]:
    """Begin the InputErrors of the block with the place of the wrong value, such as an option that they are `about`.

    >>> with locate_errors("--bytes 5Mb"):
    ...     raise InputError("unknown unit 'Mb'")
    Traceback (most recent call last):
    netsim.errors.InputError: --bytes 5Mb: unknown unit 'Mb'
    """
    try:
        yield
    except InputError as error:
        located = type(error)(f"{where}: {error}", about=about or error.about)
        located.inside, located.document = error.inside, error.document
        raise located from None


@contextmanager
def about_option(name: str | int) -> Iterator[None]:
    """Have the InputErrors of the block be about an option, or an entry of one, or options inside it.

    >>> try:
    ...     with about_option("optimizer"), about_option("lr"):
    ...         raise InputError("must be a number")
    ... except InputError as error:
    ...     error.inside, error.about
    (('optimizer', 'lr'), ())
    """
    try:
        yield
    except InputError as error:
        for each in error.parts:
            each.inside = (name, *each.inside)
        raise


_ALIKE = 0.5  # how alike two names are for one to be listed before others,
_LIKELY = 0.6  # and for one to be meant by the other


def unknown_name(what: str, given: str, known: Iterable[str], meant: str = "") -> UnknownNameError:
    """Error for a name that does not exist, as one line: kind `what`, the name `given`, and the accepted names `known`.

    Accepted names that are like the given one come first, the nearest of them before the others; the rest is in
    alphabetical order. `meant` is the one that another word stands for elsewhere, however unlike.

    >>> str(unknown_name("strategy", "DiLoco", ["FedAvg", "DiLoCo", "AllReduce"]))
    "unknown strategy 'DiLoco': did you mean 'DiLoCo'? Accepted: DiLoCo, AllReduce, FedAvg"
    """
    if not meant:
        return unknown_names(what, [given], known)
    names = {*known}
    accepted = ", ".join([*[meant] * (meant in names), *sorted(names - {meant}, key=str.casefold)])
    text = f"unknown {what} '{visible(given)}': did you mean '{meant}'? Accepted: {accepted}"
    return UnknownNameError(text)


def unknown_names(what: str, given: Iterable[str], known: Iterable[str]) -> UnknownNameError:
    """Error for several names that do not exist, as one line; the first word of `what` is in the singular.

    >>> str(unknown_names("option of adam", ["lrr", "x"], ["lr", "betas"]))
    "unknown options of adam 'lrr' (did you mean 'lr'?), 'x'; accepted: lr, betas"
    """
    wanted, names = list(given), sorted(set(known), key=lambda name: (name.casefold(), name))
    likeness = {name: [_likeness(each, name) for each in wanted] for name in names}
    by_likeness = sorted(names, key=lambda name: -max(likeness[name]))
    likely = [name for name in by_likeness if max(likeness[name]) >= _ALIKE]
    accepted = ", ".join([*likely, *(name for name in names if name not in likely)])
    meant = [max(likely, key=lambda name: likeness[name][at], default="") for at in range(len(wanted))]
    meant = [name if name and likeness[name][at] >= _LIKELY else "" for at, name in enumerate(meant)]
    if len(wanted) == 1:
        hint = f": did you mean '{meant[0]}'? Accepted" if meant[0] else "; accepted"
        text = f"unknown {what} '{visible(wanted[0])}'"
    else:
        first, *rest = what.split(" ", 1)
        hints = [f" (did you mean '{name}'?)" if name else "" for name in meant]
        listed = ", ".join(f"'{visible(each)}'{hint}" for each, hint in zip(wanted, hints, strict=True))
        hint, text = "; accepted", f"unknown {' '.join([f'{first}s', *rest])} {listed}"
    return UnknownNameError(text + (f"{hint}: {accepted}" if names else ": none is accepted here"))


def visible(name: str) -> str:
    """A name as it was given, without what would break a line or a terminal, and no longer than a line."""
    shown = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in name[:200])
    return shown if len(name) <= 200 else f"{shown}..."


def _likeness(given: str, name: str) -> float:
    """From 0 to 1, without case and separators, since those are what people misremember."""
    one, other = (text.lower().replace("-", "").replace("_", "") for text in (given, name))
    return difflib.SequenceMatcher(None, one, other).ratio() if one else 0.0
