"""State of the engine's compiled modules: present, up to date, loaded.

mypyc compiles the files as they are when the package is built and a C compiler is there. The sources' hash is
written next to the result. Where it does not fit (an edited checkout), the sources run interpreted: to the same
bits, 5 to 15 times as slowly. mypyc compiles `min` and `max` of two numbers; of more it calls Python's with objects.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODULES", "engine_state", "is_up_to_date", "load_sources", "runs_compiled", "source_hash"]

_FOLDER = Path(__file__).parent

MODULES = (
    *("heap", "fairness", "route", "congestion", "tail_drop", "tcp"),
    *sorted(path.stem for path in _FOLDER.glob("tcp_*.py")),
    *("sockets", "bursts", "connections", "rates", "queues", "engine", "collective", "feed"),
)
"""The compiled modules, each after those that it imports."""

_HASH = _FOLDER / "compiled.sha256"


def source_hash() -> str:
    """SHA-256 of the sources of `MODULES` and of the Python version that they are compiled for."""
    digest = hashlib.sha256(sys.implementation.cache_tag.encode() if sys.implementation.cache_tag else b"")
    for name in MODULES:
        digest.update((_FOLDER / f"{name}.py").read_bytes())
    return digest.hexdigest()


def is_up_to_date() -> bool:
    """Return whether the compiled modules next to the sources, if any, belong to them."""
    return _HASH.is_file() and _HASH.read_text().strip() == source_hash()


def runs_compiled() -> bool:
    """Return whether compiled modules are there and belong to the sources; warns where they are older."""
    shared = _compiled_file(_FOLDER.parent.parent, "netsim_network__mypyc")
    if shared is None or _compiled_file(_FOLDER, "engine") is None:
        return False
    if is_up_to_date():
        _load(shared.name.partition(".")[0], importlib.machinery.ExtensionFileLoader, shared)
        return True
    warnings.warn(
        "netsim/network was edited after it was compiled and runs interpreted; compile it again: pip install -e .",
        stacklevel=2,
    )
    return False


def engine_state() -> str:
    """State of the engine, in a few words: compiled, or interpreted and how to compile it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        is_compiled = runs_compiled()
    if found:
        return "interpreted: it was edited after it was compiled; compile it again: pip install -e ."
    return "compiled" if is_compiled else "interpreted: with a C compiler, pip install compiles it"


def load_sources() -> None:
    """Import `MODULES` from their sources, whatever is compiled alongside them."""
    for name in MODULES:
        _load(f"{__package__}.{name}", importlib.machinery.SourceFileLoader, _FOLDER / f"{name}.py")


def _compiled_file(folder: Path, name: str) -> Path | None:
    files = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((file for file in files if file.exists()), None)


def _load(name: str, loader: Callable[[str, str], Any], file: Path) -> None:
    """Import a module from a file, unless it is there."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file, loader=loader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
