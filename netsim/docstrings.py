"""Sections of docstrings, for what is documented once and shown elsewhere: help of commands, schemas, tables."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from inspect import cleandoc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["documented_lines", "section_of"]


def section_of(documented: type | Callable[..., object], title: str = "Attributes") -> str:
    """Section of a docstring that nothing follows, without its title.

    Args:
        documented: class or function.
        title: of the section.
    """
    return cleandoc(documented.__doc__ or "").partition(f"{title}:\n")[2]


def documented_lines(documented: type | Callable[..., object], title: str = "Attributes") -> dict[str, str]:
    """Description of each name in a section that nothing follows, on one line.

    Args:
        documented: class or function.
        title: of the section.
    """
    if sys.flags.optimize > 1:  # python -OO leaves no docstrings: nothing is described then
        return defaultdict(str)
    entries = re.split(r"^    (\w+): ", section_of(documented, title), flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
