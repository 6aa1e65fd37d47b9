"""Tests of code on ranks, from `exogym_core.testing`; docs/testing_collectives.md shows how to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core import testing

if TYPE_CHECKING:
    from exogym_core.testing import *  # noqa: F403

__all__ = testing.__all__


def __getattr__(name: str) -> Any:
    return getattr(testing, name)
