"""Names that users give, made safe for a file's name and for a terminal."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.strategy.base import Strategy

__all__ = [
    "PROGRAM_TASK",
    "file_name",
    "seeded_name",
    "shown_value",
    "strategy_name",
    "unique_labels",
    "visible",
    "visible_text",
]

PROGRAM_TASK = "fit("
"""Beginning of the task's name in the experiment.yaml of `fit(out=...)`, whose model and data a program has."""

_MAX_LENGTH = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")
# Names of devices on Windows, whatever their extension.
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


def file_name(text: str) -> str:
    """`text` as one component of a path: ASCII letters, digits and `._+=-`, never hidden, at most 80 long.

    >>> file_name("SPARTA+DiLoCo"), file_name("../../etc/passwd"), file_name("..")
    ('SPARTA+DiLoCo', 'etc-passwd', 'run')
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = _UNSAFE.sub("-", plain).lstrip(".-").rstrip(".-")[:_MAX_LENGTH].rstrip(".-")
    return f"{name}-" if _RESERVED.fullmatch(name) else name or "run"


def seeded_name(label: str, seed: int | None) -> str:
    """Name of a strategy's files: its label, and where there are several seeds, the seed.

    >>> seeded_name("SPARTA+DiLoCo", None), seeded_name("DiLoCo", 2)
    ('SPARTA+DiLoCo', 'DiLoCo.seed-2')
    """
    name = file_name(label)
    if seed is None:
        return name
    suffix = f".seed-{seed}"
    if len(name) + len(suffix) > _MAX_LENGTH:
        # Cut so that names which differ at their ends only stay apart.
        mark = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        name = f"{name[: _MAX_LENGTH - len(suffix) - len(mark) - 1]}-{mark}"
    return f"{name}{suffix}"


def strategy_name(strategy: Strategy) -> str:
    """Name of a strategy in experiment files; of one that has none its class's."""
    kind = type(strategy)
    return next((name for name, each in strategy.registry.items() if each is kind), kind.__name__)


def unique_labels(names: Sequence[tuple[str, str | None]]) -> list[str]:
    """A label for each (name, label or None), numbered where two would share a file.

    >>> unique_labels([("DiLoCo", None), ("DiLoCo", None), ("DiLoCo", "slow")])
    ['DiLoCo', 'DiLoCo-2', 'slow']
    """
    taken: set[str] = set()
    labels: list[str] = []
    for name, label in names:
        wanted = label or name
        candidate, number = wanted, 1
        # Compared as some file systems do: without case.
        while file_name(candidate).casefold() in taken:
            number += 1
            candidate = f"{wanted[:_MAX_LENGTH]}-{number}"
            if len(file_name(candidate)) >= _MAX_LENGTH:
                candidate = f"{wanted[: _MAX_LENGTH // 2]}-{number}"
        taken.add(file_name(candidate).casefold())
        labels.append(candidate)
    return labels


def visible(text: object, max_length: int = 200) -> str:
    """`text` on one line, shortened in the middle, without control characters or marks that turn the reading direction.

    >>> visible("a\\x1b[31mb\\u202ec"), visible("DiLoCo with momentum 0.9", 15)
    ('a\\\\x1b[31mb\\\\u202ec', 'DiLoCo...um 0.9')
    """
    plain = "".join(
        part if part.isprintable() else part.encode("unicode_escape").decode() for part in str(text)
    )
    if len(plain) <= max_length:
        return plain
    kept = (max_length - 3) // 2
    return f"{plain[: max_length - 3 - kept]}...{plain[-kept:]}"


def shown_value(value: object) -> str:
    """A value that a user gave, as an error shows it: its `repr` in a few words, or its type where that fails."""
    try:
        return visible(repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def visible_text(text: str) -> str:
    """`text` with its lines and tabs, every other control character written out.

    >>> visible_text("a\\n\\tb\\x1b[31m")
    'a\\n\\tb\\\\x1b[31m'
    """
    parts = (part if part.isprintable() or part in "\n\t" else visible(part) for part in text)
    return "".join(parts)
