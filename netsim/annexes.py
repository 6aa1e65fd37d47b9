"""Annexes: folders of a package that its core never imports, and that declare what they bring in an `annex.toml`.

[commands.probe]                                      # of the package's command line
command = "netsim.probe.command:command"
help = "One line for netsim --help."
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["annex_entries", "load_reference"]


def annex_entries(package: Path, table: str) -> dict[str, Any]:
    """Entries of one table of all installed annexes of a package, by key; no annex is imported.

    Args:
        package: folder of the package.
        table: name of the table.
    """
    import tomllib

    found: dict[str, Any] = {}
    for path in sorted(package.glob("*/annex.toml")):
        found |= tomllib.loads(path.read_text(encoding="utf-8")).get(table, {})
    return found


def load_reference(reference: str) -> Any:
    """Object of a `module:name` reference, its module imported."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
