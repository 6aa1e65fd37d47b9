"""Networks as data: hosts, links, regions, routes, and where ranks are placed."""

from __future__ import annotations

from pathlib import Path

import topologies

__all__ = ["shipped_topologies"]


def shipped_topologies() -> dict[str, Path]:
    """The topologies that ship with NetGym: name -> file."""
    return {file.stem: file for file in sorted(Path(topologies.__path__[0]).glob("*.yaml"))}
