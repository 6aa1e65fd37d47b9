"""Former places of what `netgym` has now: each works until release 0.3, with a line of warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["MODULES", "NAMES", "install", "moved"]

#: Names of `exogym_core` -> the module that has them now.
NAMES = {
    "advance": "netgym.launch.session",
    "check": "netgym.strategy_check",
    "now": "netgym.launch.session",
    "tune": "netgym.studies.tuning",
}

#: Former modules -> their successors; of a package, its modules too.
MODULES = {
    "exogym_core.cli.experiment": "netgym.experiment.experiment",
    "exogym_core.cli": "netgym.cli",
    "exogym_core.planning": "netgym.planning",
    "exogym_core.run.check": "netgym.strategy_check",
    "exogym_core.sites": "netgym.sites",
    "exogym_core.studies": "netgym.studies",
    "exogym_core.tasks": "netgym.tasks",
    "exogym_core.torch_backend": "netgym.launch",
}


def moved(name: str, module: str) -> Any:
    """The object of a former name, with a warning that gives its present place.

    Args:
        name: former name, such as `exogym_core.tune`.
        module: module that has it now.
    """
    former, _, attribute = name.rpartition(".")
    _warn(name, f"{module}.{attribute}" if attribute not in NAMES else f"netgym.{attribute}", 4)
    found = getattr(importlib.import_module(module), attribute)
    setattr(sys.modules[former], attribute, found)  # `from ... import` asks twice
    return found


def _warn(name: str, successor: str, level: int) -> None:
    warnings.warn(f"{name} has moved: write {successor}", FutureWarning, stacklevel=level)


class _Finder:
    """Finds former modules: importing one gives its successor.

    It does without the classes of importlib.abc, whose import would be a twentieth of `netgym --help`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_ours = fullname.startswith("exogym_core.")  # it is asked for every import
        return ModuleSpec(fullname, self) if is_ours and successor_of(fullname) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        successor = successor_of(module.__name__)
        assert successor is not None
        if module.__name__ in MODULES and module.__name__.rpartition(".")[0] not in MODULES:
            _warn(module.__name__, successor, 3)
        # `import` takes a module's final entry, so that classes are not there twice.
        sys.modules[module.__name__] = importlib.import_module(successor)


def successor_of(module: str) -> str | None:
    """Present name of a former module; None for any other."""
    for former, successor in MODULES.items():
        if module == former or module.startswith(f"{former}."):
            return successor + module.removeprefix(former)
    return None


def install() -> None:
    """Let former modules be imported, once a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before a successor's folder is searched for submodules
