"""Whose calls go by which name; without anything that serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.ranks.requests import Lane

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["group_of"]


def group_of(group: Hashable) -> Hashable:
    """The group whose collectives or messages are known by this name."""
    return group.group if isinstance(group, Lane) else group
