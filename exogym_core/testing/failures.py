"""Names in the programs that show failures."""

from __future__ import annotations

from typing import Any

from exogym_core.workers.run import Transport
from netsim.testing.laws import place_of

__all__ = ["import_of", "name_of"]


def name_of(value: Any) -> str:
    """Name of a function, class or transport in a program; of a name, its text."""
    if isinstance(value, str):
        return repr(value)
    name = place_of(value, value.host if isinstance(value, Transport) else value)[1]
    return name or str(getattr(value, "__qualname__", repr(value))).rpartition(".")[2]


def import_of(value: Any) -> list[str]:
    """Line that imports it, or says that it is in no module."""
    if isinstance(value, str):
        return []
    module, name = place_of(value, value.host if isinstance(value, Transport) else value)
    return [
        f"from {module} import {name}"
        if module
        else f"# {name_of(value)} is local: move it into a module, and import it here"
    ]
