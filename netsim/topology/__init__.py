"""Networks as data: hosts, links, regions, routes, and where ranks are placed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["shipped_topologies"]


def shipped_topologies() -> dict[str, Path]:
    """The topologies that ship with NetGym: name -> file."""
    folder = Path(str(resources.files("topologies")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
