"""Names in the programs that show failures."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from exogym_core.workers.run import Transport

__all__ = ["import_of", "name_of"]


def _place_of(value: Any) -> tuple[str, str]:
    """Module of a function, class or transport, and its name there; "" where it is in no module."""
    module = inspect.getmodule(value.host if isinstance(value, Transport) else value)
    for name, found in vars(module).items() if module is not None else ():
        if module is not None and found is value:
            where = module.__name__ if module.__name__ != "__main__" else Path(module.__file__ or "main").stem
            return where, name
    return "", getattr(value, "__qualname__", repr(value)).rpartition(".")[2]


def name_of(value: Any) -> str:
    """Name of a function, class or transport in a program; of a name, its text."""
    return repr(value) if isinstance(value, str) else _place_of(value)[1]


def import_of(value: Any) -> list[str]:
    """Line that imports it, or says that it is in no module."""
    if isinstance(value, str):
        return []
    module, name = _place_of(value)
    return [
        f"from {module} import {name}"
        if module
        else f"# {name} is local: move it into a module, and import it here"
    ]
