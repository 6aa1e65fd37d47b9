"""The engine loaded again from its sources: what is compiled can neither be patched nor compared with itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from netsim.collectives import start
from netsim.network import network
from netsim.network.build import MODULES, load_sources

NAMES = [f"netsim.network.{name}" for name in MODULES]


def use_sources(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Have networks and collectives that are made from now on run interpreted; returns the classes, to be patched."""
    for name in NAMES:
        patch.delitem(sys.modules, name)
    load_sources()
    classes: dict[str, type] = {}
    for name in NAMES:
        loaded = vars(sys.modules[name]).items()
        classes |= {key: value for key, value in loaded if getattr(value, "__module__", "") == name}
    for user in (network, start):
        for key, value in list(vars(user).items()):
            if getattr(value, "__module__", "") in NAMES:
                patch.setattr(user, key, classes[key])
    return SimpleNamespace(**classes)
